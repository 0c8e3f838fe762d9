/* AVX-512 with VNNI: Intel from Cascade Lake (servers) and Ice Lake on, AMD from Zen 4 on. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#pragma GCC optimize("O2")

#include "engine.h"
#include "simd_avx512.h"

#define TOKENS_PER_PASS 4 /* × 2 groups of rows: 8 sums, 8 dots, 2 words in 32 registers */
#define HAS_DIRECT 1
#define THIS_SET avx512_set
#define THIS_NAME "avx512-vnni"
#include "set_functions.h"
#endif
