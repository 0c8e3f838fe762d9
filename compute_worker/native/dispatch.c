/* Which instruction sets this machine can run: CPUID says what the processor has, XGETBV what the
 * system saves on a context switch. */
#include <string.h>

#include "engine.h"

#if defined(__x86_64__)
#include <cpuid.h>

enum { YMM_STATE = 0x06, ZMM_STATE = 0xe6 }; /* bits of XCR0 that must all be set */

static uint64_t saved_state(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static int has_bits(uint32_t word, uint32_t bits)
{
    return (word & bits) == bits;
}

static int can_run(const instruction_set *set)
{
    uint32_t a, b, c, d, b7 = 0, c7 = 0;
    if (set == &portable_set)
        return 1;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has_bits(c, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C))
        return 0;
    uint64_t saved = saved_state();
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d) || !has_bits(b7, bit_AVX2 | bit_BMI2))
        return 0;
    if (set == &avx2_set)
        return (saved & YMM_STATE) == YMM_STATE;
    return (saved & ZMM_STATE) == ZMM_STATE &&
           has_bits(b7, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL) &&
           has_bits(c7, bit_AVX512VNNI);
}

static const instruction_set *const best_first[] = {&avx512_set, &avx2_set, &portable_set};

#elif defined(__aarch64__)
#include <sys/auxv.h>

enum { HAS_DOT_PRODUCT = 1 << 20 }; /* HWCAP_ASIMDDP of AT_HWCAP */

static int can_run(const instruction_set *set)
{
    return set == &portable_set || (getauxval(AT_HWCAP) & HAS_DOT_PRODUCT);
}

static const instruction_set *const best_first[] = {&neon_set, &portable_set};

#else

static int can_run(const instruction_set *set)
{
    (void)set;
    return 1;
}

static const instruction_set *const best_first[] = {&portable_set};
#endif

enum { N_SETS = sizeof best_first / sizeof best_first[0] };

const instruction_set *instruction_set_by_name(const char *name)
{
    for (int i = 0; i < N_SETS; i++)
        if (!strcmp(best_first[i]->name, name) && can_run(best_first[i]))
            return best_first[i];
    return NULL;
}

int moe_can_run(const char *instruction_set)
{
    return instruction_set_by_name(instruction_set) != NULL;
}
