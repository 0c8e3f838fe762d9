/* Plain C: runs everywhere, and is what a new instruction set is checked against. */
#pragma GCC optimize("O2")
#include "engine.h"
#include "simd_portable.h"

#define TOKENS_PER_PASS 2 /* × 2 groups of rows: 4 sums, 4 dots, 2 words in 16 registers */
#define HAS_DIRECT 0
#define THIS_SET portable_set
#define THIS_NAME "portable"
#include "set_functions.h"
