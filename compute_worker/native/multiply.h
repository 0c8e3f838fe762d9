/* A tile times tokens, and the walk over rows and tiles. Included once per instruction set.
 *
 * Per row and token, for each group of 32 columns in ascending order:
 *
 *     FAST   part = scale * sum(bytes * activation bytes)      integers, exact in any order
 *            sum += activation scale * (part + minimum * sum(activation bytes))
 *     EXACT  part = scale * sum(bytes * activations)           float32, two chains: even, odd words
 *            sum += part + minimum * sum(activations)
 *
 * with one fused multiply-add per step. Tokens are taken 8 (AVX2: 4), 2 or 1 at a time to reuse a
 * loaded word; that changes no operation of any one token.
 */

/* Pointers into the activations of one token, at the first group of a tile. */
typedef struct {
    const float *values;
    const int8_t *bytes;
    const float *scales, *sums;
} token_view;

INLINE token_view view_token(const activations *input, int token, int group)
{
    size_t at = (size_t)token * (size_t)input->n_groups + (size_t)group;
    return (token_view){input->values + GROUP * at, input->bytes + GROUP * at, input->scales + at,
                        input->sums + 3 * at};
}

INLINE void multiply_fast(const tile *t, const token_view *x, int n, int n_groups, layout type,
                          vf *sums)
{
    for (int g = 0; g < n_groups; g++) {
        vf part[TOKENS_PER_PASS];
        for (int half = 0; half < type.subgroups; half++) {
            int n_words = 8 / type.subgroups, sub = type.subgroups * g + half;
            const vu *words = t->words + n_words * sub;
            vi dots[TOKENS_PER_PASS];
            for (int i = 0; i < n; i++)
                dots[i] = (vi){0};
            for (int j = 0; j < n_words; j++)
                for (int i = 0; i < n; i++)
                    dots[i] = dot_bytes(dots[i], words[j],
                                        four_bytes(x[i].bytes + 4 * (8 * g + n_words * half + j)),
                                        type.wide);
            for (int i = 0; i < n; i++) {
                vf byte_sum = all_floats(x[i].sums[3 * g + (type.subgroups == 1 ? 2 : half)]);
                vf dot = to_float(dots[i]);
                if (type.offset && !(type.wide && WIDE_DOT_IS_SIGNED))
                    dot = multiply_add(all_floats((float)-type.offset), byte_sum, dot);
                part[i] = half == 0 ? dot * t->scale[sub] : multiply_add(dot, t->scale[sub], part[i]);
                if (type.has_minimum)
                    part[i] = multiply_add(t->minimum[sub], byte_sum, part[i]);
            }
        }
        for (int i = 0; i < n; i++)
            sums[i] = multiply_add(part[i], all_floats(x[i].scales[g]), sums[i]);
    }
}

INLINE void multiply_exact(const tile *t, const token_view *x, int n, int n_groups, layout type,
                           vf *sums)
{
    vu offsets = (vu){0} + 0x01010101u * (uint32_t)type.offset;
    for (int g = 0; g < n_groups; g++)
        for (int half = 0; half < type.subgroups; half++) {
            int n_words = 8 / type.subgroups, sub = type.subgroups * g + half;
            vf chain[2][TOKENS_PER_PASS];
            for (int i = 0; i < n; i++)
                chain[0][i] = chain[1][i] = (vf){0};
            for (int j = 0; j < n_words; j++) {
                int k = 4 * (8 * g + n_words * half + j);
                vu word = t->words[n_words * sub + j];
                if (type.offset)
                    word = subtract_bytes(word, offsets);
                for (int b = 0; b < 4; b++) {
                    vf weight = to_float(type.offset ? signed_byte(word, b) : unsigned_byte(word, b));
                    for (int i = 0; i < n; i++)
                        chain[j % 2][i] = multiply_add(weight, all_floats(x[i].values[k + b]),
                                                       chain[j % 2][i]);
                }
            }
            for (int i = 0; i < n; i++) {
                sums[i] = multiply_add(chain[0][i] + chain[1][i], t->scale[sub], sums[i]);
                if (type.has_minimum)
                    sums[i] = multiply_add(
                        t->minimum[sub],
                        all_floats(x[i].sums[3 * g + (type.subgroups == 1 ? 2 : half)]), sums[i]);
            }
        }
}

/* Four chains per group: column k goes to chain k % 4. */
INLINE void multiply_float(const tile *t, const token_view *x, int n, int n_groups, vf *sums)
{
    for (int g = 0; g < n_groups; g++) {
        vf chain[2][TOKENS_PER_PASS];
        for (int i = 0; i < n; i++)
            chain[0][i] = chain[1][i] = (vf){0};
        for (int k = GROUP * g; k < GROUP * (g + 1); k++)
            for (int i = 0; i < n; i++)
                chain[k % 2][i] = multiply_add((vf)t->words[k], all_floats(x[i].values[k]),
                                               chain[k % 2][i]);
        for (int i = 0; i < n; i++)
            sums[i] += chain[0][i] + chain[1][i];
    }
}

/* n tokens, a constant to the compiler, so that their sums live in registers. */
INLINE void multiply_pass(const tile *t, const row_job *job, int first, int n, int group,
                          int n_groups, layout type, int numerics, vf *sums)
{
    token_view views[TOKENS_PER_PASS];
    vf held[TOKENS_PER_PASS];
    for (int i = 0; i < n; i++) {
        int token = job->tokens ? job->tokens[first + i] : job->first_token + first + i;
        views[i] = view_token(job->input, token, group);
        held[i] = sums[i];
    }
    if (type.is_float)
        multiply_float(t, views, n, n_groups, held);
    else if (numerics == FAST)
        multiply_fast(t, views, n, n_groups, type, held);
    else
        multiply_exact(t, views, n, n_groups, type, held);
    for (int i = 0; i < n; i++)
        sums[i] = held[i];
}

INLINE void multiply_tile(const tile *t, const row_job *job, int first, int n_tokens, int group,
                          int n_groups, layout type, int numerics, vf *sums)
{
    int i = 0;
    for (; i + TOKENS_PER_PASS <= n_tokens; i += TOKENS_PER_PASS)
        multiply_pass(t, job, first + i, TOKENS_PER_PASS, group, n_groups, type, numerics, sums + i);
    for (; i + 2 <= n_tokens; i += 2)
        multiply_pass(t, job, first + i, 2, group, n_groups, type, numerics, sums + i);
    if (i < n_tokens)
        multiply_pass(t, job, first + i, 1, group, n_groups, type, numerics, sums + i);
}

enum { EDGE_BYTES = LANES * 34 * GROUPS_PER_TILE }; /* Q8_0 has the largest tile */

/* A tile that sticks out of the matrix, copied with zeros around it: kernels never read a byte that
 * is not the matrix's own. Rows below the last repeat nothing, they are zero and not stored. */
INLINE const uint8_t *copy_edge(uint8_t *edge, const uint8_t *p, size_t row_bytes, int n_rows,
                                size_t n_bytes, size_t tile_bytes)
{
    memset(edge, 0, LANES * tile_bytes);
    for (int row = 0; row < n_rows; row++)
        memcpy(edge + (size_t)row * tile_bytes, p + (size_t)row * row_bytes, n_bytes);
    return edge;
}

/* Ask for the bytes of the next LANES rows while these are multiplied: the same share of them as
 * this tile is of these, in the order of memory. */
INLINE void prefetch_share(const uint8_t *begin, size_t n_bytes, int part, int n_parts)
{
    size_t first = n_bytes * (size_t)part / (size_t)n_parts;
    size_t last = n_bytes * (size_t)(part + 1) / (size_t)n_parts;
    for (size_t i = first; i < last; i += 64)
        __builtin_prefetch(begin + i, 0, 2);
}

typedef void unpack_tile(tile *t, const uint8_t *p, size_t stride, const moe_grids *grids);

/* All tiles of one group of rows times at most TOKENS_AT_ONCE tokens. */
INLINE void multiply_row_group(const row_job *job, const moe_grids *grids, const uint8_t *rows,
                               int n_rows, const uint8_t *next, int first, int n, layout type,
                               int tile_columns, size_t tile_bytes, unpack_tile *unpack,
                               int numerics, vf *sums)
{
    int tile_groups = tile_columns / GROUP;
    int n_tiles = (job->input->n_groups + tile_groups - 1) / tile_groups;
    uint8_t edge[EDGE_BYTES];
    tile t;
    for (int i = 0; i < n; i++)
        sums[i] = (vf){0};
    for (int c = 0; c < n_tiles; c++) {
        const uint8_t *p = rows + (size_t)c * tile_bytes;
        size_t left = job->row_bytes - (size_t)c * tile_bytes;
        int groups = job->input->n_groups - c * tile_groups;
        if (next)
            prefetch_share(next, LANES * job->row_bytes, c, n_tiles);
        if (n_rows < LANES || left < tile_bytes)
            unpack(&t, copy_edge(edge, p, job->row_bytes, n_rows,
                                 left < tile_bytes ? left : tile_bytes, tile_bytes),
                   tile_bytes, grids);
        else
            unpack(&t, p, job->row_bytes, grids);
        multiply_tile(&t, job, first, n, c * tile_groups,
                      groups < tile_groups ? groups : tile_groups, type, numerics, sums);
    }
}

INLINE void multiply_rows_of(const row_job *job, const moe_grids *grids, int begin, int end,
                             layout type, int block_columns, int block_bytes, unpack_tile *unpack,
                             int numerics)
{
    int tile_columns = type.is_float ? FLOAT_TILE_COLUMNS : TILE_COLUMNS;
    size_t tile_bytes = (size_t)(tile_columns / block_columns * block_bytes);
    for (int row = begin; row < end; row += LANES) {
        int n_rows = end - row < LANES ? end - row : LANES;
        const uint8_t *rows = job->weights + (size_t)row * job->row_bytes;
        const uint8_t *next = row + LANES < end ? rows + LANES * job->row_bytes : job->next;
        for (int first = 0; first < job->n_tokens; first += TOKENS_AT_ONCE) {
            int n = job->n_tokens - first < TOKENS_AT_ONCE ? job->n_tokens - first : TOKENS_AT_ONCE;
            vf sums[TOKENS_AT_ONCE];
            multiply_row_group(job, grids, rows, n_rows, first == 0 ? next : NULL, first, n, type,
                               tile_columns, tile_bytes, unpack, numerics, sums);
            for (int i = 0; i < n; i++) {
                size_t o = (size_t)(job->out_rows ? job->out_rows[first + i] : first + i);
                float *out = job->out + o * job->out_stride + (row - job->out_begin);
                if (n_rows == LANES)
                    store_floats(out, sums[i]);
                else
                    store_some(out, sums[i], n_rows);
            }
        }
    }
}
