/* Sixteen rows side by side: AVX-512 F, BW, DQ, VL and VNNI.
 *
 * Every simd_*.h gives the same operations for its width. Plain arithmetic is written with the
 * compiler's vector types (+, &, >> on vu, vi, vf); here is only what those cannot say.
 */
#define LANES 16
#include "simd_types.h"

#include <immintrin.h>

#define WIDE_DOT_IS_SIGNED 0

INLINE __m128i load_16(const uint8_t *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

/* 16 bytes of each of 16 rows from byte `at` on -> out[i] holds the i-th 32-bit word of each row.
 * Every 128-bit lane gets four neighbouring rows and is transposed in itself. */
INLINE void load_columns(const row_pointers *rows, int at, vu out[4])
{
    __m512i r[4];
    HIDE_DISTANCES(rows);
    UNROLL for (int i = 0; i < 4; i++) {
        r[i] = _mm512_castsi128_si512(load_16(ROW_AT(rows, i, at)));
        r[i] = _mm512_inserti32x4(r[i], load_16(ROW_AT(rows, 4 + i, at)), 1);
        r[i] = _mm512_inserti32x4(r[i], load_16(ROW_AT(rows, 8 + i, at)), 2);
        r[i] = _mm512_inserti32x4(r[i], load_16(ROW_AT(rows, 12 + i, at)), 3);
    }
    __m512i low01 = _mm512_unpacklo_epi32(r[0], r[1]), low23 = _mm512_unpacklo_epi32(r[2], r[3]);
    __m512i high01 = _mm512_unpackhi_epi32(r[0], r[1]), high23 = _mm512_unpackhi_epi32(r[2], r[3]);
    out[0] = (vu)_mm512_unpacklo_epi64(low01, low23);
    out[1] = (vu)_mm512_unpackhi_epi64(low01, low23);
    out[2] = (vu)_mm512_unpacklo_epi64(high01, high23);
    out[3] = (vu)_mm512_unpackhi_epi64(high01, high23);
}

/* 64 bytes of each row -> 16 words, with one load per row: rows that lie a multiple of 4 KiB apart
 * share eight places of the first-level cache, and would push each other out between four loads. */
INLINE void load_lines(const row_pointers *rows, int at, vu out[16])
{
    __m512i r[16], s[16];
    HIDE_DISTANCES(rows);
    UNROLL for (int i = 0; i < 16; i++)
        r[i] = _mm512_loadu_si512(ROW_AT(rows, i, at));
    UNROLL for (int i = 0; i < 16; i += 4) { /* 4 × 4 words within 128-bit lanes */
        __m512i low01 = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        __m512i high01 = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        __m512i low23 = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]);
        __m512i high23 = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
        s[i] = _mm512_unpacklo_epi64(low01, low23);
        s[i + 1] = _mm512_unpackhi_epi64(low01, low23);
        s[i + 2] = _mm512_unpacklo_epi64(high01, high23);
        s[i + 3] = _mm512_unpackhi_epi64(high01, high23);
    }
    UNROLL for (int i = 0; i < 4; i++) { /* 4 × 4 lanes of 128 bits */
        __m512i a = _mm512_shuffle_i32x4(s[i], s[4 + i], 0x88);
        __m512i b = _mm512_shuffle_i32x4(s[i], s[4 + i], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(s[8 + i], s[12 + i], 0x88);
        __m512i d = _mm512_shuffle_i32x4(s[8 + i], s[12 + i], 0xdd);
        out[i] = (vu)_mm512_shuffle_i32x4(a, c, 0x88);
        out[4 + i] = (vu)_mm512_shuffle_i32x4(b, d, 0x88);
        out[8 + i] = (vu)_mm512_shuffle_i32x4(a, c, 0xdd);
        out[12 + i] = (vu)_mm512_shuffle_i32x4(b, d, 0xdd);
    }
}

/* Low 16 bits of each lane as a half-precision number; the high bits are ignored. */
INLINE vf half_to_float(vu bits)
{
    return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)bits));
}

INLINE vf to_float(vi v)
{
    return (vf)_mm512_cvtepi32_ps((__m512i)v);
}

INLINE vi round_to_int(vf v)
{
    return (vi)_mm512_cvtps_epi32((__m512)v);
}

INLINE vf multiply_add(vf a, vf b, vf c)
{
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

/* NaN in `b` stays. */
INLINE vf maximum(vf a, vf b)
{
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
}

INLINE vf minimum(vf a, vf b)
{
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
}

INLINE vi maximum_int(vi a, vi b)
{
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
}

INLINE int32_t largest_int(vi v)
{
    return _mm512_reduce_max_epi32((__m512i)v);
}

INLINE int32_t sum_ints(vi v)
{
    return _mm512_reduce_add_epi32((__m512i)v);
}

INLINE float largest_lane(vf v)
{
    return _mm512_reduce_max_ps((__m512)v);
}

/* In a fixed order. */
INLINE float sum_lanes(vf v)
{
    return _mm512_reduce_add_ps((__m512)v);
}

/* One half-precision number in memory as float, and one float as its bits. */
INLINE float scalar_half(const uint8_t *p)
{
    uint16_t bits;
    memcpy(&bits, p, 2);
    return _cvtsh_ss(bits);
}

INLINE uint16_t half_from_float(float x)
{
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
}

/* sums + four products per lane: unsigned bytes of `weights` times the signed bytes of `four`. */
INLINE vi dot_bytes(vi sums, vu weights, int32_t four, int wide)
{
    (void)wide;
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(four));
}

/* table[index] for every byte; indices below 16. */
INLINE vu look_up(const uint8_t table[16], vu indices)
{
    __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
    return (vu)_mm512_shuffle_epi8(t, (__m512i)indices);
}

/* table[index] for every 16-bit half; n, a multiple of 64, entries. Pieces of 64 entries by the
 * low six bits of the index, then by the bits above, pair by pair. */
INLINE vu look_up_16(const uint16_t *table, int n, vu indices)
{
    __m512i index = (__m512i)indices, pieces[16];
    UNROLL for (int i = 0; i < n / 64; i++)
        pieces[i] = _mm512_permutex2var_epi16(_mm512_loadu_si512(table + 64 * i), index,
                                              _mm512_loadu_si512(table + 64 * i + 32));
    UNROLL for (int left = n / 64, bit = 6; left > 1; left /= 2, bit++) {
        __mmask32 is_upper = _mm512_test_epi16_mask(index, _mm512_set1_epi16((short)(1 << bit)));
        UNROLL for (int i = 0; i < left / 2; i++)
            pieces[i] = _mm512_mask_blend_epi16(is_upper, pieces[2 * i], pieces[2 * i + 1]);
    }
    return (vu)pieces[0];
}

INLINE vf load_floats(const float *p)
{
    return (vf)_mm512_loadu_ps(p);
}

INLINE void store_floats(float *p, vf v)
{
    _mm512_storeu_ps(p, (__m512)v);
}

INLINE void store_some(float *p, vf v, int n)
{
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
}

/* LANES integers in [-128, 127] as bytes. */
INLINE void store_bytes(int8_t *p, vi v)
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v));
}

/* LANES half-precision numbers in memory as float32, and back (to nearest even). */
INLINE vf load_halves(const uint8_t *p)
{
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

INLINE void store_halves(uint8_t *p, vf v)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}

/* LANES signed bytes in memory as float32. */
INLINE vf load_bytes(const uint8_t *p)
{
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
