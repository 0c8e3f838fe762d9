/* The engine: one instruction set, its threads, and scratch memory that grows to the largest call. */
#include "engine.h"

#include <stdlib.h>
#include <string.h>

#include "threads.h"

enum { ALIGNMENT = 64 }; /* a cache line, and the widest vector */

static size_t aligned(size_t n_bytes)
{
    return (n_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

moe_engine *moe_engine_open(const char *instruction_set_name, int n_threads, const moe_grids *grids)
{
    const instruction_set *set = instruction_set_by_name(instruction_set_name);
    moe_engine *engine = set ? calloc(1, sizeof *engine) : NULL;
    if (!engine)
        return NULL;
    engine->set = set;
    engine->grids = *grids;
    engine->pool = threads_open(n_threads);
    if (!engine->pool) {
        free(engine);
        return NULL;
    }
    return engine;
}

void moe_engine_park(moe_engine *engine)
{
    threads_park(engine->pool);
}

void moe_engine_close(moe_engine *engine)
{
    threads_close(engine->pool);
    free(engine->scratch);
    free(engine);
}

int moe_type_is_native(const moe_engine *engine, int type)
{
    return type >= 0 && type < N_TYPES && engine->set->types[type].multiply[EXACT] != NULL;
}

void *engine_scratch(moe_engine *engine, size_t n_bytes)
{
    if (n_bytes > engine->scratch_bytes) {
        free(engine->scratch);
        engine->scratch_bytes = aligned(n_bytes);
        engine->scratch = aligned_alloc(ALIGNMENT, engine->scratch_bytes);
        if (!engine->scratch)
            engine->scratch_bytes = 0;
    }
    return engine->scratch;
}

void *carve(void **scratch, size_t n_bytes)
{
    void *piece = *scratch;
    *scratch = (char *)piece + aligned(n_bytes);
    return piece;
}

size_t row_bytes_of(const type_kernels *type, int n_columns)
{
    return (size_t)(n_columns / type->block_columns) * (size_t)type->block_bytes;
}

int planes_for(const type_kernels *type, int numerics)
{
    return type->is_float ? 0 : numerics == FAST ? 1 : MAX_PLANES;
}

/* Whole tiles; a tile of a float type is two groups. */
static int groups_of(int n_columns, int planes)
{
    int tile_columns = planes ? TILE_COLUMNS : 2 * GROUP;
    return (n_columns + tile_columns - 1) / tile_columns * (tile_columns / GROUP);
}

size_t activation_bytes(int n_tokens, int n_columns, int planes)
{
    size_t n_groups = (size_t)n_tokens * (size_t)groups_of(n_columns, planes);
    return aligned(n_groups * GROUP * sizeof(float)) + aligned(n_groups * GROUP * (size_t)planes) +
           aligned(n_groups * sizeof(float)) + aligned(n_groups * sizeof(group_sums));
}

void carve_activations(activations *input, void **scratch, int n_tokens, int n_columns, int planes)
{
    size_t n_groups = (size_t)n_tokens * (size_t)groups_of(n_columns, planes);
    input->n_groups = groups_of(n_columns, planes);
    input->planes = planes;
    input->values = carve(scratch, n_groups * GROUP * sizeof(float));
    input->bytes = carve(scratch, n_groups * GROUP * (size_t)planes);
    input->scales = carve(scratch, n_groups * sizeof(float));
    input->sums = carve(scratch, n_groups * sizeof(group_sums));
}

typedef struct {
    const instruction_set *set;
    activations *input;
    int n_tokens;
} prepare_job;

enum { PREPARED_AT_ONCE = 8 }; /* tokens per part: some microseconds of work */

static void prepare_part(void *context, int part)
{
    prepare_job *job = context;
    int end = (part + 1) * PREPARED_AT_ONCE;
    for (int token = part * PREPARED_AT_ONCE; token < end && token < job->n_tokens; token++)
        job->set->prepare(job->input, token, 0, job->input->n_groups);
}

void take_activations(moe_engine *engine, activations *input, const float *x, int n_tokens,
                      int n_columns)
{
    size_t padded = (size_t)input->n_groups * GROUP;
    if (padded == (size_t)n_columns) {
        input->values = (float *)x;
    } else {
        for (int i = 0; i < n_tokens; i++) {
            float *row = input->values + (size_t)i * padded;
            memcpy(row, x + (size_t)i * (size_t)n_columns, sizeof(float) * (size_t)n_columns);
            memset(row + n_columns, 0, sizeof(float) * (padded - (size_t)n_columns));
        }
    }
    if (input->planes) {
        prepare_job job = {engine->set, input, n_tokens};
        threads_run(engine->pool, prepare_part, &job,
                    (n_tokens + PREPARED_AT_ONCE - 1) / PREPARED_AT_ONCE);
    }
}
