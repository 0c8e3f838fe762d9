/* Operations of a layer that go row by row: norms, rotation, choice of experts, sum of what they
 * gave. Some rows are a part; a lone token is done by the calling thread. */
#include <string.h>

#include "engine.h"
#include "threads.h"

enum { ROWS_PER_PART = 16 };

static void run_rows(moe_engine *engine, void (*work)(void *context, int part), void *job,
                     int n_rows)
{
    threads_run(engine->pool, work, job, (n_rows + ROWS_PER_PART - 1) / ROWS_PER_PART);
}

static int end_of_part(int part, int n_rows)
{
    int end = (part + 1) * ROWS_PER_PART;
    return end < n_rows ? end : n_rows;
}

typedef struct {
    const instruction_set *set;
    const float *x, *weight;
    int n_rows, n_columns;
    float epsilon, *out;
} norm_job;

static void norm_part(void *context, int part)
{
    const norm_job *job = context;
    for (int row = part * ROWS_PER_PART; row < end_of_part(part, job->n_rows); row++) {
        size_t at = (size_t)row * (size_t)job->n_columns;
        job->set->rms_norm(job->x + at, job->weight, job->n_columns, job->epsilon, job->out + at);
    }
}

void moe_rms_norm(moe_engine *engine, const float *x, const float *weight, int n_rows,
                  int n_columns, float epsilon, float *out)
{
    norm_job job = {engine->set, x, weight, n_rows, n_columns, epsilon, out};
    run_rows(engine, norm_part, &job, n_rows);
}

typedef struct {
    const instruction_set *set;
    float *x;
    int n_tokens, n_heads, head_width, half;
    const float *cosines, *sines;
} rotation_job;

static void rotation_part(void *context, int part)
{
    const rotation_job *job = context;
    for (int token = part * ROWS_PER_PART; token < end_of_part(part, job->n_tokens); token++) {
        size_t angle = (size_t)token * (size_t)job->half;
        size_t row = (size_t)token * (size_t)job->n_heads;
        for (int head = 0; head < job->n_heads; head++)
            job->set->rotate(job->x + (row + (size_t)head) * (size_t)job->head_width,
                             job->cosines + angle, job->sines + angle, job->half);
    }
}

void moe_rotate(moe_engine *engine, float *x, int n_tokens, int n_heads, int head_width,
                const float *cosines, const float *sines, int half)
{
    rotation_job job = {engine->set, x, n_tokens, n_heads, head_width, half, cosines, sines};
    run_rows(engine, rotation_part, &job, n_tokens);
}

typedef struct {
    const instruction_set *set;
    float *scores;
    int n_tokens, n_experts, n_active, norm_topk;
    int32_t *chosen;
    float *weights;
} choice_job;

/* Whether share a comes before share b, whose expert has the lower id. NaN comes last. */
static int is_before(float a, float b)
{
    return a > b || (a == a && b != b);
}

/* The largest shares take their places in ascending order of id: `is_chosen` marks them. */
static void choose_experts(const choice_job *job, const float *shares, int32_t *chosen,
                           float *weights)
{
    float total = 0.0f;
    uint8_t is_chosen[MOE_MAX_EXPERTS];
    memset(is_chosen, 0, (size_t)job->n_experts);
    for (int i = 0; i < job->n_active; i++) {
        int best = -1;
        for (int e = 0; e < job->n_experts; e++)
            if (!is_chosen[e] && (best < 0 || is_before(shares[e], shares[best])))
                best = e;
        is_chosen[best] = 1;
    }
    for (int e = 0, i = 0; e < job->n_experts; e++)
        if (is_chosen[e]) {
            chosen[i] = e;
            weights[i++] = shares[e];
            total += shares[e];
        }
    for (int i = 0; job->norm_topk && i < job->n_active; i++)
        weights[i] /= total;
}

static void choice_part(void *context, int part)
{
    const choice_job *job = context;
    for (int token = part * ROWS_PER_PART; token < end_of_part(part, job->n_tokens); token++) {
        float *shares = job->scores + (size_t)token * (size_t)job->n_experts;
        size_t at = (size_t)token * (size_t)job->n_active;
        job->set->softmax(shares, job->n_experts);
        choose_experts(job, shares, job->chosen + at, job->weights + at);
    }
}

void moe_top_experts(moe_engine *engine, float *scores, int n_tokens, int n_experts, int n_active,
                     int norm_topk, int32_t *chosen, float *weights)
{
    choice_job job = {engine->set, scores, n_tokens, n_experts, n_active, norm_topk, chosen,
                      weights};
    run_rows(engine, choice_part, &job, n_tokens);
}

typedef struct {
    const instruction_set *set;
    float *out;
    const float *weights;
    int n_tokens, n_active, width;
} sum_job;

static void sum_part(void *context, int part)
{
    const sum_job *job = context;
    size_t row = (size_t)job->n_active;
    for (int token = part * ROWS_PER_PART; token < end_of_part(part, job->n_tokens); token++)
        job->set->add_weighted(job->out + (size_t)token * row * (size_t)job->width,
                               job->weights + (size_t)token * row, job->n_active, job->width);
}

void moe_combine(moe_engine *engine, float *out, const float *weights, int n_tokens, int n_active,
                 int width)
{
    sum_job job = {engine->set, out, weights, n_tokens, n_active, width};
    run_rows(engine, sum_part, &job, n_tokens);
}

typedef struct {
    float *x;
    const float *y;
    int n_rows, n_columns;
} addition_job;

static void addition_part(void *context, int part)
{
    const addition_job *job = context;
    size_t begin = (size_t)part * ROWS_PER_PART, end = (size_t)end_of_part(part, job->n_rows);
    for (size_t i = begin * (size_t)job->n_columns; i < end * (size_t)job->n_columns; i++)
        job->x[i] += job->y[i];
}

void add_rows(moe_engine *engine, float *x, const float *y, int n_rows, int n_columns)
{
    addition_job job = {x, y, n_rows, n_columns};
    run_rows(engine, addition_part, &job, n_rows);
}
