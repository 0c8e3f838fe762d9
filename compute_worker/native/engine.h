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

enum { EXACT = 0, FAST = 1 };

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
    TOKENS_AT_ONCE = 128, /* per unpacked tile: their sums stay in the first-level cache */
    KV_TILE = 64,        /* positions per block of the KV cache */
    MIXED_AT_ONCE = 4,   /* queries of one tile of values */
    MAX_PLANES = 3,
    SIDE_BY_SIDE = 4,    /* tokens in a bundle */
    MOE_MAX_EXPERTS = 1024, /* of a layer, where C chooses among them */
};

/* Tokens ready to be multiplied, filled up with zeros to whole tiles of columns.
 *
 * Quantised weights are multiplied with integers of 8 bits per plane: value = scale * integer, one
 * scale per group of 32 = largest magnitude / largest integer; the integer's signed base-256
 * digits are the planes.
 *
 *     3 planes   exact. It rounds by 2^-24 of the group's largest value, as one float32 addition of
 *                that value would, and all that follows within a group is exact.
 *     2 planes   fast, dense matrices. What attention adds to the hidden state decides which
 *                experts are chosen. With 8 bits here, flipped choices are most of a model's error;
 *                with 16 the divergence of its distributions falls to a quarter. One plane for q
 *                and k alone, or v, or the output makes it 2 to 3 times as large again; for the
 *                output head, 1.08 times. Costs nothing at decode, where memory is the limit, and
 *                a tenth of the time of a prompt.
 *     1 plane    fast, experts.
 *
 * Float weights are multiplied with the values themselves (0 planes).
 *
 * `width` tokens W, 1 or SIDE_BY_SIDE, are a bundle and lie side by side, so that one pointer
 * serves them all: token i is lane i % W of bundle i / W. A bundle has one record per group (P is
 * planes):
 *
 *     int8   bytes (P, 8, W, 4)   lowest digit first; 8 words of 4 columns
 *     float  scale (W)
 *     float  sums  (N_SUMS, W)    of the integers, for minima and offsets of the weights
 */
typedef struct {
    int n_groups, planes, width; /* n_groups: of the arrays, some more than the columns have */
    float *values;    /* (bundles, 32 n_groups, W), or NULL where no weights are floats */
    uint8_t *records; /* (bundles, n_groups), or NULL where all are */
} activations;

enum { ALL_32 = 0, FIRST_16 = 1, LAST_16 = 2, N_SUMS = 3 };

static inline size_t record_bytes(int planes, int width)
{
    return (size_t)(4 * width * (GROUP / 4 * planes + 1 + N_SUMS));
}

/* Places in a record: word j of plane p, scale, sums. */
static inline size_t word_at(int width, int p, int j, int lane)
{
    return (size_t)(4 * (width * (GROUP / 4 * p + j) + lane));
}

static inline size_t scale_at(int planes, int width, int lane)
{
    return word_at(width, planes, 0, lane);
}

static inline size_t sum_at(int planes, int width, int kind, int lane)
{
    return word_at(width, planes, 1 + kind, lane);
}

/* Rows [begin, end) of a matrix times tokens [first_token, first_token + n_tokens) of the input.
 * Token i of these times row r is written to out[o * out_stride + r - out_begin], o = out_rows[i],
 * or i where out_rows is NULL. Where the input's width is 1, n_tokens is 1; else first_token
 * begins a bundle. */
typedef struct {
    const uint8_t *weights;
    const uint8_t *next; /* bytes that will be wanted after row `end`, or NULL: a hint */
    int n_columns;
    size_t row_bytes;
    const activations *input;
    int first_token, n_tokens;
    float *out;
    const int32_t *out_rows;
    size_t out_stride;
    int out_begin;
} row_job;

typedef void multiply_rows(const row_job *job, const moe_grids *grids, int begin, int end);

typedef struct {
    int block_columns, block_bytes, is_float; /* block_columns 0: no kernels for this type */
    multiply_rows *multiply[MAX_PLANES + 1];  /* by planes of the activations */
} type_kernels;

/* One instruction set. */
typedef struct {
    const char *name;
    int has_direct; /* functions for a lone token (tile.h); else it is a bundle, one lane used */
    type_kernels types[N_TYPES];
    /* Fill groups [g, g + n) of token i from 32 n values. */
    void (*prepare)(activations *input, int i, int g, int n, const float *x);
    /* out[i] = silu(gate[i]) * up[i], n a multiple of 16 */
    void (*silu_product)(const float *gate, const float *up, float *out, int n);
    /* See row_math.h. */
    void (*rms_norm)(const float *x, const float *weight, int n, float epsilon, float *out);
    void (*rotate)(float *x, const float *cosines, const float *sines, int half);
    void (*softmax)(float *x, int n);
    void (*add_weighted)(float *rows, const float *weights, int n_rows, int n);
    /* The scores (64) of one query and one tile, times `scale`, become weights
     * exp(score - largest); positions from `count` on weigh 0. `largest` and `total` run over the tiles;
     * returns what the sums of earlier tiles must be multiplied with. */
    float (*soften)(float *scores, int count, float scale, float *largest, float *total);
    /* For each of n <= MIXED_AT_ONCE queries i: out[i][d] += sum over positions [0, count) of
     * weights[KV_TILE i + position] * values[position][d] */
    void (*mix_values)(int type, const void *values, int head_width, int n, const float *weights,
                       int count, float *const *out);
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

/* Rounded up to whole cache lines, which is also the widest vector. */
static inline size_t aligned(size_t n_bytes)
{
    return (n_bytes + 63) / 64 * 64;
}

/* The next n_bytes of a piece of scratch, aligned; moves the pointer on. */
void *carve(void **scratch, size_t n_bytes);

size_t row_bytes_of(const type_kernels *type, int n_columns);

/* Planes that a matrix of this type wants its activations in. */
int planes_for(const type_kernels *type, int numerics, int is_expert);

/* x (n_rows, n_columns) += y */
void add_rows(moe_engine *engine, float *x, const float *y, int n_rows, int n_columns);

/* What activations of n_tokens tokens must hold. */
typedef struct {
    int n_tokens, n_columns, planes, has_values, width;
} activation_shape;

/* Groups that so many columns have, filled up to whole tiles. */
int used_groups(int n_columns, int planes);
size_t activation_bytes(activation_shape shape);
void carve_activations(activations *input, void **scratch, activation_shape shape);

/* Fill token i from n_columns values; what is beyond them becomes zero. */
void prepare_token(const instruction_set *set, activations *input, int i, const float *x,
                   int n_columns);
void prepare_tokens(moe_engine *engine, activations *input, const float *x, int n_tokens,
                    int n_columns);

/* Bundle `bundle` of `to` (SIDE_BY_SIDE wide) from n tokens of `from` (of width 1). */
void bundle_tokens(const activations *from, const int32_t *tokens, int n, activations *to,
                   int bundle);

#endif
