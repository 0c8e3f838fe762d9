/* What the parts of the kernels agree on: prepared activations, a job of rows, and the table of
 * functions that every instruction set fills in. Nothing here is visible to Python.
 *
 * Same bits. An output element is a function of its weight row and its token alone. Two rules make
 * that true by construction, and a change must keep them:
 *   - a lane of a vector register is a row of the matrix, so no result depends on its neighbours;
 *   - the columns are taken in ascending order, in groups of 32, whatever the number of tokens.
 */
#ifndef MOE_ENGINE_H
#define MOE_ENGINE_H
#include <stddef.h>
#include <stdint.h>

#include "api.h"

/* Every type with kernels: number, name in the code, columns and bytes of a block, and the kind of
 * multiplication that its tiles get (multiply.h). */
#define FLOAT_TYPES(each)                                                                         \
    each(TYPE_F32, f32, 1, 4, floats) each(TYPE_F16, f16, 1, 2, floats)                           \
    each(TYPE_BF16, bf16, 1, 2, floats)
#define QUANTISED_TYPES(each)                                                                     \
    each(TYPE_Q4_0, q4_0, 32, 18, scales_32) each(TYPE_Q4_1, q4_1, 32, 20, scales_32_minima)      \
    each(TYPE_Q5_0, q5_0, 32, 22, scales_32) each(TYPE_Q5_1, q5_1, 32, 24, scales_32_minima)      \
    each(TYPE_Q8_0, q8_0, 32, 34, scales_32_wide)                                                 \
    each(TYPE_IQ4_NL, iq4_nl, 32, 18, scales_32_wide) each(TYPE_MXFP4, mxfp4, 32, 17, scales_32)  \
    each(TYPE_Q2_K, q2_k, 256, 84, scales_16_minima) each(TYPE_Q3_K, q3_k, 256, 110, scales_16)   \
    each(TYPE_Q4_K, q4_k, 256, 144, scales_32_minima)                                             \
    each(TYPE_Q5_K, q5_k, 256, 176, scales_32_minima) each(TYPE_Q6_K, q6_k, 256, 210, scales_16)  \
    each(TYPE_IQ4_XS, iq4_xs, 256, 136, scales_32_wide)                                           \
    each(TYPE_IQ2_XXS, iq2_xxs, 256, 66, scales_32) each(TYPE_IQ2_XS, iq2_xs, 256, 74, scales_16) \
    each(TYPE_IQ2_S, iq2_s, 256, 82, scales_16) each(TYPE_IQ3_XXS, iq3_xxs, 256, 98, scales_32)   \
    each(TYPE_IQ3_S, iq3_s, 256, 110, scales_32)

enum { EXACT = 0, FAST = 1, N_NUMERICS = 2 };

/* ggml type numbers of the file format. */
enum {
    TYPE_F32 = 0, TYPE_F16 = 1, TYPE_Q4_0 = 2, TYPE_Q4_1 = 3, TYPE_Q5_0 = 6, TYPE_Q5_1 = 7,
    TYPE_Q8_0 = 8, TYPE_Q2_K = 10, TYPE_Q3_K = 11, TYPE_Q4_K = 12, TYPE_Q5_K = 13, TYPE_Q6_K = 14,
    TYPE_IQ2_XXS = 16, TYPE_IQ2_XS = 17, TYPE_IQ3_XXS = 18, TYPE_IQ4_NL = 20, TYPE_IQ3_S = 21,
    TYPE_IQ2_S = 22, TYPE_IQ4_XS = 23, TYPE_BF16 = 30, TYPE_MXFP4 = 39, N_TYPES = 40
};

enum {
    GROUP = 32,          /* columns that share one activation scale */
    GROUPS_PER_TILE = 8, /* a tile is 256 columns: one block of the K types */
    TILE_COLUMNS = GROUP * GROUPS_PER_TILE,
    TOKENS_AT_ONCE = 64, /* tokens per unpacked tile: their sums stay in the first-level cache */
    KV_TILE = 64,        /* positions per block of the KV cache */
    MAX_PLANES = 3,
};

/* Sums of the activation integers of a group, which offsets (planes) and minima (floats) of the
 * weights are multiplied with. */
typedef struct {
    int32_t planes[MAX_PLANES][2]; /* of each plane: first and last 16 columns */
    float halves[2], whole;        /* of the whole integers */
} group_sums;

/* T tokens ready to be multiplied, filled up with zeros to whole tiles.
 *
 * Quantised weights are multiplied with integers: value = scale * integer, one scale per group of 32.
 *   FAST   8 bits: scale = largest magnitude / 127
 *   EXACT  24 bits: scale = largest magnitude / 8355000, integer = 65536 a + 256 b + c with signed
 *          bytes a, b, c, a plane each. It rounds by 2^-24 of the group's largest value, as one
 *          float32 addition of that value would, and all that follows within a group is exact.
 * Float weights are multiplied with the values themselves (planes is 0). */
typedef struct {
    int n_groups, planes;
    float *values;    /* (T, 32 * n_groups); only read once it is prepared */
    int8_t *bytes;    /* (T, planes, 32 * n_groups), c first */
    float *scales;    /* (T, n_groups) */
    group_sums *sums; /* (T, n_groups) */
} activations;

/* Rows [begin, end) of a matrix times some tokens. For i of [0, n_tokens): token tokens[i] of the
 * input, or first_token + i where tokens is NULL, times row r is written to
 * out[o * out_stride + r - out_begin], o = out_rows[i], or i where out_rows is NULL. */
typedef struct {
    const uint8_t *weights;
    const uint8_t *next; /* bytes that will be wanted after row `end`, or NULL: a hint */
    int n_columns;
    size_t row_bytes;
    const activations *input;
    const int32_t *tokens;
    int first_token, n_tokens;
    float *out;
    const int32_t *out_rows;
    size_t out_stride;
    int out_begin;
} row_job;

typedef void multiply_rows(const row_job *job, const moe_grids *grids, int begin, int end);

typedef struct {
    int block_columns, block_bytes, is_float;
    multiply_rows *multiply[N_NUMERICS]; /* NULL: no kernel for this type */
} type_kernels;

/* One instruction set. */
typedef struct {
    const char *name;
    type_kernels types[N_TYPES];
    /* Fill bytes, scales and sums of groups [begin, end) of one token from its values. */
    void (*prepare)(activations *input, int token, int begin, int end);
    /* out[i] = silu(gate[i]) * up[i], n a multiple of 16 */
    void (*silu_product)(const float *gate, const float *up, float *out, int n);
    /* The scores (64) of one query and one tile, times `scale`, become weights exp(score - largest);
     * positions from `count` on weigh 0. `largest` and `total` run over the tiles; returns what the
     * sums of earlier tiles must be multiplied with. */
    float (*soften)(float *scores, int count, float scale, float *largest, float *total);
    /* out[d] += sum over positions [0, count) of weights[position] * values[position][d] */
    void (*mix_values)(int type, const void *values, int head_width, const float *weights, int count,
                       float *out);
    /* One row of keys or values as the cache holds it. */
    void (*store_row)(int type, const float *values, int n, void *out);
} instruction_set;

extern const instruction_set portable_set;
#if defined(__x86_64__)
extern const instruction_set avx2_set, avx512_set;
#endif
#if defined(__aarch64__)
extern const instruction_set neon_set;
#endif

const instruction_set *instruction_set_by_name(const char *name); /* NULL: cannot run here */

typedef struct thread_pool thread_pool;

struct moe_engine {
    const instruction_set *set;
    thread_pool *pool;
    moe_grids grids;
    void *scratch;
    size_t scratch_bytes;
};

/* At least n_bytes of scratch, valid until the next call; NULL where memory is short. */
void *engine_scratch(moe_engine *engine, size_t n_bytes);

/* The next n_bytes of a piece of scratch, aligned; moves the pointer on. */
void *carve(void **scratch, size_t n_bytes);

size_t row_bytes_of(const type_kernels *type, int n_columns);

/* Planes that a matrix of this type wants its activations in. */
int planes_for(const type_kernels *type, int numerics);

/* Room for the activations of some tokens, and its place in scratch. */
size_t activation_bytes(int n_tokens, int n_columns, int planes);
void carve_activations(activations *input, void **scratch, int n_tokens, int n_columns, int planes);

/* Prepare x (T, n_columns); it is used in place where its rows are whole tiles, else copied. */
void take_activations(moe_engine *engine, activations *input, const float *x, int n_tokens,
                      int n_columns);

#endif
