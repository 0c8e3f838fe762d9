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

/* Bytes are taken in the order of memory as far as possible, so the scales at the end of a block come
 * last: taking them first costs a sixth of the speed from memory.
 *
 * Both halves of a block are unpacked by the same code: what the second half wants lies in the
 * upper bits or words of what the first has used, and is moved down at the end of a turn. */
#define HALVES ROLLED for (int half = 0; half < 2; half++)

/* Pair s of each byte, times its factor: most pairs stay where they are, and the scale of their
 * columns is that much smaller, which rounds nothing. Shifts are what limits these types. */
INLINE int pair_factor(int s)
{
    return s == 0 ? 1 : s == 1 ? 4 : 16;
}

INLINE vu pair_in_place(vu pairs, int s)
{
    return s == 3 ? (pairs >> 2) & 0x30303030u : pairs & (0x03030303u * (unsigned)pair_factor(s));
}

INLINE void unpack_q2_k(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    (void)grids;
    vu scales[4], pairs[4], tail[4];
    vf d = {0}, dmin = {0};
    take_columns(t, rows, 0, scales);
    HALVES {
        UNROLL for (int i = 0; i < 2; i++) { /* columns 16 i .. of each pair */
            take_columns(t, rows, 16 + 32 * half + 16 * i, pairs);
            UNROLL for (int j = 0; j < 4; j++)
                UNROLL for (int s = 0; s < 4; s++)
                    put(t, how, 8 * s + 4 * i + j, pair_in_place(pairs[j], s));
        }
        if (half == 0) {
            load_columns(rows, 68, tail); /* the last word: d, dmin; load_words is slower */
            d = half_to_float(tail[3]);
            dmin = -half_to_float(tail[3] >> 16);
        }
        UNROLL for (int s = 0; s < 8; s++) {
            vu both = scales[s / 4] >> (8 * (s % 4));
            t->scale[s] = d * all_floats(1.0f / (float)pair_factor(s / 2)) * to_float((vi)(both & 15u));
            t->minimum[s] = dmin * to_float((vi)((both >> 4) & 15u));
        }
        finish(t, how);
        scales[0] = scales[2];
        scales[1] = scales[3];
    }
}

/* Six-bit scales of Q3_K in 12 bytes: byte i of the first 8 holds the low four bits of scales i and
 * i + 8; byte 8 + i the high pairs of scales i, i + 4, i + 8, i + 12. Sets scales 0 .. 7. */
INLINE void scales_q3_k(tile *t, vf d, const vu packed[3])
{
    UNROLL for (int q = 0; q < 2; q++) {
        vu six = (packed[q] & 0x0f0f0f0fu) | (((packed[2] >> (2 * q)) & 0x03030303u) << 4);
        UNROLL for (int j = 0; j < 4; j++)
            t->scale[4 * q + j] = d * to_float(unsigned_byte(six, j) - 32);
    }
}

INLINE void unpack_q3_k(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    (void)grids;
    vu high[8], packed[3], pairs[4];
    vf d = {0};
    take_columns(t, rows, 0, high);
    take_columns(t, rows, 16, high + 4);
    HALVES {
        UNROLL for (int i = 0; i < 2; i++) {
            take_columns(t, rows, 32 + 32 * half + 16 * i, pairs);
            UNROLL for (int j = 0; j < 4; j++)
                UNROLL for (int s = 0; s < 4; s++) {
                    vu bits = high[4 * i + j];
                    vu third = (s < 2 ? bits << (2 - s) : bits >> (s - 2)) & 0x04040404u;
                    put(t, how, 8 * s + 4 * i + j, ((pairs[j] >> (2 * s)) & 0x03030303u) | third);
                }
        }
        if (half == 0) {
            vu tail[4];
            load_columns(rows, 94, tail); /* the last two bytes of pairs, scales, d */
            UNROLL for (int i = 0; i < 3; i++)
                packed[i] = (tail[i] >> 16) | (tail[i + 1] << 16);
            d = half_to_float(tail[3] >> 16);
        }
        scales_q3_k(t, d, packed);
        finish(t, how);
        UNROLL for (int i = 0; i < 8; i++)
            high[i] >>= 4;
        UNROLL for (int i = 0; i < 3; i++)
            packed[i] >>= 4;
    }
}

/* Scales and minima of Q4_K and Q5_K, 6 bits each, in three words. Word 0: scales 0..3, and the
 * high pairs of scales 4..7; word 1 the same for minima; word 2: low nibbles of scales 4..7 and,
 * in the high halves, of minima 4..7. `head` begins with d and dmin. */
typedef struct {
    vf d, dmin;
    vu scales[2], minima[2]; /* four bytes of 6 bits each */
} scales_of_8;

INLINE scales_of_8 scales_q4_k(const vu head[4])
{
    return (scales_of_8){
        .d = half_to_float(head[0]),
        .dmin = -half_to_float(head[0] >> 16),
        .scales = {head[1] & 0x3f3f3f3fu,
                   (head[3] & 0x0f0f0f0fu) | ((head[1] >> 2) & 0x30303030u)},
        .minima = {head[2] & 0x3f3f3f3fu,
                   ((head[3] >> 4) & 0x0f0f0f0fu) | ((head[2] >> 2) & 0x30303030u)},
    };
}

/* Those of the first half go to the tile, those of the second take their place. */
INLINE void shift_scales(tile *t, scales_of_8 *all)
{
    UNROLL for (int s = 0; s < 4; s++) {
        t->scale[s] = all->d * to_float(unsigned_byte(all->scales[0], s));
        t->minimum[s] = all->dmin * to_float(unsigned_byte(all->minima[0], s));
    }
    all->scales[0] = all->scales[1];
    all->minima[0] = all->minima[1];
}

INLINE void unpack_q4_k(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    (void)grids;
    vu raw[4];
    take_columns(t, rows, 0, raw);
    scales_of_8 scales = scales_q4_k(raw);
    HALVES {
        UNROLL for (int i = 0; i < 4; i++) {
            int first = 16 * (i / 2) + 4 * (i % 2);
            take_columns(t, rows, 16 + 64 * half + 16 * i, raw);
            UNROLL for (int j = 0; j < 4; j++) {
                put(t, how, first + j, raw[j] & 0x0f0f0f0fu);
                put(t, how, first + 8 + j, (raw[j] >> 4) & 0x0f0f0f0fu);
            }
        }
        shift_scales(t, &scales);
        finish(t, how);
    }
}

/* Bit g < 4 of each byte -> bit 4. */
INLINE vu fifth_bit(vu bits, int g)
{
    return (bits << (4 - g)) & 0x10101010u;
}

INLINE void unpack_q5_k(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    (void)grids;
    vu raw[4], high[8];
    take_columns(t, rows, 0, raw);
    take_columns(t, rows, 16, high);
    take_columns(t, rows, 32, high + 4);
    scales_of_8 scales = scales_q4_k(raw);
    HALVES {
        UNROLL for (int i = 0; i < 4; i++) {
            int first = 16 * (i / 2) + 4 * (i % 2);
            take_columns(t, rows, 48 + 64 * half + 16 * i, raw);
            UNROLL for (int j = 0; j < 4; j++) {
                vu bits = high[4 * (i % 2) + j];
                put(t, how, first + j, (raw[j] & 0x0f0f0f0fu) | fifth_bit(bits, 2 * (i / 2)));
                put(t, how, first + 8 + j,
                    ((raw[j] >> 4) & 0x0f0f0f0fu) | fifth_bit(bits, 2 * (i / 2) + 1));
            }
        }
        shift_scales(t, &scales);
        finish(t, how);
        UNROLL for (int i = 0; i < 8; i++)
            high[i] >>= 4;
    }
}

INLINE void unpack_q6_k(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    (void)grids;
    vu scales[4], high[8], low[4];
    vf d = {0};
    HALVES {
        take_columns(t, rows, 128 + 32 * half, high);
        take_columns(t, rows, 144 + 32 * half, high + 4);
        UNROLL for (int i = 0; i < 4; i++) { /* columns 16 i .. and 64 + 16 i .. of the half */
            take_columns(t, rows, 64 * half + 16 * i, low);
            UNROLL for (int j = 0; j < 4; j++) {
                vu pairs = high[4 * (i % 2) + j];
                vu upper = i < 2 ? pairs << 4 : pairs << 2, lower = i < 2 ? pairs : pairs >> 2;
                put(t, how, 4 * i + j, (low[j] & 0x0f0f0f0fu) | (upper & 0x30303030u));
                put(t, how, 16 + 4 * i + j, ((low[j] >> 4) & 0x0f0f0f0fu) | (lower & 0x30303030u));
            }
        }
        if (half == 0) {
            vu tail[4];
            take_columns(t, rows, 192, scales);
            load_columns(rows, 194, tail); /* d; a word at 208 would leave the block */
            d = half_to_float(tail[3] >> 16);
        }
        UNROLL for (int s = 0; s < 8; s++)
            t->scale[s] = d * to_float(signed_byte(scales[s / 4], s % 4));
        finish(t, how);
        scales[0] = scales[2];
        scales[1] = scales[3];
    }
}

INLINE void unpack_iq4_xs(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    (void)grids;
    vu head = load_words(rows, 0), low = load_words(rows, 4), high = head >> 16, raw[4];
    vf d = half_to_float(head);
    HALVES {
        UNROLL for (int g = 0; g < CHUNK_GROUPS; g++) {
            vu six = ((low >> (4 * g)) & 15u) | (((high >> (2 * g)) & 3u) << 4);
            take_columns(t, rows, 8 + 64 * half + 16 * g, raw);
            UNROLL for (int j = 0; j < 8; j++)
                put(t, how, 8 * g + j,
                    look_up(table_iq4, (raw[j % 4] >> (4 * (j / 4))) & 0x0f0f0f0fu));
            t->scale[g] = d * to_float((vi)six - 32);
        }
        finish(t, how);
        low >>= 16;
        high >>= 8;
    }
}
