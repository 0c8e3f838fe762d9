/* A tile times tokens, and the walk over rows and tiles. Included once per instruction set.
 *
 * Per row and token, for each group of 32 columns in ascending order:
 *
 *     dot  = sum(bytes * activation integers)        integers, exact in any order
 *     part = scale * dot + minimum * sum(activation integers)
 *     sum += activation scale * part                 one fused multiply-add
 *
 * EXACT has activations of 24 bits in three planes of 8: the dots of the planes are put together as
 * float32. Float weights: two chains of multiply-adds per group (even and odd columns), then added.
 * Several tokens at once reuse a loaded word; that changes no operation of any one token.
 */

INLINE token_view view_token(const row_job *job, int i, int group)
{
    const activations *input = job->input;
    size_t token = (size_t)(job->tokens ? job->tokens[i] : job->first_token + i);
    size_t groups = (size_t)input->n_groups, at = token * groups + (size_t)group;
    return (token_view){
        .values = input->values + GROUP * at,
        .bytes = input->bytes + GROUP * (token * groups * (size_t)input->planes + (size_t)group),
        .scales = input->scales + at,
        .sums = input->sums + at,
        .plane_bytes = GROUP * groups,
    };
}

/* A stored tile times n tokens, n a constant to the compiler. */
INLINE void multiply_integers(const stored_tile *t, plan how, const token_view *x, int n,
                              int n_groups, vf *sums)
{
    int n_words = 8 / how.type.subgroups;
    for (int g = 0; g < n_groups; g++) {
        vf part[TOKENS_PER_PASS];
        UNROLL for (int half = 0; half < how.type.subgroups; half++) {
            int s = how.type.subgroups * g + half;
            vi dots[TOKENS_PER_PASS][MAX_PLANES];
            UNROLL for (int i = 0; i < n; i++)
                UNROLL for (int p = 0; p < how.planes; p++)
                    dots[i][p] = first_dot(how.type, x[i].sums + g, p, half);
            UNROLL for (int j = 0; j < n_words; j++) {
                vu word = t->words[n_words * s + j];
                size_t at = (size_t)(4 * (n_words * s + j));
                UNROLL for (int i = 0; i < n; i++)
                    UNROLL for (int p = 0; p < how.planes; p++) {
                        const int8_t *four = x[i].bytes + (size_t)p * x[i].plane_bytes + at;
                        dots[i][p] = dot_bytes(dots[i][p], word, four_bytes(four), how.type.wide);
                    }
            }
            UNROLL for (int i = 0; i < n; i++)
                part[i] = add_subgroup(how.type, half, join_planes(how.planes, dots[i]), t->scale[s],
                                       t->minimum[s], x[i].sums + g, part[i]);
        }
        UNROLL for (int i = 0; i < n; i++)
            sums[i] = multiply_add(part[i], all_floats(x[i].scales[g]), sums[i]);
    }
}

INLINE void multiply_floats(const stored_tile *t, const token_view *x, int n, vf *sums)
{
    for (int g = 0; g < FLOAT_TILE_COLUMNS / GROUP; g++) {
        vf chains[2][TOKENS_PER_PASS];
        UNROLL for (int i = 0; i < n; i++)
            chains[0][i] = chains[1][i] = (vf){0};
        for (int k = GROUP * g; k < GROUP * (g + 1); k += 2)
            UNROLL for (int odd = 0; odd < 2; odd++)
                UNROLL for (int i = 0; i < n; i++)
                    chains[odd][i] = multiply_add((vf)t->words[k + odd],
                                                  all_floats(x[i].values[k + odd]), chains[odd][i]);
        UNROLL for (int i = 0; i < n; i++)
            sums[i] += chains[0][i] + chains[1][i];
    }
}

/* Tokens first .. first+n-1 of the job, n a constant; their sums are in registers meanwhile. */
INLINE void multiply_pass(const stored_tile *t, plan how, const row_job *job, int first, int n, int group,
                          int n_groups, vf *sums)
{
    token_view views[TOKENS_PER_PASS];
    vf held[TOKENS_PER_PASS];
    UNROLL for (int i = 0; i < n; i++) {
        views[i] = view_token(job, first + i, group);
        held[i] = sums[i];
    }
    if (how.type.is_float)
        multiply_floats(t, views, n, held);
    else
        multiply_integers(t, how, views, n, n_groups, held);
    UNROLL for (int i = 0; i < n; i++)
        sums[i] = held[i];
}

INLINE void multiply_stored(const stored_tile *t, plan how, const row_job *job, int first, int n_tokens,
                            int group, int n_groups, vf *sums)
{
    int at_once = how.planes == 1 ? TOKENS_PER_PASS : TOKENS_PER_PASS / 2, i = 0;
    for (; i + at_once <= n_tokens; i += at_once)
        multiply_pass(t, how, job, first + i, at_once, group, n_groups, sums + i);
    for (; i < n_tokens; i++)
        multiply_pass(t, how, job, first + i, 1, group, n_groups, sums + i);
}

/* The multiplication of a stored tile is the same for all types of a kind, so it is compiled once per
 * kind and numerics; the unpacking that stores is the same for both numerics. */
typedef void unpack_tile(tile *t, const row_pointers *rows, const moe_grids *grids);
typedef void multiply_tile(const stored_tile *t, layout type, const row_job *job, int first, int n_tokens,
                           int group, int n_groups, vf *sums);

#define MULTIPLY_TILE(kind, ...)                                                                  \
    static void kind##_fast(const stored_tile *t, layout type, const row_job *job, int first,            \
                            int n_tokens, int group, int n_groups, vf *sums)                      \
    {                                                                                             \
        plan how = {{.offset = type.offset, __VA_ARGS__}, 1, 0};                                  \
        multiply_stored(t, how, job, first, n_tokens, group, n_groups, sums);                               \
    }                                                                                             \
    static void kind##_exact(const stored_tile *t, layout type, const row_job *job, int first,           \
                             int n_tokens, int group, int n_groups, vf *sums)                     \
    {                                                                                             \
        plan how = {{.offset = type.offset, __VA_ARGS__}, MAX_PLANES, 0};                         \
        multiply_stored(t, how, job, first, n_tokens, group, n_groups, sums);                               \
    }

MULTIPLY_TILE(scales_32, .subgroups = 1)
MULTIPLY_TILE(scales_32_wide, .subgroups = 1, .wide = 1)
MULTIPLY_TILE(scales_32_minima, .subgroups = 1, .has_minimum = 1)
MULTIPLY_TILE(scales_16, .subgroups = 2)
MULTIPLY_TILE(scales_16_minima, .subgroups = 2, .has_minimum = 1)

static void floats_fast(const stored_tile *t, layout type, const row_job *job, int first, int n_tokens,
                        int group, int n_groups, vf *sums)
{
    plan how = {{.is_float = 1}, 1, 0};
    (void)type;
    multiply_stored(t, how, job, first, n_tokens, group, n_groups, sums);
}

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
    size_t tile_bytes;
} row_group;

INLINE int tiles_of(const row_group *g)
{
    return (g->job->n_columns + g->tile_columns - 1) / g->tile_columns;
}

/* The rows of tile c, and what to ask for meanwhile: the same share of the next rows. */
INLINE row_pointers point_tile(const row_group *g, int c, uint8_t *edge, tile *t)
{
    const uint8_t *p = g->rows + (size_t)c * g->tile_bytes;
    size_t left = g->job->row_bytes - (size_t)c * g->tile_bytes;
    t->ahead = g->next ? g->next + (size_t)c * LANES * g->tile_bytes : p;
    t->ahead_end = t->ahead + LANES * g->tile_bytes;
    if (g->n_rows == LANES && left >= g->tile_bytes)
        return point_rows(p, g->job->row_bytes);
    return point_rows(copy_edge(edge, p, g->job->row_bytes, g->n_rows,
                                left < g->tile_bytes ? left : g->tile_bytes, g->tile_bytes),
                      g->tile_bytes);
}

/* All tiles times n <= TOKENS_AT_ONCE tokens from number `first` on. */
static void multiply_several(const row_group *g, layout type, int first, int n, unpack_tile *unpack,
                             multiply_tile *multiply, vf *sums)
{
    uint8_t edge[EDGE_BYTES];
    stored_tile stored;
    tile t;
    int n_groups = g->tile_columns / GROUP;
    for (int i = 0; i < n; i++)
        sums[i] = (vf){0};
    for (int c = 0; c < tiles_of(g); c++) {
        row_pointers rows = point_tile(g, c, edge, &t);
        t.words = stored.words;
        t.scales = stored.scale;
        t.minima = stored.minimum;
        unpack(&t, &rows, g->grids);
        ask_for_rest(&t);
        multiply(&stored, type, g->job, first, n, c * n_groups, n_groups, sums);
    }
}

INLINE void store_sums(const row_job *job, int row, int n_rows, int first, int n, const vf *sums)
{
    for (int i = 0; i < n; i++) {
        size_t o = (size_t)(job->out_rows ? job->out_rows[first + i] : first + i);
        float *out = job->out + o * job->out_stride + (row - job->out_begin);
        if (n_rows == LANES)
            store_floats(out, sums[i]);
        else
            store_some(out, sums[i], n_rows);
    }
}

/* What differs between the types. */
typedef struct {
    layout type;
    int tile_columns;
    size_t tile_bytes;
    vf (*direct)(const row_group *g, int token); /* all tiles times one token */
    unpack_tile *unpack;
    multiply_tile *multiply;
} row_kernel;

static void multiply_rows_with(const row_kernel *kernel, const row_job *job, const moe_grids *grids,
                               int begin, int end)
{
    row_group g = {.job = job, .grids = grids, .tile_columns = kernel->tile_columns,
                   .tile_bytes = kernel->tile_bytes};
    for (int row = begin; row < end; row += LANES) {
        g.n_rows = end - row < LANES ? end - row : LANES;
        g.rows = job->weights + (size_t)row * job->row_bytes;
        g.next = row + LANES < end ? g.rows + LANES * job->row_bytes : job->next;
        for (int first = 0; first < job->n_tokens; first += TOKENS_AT_ONCE) {
            int n = job->n_tokens - first < TOKENS_AT_ONCE ? job->n_tokens - first : TOKENS_AT_ONCE;
            vf sums[TOKENS_AT_ONCE];
            if (n == 1 && kernel->direct)
                sums[0] = kernel->direct(&g, first);
            else
                multiply_several(&g, kernel->type, first, n, kernel->unpack, kernel->multiply, sums);
            store_sums(job, row, g.n_rows, first, n, sums);
            g.next = NULL; /* asked for once */
        }
    }
}
