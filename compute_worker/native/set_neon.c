/* NEON with dot products: Cortex-A55, A75 and later, Apple M1 and later, all Graviton but the
 * first. */
#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+dotprod")
#pragma GCC optimize("O2")

#include "engine.h"
#include "simd_neon.h"

#define TOKENS_PER_PASS 4 /* × 2 groups of rows: 8 sums, 8 dots, 2 words in 32 registers */
#define HAS_DIRECT 1
#define THIS_SET neon_set
#define THIS_NAME "neon-dotprod"
#include "set_functions.h"
#endif
