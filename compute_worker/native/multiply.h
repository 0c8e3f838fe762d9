/* A tile times tokens. Included once per instruction set; walk.h goes over rows and tiles.
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
