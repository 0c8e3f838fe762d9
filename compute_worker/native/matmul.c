/* Matrices times tokens: the rows are divided into parts, and the threads take them as they come. */
#include "engine.h"
#include "threads.h"

enum { MATRICES_AT_ONCE = 4 };

typedef struct {
    row_job rows;
    multiply_rows *multiply;
    int n_rows, first_part;
} matrix_job;

typedef struct {
    matrix_job matrices[MATRICES_AT_ONCE];
    int n_matrices, rows_per_part;
    const moe_grids *grids;
} matmul_job;

static void matmul_part(void *context, int part)
{
    const matmul_job *job = context;
    int i = job->n_matrices - 1;
    while (job->matrices[i].first_part > part)
        i--;
    const matrix_job *matrix = job->matrices + i;
    int begin = (part - matrix->first_part) * job->rows_per_part, end = begin + job->rows_per_part;
    row_job rows = matrix->rows;
    if (end < matrix->n_rows)
        rows.next = rows.weights + (size_t)end * rows.row_bytes;
    else
        rows.next = i + 1 < job->n_matrices ? matrix[1].rows.weights : NULL;
    end = end < matrix->n_rows ? end : matrix->n_rows;
    matrix->multiply(&rows, job->grids, begin, end);
}

/* Parts of a whole number of vectors: small enough to balance, large enough that the first rows of
 * a part, which nobody prefetched, do not count: a router has 64 rows of 8 KiB, and both threads are
 * to read them. They never count for many tokens, whose parts take long. One thread takes all rows
 * at once. */
static int part_rows(const thread_pool *pool, int n_rows, size_t row_bytes, int n_tokens)
{
    enum { VECTOR = 16, SMALLEST_BYTES = 64 * 1024, PARTS_PER_THREAD = 8 };
    enum { MANY_TOKENS = 32, MANY_TOKENS_ROWS = 64 };
    int n_threads = threads_count(pool);
    int smallest = (int)(SMALLEST_BYTES / row_bytes) / VECTOR * VECTOR + VECTOR;
    int rows = n_rows / (n_threads * PARTS_PER_THREAD) / smallest * smallest;
    if (n_threads == 1)
        return n_rows;
    if (n_tokens >= MANY_TOKENS)
        return smallest < MANY_TOKENS_ROWS ? smallest : MANY_TOKENS_ROWS;
    return rows > smallest ? rows : smallest;
}

/* What all matrices together want of the activations. */
static activation_shape wanted_shape(const moe_engine *engine, int numerics, int n_matrices,
                                     const int32_t *types, int n_columns, int n_tokens)
{
    activation_shape shape = {
        .n_tokens = n_tokens, .n_columns = n_columns,
        .width = n_tokens == 1 && engine->set->has_direct ? 1 : SIDE_BY_SIDE,
    };
    for (int i = 0; i < n_matrices; i++) {
        const type_kernels *kernels = &engine->set->types[types[i]];
        int planes = planes_for(kernels, numerics, 0);
        shape.planes = planes > shape.planes ? planes : shape.planes;
        shape.has_values |= kernels->is_float;
    }
    return shape;
}

static int multiply_matrices(moe_engine *engine, int numerics, int n_matrices,
                             const int32_t *types, const uint64_t *weights, const int32_t *n_rows,
                             int n_columns, const float *x, int n_tokens, float *out)
{
    activation_shape shape =
        wanted_shape(engine, numerics, n_matrices, types, n_columns, n_tokens);
    activations input;
    void *scratch = engine_scratch(engine, activation_bytes(shape));
    if (!scratch)
        return -1;
    carve_activations(&input, &scratch, shape);
    prepare_tokens(engine, &input, x, n_tokens, n_columns);
    matmul_job job = {.n_matrices = n_matrices, .grids = &engine->grids};
    int n_rows_of_all = 0, n_parts = 0;
    for (int i = 0; i < n_matrices; i++)
        n_rows_of_all += n_rows[i];
    job.rows_per_part =
        part_rows(engine->pool, n_rows_of_all,
                  row_bytes_of(&engine->set->types[types[0]], n_columns), n_tokens);
    for (int i = 0; i < n_matrices; i++) {
        const type_kernels *kernels = &engine->set->types[types[i]];
        job.matrices[i] = (matrix_job){
            .rows = {.weights = (const uint8_t *)(uintptr_t)weights[i], .n_columns = n_columns,
                     .row_bytes = row_bytes_of(kernels, n_columns), .input = &input,
                     .n_tokens = n_tokens, .out = out, .out_stride = (size_t)n_rows[i]},
            .multiply = kernels->multiply[planes_for(kernels, numerics, 0)],
            .n_rows = n_rows[i],
            .first_part = n_parts,
        };
        n_parts += (n_rows[i] + job.rows_per_part - 1) / job.rows_per_part;
        out += (size_t)n_tokens * (size_t)n_rows[i];
    }
    threads_run(engine->pool, matmul_part, &job, n_parts);
    return 0;
}

int moe_matmul(moe_engine *engine, int numerics, int n_matrices, const int32_t *types,
               const uint64_t *weights, const int32_t *n_rows, int n_columns, const float *x,
               int n_tokens, float *out)
{
    for (int i = 0; i < n_matrices; i += MATRICES_AT_ONCE) {
        int n = n_matrices - i < MATRICES_AT_ONCE ? n_matrices - i : MATRICES_AT_ONCE;
        if (multiply_matrices(engine, numerics, n, types + i, weights + i, n_rows + i, n_columns, x,
                              n_tokens, out))
            return -1;
        for (int j = i; j < i + n; j++)
            out += (size_t)n_tokens * (size_t)n_rows[j];
    }
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
