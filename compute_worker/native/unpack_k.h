/* The K types and IQ4_XS: blocks of 256 columns with small integer scales. d, dmin: half precision.
 *
 *     Q2_K   scales[16] pairs[64] d[2] dmin[2]
 *            weight = d * (scale & 15) * q - dmin * (scale >> 4), q of 2 bits, a scale per 16
 *     Q3_K   high[32] pairs[64] scales[12] d[2]
 *            weight = d * (scale - 32) * ((high bit << 2 | q) - 4), scales of 6 bits, one per 16
 *     Q4_K   d[2] dmin[2] scales[12] nibbles[128]
 *            weight = d * scale * q - dmin * minimum, both of 6 bits, per 32
 *     Q5_K   d[2] dmin[2] scales[12] high[32] nibbles[128]       as Q4_K with a fifth bit
 *     Q6_K   low[128] high[64] scales[16] d[2]
 *            weight = d * scale * ((high pair << 4 | nibble) - 32), scale signed, per 16
 *     IQ4_XS d[2] scales_high[2] scales_low[4] nibbles[128]
 *            weight = d * (scale - 32) * table[nibble], scales of 6 bits, per 32
 *
 * Pairs (2 bits): byte i of half h (of 32 bytes) holds columns 128 h + 32 s + i in bits 2 s.
 * Nibbles of Q4_K, Q5_K: byte i of quarter c (of 32) holds columns 64 c + i (low), 64 c + 32 + i.
 * Nibbles of IQ4_XS: byte i of eighth c (of 16) holds columns 32 c + i (low), 32 c + 16 + i.
 * Low nibbles of Q6_K: byte i of half h (of 64) holds columns 128 h + i (low), 128 h + 64 + i; the
 * high pairs as the pairs above.
 * High bits of Q3_K and Q5_K: bit g of byte i belongs to column 32 g + i.
 */

static const layout layout_q2_k = {.subgroups = 2, .has_minimum = 1};
static const layout layout_q3_k = {.offset = 4, .subgroups = 2};
static const layout layout_q4_k = {.subgroups = 1, .has_minimum = 1};
static const layout layout_q5_k = {.subgroups = 1, .has_minimum = 1};
static const layout layout_q6_k = {.offset = 32, .subgroups = 2};
static const layout layout_iq4_xs = {.offset = 128, .wide = 1, .subgroups = 1};

INLINE void unpack_q2_k(tile *t, const uint8_t *p, size_t stride, const moe_grids *grids)
{
    (void)grids;
    vu scales[4], pairs[4];
    vu head = load_words(p + 80, stride);
    vf d = half_to_float(head), dmin = -half_to_float(head >> 16);
    load_columns(p, stride, scales);
    for (int s = 0; s < 16; s++) {
        vi both = unsigned_byte(scales[s / 4], s % 4);
        t->scale[s] = d * to_float(both & 15);
        t->minimum[s] = dmin * to_float(both >> 4);
    }
    for (int i = 0; i < 4; i++) { /* 16 bytes: columns 128 (i / 2) + 16 (i % 2) + ... */
        vu *words = t->words + 32 * (i / 2) + 4 * (i % 2);
        load_columns(p + 16 + 16 * i, stride, pairs);
        for (int j = 0; j < 4; j++)
            for (int s = 0; s < 4; s++)
                words[8 * s + j] = (pairs[j] >> (2 * s)) & 0x03030303u;
    }
}

/* Six-bit scales of Q3_K in 12 bytes: byte i of the first 8 holds the low four bits of scales i and
 * i + 8; byte 8 + i the high pairs of scales i, i + 4, i + 8, i + 12. */
INLINE void scales_q3_k(vf *scale, vf d, const vu packed[3])
{
    for (int s = 0; s < 4; s++) { /* four scales s*4 .. s*4+3 in one word */
        vu low = (packed[s % 2] >> (4 * (s / 2))) & 0x0f0f0f0fu;
        vu six = low | ((((packed[2] >> (2 * s)) & 0x03030303u)) << 4);
        for (int j = 0; j < 4; j++)
            scale[4 * s + j] = d * to_float(unsigned_byte(six, j) - 32);
    }
}

INLINE void unpack_q3_k(tile *t, const uint8_t *p, size_t stride, const moe_grids *grids)
{
    (void)grids;
    vu high[8], tail[4], pairs[4];
    load_columns(p, stride, high);
    load_columns(p + 16, stride, high + 4);
    load_columns(p + 94, stride, tail); /* last 2 bytes of pairs, scales, d */
    vu packed[3];
    for (int i = 0; i < 3; i++)
        packed[i] = (tail[i] >> 16) | (tail[i + 1] << 16);
    scales_q3_k(t->scale, half_to_float(tail[3] >> 16), packed);
    for (int i = 0; i < 4; i++) {
        vu *words = t->words + 32 * (i / 2) + 4 * (i % 2);
        load_columns(p + 32 + 16 * i, stride, pairs);
        for (int j = 0; j < 4; j++)
            for (int s = 0; s < 4; s++) {
                int g = 4 * (i / 2) + s;
                vu bits = high[4 * (i % 2) + j];
                vu third = (g < 2 ? bits << (2 - g) : bits >> (g - 2)) & 0x04040404u;
                words[8 * s + j] = ((pairs[j] >> (2 * s)) & 0x03030303u) | third;
            }
    }
}

/* Scales and minima of Q4_K and Q5_K, 6 bits each, in three words. Word 0: scales 0..3, and the high
 * pairs of scales 4..7; word 1 the same for minima; word 2: low nibbles of scales 4..7 and, in the
 * high halves, of minima 4..7. */
INLINE void scales_q4_k(tile *t, const vu head[4])
{
    vf d = half_to_float(head[0]), dmin = -half_to_float(head[0] >> 16);
    vu scales[2], minima[2];
    scales[0] = head[1] & 0x3f3f3f3fu;
    minima[0] = head[2] & 0x3f3f3f3fu;
    scales[1] = (head[3] & 0x0f0f0f0fu) | ((head[1] >> 2) & 0x30303030u);
    minima[1] = ((head[3] >> 4) & 0x0f0f0f0fu) | ((head[2] >> 2) & 0x30303030u);
    for (int s = 0; s < 8; s++) {
        t->scale[s] = d * to_float(unsigned_byte(scales[s / 4], s % 4));
        t->minimum[s] = dmin * to_float(unsigned_byte(minima[s / 4], s % 4));
    }
}

INLINE void unpack_q4_k(tile *t, const uint8_t *p, size_t stride, const moe_grids *grids)
{
    (void)grids;
    vu raw[4];
    load_columns(p, stride, raw);
    scales_q4_k(t, raw);
    for (int i = 0; i < 8; i++) {
        vu *words = t->words + 16 * (i / 2) + 4 * (i % 2);
        load_columns(p + 16 + 16 * i, stride, raw);
        for (int j = 0; j < 4; j++) {
            words[j] = raw[j] & 0x0f0f0f0fu;
            words[8 + j] = (raw[j] >> 4) & 0x0f0f0f0fu;
        }
    }
}

/* Bit g of each byte -> bit 4. */
INLINE vu fifth_bit(vu bits, int g)
{
    return (g < 4 ? bits << (4 - g) : bits >> (g - 4)) & 0x10101010u;
}

INLINE void unpack_q5_k(tile *t, const uint8_t *p, size_t stride, const moe_grids *grids)
{
    (void)grids;
    vu raw[4], high[8];
    load_columns(p, stride, raw);
    scales_q4_k(t, raw);
    load_columns(p + 16, stride, high);
    load_columns(p + 32, stride, high + 4);
    for (int i = 0; i < 8; i++) {
        vu *words = t->words + 16 * (i / 2) + 4 * (i % 2);
        load_columns(p + 48 + 16 * i, stride, raw);
        for (int j = 0; j < 4; j++) {
            vu bits = high[4 * (i % 2) + j];
            words[j] = (raw[j] & 0x0f0f0f0fu) | fifth_bit(bits, 2 * (i / 2));
            words[8 + j] = ((raw[j] >> 4) & 0x0f0f0f0fu) | fifth_bit(bits, 2 * (i / 2) + 1);
        }
    }
}

INLINE void unpack_q6_k(tile *t, const uint8_t *p, size_t stride, const moe_grids *grids)
{
    (void)grids;
    vu scales[4], high[8], low[4];
    vf d = half_to_float(load_words(p + 206, stride) >> 16); /* a word at 208 would leave the block */
    load_columns(p + 192, stride, scales);
    for (int s = 0; s < 16; s++)
        t->scale[s] = d * to_float(signed_byte(scales[s / 4], s % 4));
    for (int half = 0; half < 2; half++) {
        load_columns(p + 128 + 32 * half, stride, high);
        load_columns(p + 144 + 32 * half, stride, high + 4);
        for (int i = 0; i < 4; i++) { /* columns 16 i + ... and 64 + 16 i + ... of the half */
            vu *words = t->words + 32 * half + 4 * i;
            load_columns(p + 64 * half + 16 * i, stride, low);
            for (int j = 0; j < 4; j++) {
                vu pairs = high[4 * (i % 2) + j];
                vu first = i < 2 ? pairs << 4 : pairs << 2, second = i < 2 ? pairs : pairs >> 2;
                words[j] = (low[j] & 0x0f0f0f0fu) | (first & 0x30303030u);
                words[16 + j] = ((low[j] >> 4) & 0x0f0f0f0fu) | (second & 0x30303030u);
            }
        }
    }
}

INLINE void unpack_iq4_xs(tile *t, const uint8_t *p, size_t stride, const moe_grids *grids)
{
    (void)grids;
    vu head = load_words(p, stride), low = load_words(p + 4, stride);
    vf d = half_to_float(head);
    for (int g = 0; g < GROUPS_PER_TILE; g++) {
        vu *words = t->words + 8 * g;
        vu six = ((low >> (4 * g)) & 15u) | (((head >> (16 + 2 * g)) & 3u) << 4);
        t->scale[g] = d * to_float((vi)six - 32);
        split_nibbles(p + 8 + 16 * g, stride, words);
        for (int j = 0; j < 8; j++)
            words[j] = look_up(table_iq4, words[j]);
    }
}
