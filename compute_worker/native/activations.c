/* The arrays of prepared activations: their sizes, filling, and gathering for an expert. What a
 * group of values becomes is decided in activations.h, by each instruction set. */
#include <string.h>

#include "engine.h"
#include "threads.h"

int planes_for(const type_kernels *type, int numerics, int is_expert)
{
    return type->is_float ? 0 : numerics == EXACT ? 3 : is_expert ? 1 : 2;
}

/* Whole tiles; a tile of a float type is two groups. */
int used_groups(int n_columns, int planes)
{
    int tile_columns = planes ? TILE_COLUMNS : 2 * GROUP;
    return (n_columns + tile_columns - 1) / tile_columns * (tile_columns / GROUP);
}

/* Two groups more between bundles: at a distance of a power of two, the same columns of all bundles
 * would share a few places of the first-level cache. */
static int groups_of(activation_shape shape)
{
    return used_groups(shape.n_columns, shape.planes) + (shape.width > 1 ? 2 : 0);
}

/* Groups of all tokens, with those that fill up the last bundle. */
static size_t all_groups(activation_shape shape)
{
    int bundles = (shape.n_tokens + shape.width - 1) / shape.width;
    return (size_t)bundles * (size_t)shape.width * (size_t)groups_of(shape);
}

static size_t values_bytes(activation_shape shape)
{
    return shape.has_values ? aligned(all_groups(shape) * GROUP * sizeof(float)) : 0;
}

static size_t records_bytes(activation_shape shape)
{
    size_t bundled_groups = all_groups(shape) / (size_t)shape.width;
    return shape.planes ? aligned(bundled_groups * record_bytes(shape.planes, shape.width)) : 0;
}

size_t activation_bytes(activation_shape shape)
{
    return values_bytes(shape) + records_bytes(shape);
}

void carve_activations(activations *input, void **scratch, activation_shape shape)
{
    *input = (activations){groups_of(shape), shape.planes, shape.width, NULL, NULL};
    if (shape.has_values)
        input->values = carve(scratch, values_bytes(shape));
    if (shape.planes)
        input->records = carve(scratch, records_bytes(shape));
}

void prepare_token(const instruction_set *set, activations *input, int i, const float *x,
                   int n_columns)
{
    float last[GROUP];
    int n_whole = n_columns / GROUP, n_groups = used_groups(n_columns, input->planes);
    set->prepare(input, i, 0, n_whole, x);
    for (int g = n_whole; g < n_groups; g++) {
        memset(last, 0, sizeof last);
        if (g == n_whole)
            memcpy(last, x + GROUP * g, sizeof(float) * (size_t)(n_columns % GROUP));
        set->prepare(input, i, g, 1, last);
    }
}

typedef struct {
    const instruction_set *set;
    activations *input;
    const float *x;
    int n_tokens, n_columns;
} prepare_job;

enum { PREPARED_AT_ONCE = SIDE_BY_SIDE }; /* some microseconds of work, and no shared cache lines */

static void prepare_part(void *context, int part)
{
    prepare_job *job = context;
    int end = (part + 1) * PREPARED_AT_ONCE;
    for (int i = part * PREPARED_AT_ONCE; i < end && i < job->n_tokens; i++)
        prepare_token(job->set, job->input, i, job->x + (size_t)i * (size_t)job->n_columns,
                      job->n_columns);
}

void prepare_tokens(moe_engine *engine, activations *input, const float *x, int n_tokens,
                    int n_columns)
{
    prepare_job job = {engine->set, input, x, n_tokens, n_columns};
    threads_run(engine->pool, prepare_part, &job,
                (n_tokens + PREPARED_AT_ONCE - 1) / PREPARED_AT_ONCE);
}

/* Words of one token into lane `lane` of a bundle. */
static void spread_words(const void *from, void *to, size_t n_words, size_t lane)
{
    for (size_t i = 0; i < n_words; i++)
        memcpy((char *)to + 4 * (i * SIDE_BY_SIDE + lane), (const char *)from + 4 * i, 4);
}

/* A record of width 1 and a lane of a wider one hold the same words in the same order. */
void bundle_tokens(const activations *from, const int32_t *tokens, int n, activations *to,
                   int bundle)
{
    size_t n_groups = (size_t)from->n_groups, to_groups = (size_t)to->n_groups, b = (size_t)bundle;
    size_t one = record_bytes(from->planes, 1);
    for (int lane = 0; lane < n; lane++) {
        size_t i = (size_t)tokens[lane];
        if (to->values)
            spread_words(from->values + i * n_groups * GROUP,
                         to->values + b * to_groups * GROUP * SIDE_BY_SIDE, n_groups * GROUP,
                         (size_t)lane);
        if (to->records)
            spread_words(from->records + i * n_groups * one,
                         to->records + b * to_groups * one * SIDE_BY_SIDE, n_groups * one / 4,
                         (size_t)lane);
    }
}
