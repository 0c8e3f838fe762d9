/* Attention over the KV cache: one call per layer.
 *
 *     kv (n_blocks, n_layers, 2, K, 64, head_width)      2: keys, values
 *
 * A part is one key-value head and some neighbouring tokens of one sequence, so that a tile of
 * keys is unpacked once for all of them and for all heads that share it. For each tile of 64
 * positions in ascending order: scores (the tile is a matrix of 64 rows), running softmax, mix of
 * values. A query ends with the tile of its own position, whoever else is in the part.
 */
#include <math.h>
#include <string.h>

#include "engine.h"
#include "threads.h"

enum { QUERIES_AT_ONCE = 64 };

typedef struct {
    const moe_engine *engine;
    const moe_kv *kv;
    int layer, n_heads, max_blocks, n_tokens;
    const int32_t *tables, *sequence_of_token, *positions;
    int32_t *spans; /* first token of each span, and the number of tokens */
    activation_shape shape; /* of the queries of a part */
    char *prepared;         /* (parts) of that shape */
    const float *q;
    float *out;
} attention_job;

typedef struct {
    float scores[QUERIES_AT_ONCE * KV_TILE];
    float largest[QUERIES_AT_ONCE], total[QUERIES_AT_ONCE];
    int32_t rows[QUERIES_AT_ONCE]; /* of q and out */
    int positions[QUERIES_AT_ONCE], counts[QUERIES_AT_ONCE];
    activations input; /* the queries, prepared */
} query_block;

static size_t kv_row_bytes(const moe_kv *kv)
{
    return kv->type == TYPE_F32 ? 4 * (size_t)kv->head_width
         : kv->type == TYPE_F16 ? 2 * (size_t)kv->head_width
                                : (size_t)(kv->head_width / 32 * 34);
}

/* part 0: keys, 1: values */
static uint8_t *kv_tile(const moe_kv *kv, int block, int layer, int part, int head)
{
    size_t tile = (((size_t)block * (size_t)kv->n_layers + (size_t)layer) * 2 + (size_t)part) *
                      (size_t)kv->n_kv_heads + (size_t)head;
    return (uint8_t *)kv->data + tile * KV_TILE * kv_row_bytes(kv);
}

/* Neighbouring queries with as many positions go together. */
static void mix_tile(const attention_job *job, query_block *q, int n, const uint8_t *values)
{
    for (int i = 0, n_same; i < n; i += n_same) {
        float *out[MIXED_AT_ONCE];
        for (n_same = 0; n_same < MIXED_AT_ONCE && i + n_same < n; n_same++) {
            if (q->counts[i + n_same] != q->counts[i])
                break;
            out[n_same] = job->out + (size_t)q->rows[i + n_same] * (size_t)job->kv->head_width;
        }
        if (q->counts[i])
            job->engine->set->mix_values(job->kv->type, values, job->kv->head_width, n_same,
                                         q->scores + i * KV_TILE, q->counts[i], out);
    }
}

static void attend_tile(const attention_job *job, query_block *q, int n, int tile, int head,
                        int block)
{
    const moe_kv *kv = job->kv;
    const instruction_set *set = job->engine->set;
    float scale = 1.0f / sqrtf((float)kv->head_width);
    row_job rows = {
        .weights = kv_tile(kv, block, job->layer, 0, head), .n_columns = kv->head_width,
        .next = kv_tile(kv, block, job->layer, 1, head), .row_bytes = kv_row_bytes(kv),
        .input = &q->input, .n_tokens = n, .out = q->scores,
        .out_stride = KV_TILE,
    };
    set->types[kv->type].multiply[job->shape.planes](&rows, &job->engine->grids, 0, KV_TILE);
    for (int i = 0; i < n; i++) {
        int count = q->positions[i] - tile * KV_TILE + 1;
        q->counts[i] = count < 0 ? 0 : count < KV_TILE ? count : KV_TILE;
        if (count <= 0)
            continue;
        float *out = job->out + (size_t)q->rows[i] * (size_t)kv->head_width;
        float rescale = set->soften(q->scores + i * KV_TILE, q->counts[i], scale, q->largest + i,
                                    q->total + i);
        for (int d = 0; d < kv->head_width; d++)
            out[d] *= rescale;
    }
    mix_tile(job, q, n, kv_tile(kv, block, job->layer, 1, head));
}

static void attend_queries(const attention_job *job, query_block *q, int n, int sequence, int head)
{
    const int32_t *table = job->tables + (size_t)sequence * (size_t)job->max_blocks;
    int width = job->kv->head_width, last = 0;
    for (int i = 0; i < n; i++) {
        prepare_token(job->engine->set, &q->input, i, job->q + (size_t)q->rows[i] * (size_t)width,
                      width);
        q->largest[i] = -INFINITY;
        q->total[i] = 0.0f;
        memset(job->out + (size_t)q->rows[i] * (size_t)width, 0, 4 * (size_t)width);
        last = q->positions[i] > last ? q->positions[i] : last;
    }
    for (int tile = 0; tile <= last / KV_TILE; tile++)
        attend_tile(job, q, n, tile, head, table[tile]);
    for (int i = 0; i < n; i++) {
        float *out = job->out + (size_t)q->rows[i] * (size_t)width;
        for (int d = 0; d < width; d++)
            out[d] /= q->total[i];
    }
}

static void attention_part(void *context, int part)
{
    const attention_job *job = context;
    int span = part / job->kv->n_kv_heads, head = part % job->kv->n_kv_heads;
    int shared = job->n_heads / job->kv->n_kv_heads, n = 0;
    int sequence = job->sequence_of_token[job->spans[span]];
    query_block q;
    void *prepared = job->prepared + (size_t)part * activation_bytes(job->shape);
    carve_activations(&q.input, &prepared, job->shape);
    for (int token = job->spans[span]; token < job->spans[span + 1]; token++)
        for (int i = 0; i < shared; i++) {
            q.rows[n] = token * job->n_heads + head * shared + i;
            q.positions[n++] = job->positions[token];
            if (n == QUERIES_AT_ONCE) {
                attend_queries(job, &q, n, sequence, head);
                n = 0;
            }
        }
    if (n)
        attend_queries(job, &q, n, sequence, head);
}

/* Neighbouring tokens of one sequence, as many as fill one block of queries, are a span. Returns
 * their number, and writes where they begin if there is room for it already. */
static int count_spans(const attention_job *job, int shared)
{
    int most = shared < QUERIES_AT_ONCE ? QUERIES_AT_ONCE / shared : 1, n_spans = 0, begin = 0;
    for (int token = 0; token <= job->n_tokens; token++)
        if (token == 0 || token == job->n_tokens || token - begin == most ||
            job->sequence_of_token[token] != job->sequence_of_token[token - 1]) {
            begin = token;
            if (job->spans)
                job->spans[n_spans] = token;
            n_spans++;
        }
    return n_spans - 1;
}

int moe_attention(moe_engine *engine, const float *q, const moe_kv *kv, int layer, int n_heads,
                  const int32_t *tables, int max_blocks, const int32_t *sequence_of_token,
                  const int32_t *positions, int n_tokens, float *out)
{
    const type_kernels *type = &engine->set->types[kv->type];
    int shared = n_heads / kv->n_kv_heads, n_queries = n_tokens * shared;
    n_queries = n_queries < QUERIES_AT_ONCE ? n_queries : QUERIES_AT_ONCE;
    attention_job job = {
        .engine = engine, .kv = kv, .layer = layer, .n_heads = n_heads, .max_blocks = max_blocks,
        .n_tokens = n_tokens, .tables = tables, .sequence_of_token = sequence_of_token,
        .positions = positions, .q = q, .out = out,
        .shape = {.n_tokens = n_queries, .n_columns = kv->head_width,
                  .planes = planes_for(type, EXACT, 0), .has_values = type->is_float,
                  .width = n_queries == 1 && engine->set->has_direct ? 1 : SIDE_BY_SIDE},
    };
    size_t span_bytes = ((size_t)n_tokens + 1) * sizeof(int32_t);
    int n_parts = count_spans(&job, shared) * kv->n_kv_heads;
    void *scratch = engine_scratch(
        engine, aligned(span_bytes) + (size_t)n_parts * activation_bytes(job.shape));
    if (!scratch)
        return -1;
    job.spans = carve(&scratch, span_bytes);
    job.prepared = scratch;
    count_spans(&job, shared);
    threads_run(engine->pool, attention_part, &job, n_parts);
    return 0;
}

typedef struct {
    const moe_engine *engine;
    const moe_kv *kv;
    int layer, max_blocks, n_tokens;
    const float *k, *v;
    const int32_t *tables, *sequence_of_token, *positions;
} store_job;

enum { STORED_AT_ONCE = 16 }; /* tokens of a part */

static void store_part(void *context, int part)
{
    const store_job *job = context;
    const moe_kv *kv = job->kv;
    size_t width = (size_t)kv->head_width;
    int begin = part * STORED_AT_ONCE, end = begin + STORED_AT_ONCE;
    for (int token = begin; token < end && token < job->n_tokens; token++) {
        int position = job->positions[token];
        int block = job->tables[(size_t)job->sequence_of_token[token] * (size_t)job->max_blocks +
                                (size_t)(position / KV_TILE)];
        for (int head = 0; head < kv->n_kv_heads; head++) {
            size_t from = ((size_t)token * (size_t)kv->n_kv_heads + (size_t)head) * width;
            size_t row = (size_t)(position % KV_TILE) * kv_row_bytes(kv);
            job->engine->set->store_row(kv->type, job->k + from, kv->head_width,
                                        kv_tile(kv, block, job->layer, 0, head) + row);
            job->engine->set->store_row(kv->type, job->v + from, kv->head_width,
                                        kv_tile(kv, block, job->layer, 1, head) + row);
        }
    }
}

void moe_store_kv(moe_engine *engine, const moe_kv *kv, int layer, const float *k, const float *v,
                  const int32_t *tables, int max_blocks, const int32_t *sequence_of_token,
                  const int32_t *positions, int n_tokens)
{
    store_job job = {engine, kv, layer, max_blocks, n_tokens, k, v, tables, sequence_of_token,
                     positions};
    threads_run(engine->pool, store_part, &job, (n_tokens + STORED_AT_ONCE - 1) / STORED_AT_ONCE);
}
