/* A tile: LANES rows × 256, 128 or 64 columns of weights, side by side. Included once per set.
 *
 *     word k / 4     lane r: columns k .. k+3 of row r, a byte each, as weight + offset (unsigned)
 *     scale[s]       lane r: scale of subgroup s of row r, minimum[s] likewise
 *
 *     weight = scale * (byte - offset) + minimum
 *
 * A subgroup is 32 columns, or 16 where a type has twice as many scales. Float types have no
 * scales: word k is column k as float32.
 *
 * The unpack functions of all types work in chunks of 128 columns: they hand 32 words to `put`, in
 * ascending order within a subgroup, set the chunk's scales, and call `finish`. For one token,
 * `put` and `finish` multiply at once, and nothing leaves the registers. For several tokens they
 * store, and multiply.h goes over the tile token by token.
 */

/* What the multiplication must know of a type; constants to the compiler. */
typedef struct {
    int offset;    /* of the bytes, so that they are unsigned */
    int wide;      /* bytes go beyond 127 */
    int subgroups; /* per 32 columns: 1 or 2 */
    int has_minimum;
    int is_float;
} layout;

enum {
    FLOAT_TILE_COLUMNS = 64, /* the tile of a float type */
    CHUNK_COLUMNS = 128,     /* the tile of a type with blocks of 32 */
    CHUNK_GROUPS = CHUNK_COLUMNS / GROUP,
    CHUNK_WORDS = CHUNK_COLUMNS / 4,
    CHUNK_SUBGROUPS = CHUNK_COLUMNS / 16,
    TILE_WORDS = TILE_COLUMNS / 4, /* also enough for a float tile */
    TILE_SUBGROUPS = TILE_COLUMNS / 16,
};

/* Where the activations of a bundle begin for a tile or chunk. */
typedef struct {
    const float *values;
    const uint8_t *records;
    const uint8_t *next; /* records of the bundle to ask for meanwhile */
} bundle_view;

INLINE bundle_view view_bundle(const activations *input, int bundle, int g)
{
    size_t group = (size_t)bundle * (size_t)input->n_groups + (size_t)g;
    size_t one = record_bytes(input->planes, input->width);
    const uint8_t *records = input->records + group * one;
    return (bundle_view){input->values + GROUP * group * (size_t)input->width, records,
                         records + (size_t)input->n_groups * one};
}

INLINE float float_at(const uint8_t *p)
{
    float x;
    memcpy(&x, p, 4);
    return x;
}

/* What a function of the table is made for. Passed by value and never stored, so that the compiler
 * sees constants and all arrays of a tile become registers. */
typedef struct {
    layout type;
    int planes;    /* of the activations */
    int is_direct; /* multiply at once, else store */
} plan;

/* A tile as stored for several tokens. */
typedef struct {
    vu words[TILE_WORDS];
    vf scale[TILE_SUBGROUPS], minimum[TILE_SUBGROUPS];
} stored_tile;

typedef struct {
    const uint8_t *ahead, *ahead_end; /* bytes of the next rows, still to be asked for */
    vf scale[CHUNK_SUBGROUPS], minimum[CHUNK_SUBGROUPS]; /* of this chunk */
    /* where not direct: this chunk's place */
    vu *words;
    vf *scales, *minima;
    /* where direct: the token at this chunk, the chunk's dots, and the sum over all chunks */
    bundle_view x;
    vi dots[MAX_PLANES][CHUNK_SUBGROUPS];
    vf chains[2][FLOAT_TILE_COLUMNS / GROUP];
    vf sum;
} tile;

/* Sixteen bytes of each row from byte `at` on, as four words per lane. Asks for the bytes of the
 * next LANES rows at the same pace: in the order of memory, into the second-level cache. */
INLINE void take_columns(tile *t, const row_pointers *rows, int at, vu out[4])
{
    UNROLL for (int i = 0; i < LANES / 4; i++)
        __builtin_prefetch(t->ahead + 64 * i, 0, 2);
    t->ahead += 16 * LANES;
    load_columns(rows, at, out);
}

/* The same for LANES words of each row. */
INLINE void take_lines(tile *t, const row_pointers *rows, int at, vu out[LANES])
{
    UNROLL for (int i = 0; i < LANES * LANES / 16; i++)
        __builtin_prefetch(t->ahead + 64 * i, 0, 2);
    t->ahead += 4 * LANES * LANES;
    load_lines(rows, at, out);
}

/* Bytes of the tile that no take_… counted. */
INLINE void ask_for_rest(tile *t)
{
    for (; t->ahead < t->ahead_end; t->ahead += 64)
        __builtin_prefetch(t->ahead, 0, 2);
}

/* Which sum belongs to subgroup `half` of a group. */
INLINE int sum_kind(layout type, int half)
{
    return type.subgroups == 1 ? ALL_32 : half == 0 ? FIRST_16 : LAST_16;
}

/* Dots of the planes as one number. The lower two, 256 * high + low, still fit into 32 bits. */
INLINE vf join_planes(int planes, const vi dots[MAX_PLANES])
{
    if (planes == 1)
        return to_float(dots[0]);
    vf lower = to_float(dots[0] + (dots[1] << 8));
    return planes == 2 ? lower : multiply_add(to_float(dots[2]), all_floats(65536.0f), lower);
}

/* One subgroup's share of its group: scale * (dot - offset * sum) + minimum * sum. With one plane
 * dot and offset * sum are integers below 2^24, so their difference is exact. Their product is
 * one number for all rows, and the difference goes to the units that add: those that multiply are
 * what limits a prompt. */
INLINE vf add_subgroup(layout type, int half, vf dot, vf scale, vf minimum, float sum, vf part)
{
    if (type.offset && !(type.wide && WIDE_DOT_IS_SIGNED))
        dot -= all_floats((float)type.offset * sum);
    part = half == 0 ? dot * scale : multiply_add(dot, scale, part);
    return type.has_minimum ? multiply_add(minimum, all_floats(sum), part) : part;
}

/* Word `index` of the chunk. */
INLINE void put(tile *t, plan how, int index, vu word)
{
    if (!how.is_direct) {
        t->words[index] = word;
        return;
    }
    int n_words = 8 / how.type.subgroups, s = index / n_words;
    const uint8_t *record = t->x.records + (size_t)(index / 8) * record_bytes(how.planes, 1);
    UNROLL for (int p = 0; p < how.planes; p++) {
        vi dot = index % n_words ? t->dots[p][s] : (vi){0};
        t->dots[p][s] = dot_bytes(dot, word, four_bytes(record + word_at(1, p, index % 8, 0)),
                                  how.type.wide);
    }
}

INLINE void finish_direct(tile *t, plan how)
{
    UNROLL for (int g = 0; g < CHUNK_GROUPS; g++) {
        const uint8_t *record = t->x.records + (size_t)g * record_bytes(how.planes, 1);
        vf part = {0};
        UNROLL for (int half = 0; half < how.type.subgroups; half++) {
            int s = how.type.subgroups * g + half;
            vi dots[MAX_PLANES];
            UNROLL for (int p = 0; p < how.planes; p++)
                dots[p] = t->dots[p][s];
            float sum = float_at(record + sum_at(how.planes, 1, sum_kind(how.type, half), 0));
            part = add_subgroup(how.type, half, join_planes(how.planes, dots), t->scale[s],
                                t->minimum[s], sum, part);
        }
        float scale = float_at(record + scale_at(how.planes, 1, 0));
        t->sum = multiply_add(part, all_floats(scale), t->sum);
    }
    t->x.records += CHUNK_GROUPS * record_bytes(how.planes, 1);
}

/* The chunk is complete; the next one begins. */
INLINE void finish(tile *t, plan how)
{
    if (how.is_direct) {
        finish_direct(t, how);
        return;
    }
    UNROLL for (int s = 0; s < how.type.subgroups * CHUNK_GROUPS; s++) {
        t->scales[s] = t->scale[s];
        if (how.type.has_minimum)
            t->minima[s] = t->minimum[s];
    }
    t->words += CHUNK_WORDS;
    t->scales += how.type.subgroups * CHUNK_GROUPS;
    t->minima += how.type.subgroups * CHUNK_GROUPS;
}

/* Column `index` of a float tile, and its end. */
INLINE void put_float(tile *t, plan how, int index, vf word)
{
    if (!how.is_direct) {
        t->words[index] = (vu)word;
        return;
    }
    vf chain = index % GROUP < 2 ? (vf){0} : t->chains[index % 2][index / GROUP];
    t->chains[index % 2][index / GROUP] = multiply_add(word, all_floats(t->x.values[index]), chain);
}

INLINE void finish_floats(tile *t, plan how)
{
    if (how.is_direct)
        UNROLL for (int g = 0; g < FLOAT_TILE_COLUMNS / GROUP; g++)
            t->sum += t->chains[0][g] + t->chains[1][g];
}
