/* The IQ2 and IQ3 types: blocks of 256 columns, whose weights are looked up 8 or 4 at a time.
 *
 *     IQ2_XXS  d[2], per group: indices[4], u32 with 4 × 7 sign bits and a scale of 4 bits
 *     IQ2_XS   d[2] u16[32] (9 bits index, 7 bits signs), scales[8] of 4 bits per 16 columns
 *     IQ2_S    d[2] indices[32] signs[32] high[8] (2 bits per index) scales[8] of 4 bits per 16
 *     IQ3_XXS  d[2] indices[64], per group: u32 with 4 × 7 sign bits and a scale of 4 bits
 *     IQ3_S    d[2] indices[64] high[8] (1 bit per index) signs[32] scales[4] of 4 bits per 32
 *
 *     IQ2: weight = +- d * (0.5 + scale) / 4 * {8, 25, 43}[code], an index gives 8 codes of 2 bits
 *     IQ3_XXS: weight = +- d * (0.5 + scale) / 2 * {4, 12, 20, 28, 36, 44, 52, 62}[code]
 *     IQ3_S: weight = +- d * (1 + 2 * scale) * {1, 3, 5, 7, 9, 11, 13, 15}[code]
 *            both: an index gives 4 codes of 3 bits, one per nibble
 *
 * Codes are stored as 16 bits per index (moe_grids). Seven sign bits stand for eight: the eighth
 * makes their number even.
 */
#define IQ_OFFSET 64 /* the largest magnitude is 62 */
static const layout layout_iq2_xxs = {.offset = IQ_OFFSET, .subgroups = 1};
static const layout layout_iq2_xs = {.offset = IQ_OFFSET, .subgroups = 2};
static const layout layout_iq2_s = {.offset = IQ_OFFSET, .subgroups = 2};
static const layout layout_iq3_xxs = {.offset = IQ_OFFSET, .subgroups = 1};
static const layout layout_iq3_s = {.offset = IQ_OFFSET, .subgroups = 1};

/* By code, and the sign above it. */
static const uint8_t table_iq2[16] = {
    64 + 8, 64 + 25, 64 + 43, 64, 64 - 8, 64 - 25, 64 - 43, 64,
};
static const uint8_t table_iq3_xxs[16] = {
    64 + 4, 64 + 12, 64 + 20, 64 + 28, 64 + 36, 64 + 44, 64 + 52, 64 + 62,
    64 - 4, 64 - 12, 64 - 20, 64 - 28, 64 - 36, 64 - 44, 64 - 52, 64 - 62,
};
static const uint8_t table_iq3_s[16] = {
    64 + 1, 64 + 3, 64 + 5, 64 + 7, 64 + 9, 64 + 11, 64 + 13, 64 + 15,
    64 - 1, 64 - 3, 64 - 5, 64 - 7, 64 - 9, 64 - 11, 64 - 13, 64 - 15,
};

/* Two fields of seven sign bits, at bits 0 and 16 -> eight bits each. */
INLINE vu even_signs(vu fields)
{
    vu parity = fields ^ (fields >> 4);
    parity ^= parity >> 2;
    parity ^= parity >> 1;
    return fields | ((parity & 0x00010001u) << 7);
}

/* Four sign bits from bit i on -> bit `to` of four bytes (see fifth_bits in unpack_32.h). */
INLINE vu spread_signs(vu signs, int i, int to)
{
    return (((signs >> i) & 15u) * (0x00204081u << to)) & (0x01010101u << to);
}

/* Eight weights of an IQ2 type: codes in 16 bits from bit `half` (0 or 16) on, signs in 8 bits. */
INLINE void put_8(tile *t, plan how, int index, vu codes, vu signs, int half)
{
    UNROLL for (int k = 0; k < 2; k++) {
        vu pairs = (codes >> (half + 8 * k)) & 255u;
        pairs = (pairs | (pairs << 12)) & 0x000f000fu;
        pairs = (pairs | (pairs << 6)) & 0x03030303u;
        put(t, how, index + k, look_up(table_iq2, pairs | spread_signs(signs, half + 4 * k, 2)));
    }
}

/* Four weights of an IQ3 type, the signs four bits from bit `at` on. */
INLINE void put_4(tile *t, plan how, int index, const uint8_t table[16], vu codes, int half,
                  vu signs, int at)
{
    vu nibbles = (codes >> half) & 0xffffu;
    nibbles = (nibbles | (nibbles << 8)) & 0x00ff00ffu;
    nibbles = (nibbles | (nibbles << 4)) & 0x0f0f0f0fu;
    put(t, how, index, look_up(table, nibbles | spread_signs(signs, at, 3)));
}

/* 0.5 + the scale in the low four bits */
INLINE vf half_more(vu scale)
{
    return to_float((vi)(scale & 15u)) + all_floats(0.5f);
}

/* Sign fields 0 and 2, or 1 and 3, of a word with 4 × 7 bits, as eight bits each at 0 and 16. */
INLINE vu signs_of_word(vu word, int odd)
{
    return even_signs(odd ? ((word >> 7) & 0x7fu) | ((word >> 5) & 0x007f0000u)
                          : (word & 0x7fu) | ((word << 2) & 0x007f0000u));
}

INLINE void unpack_iq2_xxs(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    vf d = half_to_float(load_words(rows, 0)) * all_floats(0.25f);
    HALVES {
        UNROLL for (int i = 0; i < 2; i++) { /* two groups: indices, signs, indices, signs */
            vu raw[4];
            take_columns(t, rows, 2 + 32 * half + 16 * i, raw);
            UNROLL for (int k = 0; k < 2; k++) {
                int g = 2 * i + k;
                vu indices = raw[2 * k], word = raw[2 * k + 1];
                UNROLL for (int odd = 0; odd < 2; odd++) {
                    vu pair = (indices >> (8 * odd)) & 0x00ff00ffu;
                    vu codes = look_up_16(grids->iq2_xxs, 256, pair);
                    vu signs = signs_of_word(word, odd);
                    put_8(t, how, 8 * g + 2 * odd, codes, signs, 0);
                    put_8(t, how, 8 * g + 4 + 2 * odd, codes, signs, 16);
                }
                t->scale[g] = d * half_more(word >> 28);
            }
        }
        finish(t, how);
    }
}

INLINE void unpack_iq2_xs(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    vf d = half_to_float(load_words(rows, 0)) * all_floats(0.25f);
    HALVES {
        vu scales = load_words(rows, 66 + 4 * half);
        UNROLL for (int i = 0; i < 2; i++) {
            vu raw[4];
            take_columns(t, rows, 2 + 32 * half + 16 * i, raw);
            UNROLL for (int j = 0; j < 4; j++) { /* 16 columns each */
                int s = 4 * i + j;
                vu codes = look_up_16(grids->iq2_xs, 512, raw[j] & 0x01ff01ffu);
                vu signs = even_signs((raw[j] >> 9) & 0x007f007fu);
                put_8(t, how, 4 * s, codes, signs, 0);
                put_8(t, how, 4 * s + 2, codes, signs, 16);
                t->scale[s] = d * half_more(scales >> (4 * s));
            }
        }
        finish(t, how);
    }
}

INLINE void unpack_iq2_s(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    vf d = half_to_float(load_words(rows, 0)) * all_floats(0.25f);
    HALVES {
        vu high = load_words(rows, 66 + 4 * half), scales = load_words(rows, 74 + 4 * half);
        vu indices[4], signs[4];
        take_columns(t, rows, 2 + 16 * half, indices);
        take_columns(t, rows, 34 + 16 * half, signs);
        UNROLL for (int g = 0; g < CHUNK_GROUPS; g++) {
            UNROLL for (int odd = 0; odd < 2; odd++) { /* indices 0 and 2, then 1 and 3 */
                vu pair = (indices[g] >> (8 * odd)) & 0x00ff00ffu;
                vu bits = high >> (8 * g + 2 * odd);
                pair |= ((bits & 3u) << 8) | ((bits & 0x30u) << 20);
                vu codes = look_up_16(grids->iq2_s, 1024, pair);
                vu pair_signs = (signs[g] >> (8 * odd)) & 0x00ff00ffu;
                put_8(t, how, 8 * g + 2 * odd, codes, pair_signs, 0);
                put_8(t, how, 8 * g + 4 + 2 * odd, codes, pair_signs, 16);
            }
            t->scale[2 * g] = d * half_more(scales >> (8 * g));
            t->scale[2 * g + 1] = d * half_more(scales >> (8 * g + 4));
        }
        finish(t, how);
    }
}

INLINE void unpack_iq3_xxs(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    vf d = half_to_float(load_words(rows, 0)) * all_floats(0.5f);
    HALVES {
        vu words[4], indices[4];
        take_columns(t, rows, 66 + 16 * half, words);
        UNROLL for (int i = 0; i < 2; i++) { /* two groups of eight indices */
            take_columns(t, rows, 2 + 32 * half + 16 * i, indices);
            UNROLL for (int j = 0; j < 4; j++) {
                int g = 2 * i + j / 2, first = 8 * g + 4 * (j % 2); /* set 2 (j % 2) and the next */
                UNROLL for (int odd = 0; odd < 2; odd++) {
                    vu pair = (indices[j] >> (8 * odd)) & 0x00ff00ffu;
                    vu codes = look_up_16(grids->iq3_xxs, 256, pair);
                    vu even = signs_of_word(words[g], 0), uneven = signs_of_word(words[g], 1);
                    int at = 16 * (j % 2) + 4 * odd;
                    put_4(t, how, first + odd, table_iq3_xxs, codes, 0, even, at);
                    put_4(t, how, first + 2 + odd, table_iq3_xxs, codes, 16, uneven, at);
                }
                t->scale[g] = d * half_more(words[g] >> 28);
            }
        }
        finish(t, how);
    }
}

INLINE void unpack_iq3_s(tile *t, plan how, const row_pointers *rows, const moe_grids *grids)
{
    vf d = half_to_float(load_words(rows, 0));
    vu scales = load_words(rows, 106);
    HALVES {
        vu high = load_words(rows, 66 + 4 * half), signs[4], indices[4];
        take_columns(t, rows, 74 + 16 * half, signs);
        UNROLL for (int i = 0; i < 2; i++) {
            take_columns(t, rows, 2 + 32 * half + 16 * i, indices);
            UNROLL for (int j = 0; j < 4; j++) {
                int g = 2 * i + j / 2, first = 4 * (j % 2);
                UNROLL for (int odd = 0; odd < 2; odd++) { /* indices 0 and 2, then 1 and 3 */
                    vu pair = (indices[j] >> (8 * odd)) & 0x00ff00ffu;
                    vu bits = high >> (8 * g + first + odd);
                    pair |= ((bits & 1u) << 8) | ((bits & 4u) << 22);
                    vu codes = look_up_16(grids->iq3_s, 512, pair);
                    put_4(t, how, 8 * g + first + odd, table_iq3_s, codes, 0, signs[g],
                          4 * (first + odd));
                    put_4(t, how, 8 * g + first + 2 + odd, table_iq3_s, codes, 16, signs[g],
                          4 * (first + odd + 2));
                }
            }
        }
        UNROLL for (int g = 0; g < CHUNK_GROUPS; g++) {
            vf scale = to_float((vi)((scales >> (4 * g)) & 15u));
            t->scale[g] = d * (all_floats(1.0f) + scale + scale);
        }
        scales >>= 16;
        finish(t, how);
    }
}
