/* The functions of one instruction set and their table, from the headers below. The including file
 * has chosen LANES with its simd_*.h, and defines TOKENS_PER_PASS (tokens whose sums fit in
 * registers), HAS_DIRECT (functions for a lone token), THIS_SET (the table) and THIS_NAME. */
#include "tile.h"
#include "unpack_float.h"
#include "unpack_32.h"
#include "unpack_k.h"
#include "unpack_iq.h"
#include "multiply.h"
#include "walk.h"
#include "activations.h"
#include "attention_tile.h"
#include "row_math.h"

/* Unpack into memory, for several tokens. */
#define STORE_FUNCTION(name)                                                                      \
    static void store_##name(tile *t, const row_pointers *rows, const moe_grids *grids)           \
    {                                                                                             \
        plan how = {layout_##name, 1, 0};                                                         \
        unpack_##name(t, how, rows, grids);                                                       \
    }
/* All tiles of some rows times one token. */
#if HAS_DIRECT
#define DIRECT_FUNCTION(name, planes)                                                             \
    static vf direct_##planes##_##name(const row_group *g)                                        \
    {                                                                                             \
        plan how = {layout_##name, planes, 1};                                                    \
        uint8_t edge[EDGE_BYTES];                                                                 \
        tile t;                                                                                   \
        t.sum = (vf){0};                                                                          \
        for (int c = 0; c < tiles_of(g); c++) {                                                   \
            row_pointers rows = point_tile(g, c, edge, &t);                                       \
            t.x = view_bundle(g->job->input, g->job->first_token, c * g->tile_columns / GROUP);   \
            unpack_##name(&t, how, &rows, g->grids);                                              \
            ask_for_rest(&t);                                                                     \
        }                                                                                         \
        return t.sum;                                                                             \
    }
#define DIRECT_OR_NULL(name, planes) direct_##planes##_##name
#else
#define DIRECT_FUNCTION(name, planes)
#define DIRECT_OR_NULL(name, planes) NULL
#endif

#define ROW_FUNCTION(name, planes, tile_columns, columns, bytes, kind)                            \
    DIRECT_FUNCTION(name, planes)                                                                 \
    static void rows_##planes##_##name(const row_job *job, const moe_grids *grids, int begin,     \
                                       int end)                                                   \
    {                                                                                             \
        const row_kernel kernel = {                                                               \
            layout_##name, tile_columns, (tile_columns) / (columns) * (bytes),                    \
            DIRECT_OR_NULL(name, planes), store_##name, kind##_##planes};                         \
        multiply_rows_with(&kernel, job, grids, begin, end);                                      \
    }
#define DEFINE_FLOAT(type, name, columns, bytes, kind)                                            \
    STORE_FUNCTION(name) ROW_FUNCTION(name, 0, FLOAT_TILE_COLUMNS, columns, bytes, kind)
/* One block of the K types, one chunk of those with blocks of 32. */
#define QUANTISED_TILE(block_columns) ((block_columns) == 32 ? CHUNK_COLUMNS : TILE_COLUMNS)
#define DEFINE_QUANTISED(type, name, columns, bytes, kind)                                        \
    STORE_FUNCTION(name)                                                                          \
    ROW_FUNCTION(name, 1, QUANTISED_TILE(columns), columns, bytes, kind)                          \
    ROW_FUNCTION(name, 2, QUANTISED_TILE(columns), columns, bytes, kind)                          \
    ROW_FUNCTION(name, 3, QUANTISED_TILE(columns), columns, bytes, kind)

FLOAT_TYPES(DEFINE_FLOAT)
QUANTISED_TYPES(DEFINE_QUANTISED)

#define FLOAT_ENTRY(type, name, columns, bytes, kind)                                             \
    [type] = {columns, bytes, 1, {rows_0_##name}},
#define QUANTISED_ENTRY(type, name, columns, bytes, kind)                                         \
    [type] = {columns, bytes, 0, {NULL, rows_1_##name, rows_2_##name, rows_3_##name}},

const instruction_set THIS_SET = {
    .name = THIS_NAME,
    .has_direct = HAS_DIRECT,
    .types = {FLOAT_TYPES(FLOAT_ENTRY) QUANTISED_TYPES(QUANTISED_ENTRY)},
    .prepare = prepare,
    .silu_product = silu_product,
    .rms_norm = rms_norm,
    .rotate = rotate,
    .softmax = softmax,
    .add_weighted = add_weighted,
    .mix_values = mix_values,
    .soften = soften,
    .store_row = store_row,
};
