/* The two dense halves of a layer, each one call, attention and the choice of experts; and whole
 * layers as far as their experts are known. They do nothing of their own but an addition and the
 * grouping of tokens by expert; the operations are those of api.h, in the same order as
 * `dense_layer` and `known_layers` call them one by one, and so the bits are the same. */
#include <string.h>
#include <time.h>

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

/* Of a token: the scores, then what a guess wants, then the outputs of experts and the pairs by
 * expert (integers of the same size). Attention is over by then. */
static size_t experts_floats(const moe_layer *layer)
{
    size_t width = (size_t)layer->width, n_active = (size_t)layer->n_active;
    size_t guess = width + (size_t)layer->n_experts + n_active;
    return larger(guess, n_active * (width + 1));
}

uint64_t moe_layers_floats(const moe_layer *const *layers, int first, int stop, int n_tokens)
{
    size_t most = 0;
    for (int index = first; index < stop; index++) {
        size_t experts = (size_t)n_tokens * experts_floats(layers[index]);
        most = larger(most, larger(moe_attend_floats(layers[index], n_tokens), experts));
    }
    return most;
}

static uint64_t now_nanoseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Something else may write to the mark at any time, if only by mistake. */
static int may_be_used(const moe_known_expert *expert)
{
    const volatile uint64_t *mark = (const volatile uint64_t *)(uintptr_t)expert->mark;
    return expert->addresses[0] &&
           (!mark || (mark[0] == expert->words[0] && mark[1] == expert->words[1]));
}

static int may_all_be_used(const moe_known_expert *experts, const int32_t *chosen, size_t n)
{
    for (size_t p = 0; p < n; p++)
        if (!may_be_used(experts + chosen[p]))
            return 0;
    return 1;
}

/* What `next` would choose of the state that reaches the layer before it: ids (n_active), the
 * likeliest first, of equal ones the smallest. See `guess_of`. */
static int guess_experts(moe_engine *engine, int numerics, const moe_layer *next,
                         const float *hidden, float *scratch, int32_t *ids)
{
    float *x = scratch, *scores = x + next->width, *shares = scores + next->n_experts;
    if (moe_choose(engine, numerics, next, hidden, 1, x, scores, ids, shares))
        return -1;
    for (int end = 1; end < next->n_active; end++) {
        float share = shares[end];
        int32_t id = ids[end];
        int at = end;
        for (; at && shares[at - 1] < share; at--) {
            shares[at] = shares[at - 1];
            ids[at] = ids[at - 1];
        }
        shares[at] = share;
        ids[at] = id;
    }
    return 0;
}

static int are_all_known(const moe_known_expert *experts, const int32_t *ids, int n)
{
    for (int i = 0; i < n; i++)
        if (!experts[ids[i]].addresses[0])
            return 0;
    return 1;
}

/* The experts that some pairs chose, ascending. */
typedef struct {
    int n;
    int32_t counts[MOE_MAX_EXPERTS];       /* pairs of each */
    uint64_t addresses[3 * MOE_MAX_EXPERTS];
} used_experts;

/* Pairs (n) in the order of their experts; those of one expert stay in theirs. */
static void group_pairs(const moe_layer *layer, const int32_t *chosen, size_t n,
                        const moe_known_expert *experts, int32_t *pairs, used_experts *used)
{
    int32_t begin[MOE_MAX_EXPERTS + 1] = {0};
    for (size_t p = 0; p < n; p++)
        begin[chosen[p] + 1]++;
    used->n = 0;
    for (int e = 0; e < layer->n_experts; e++) {
        if (begin[e + 1]) {
            memcpy(used->addresses + 3 * used->n, experts[e].addresses,
                   sizeof experts[e].addresses);
            used->counts[used->n++] = begin[e + 1];
        }
        begin[e + 1] += begin[e];
    }
    for (size_t p = 0; p < n; p++)
        pairs[begin[chosen[p]]++] = (int32_t)p;
}

/* Compute what was chosen, add the sum to `hidden`. */
static int add_experts(moe_engine *engine, int numerics, const moe_layer *layer,
                       const moe_known_expert *experts, int n_tokens, const float *x,
                       const int32_t *chosen, const float *shares, float *scratch, float *hidden)
{
    size_t tokens = (size_t)n_tokens, width = (size_t)layer->width;
    size_t n_pairs = tokens * (size_t)layer->n_active;
    float *out = scratch;
    int32_t *pairs = (int32_t *)(out + n_pairs * width);
    used_experts used;
    group_pairs(layer, chosen, n_pairs, experts, pairs, &used);
    if (moe_expert_blocks(engine, numerics, layer->gate_type, layer->up_type, layer->down_type,
                          layer->width, layer->expert_width, used.addresses, used.n, pairs,
                          used.counts, layer->n_active, x, n_tokens, out))
        return -1;
    moe_combine(engine, out, shares, n_tokens, layer->n_active, layer->width);
    for (size_t token = 0; token < tokens; token++)
        for (size_t i = 0; i < width; i++)
            hidden[token * width + i] += out[token * (size_t)layer->n_active * width + i];
    return 0;
}

int moe_layers(moe_engine *engine, int numerics, const moe_layer *const *layers, int first,
               int stop, const moe_known_expert *experts, const moe_kv *kv,
               const moe_places *places, float *hidden, float *scratch, float *x, int32_t *chosen,
               float *shares, int n_guesses, int32_t *guesses, moe_layers_report *report)
{
    int n_tokens = places->n_tokens;
    *report = (moe_layers_report){.next_layer = first};
    for (; report->next_layer < stop; report->next_layer++) {
        int index = report->next_layer;
        const moe_layer *layer = layers[index];
        const moe_known_expert *own = experts + (size_t)index * (size_t)layer->n_experts;
        size_t n_pairs = (size_t)n_tokens * (size_t)layer->n_active;
        if (moe_attend(engine, numerics, layer, kv, index, places, hidden, scratch) ||
            moe_choose(engine, numerics, layer, hidden, n_tokens, x, scratch, chosen, shares))
            return -1;
        int is_guessing = n_guesses && index + 1 < stop;
        if (is_guessing &&
            guess_experts(engine, numerics, layers[index + 1], hidden, scratch, guesses))
            return -1;
        if (!may_all_be_used(own, chosen, n_pairs) ||
            (is_guessing && !are_all_known(own + layer->n_experts, guesses, n_guesses)))
            return 0;
        uint64_t started = now_nanoseconds();
        if (add_experts(engine, numerics, layer, own, n_tokens, x, chosen, shares, scratch, hidden))
            return -1;
        report->experts_nanoseconds += now_nanoseconds() - started;
        chosen += n_pairs;
        guesses += layer->n_active;
    }
    return 0;
}
