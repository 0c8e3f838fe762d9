/* The functions of one instruction set and their table, from the headers below. The including file
 * has chosen LANES with its simd_*.h, and defines TOKENS_PER_PASS (tokens whose sums fit in
 * registers), THIS_SET (the table) and THIS_NAME. */
#include "tile.h"
#include "unpack_float.h"
#include "unpack_32.h"
#include "unpack_k.h"
#include "multiply.h"
#include "activations.h"
#include "attention_tile.h"

#define ROW_FUNCTION(name, numerics_name, numerics, columns, bytes)                               \
    static void rows_##numerics_name##_##name(const row_job *job, const moe_grids *grids,         \
                                              int begin, int end)                                 \
    {                                                                                             \
        multiply_rows_of(job, grids, begin, end, layout_##name, columns, bytes, unpack_##name,    \
                         numerics);                                                               \
    }
#define DEFINE_FLOAT(type, name, columns, bytes) ROW_FUNCTION(name, exact, EXACT, columns, bytes)
#define DEFINE_QUANTISED(type, name, columns, bytes)                                              \
    ROW_FUNCTION(name, exact, EXACT, columns, bytes) ROW_FUNCTION(name, fast, FAST, columns, bytes)

FLOAT_TYPES(DEFINE_FLOAT)
QUANTISED_TYPES(DEFINE_QUANTISED)

/* Float weights keep float32 activations in both numerics. */
#define FLOAT_ENTRY(type, name, columns, bytes)                                                   \
    [type] = {columns, bytes, {rows_exact_##name, rows_exact_##name}},
#define QUANTISED_ENTRY(type, name, columns, bytes)                                               \
    [type] = {columns, bytes, {rows_exact_##name, rows_fast_##name}},

const instruction_set THIS_SET = {
    .name = THIS_NAME,
    .types = {FLOAT_TYPES(FLOAT_ENTRY) QUANTISED_TYPES(QUANTISED_ENTRY)},
    .prepare = prepare,
    .silu_product = silu_product,
    .mix_values = mix_values,
    .soften = soften,
    .store_row = store_row,
};
