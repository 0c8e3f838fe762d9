/* The walk over rows, tiles and tokens, and what memory is asked for on the way. Included once per
 * instruction set, after multiply.h, which multiplies the tiles.
 *
 * A lone token takes LANES rows at a time and multiplies while it unpacks. Several tokens take twice
 * as many rows; each tile of them is unpacked once and multiplied with all tokens, and the bytes of
 * the next rows are asked for while it is multiplied.
 */

enum { EDGE_BYTES = LANES * 4 * FLOAT_TILE_COLUMNS }; /* F32 has the largest tile */

/* A tile that sticks out of the matrix, copied with zeros around it: kernels never read a byte that
 * is not the matrix's own. */
static const uint8_t *copy_edge(uint8_t *edge, const uint8_t *p, size_t row_bytes, int n_rows,
                                size_t n_bytes, size_t tile_bytes)
{
    memset(edge, 0, LANES * tile_bytes);
    for (int row = 0; row < n_rows; row++)
        memcpy(edge + (size_t)row * tile_bytes, p + (size_t)row * row_bytes, n_bytes);
    return edge;
}

/* LANES rows of the matrix, or n_rows where it ends. */
typedef struct {
    const row_job *job;
    const moe_grids *grids;
    const uint8_t *rows;
    const uint8_t *next; /* rows to ask for, or NULL */
    int n_rows, tile_columns;
    int is_last; /* of its job: nobody has asked for the start of `next` */
    size_t tile_bytes;
} row_group;

INLINE int tiles_of(const row_group *g)
{
    return (g->job->n_columns + g->tile_columns - 1) / g->tile_columns;
}

enum { AHEAD_BYTES = 8192 }; /* beyond the next rows: 3 to 5 % faster than asking for those alone */

/* The bytes that rows before these would have asked for. */
INLINE void ask_for_start(const uint8_t *rows)
{
    for (int i = 0; i < AHEAD_BYTES; i += 64)
        __builtin_prefetch(rows + i, 0, 2);
}

/* The rows of tile c, and what to ask for meanwhile: the same share of the next rows. */
INLINE row_pointers point_tile(const row_group *g, int c, uint8_t *edge, tile *t)
{
    const uint8_t *p = g->rows + (size_t)c * g->tile_bytes;
    size_t left = g->job->row_bytes - (size_t)c * g->tile_bytes;
    t->ahead = g->next ? g->next + AHEAD_BYTES + (size_t)c * LANES * g->tile_bytes : p;
    t->ahead_end = t->ahead + LANES * g->tile_bytes;
    if (g->is_last && g->next && c == 0)
        ask_for_start(g->next);
    if (g->n_rows == LANES && left >= g->tile_bytes)
        return point_rows(p, g->job->row_bytes);
    return point_rows(copy_edge(edge, p, g->job->row_bytes, g->n_rows,
                                left < g->tile_bytes ? left : g->tile_bytes, g->tile_bytes),
                      g->tile_bytes);
}

/* What differs between the types. */
typedef struct {
    layout type;
    int tile_columns;
    size_t tile_bytes;
    vf (*direct)(const row_group *g); /* all tiles times one token */
    unpack_tile *unpack;
    multiply_tile *multiply;
} row_kernel;

/* Tile c's share of the bytes of as many groups of rows that follow each other. */
INLINE asking ask_for_share(const row_group *g, int n_row_groups, int c)
{
    size_t share = (size_t)n_row_groups * LANES * g->tile_bytes;
    const uint8_t *at = g->next + AHEAD_BYTES + (size_t)c * share;
    return (asking){at, at + share, 0};
}

/* Where the product of some rows, the first of them `row`, with token i of the job goes. */
INLINE float *out_at(const row_job *job, int row, int i)
{
    size_t o = (size_t)(job->out_rows ? job->out_rows[i] : i);
    return job->out + o * job->out_stride + (row - job->out_begin);
}

/* Asks for the places of tokens [first, end), which are far from each other, before they are
 * written. */
INLINE void ask_for_places(const row_job *job, int row, int n_row_groups, int first, int end)
{
    for (int i = first; i < end; i++)
        for (int r = 0; r < n_row_groups; r++)
            __builtin_prefetch(out_at(job, row + r * LANES, i), 1, 3);
}

/* All tiles of one or two groups of rows times n <= TOKENS_AT_ONCE tokens from `first` on. */
static void multiply_several(const row_kernel *kernel, const row_group *groups, int n_row_groups,
                             int row, int first, int n, row_sums *sums)
{
    uint8_t edge[EDGE_BYTES];
    stored_tile stored[2];
    tile t;
    int n_groups = groups->tile_columns / GROUP, n_tiles = tiles_of(groups);
    for (int r = 0; r < n_row_groups; r++)
        for (int i = 0; i < n; i++)
            sums[r][i] = (vf){0};
    for (int c = 0; c < n_tiles; c++) {
        asking ask = {NULL, NULL, 0};
        for (int r = 0; r < n_row_groups; r++) {
            row_pointers rows = point_tile(groups + r, c, edge, &t);
            if (r == 0 && groups->next)
                ask = ask_for_share(groups, n_row_groups, c);
            t.ahead = t.ahead_end = groups[r].rows; /* these are here: unpacking asks for nothing */
            t.words = stored[r].words;
            t.scales = stored[r].scale;
            t.minima = stored[r].minimum;
            kernel->unpack(&t, &rows, groups->grids);
        }
        ask_for_places(groups->job, row, n_row_groups, first + n * c / n_tiles,
                       first + n * (c + 1) / n_tiles);
        kernel->multiply(stored, kernel->type, n_row_groups, groups->job, first, n, c * n_groups,
                         n_groups, ask, sums);
    }
}

INLINE void store_sums(const row_job *job, int row, int n_rows, int first, int n, const vf *sums)
{
    for (int i = 0; i < n; i++) {
        float *out = out_at(job, row, first + i);
        if (n_rows == LANES)
            store_floats(out, sums[i]);
        else
            store_some(out, sums[i], n_rows);
    }
}

/* The rows from `row` on; those `step` further on are asked for meanwhile. */
INLINE row_group group_at(const row_kernel *kernel, const row_job *job, const moe_grids *grids,
                          int row, int end, int step)
{
    const uint8_t *rows = job->weights + (size_t)row * job->row_bytes;
    return (row_group){
        .job = job, .grids = grids, .rows = rows,
        .next = row + step < end ? rows + (size_t)step * job->row_bytes
              : job->next ? job->next + (size_t)(row + step - end) * job->row_bytes : NULL,
        .is_last = row + step >= end,
        .n_rows = end - row < LANES ? end - row : LANES,
        .tile_columns = kernel->tile_columns, .tile_bytes = kernel->tile_bytes,
    };
}

static void multiply_rows_with(const row_kernel *kernel, const row_job *job, const moe_grids *grids,
                               int begin, int end)
{
    ask_for_start(job->weights + (size_t)begin * job->row_bytes);
    if (job->input->width == 1) {
        for (int row = begin; row < end; row += LANES) {
            row_group group = group_at(kernel, job, grids, row, end, LANES);
            vf sum = kernel->direct(&group);
            store_sums(job, row, group.n_rows, 0, 1, &sum);
        }
        return;
    }
    /* Tokens outside, rows inside: the activations of TOKENS_AT_ONCE tokens stay in the
     * second-level cache for all rows of the part. */
    for (int first = 0; first < job->n_tokens; first += TOKENS_AT_ONCE) {
        int n = job->n_tokens - first < TOKENS_AT_ONCE ? job->n_tokens - first : TOKENS_AT_ONCE;
        for (int row = begin; row < end; row += 2 * LANES) {
            int n_row_groups = row + LANES < end ? 2 : 1;
            row_group groups[2];
            row_sums sums[2];
            for (int r = 0; r < n_row_groups; r++)
                groups[r] = group_at(kernel, job, grids, row + r * LANES, end, 2 * LANES);
            multiply_several(kernel, groups, n_row_groups, row, first, n, sums);
            for (int r = 0; r < n_row_groups; r++)
                store_sums(job, row + r * LANES, groups[r].n_rows, first, n, sums[r]);
        }
    }
}
