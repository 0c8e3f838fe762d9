/* Plain C: runs everywhere, and is what a new instruction set is checked against. */
#pragma GCC optimize("O3")
#include "engine.h"
#include "simd_portable.h"

#define TOKENS_PER_PASS 4
#define HAS_DIRECT 0
#define THIS_SET portable_set
#define THIS_NAME "portable"
#include "set_functions.h"
