/* The two dense halves of a layer, each one call: attention, and the choice of experts. They do
 * nothing of their own but an addition; the operations are those of api.h, in the same order as
 * `dense_layer` calls them one by one, and so the bits are the same. */
#include "engine.h"

/* The queries, keys and values of a token. */
static size_t rows_of_all(const moe_layer *layer)
{
    return (size_t)layer->n_rows[0] + (size_t)layer->n_rows[1] + (size_t)layer->n_rows[2];
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* First the normed input, then what attention mixes. */
static size_t input_floats(const moe_layer *layer)
{
    return larger((size_t)layer->width, (size_t)layer->n_rows[0]);
}

uint64_t moe_attend_floats(const moe_layer *layer, int n_tokens)
{
    size_t product = larger(rows_of_all(layer), (size_t)layer->width);
    return (uint64_t)n_tokens * (input_floats(layer) + product);
}

static void norm_heads(moe_engine *engine, const moe_layer *layer, const float *weight,
                       int norm_width, float *x, size_t n)
{
    if (weight)
        moe_rms_norm(engine, x, weight, (int)(n / (size_t)norm_width), norm_width, layer->epsilon,
                     x);
}

int moe_attend(moe_engine *engine, int numerics, const moe_layer *layer, const moe_kv *kv,
               int index, const moe_places *places, float *hidden, float *scratch)
{
    int n_tokens = places->n_tokens;
    size_t tokens = (size_t)n_tokens;
    size_t n_q = tokens * (size_t)layer->n_rows[0], n_k = tokens * (size_t)layer->n_rows[1];
    float *x = scratch, *q = scratch + tokens * input_floats(layer), *k = q + n_q, *v = k + n_k;

    moe_rms_norm(engine, hidden, layer->attn_norm, n_tokens, layer->width, layer->epsilon, x);
    if (moe_matmul(engine, numerics, 3, layer->types, layer->weights, layer->n_rows, layer->width,
                   x, n_tokens, q))
        return -1;
    norm_heads(engine, layer, layer->q_norm, layer->q_norm_width, q, n_q);
    norm_heads(engine, layer, layer->k_norm, layer->k_norm_width, k, n_k);
    moe_rotate(engine, q, n_tokens, layer->n_heads, layer->head_width, places->cosines,
               places->sines, places->half);
    moe_rotate(engine, k, n_tokens, layer->n_kv_heads, layer->head_width, places->cosines,
               places->sines, places->half);
    moe_store_kv(engine, kv, index, k, v, places->tables, places->max_blocks,
                 places->sequence_of_token, places->positions, n_tokens);
    float *mixed = x, *out = q; /* what was there is used up */
    if (moe_attention(engine, q, kv, index, layer->n_heads, places->tables, places->max_blocks,
                      places->sequence_of_token, places->positions, n_tokens, mixed))
        return -1;
    if (moe_matmul(engine, numerics, 1, &layer->output_type, &layer->output, &layer->width,
                   layer->n_rows[0], mixed, n_tokens, out))
        return -1;
    add_rows(engine, hidden, out, n_tokens, layer->width);
    return 0;
}

int moe_choose(moe_engine *engine, int numerics, const moe_layer *layer, const float *hidden,
               int n_tokens, float *x, float *scores, int32_t *chosen, float *weights)
{
    moe_rms_norm(engine, hidden, layer->ffn_norm, n_tokens, layer->width, layer->epsilon, x);
    if (moe_matmul(engine, numerics, 1, &layer->router_type, &layer->router, &layer->n_experts,
                   layer->width, x, n_tokens, scores))
        return -1;
    moe_top_experts(engine, scores, n_tokens, layer->n_experts, layer->n_active, layer->norm_topk,
                    chosen, weights);
    return 0;
}
