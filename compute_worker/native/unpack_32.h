/* The types with blocks of 32 columns: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4.
 *
 *             bytes of a block (d, m: half precision)
 *     Q4_0    d[2]          nibbles[16]      weight = d * (nibble - 8)
 *     Q4_1    d[2] m[2]     nibbles[16]      weight = d * nibble + m
 *     Q5_0    d[2]      h[4] nibbles[16]     weight = d * ((h_i << 4 | nibble) - 16)
 *     Q5_1    d[2] m[2] h[4] nibbles[16]     weight = d * (h_i << 4 | nibble) + m
 *     Q8_0    d[2]          bytes[32]        weight = d * byte
 *     IQ4_NL  d[2]          nibbles[16]      weight = d * table[nibble]
 *     MXFP4   e[1]          nibbles[16]      weight = 2^(e - 128) * table[nibble]
 *
 * Nibbles: byte i holds column i in its low and column i + 16 in its high half. h is one 32-bit
 * word, bit i belongs to column i.
 */

static const layout layout_q4_0 = {.offset = 8, .subgroups = 1};
static const layout layout_q4_1 = {.subgroups = 1, .has_minimum = 1};
static const layout layout_q5_0 = {.offset = 16, .subgroups = 1};
static const layout layout_q5_1 = {.subgroups = 1, .has_minimum = 1};
static const layout layout_q8_0 = {.offset = 128, .wide = 1, .subgroups = 1};
static const layout layout_iq4_nl = {.offset = 128, .wide = 1, .subgroups = 1};
static const layout layout_mxfp4 = {.offset = 12, .subgroups = 1};

/* Values of the 16 codes, each plus the offset of its layout. */
static const uint8_t table_iq4[16] = {
    128 - 127, 128 - 104, 128 - 83, 128 - 65, 128 - 49, 128 - 35, 128 - 22, 128 - 10,
    128 + 1, 128 + 13, 128 + 25, 128 + 38, 128 + 53, 128 + 69, 128 + 89, 128 + 113,
};
static const uint8_t table_mxfp4[16] = { /* twice the e2m1 numbers 0, 0.5, 1, 1.5, 2, 3, 4, 6 */
    12 + 0, 12 + 1, 12 + 2, 12 + 3, 12 + 4, 12 + 6, 12 + 8, 12 + 12,
    12 - 0, 12 - 1, 12 - 2, 12 - 3, 12 - 4, 12 - 6, 12 - 8, 12 - 12,
};

/* Blocks are short and begin anywhere, so the rows' bytes of a whole chunk are taken in order, 16
 * at a time, and a 32-bit word at any byte is put together from two of those. `words` holds what
 * has been taken so far; the compiler keeps only those that are still wanted. */
enum { STREAM_WORDS = 28 };

typedef struct {
    vu words[STREAM_WORDS];
    int n_taken; /* words */
} stream;

/* Takes bytes until [0, end) are there. A chunk of n_bytes ends with a piece that overlaps the one
 * before it, so that nothing beyond the chunk is read; all sizes are multiples of 4. */
INLINE void take_until(tile *t, const row_pointers *rows, stream *s, int end, int n_bytes)
{
    UNROLL for (int i = 0; i < STREAM_WORDS / 4; i++) {
        if (4 * s->n_taken >= end)
            continue;
        if (4 * s->n_taken + 16 > n_bytes)
            s->n_taken = n_bytes / 4 - 4;
        take_columns(t, rows, 4 * s->n_taken, s->words + s->n_taken);
        s->n_taken += 4;
    }
}

INLINE vu stream_word(const stream *s, int at)
{
    vu first = s->words[at / 4];
    int shift = 8 * (at % 4);
    return shift == 0 ? first : (first >> shift) | (s->words[at / 4 + 1] << (32 - shift));
}

/* The half-precision number at an even byte. */
INLINE vf half_at(const stream *s, int at)
{
    return half_to_float(s->words[at / 4] >> (8 * (at % 4)));
}

/* The nibbles that begin at byte `at`: word j of their group. */
INLINE vu nibbles_at(const stream *s, int at, int j)
{
    return (stream_word(s, at + 4 * (j % 4)) >> (4 * (j / 4))) & 0x0f0f0f0fu;
}

/* Bits i .. i+3 of each lane -> bit 4 of the four bytes: the product lays copies of the four bits
 * at distances of 7, so that bit n of them falls on bit 8 n. */
INLINE vu fifth_bits(vu bits, int i)
{
    return ((((bits >> i) & 15u) * 0x00204081u) & 0x01010101u) << 4;
}

#define BLOCKS(n_bytes) UNROLL for (int g = 0, at = 0; g < CHUNK_GROUPS; g++, at += (n_bytes))

INLINE void unpack_q4_0(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    (void)grids;
    stream s = {.n_taken = 0};
    BLOCKS(18) {
        take_until(t, rows, &s, at + 18, 18 * CHUNK_GROUPS);
        UNROLL for (int j = 0; j < 8; j++)
            put(t, how, 8 * g + j, nibbles_at(&s, at + 2, j));
        t->scale[g] = half_at(&s, at);
    }
    finish(t, how);
}

INLINE void unpack_q4_1(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    (void)grids;
    stream s = {.n_taken = 0};
    BLOCKS(20) {
        take_until(t, rows, &s, at + 20, 20 * CHUNK_GROUPS);
        UNROLL for (int j = 0; j < 8; j++)
            put(t, how, 8 * g + j, nibbles_at(&s, at + 4, j));
        t->scale[g] = half_at(&s, at);
        t->minimum[g] = half_at(&s, at + 2);
    }
    finish(t, how);
}

INLINE void unpack_q5_0(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    (void)grids;
    stream s = {.n_taken = 0};
    BLOCKS(22) {
        take_until(t, rows, &s, at + 22, 22 * CHUNK_GROUPS);
        vu bits = stream_word(&s, at + 2);
        UNROLL for (int j = 0; j < 8; j++)
            put(t, how, 8 * g + j, nibbles_at(&s, at + 6, j) | fifth_bits(bits, 4 * j));
        t->scale[g] = half_at(&s, at);
    }
    finish(t, how);
}

INLINE void unpack_q5_1(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    (void)grids;
    stream s = {.n_taken = 0};
    BLOCKS(24) {
        take_until(t, rows, &s, at + 24, 24 * CHUNK_GROUPS);
        vu bits = stream_word(&s, at + 4);
        UNROLL for (int j = 0; j < 8; j++)
            put(t, how, 8 * g + j, nibbles_at(&s, at + 8, j) | fifth_bits(bits, 4 * j));
        t->scale[g] = half_at(&s, at);
        t->minimum[g] = half_at(&s, at + 2);
    }
    finish(t, how);
}

/* Long enough to be read where it lies: half of the words would have to be put together. */
INLINE void unpack_q8_0(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    (void)grids;
    BLOCKS(34) {
        vu words[8];
        take_columns(t, rows, at + 2, words);
        take_columns(t, rows, at + 18, words + 4);
        UNROLL for (int j = 0; j < 8; j++)
            put(t, how, 8 * g + j, words[j] ^ 0x80808080u); /* signed to unsigned, offset 128 */
        t->scale[g] = half_to_float(load_words(rows, at));
    }
    finish(t, how);
}

INLINE void unpack_iq4_nl(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    (void)grids;
    stream s = {.n_taken = 0};
    BLOCKS(18) {
        take_until(t, rows, &s, at + 18, 18 * CHUNK_GROUPS);
        UNROLL for (int j = 0; j < 8; j++)
            put(t, how, 8 * g + j, look_up(table_iq4, nibbles_at(&s, at + 2, j)));
        t->scale[g] = half_at(&s, at);
    }
    finish(t, how);
}

/* 2^(e - 128) as float32; the two smallest are denormal. */
INLINE vf power_of_two(vu e)
{
    vi is_small = (vi)(e < 2u);
    return choose(is_small, (vf)(((vu){0} + 0x00200000u) << e), (vf)((e - 1u) << 23));
}

INLINE void unpack_mxfp4(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    (void)grids;
    stream s = {.n_taken = 0};
    BLOCKS(17) {
        take_until(t, rows, &s, at + 17, 17 * CHUNK_GROUPS);
        UNROLL for (int j = 0; j < 8; j++)
            put(t, how, 8 * g + j, look_up(table_mxfp4, nibbles_at(&s, at + 1, j)));
        t->scale[g] = power_of_two((vu)unsigned_byte(s.words[at / 4], at % 4));
    }
    finish(t, how);
}
