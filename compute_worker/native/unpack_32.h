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

/* 16 bytes of nibbles -> 8 words of 4 columns each. */
INLINE void split_nibbles(const uint8_t *p, size_t stride, vu words[8])
{
    vu raw[4];
    load_columns(p, stride, raw);
    for (int j = 0; j < 4; j++) {
        words[j] = raw[j] & 0x0f0f0f0fu;
        words[4 + j] = (raw[j] >> 4) & 0x0f0f0f0fu;
    }
}

/* Bits i .. i+3 of each lane -> bit 4 of the four bytes: the product lays copies of the four bits at
 * distances of 7, so that bit n of them falls on bit 8 n. */
INLINE vu fifth_bits(vu bits, int i)
{
    return ((((bits >> i) & 15u) * 0x00204081u) & 0x01010101u) << 4;
}

INLINE void unpack_q4_0(tile *t, const uint8_t *p, size_t stride, const moe_grids *grids)
{
    (void)grids;
    for (int g = 0; g < GROUPS_PER_TILE; g++, p += 18) {
        t->scale[g] = half_to_float(load_words(p, stride));
        split_nibbles(p + 2, stride, t->words + 8 * g);
    }
}

INLINE void unpack_q4_1(tile *t, const uint8_t *p, size_t stride, const moe_grids *grids)
{
    (void)grids;
    for (int g = 0; g < GROUPS_PER_TILE; g++, p += 20) {
        vu head = load_words(p, stride);
        t->scale[g] = half_to_float(head);
        t->minimum[g] = half_to_float(head >> 16);
        split_nibbles(p + 4, stride, t->words + 8 * g);
    }
}

INLINE void unpack_q5_0(tile *t, const uint8_t *p, size_t stride, const moe_grids *grids)
{
    (void)grids;
    for (int g = 0; g < GROUPS_PER_TILE; g++, p += 22) {
        vu bits = load_words(p + 2, stride);
        t->scale[g] = half_to_float(load_words(p, stride));
        split_nibbles(p + 6, stride, t->words + 8 * g);
        for (int j = 0; j < 8; j++)
            t->words[8 * g + j] |= fifth_bits(bits, 4 * j);
    }
}

INLINE void unpack_q5_1(tile *t, const uint8_t *p, size_t stride, const moe_grids *grids)
{
    (void)grids;
    for (int g = 0; g < GROUPS_PER_TILE; g++, p += 24) {
        vu head = load_words(p, stride), bits = load_words(p + 4, stride);
        t->scale[g] = half_to_float(head);
        t->minimum[g] = half_to_float(head >> 16);
        split_nibbles(p + 8, stride, t->words + 8 * g);
        for (int j = 0; j < 8; j++)
            t->words[8 * g + j] |= fifth_bits(bits, 4 * j);
    }
}

INLINE void unpack_q8_0(tile *t, const uint8_t *p, size_t stride, const moe_grids *grids)
{
    (void)grids;
    for (int g = 0; g < GROUPS_PER_TILE; g++, p += 34) {
        vu *words = t->words + 8 * g;
        t->scale[g] = half_to_float(load_words(p, stride));
        load_columns(p + 2, stride, words);
        load_columns(p + 18, stride, words + 4);
        for (int j = 0; j < 8; j++)
            words[j] ^= 0x80808080u; /* signed to unsigned, offset 128 */
    }
}

INLINE void unpack_iq4_nl(tile *t, const uint8_t *p, size_t stride, const moe_grids *grids)
{
    (void)grids;
    for (int g = 0; g < GROUPS_PER_TILE; g++, p += 18) {
        vu *words = t->words + 8 * g;
        t->scale[g] = half_to_float(load_words(p, stride));
        split_nibbles(p + 2, stride, words);
        for (int j = 0; j < 8; j++)
            words[j] = look_up(table_iq4, words[j]);
    }
}

/* 2^(e - 128) as float32; the two smallest are denormal. */
INLINE vf power_of_two(vu e)
{
    vi is_small = (vi)(e < 2u);
    return choose(is_small, (vf)(((vu){0} + 0x00200000u) << e), (vf)((e - 1u) << 23));
}

INLINE void unpack_mxfp4(tile *t, const uint8_t *p, size_t stride, const moe_grids *grids)
{
    (void)grids;
    for (int g = 0; g < GROUPS_PER_TILE; g++, p += 17) {
        vu *words = t->words + 8 * g;
        t->scale[g] = power_of_two(load_words(p, stride) & 255u);
        split_nibbles(p + 1, stride, words);
        for (int j = 0; j < 8; j++)
            words[j] = look_up(table_mxfp4, words[j]);
    }
}
