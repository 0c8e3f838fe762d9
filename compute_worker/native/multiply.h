/* A tile times tokens, and the walk over rows and tiles. Included once per instruction set.
 *
 * Per row and token, for each group of 32 columns in ascending order:
 *
 *     dot  = sum(bytes * activation integers)        integers, exact in any order
 *     part = scale * (dot - offset * sum(integers)) + minimum * sum(integers)
 *     sum += activation scale * part
 *
 * with one fused multiply-add per step. Several planes of activations: the dots of the planes are
 * put together as float32 first. Float weights: two chains of multiply-adds per group (even and
 * odd columns), then added. Several tokens and rows at once reuse what is loaded; that changes no
 * operation of any one of them.
 */

/* Sums of a group of rows, by token of the job. */
typedef vf row_sums[TOKENS_AT_ONCE];

/* Bytes of the next rows, still to be asked for while a tile is multiplied: a few lines at a time.
 * Asked for all at once, more than the processor can have under way, they would hold it up. */
typedef struct {
    const uint8_t *at, *end;
    int lines_per_group;
} asking;

INLINE void ask_for_some(asking *ask, int n_groups)
{
    const uint8_t *end = ask->at + 64 * (ptrdiff_t)(n_groups * ask->lines_per_group);
    for (; ask->at < end && ask->at < ask->end; ask->at += 64)
        __builtin_prefetch(ask->at, 0, 2);
}

/* The widths of a pass are constants to the compiler: n_tiles groups of rows (1 or 2) times n
 * tokens of a bundle. Two groups of rows share what is loaded of the activations. */
INLINE void multiply_integers(const stored_tile *t, plan how, int n_tiles, bundle_view x, int n,
                              int n_groups, asking *ask, vf sums[2][SIDE_BY_SIDE])
{
    enum { W = SIDE_BY_SIDE };
    int n_words = 8 / how.type.subgroups;
    ROLLED for (int g = 0; g < n_groups; g++, x.records += record_bytes(how.planes, W)) {
        vf part[2][W];
        UNROLL for (size_t i = 0; i < record_bytes(how.planes, W); i += 64)
            __builtin_prefetch(x.next + i, 0, 3);
        x.next += record_bytes(how.planes, W);
        ask_for_some(ask, 1);
        UNROLL for (int half = 0; half < how.type.subgroups; half++) {
            int s = how.type.subgroups * g + half, kind = sum_kind(how.type, half);
            vi dots[2][W][MAX_PLANES];
            UNROLL for (int i = 0; i < n; i++)
                UNROLL for (int p = 0; p < how.planes; p++)
                    dots[0][i][p] = dots[1][i][p] = (vi){0};
            UNROLL for (int j = 0; j < n_words; j++)
                UNROLL for (int i = 0; i < n; i++)
                    UNROLL for (int p = 0; p < how.planes; p++) {
                        size_t at = word_at(W, p, n_words * half + j, i);
                        int32_t four = four_bytes(x.records + at);
                        UNROLL for (int r = 0; r < n_tiles; r++)
                            dots[r][i][p] = dot_bytes(dots[r][i][p], t[r].words[n_words * s + j],
                                                      four, how.type.wide);
                    }
            UNROLL for (int i = 0; i < n; i++) {
                float sum = float_at(x.records + sum_at(how.planes, W, kind, i));
                UNROLL for (int r = 0; r < n_tiles; r++)
                    part[r][i] = add_subgroup(how.type, half, join_planes(how.planes, dots[r][i]),
                                              t[r].scale[s], t[r].minimum[s], sum, part[r][i]);
            }
        }
        UNROLL for (int i = 0; i < n; i++) {
            vf scale = all_floats(float_at(x.records + scale_at(how.planes, W, i)));
            UNROLL for (int r = 0; r < n_tiles; r++)
                sums[r][i] = multiply_add(part[r][i], scale, sums[r][i]);
        }
    }
}

INLINE void multiply_floats(const stored_tile *t, int n_tiles, bundle_view x, int n,
                            vf sums[2][SIDE_BY_SIDE])
{
    enum { W = SIDE_BY_SIDE };
    ROLLED for (int g = 0; g < FLOAT_TILE_COLUMNS / GROUP; g++) {
        vf chains[2][2][W];
        UNROLL for (int r = 0; r < n_tiles; r++)
            UNROLL for (int i = 0; i < n; i++)
                chains[r][0][i] = chains[r][1][i] = (vf){0};
        ROLLED for (int k = GROUP * g; k < GROUP * (g + 1); k += 2, x.values += 2 * W)
            UNROLL for (int odd = 0; odd < 2; odd++)
                UNROLL for (int i = 0; i < n; i++) {
                    vf value = all_floats(x.values[W * odd + i]);
                    UNROLL for (int r = 0; r < n_tiles; r++)
                        chains[r][odd][i] = multiply_add((vf)t[r].words[k + odd], value,
                                                         chains[r][odd][i]);
                }
        UNROLL for (int r = 0; r < n_tiles; r++)
            UNROLL for (int i = 0; i < n; i++)
                sums[r][i] += chains[r][0][i] + chains[r][1][i];
    }
}

/* Sums of a bundle are in registers during a pass. */
INLINE void multiply_pass(const stored_tile *t, plan how, int n_tiles, bundle_view x, int n,
                          int n_groups, asking *ask, row_sums *sums, int first)
{
    vf held[2][SIDE_BY_SIDE];
    UNROLL for (int r = 0; r < n_tiles; r++)
        UNROLL for (int i = 0; i < n; i++)
            held[r][i] = sums[r][first + i];
    if (how.type.is_float) {
        ask_for_some(ask, n_groups);
        multiply_floats(t, n_tiles, x, n, held);
    } else {
        multiply_integers(t, how, n_tiles, x, n, n_groups, ask, held);
    }
    UNROLL for (int r = 0; r < n_tiles; r++)
        UNROLL for (int i = 0; i < n; i++)
            sums[r][first + i] = held[r][i];
}

INLINE void multiply_bundles(const stored_tile *t, plan how, int n_tiles, const row_job *job,
                             int first, int n_tokens, int group, int n_groups, asking ask,
                             row_sums *sums)
{
    enum { W = SIDE_BY_SIDE };
    int at_once = how.planes <= 2 ? TOKENS_PER_PASS : TOKENS_PER_PASS / 2;
    int n_passes = (n_tokens + at_once - 1) / at_once, n_lines = (int)((ask.end - ask.at) / 64);
    ask.lines_per_group = n_lines / (n_passes * n_groups) + 1;
    for (int i = 0; i < n_tokens;) {
        int token = job->first_token + first + i, lane = token % W, n = n_tokens - i;
        bundle_view x = view_bundle(job->input, token / W, group);
        x.records += 4 * lane; /* words of a lane are four bytes in both arrays */
        x.values += lane;
        if (at_once == 4 && n >= 4) {
            multiply_pass(t, how, n_tiles, x, 4, n_groups, &ask, sums, i);
            i += 4;
        } else if (at_once >= 2 && n >= 2 && lane % 2 == 0) {
            multiply_pass(t, how, n_tiles, x, 2, n_groups, &ask, sums, i);
            i += 2;
        } else {
            multiply_pass(t, how, n_tiles, x, 1, n_groups, &ask, sums, i);
            i += 1;
        }
    }
}

INLINE void multiply_stored(const stored_tile *t, plan how, int n_tiles, const row_job *job,
                            int first, int n_tokens, int group, int n_groups, asking ask,
                            row_sums *sums)
{
    if (n_tiles == 2)
        multiply_bundles(t, how, 2, job, first, n_tokens, group, n_groups, ask, sums);
    else
        multiply_bundles(t, how, 1, job, first, n_tokens, group, n_groups, ask, sums);
}

/* The multiplication of a stored tile is the same for all types of a kind, so it is compiled once
 * per kind and number of planes; the unpacking that stores is the same for all of these. */
typedef void unpack_tile(tile *t, const row_pointers *rows, const moe_grids *grids);
typedef void multiply_tile(const stored_tile *t, layout type, int n_tiles, const row_job *job,
                           int first, int n_tokens, int group, int n_groups, asking ask,
                           row_sums *sums);

#define MULTIPLY_FUNCTION(name, planes, ...)                                                      \
    static void name(const stored_tile *t, layout type, int n_tiles, const row_job *job,          \
                     int first, int n_tokens, int group, int n_groups, asking ask,                \
                     row_sums *sums)                                                              \
    {                                                                                             \
        plan how = {{__VA_ARGS__}, planes, 0};                                                    \
        (void)type;                                                                               \
        multiply_stored(t, how, n_tiles, job, first, n_tokens, group, n_groups, ask, sums);       \
    }
#define MULTIPLY_TILE(kind, ...)                                                                  \
    MULTIPLY_FUNCTION(kind##_1, 1, __VA_ARGS__)                                                   \
    MULTIPLY_FUNCTION(kind##_2, 2, __VA_ARGS__)                                                   \
    MULTIPLY_FUNCTION(kind##_3, 3, __VA_ARGS__)

MULTIPLY_TILE(scales_32, .subgroups = 1, .offset = type.offset)
MULTIPLY_TILE(scales_32_wide, .subgroups = 1, .offset = 128, .wide = 1)
MULTIPLY_TILE(scales_32_minima, .subgroups = 1, .has_minimum = 1)
MULTIPLY_TILE(scales_16, .subgroups = 2, .offset = type.offset)
MULTIPLY_TILE(scales_16_minima, .subgroups = 2, .has_minimum = 1)

MULTIPLY_FUNCTION(floats_0, 1, .is_float = 1)

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
