/* What Python sees of the kernels. The build script hands the lines between the two marks to cffi,
 * so they hold plain declarations only: no macros, no includes.
 *
 * Numerics: 0 exact, 1 fast (see `activations` in engine.h).
 * Results: 0, or -1 where scratch memory could not be allocated.
 * Types are ggml type numbers. A (T, n) array is row-major and contiguous.
 */
#ifndef MOE_API_H
#define MOE_API_H
#include <stdint.h>

/* cffi begins */
typedef struct moe_engine moe_engine;

/* Look-up tables of the IQ2 and IQ3 types: per index the codes of 8 (2 bits each) or 4 (4 bits
 * each) neighbouring weights, the first in the lowest bits. One more entry than indices: it may be
 * read but is not used. The caller keeps them alive. */
typedef struct {
    const uint16_t *iq2_xxs; /* 256 + 1 */
    const uint16_t *iq2_xs;  /* 512 + 1 */
    const uint16_t *iq2_s;   /* 1024 + 1 */
    const uint16_t *iq3_xxs; /* 256 + 1 */
    const uint16_t *iq3_s;   /* 512 + 1 */
} moe_grids;

/* Whether this machine can run "avx512-vnni", "avx2", "neon-dotprod" or "portable". */
int moe_can_run(const char *instruction_set);

/* NULL: no memory, threads could not start, or the instruction set cannot run here. */
moe_engine *moe_engine_open(const char *instruction_set, int n_threads, const moe_grids *grids);
void moe_engine_park(moe_engine *engine);
void moe_engine_close(moe_engine *engine);

int moe_type_is_native(const moe_engine *engine, int type);

/* Several matrices times the same x (T, n_cols): matrix i has n_rows[i] rows of types[i] at address
 * weights[i]; its product (T, n_rows[i]) follows that of the matrix before in `out`. */
int moe_matmul(moe_engine *engine, int numerics, int n_matrices, const int32_t *types,
               const uint64_t *weights, const int32_t *n_rows, int n_cols, const float *x,
               int n_tokens, float *out);

/* Expert i: for every p of its pair_counts[i] entries in pairs (the lists of all experts follow
 * each other), out[p] = down @ (silu(gate @ x[p / n_active]) * (up @ x[p / n_active])). */
int moe_expert_blocks(moe_engine *engine, int numerics, int gate_type, int up_type, int down_type,
                      int width, int expert_width, const uint64_t *addresses, int n_experts,
                      const int32_t *pairs, const int32_t *pair_counts, int n_active,
                      const float *x, int n_tokens, float *out);

/* kv: (n_blocks, n_layers, 2, n_kv_heads, 64, head_width) of type 0 (F32), 1 (F16) or 8 (Q8_0). */
typedef struct {
    void *data;
    int type, n_layers, n_kv_heads, head_width;
} moe_kv;

/* Row by row, see `reference`. Nothing here can fail. */
void moe_rms_norm(moe_engine *engine, const float *x, const float *weight, int n_rows,
                  int n_columns, float epsilon, float *out);
/* x (T, n_heads, head_width), in place; cosines and sines (T, half) */
void moe_rotate(moe_engine *engine, float *x, int n_tokens, int n_heads, int head_width,
                const float *cosines, const float *sines, int half);
/* scores (T, E), E <= 1024, become shares; chosen and weights (T, A) */
void moe_top_experts(moe_engine *engine, float *scores, int n_tokens, int n_experts, int n_active,
                     int norm_topk, int32_t *chosen, float *weights);
/* out (T, A, width): the weighted sum over A is left in out[:, 0] */
void moe_combine(moe_engine *engine, float *out, const float *weights, int n_tokens, int n_active,
                 int width);

int moe_attention(moe_engine *engine, const float *q, const moe_kv *kv, int layer, int n_heads,
                  const int32_t *tables, int max_blocks, const int32_t *sequence_of_token,
                  const int32_t *positions, int n_tokens, float *out);
void moe_store_kv(moe_engine *engine, const moe_kv *kv, int layer, const float *k, const float *v,
                  const int32_t *tables, int max_blocks, const int32_t *sequence_of_token,
                  const int32_t *positions, int n_tokens);

/* The dense weights of a layer, which do not change between tokens. Norms that an architecture does
 * not have are NULL; a head norm goes over norm_width floats at a time. The caller keeps it and
 * all that it points to alive. Of the experts: their types and the rows of gate and up. */
typedef struct {
    const float *attn_norm, *q_norm, *k_norm, *ffn_norm;
    int32_t types[3], n_rows[3]; /* of q, k, v */
    uint64_t weights[3];
    int32_t output_type, router_type;
    uint64_t output, router;
    int q_norm_width, k_norm_width;
    int width, n_heads, n_kv_heads, head_width, n_experts, n_active, norm_topk;
    float epsilon;
    int gate_type, up_type, down_type, expert_width;
} moe_layer;

/* Where the tokens of a batch are, the same for all its layers. */
typedef struct {
    const int32_t *tables, *sequence_of_token, *positions;
    const float *cosines, *sines; /* (T, half) */
    int max_blocks, half, n_tokens;
} moe_places;

/* Floats of scratch that moe_attend wants for so many tokens. */
uint64_t moe_attend_floats(const moe_layer *layer, int n_tokens);
/* See `dense_layer.attend`: hidden (T, width) is changed in place. */
int moe_attend(moe_engine *engine, int numerics, const moe_layer *layer, const moe_kv *kv,
               int index, const moe_places *places, float *hidden, float *scratch);
/* See `dense_layer.choose`: x (T, width), scores (T, n_experts), chosen and weights (T, n_active)
 * are written. */
int moe_choose(moe_engine *engine, int numerics, const moe_layer *layer, const float *hidden,
               int n_tokens, float *x, float *scores, int32_t *chosen, float *weights);

/* An entry of `KnownExperts`. */
typedef struct {
    uint64_t addresses[3]; /* of gate, up and down; gate 0: not known */
    uint64_t mark;         /* address of two words, or 0 */
    uint64_t words[2];     /* they are so as long as the expert is in its place */
} moe_known_expert;

typedef struct {
    int next_layer; /* those before it are done; of this one attention and choice, unless all are */
    uint64_t experts_nanoseconds;
} moe_layers_report;

/* Floats of scratch that moe_layers wants for so many tokens. */
uint64_t moe_layers_floats(const moe_layer *const *layers, int first, int stop, int n_tokens);
/* See `known_layers`: layers [first, stop) of all `layers`, as far as their experts are known in
 * `experts` (all layers, n_experts). hidden (T, width) is changed in place. chosen (stop - first,
 * T, n_active) is written for all layers up to the next one, x (T, width) and shares (T, n_active)
 * for that one. A single token may tell guesses, of each row (stop - first, n_active) the first
 * n_guesses; the layer before `stop` tells none. */
int moe_layers(moe_engine *engine, int numerics, const moe_layer *const *layers, int first,
               int stop, const moe_known_expert *experts, const moe_kv *kv,
               const moe_places *places, float *hidden, float *scratch, float *x, int32_t *chosen,
               float *shares, int n_guesses, int32_t *guesses, moe_layers_report *report);

/* Sum of all 64-bit words of a buffer, over all threads: reads at the speed of the memory bus. */
uint64_t moe_read_all(moe_engine *engine, const void *data, uint64_t n_bytes);
/* cffi ends */

#endif
