/* The engine: one instruction set, its threads, and scratch that grows to the largest call. */
#include "engine.h"

#include <stdlib.h>

#include "threads.h"

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
    return type >= 0 && type < N_TYPES && engine->set->types[type].block_columns != 0;
}

void *engine_scratch(moe_engine *engine, size_t n_bytes)
{
    if (n_bytes > engine->scratch_bytes) {
        free(engine->scratch);
        engine->scratch_bytes = aligned(n_bytes);
        engine->scratch = aligned_alloc(64, engine->scratch_bytes);
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
