/* AVX2 with FMA and F16C: Intel from Haswell on, AMD from Zen on. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,bmi2")
#pragma GCC optimize("O2")

#include "engine.h"
#include "simd_avx2.h"

#define TOKENS_PER_PASS 2 /* × 2 groups of rows: 4 sums, 4 dots, 2 words in 16 registers */
#define HAS_DIRECT 1
#define THIS_SET avx2_set
#define THIS_NAME "avx2"
#include "set_functions.h"
#endif
