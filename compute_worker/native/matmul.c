/* Matrix times tokens: the rows are divided into parts, and the threads take them as they come. */
#include "engine.h"
#include "threads.h"

typedef struct {
    row_job rows;
    multiply_rows *multiply;
    const moe_grids *grids;
    int n_rows, rows_per_part;
} matmul_job;

static void matmul_part(void *context, int part)
{
    const matmul_job *job = context;
    int begin = part * job->rows_per_part, end = begin + job->rows_per_part;
    row_job rows = job->rows;
    end = end < job->n_rows ? end : job->n_rows;
    rows.next = end < job->n_rows ? rows.weights + (size_t)end * rows.row_bytes : NULL;
    job->multiply(&rows, job->grids, begin, end);
}

/* Parts of a whole number of vectors: small enough to balance, large enough that the first rows of
 * a part, which nobody prefetched, do not count. One thread takes all rows at once. */
static int part_rows(const thread_pool *pool, int n_rows)
{
    enum { SMALLEST = 64, PARTS_PER_THREAD = 8 };
    int n_threads = threads_count(pool);
    int rows = n_rows / (n_threads * PARTS_PER_THREAD) / SMALLEST * SMALLEST;
    return n_threads == 1 ? n_rows : rows < SMALLEST ? SMALLEST : rows;
}

int moe_matmul(moe_engine *engine, int numerics, int type, const void *weights, int n_rows,
               int n_columns, const float *x, int n_tokens, float *out)
{
    const type_kernels *kernels = &engine->set->types[type];
    activation_shape shape = {
        .n_tokens = n_tokens, .n_columns = n_columns, .planes = planes_for(kernels, numerics, 0),
        .has_values = kernels->is_float,
        .width = n_tokens == 1 && engine->set->has_direct ? 1 : SIDE_BY_SIDE,
    };
    activations input;
    void *scratch = engine_scratch(engine, activation_bytes(shape));
    if (!scratch)
        return -1;
    carve_activations(&input, &scratch, shape);
    prepare_tokens(engine, &input, x, n_tokens, n_columns);
    matmul_job job = {
        .rows = {.weights = weights, .n_columns = n_columns,
                 .row_bytes = row_bytes_of(kernels, n_columns), .input = &input,
                 .n_tokens = n_tokens, .out = out, .out_stride = (size_t)n_rows},
        .multiply = kernels->multiply[shape.planes],
        .grids = &engine->grids,
        .n_rows = n_rows,
        .rows_per_part = part_rows(engine->pool, n_rows),
    };
    threads_run(engine->pool, matmul_part, &job,
                (n_rows + job.rows_per_part - 1) / job.rows_per_part);
    return 0;
}

enum { READ_PART_BYTES = 1 << 20 };

typedef struct {
    const uint64_t *words;
    uint64_t n_words;
    _Atomic uint64_t sum;
} read_job;

/* Eight sums, so that the processor waits for memory only. */
static void read_part(void *context, int part)
{
    read_job *job = context;
    uint64_t begin = (uint64_t)part * (READ_PART_BYTES / 8), end = begin + READ_PART_BYTES / 8;
    uint64_t sums[8] = {0};
    for (uint64_t i = begin; i + 8 <= (end < job->n_words ? end : job->n_words); i += 8) {
        __builtin_prefetch(job->words + i + 512, 0, 3);
        for (int j = 0; j < 8; j++)
            sums[j] += job->words[i + (uint64_t)j];
    }
    for (int j = 0; j < 8; j++)
        job->sum += sums[j];
}

uint64_t moe_read_all(moe_engine *engine, const void *data, uint64_t n_bytes)
{
    read_job job = {.words = data, .n_words = n_bytes / 8};
    threads_run(engine->pool, read_part, &job,
                (int)((n_bytes + READ_PART_BYTES - 1) / READ_PART_BYTES));
    return job.sum;
}
