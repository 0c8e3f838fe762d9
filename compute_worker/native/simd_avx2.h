/* Eight rows side by side: AVX2, FMA, F16C. */
#define LANES 8
#include "simd_types.h"

#include <immintrin.h>

#define WIDE_DOT_IS_SIGNED 0

INLINE void load_columns(const row_pointers *rows, int at, vu out[4])
{
    __m256i r[4];
    HIDE_DISTANCES(rows);
    UNROLL for (int i = 0; i < 4; i++) {
        __m128i upper = _mm_loadu_si128((const __m128i *)ROW_AT(rows, 4 + i, at));
        r[i] = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)ROW_AT(rows, i, at)));
        r[i] = _mm256_inserti128_si256(r[i], upper, 1);
    }
    __m256i low01 = _mm256_unpacklo_epi32(r[0], r[1]), low23 = _mm256_unpacklo_epi32(r[2], r[3]);
    __m256i high01 = _mm256_unpackhi_epi32(r[0], r[1]), high23 = _mm256_unpackhi_epi32(r[2], r[3]);
    out[0] = (vu)_mm256_unpacklo_epi64(low01, low23);
    out[1] = (vu)_mm256_unpackhi_epi64(low01, low23);
    out[2] = (vu)_mm256_unpacklo_epi64(high01, high23);
    out[3] = (vu)_mm256_unpackhi_epi64(high01, high23);
}

/* 32 bytes of each row -> 8 words. */
INLINE void load_lines(const row_pointers *rows, int at, vu out[8])
{
    load_columns(rows, at, out);
    load_columns(rows, at + 16, out + 4);
}

INLINE vf half_to_float(vu bits)
{
    __m256i low = (__m256i)(bits & 0xffffu);
    __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    return (vf)_mm256_cvtph_ps(words);
}

INLINE vf to_float(vi v)
{
    return (vf)_mm256_cvtepi32_ps((__m256i)v);
}

INLINE vi round_to_int(vf v)
{
    return (vi)_mm256_cvtps_epi32((__m256)v);
}

INLINE vf multiply_add(vf a, vf b, vf c)
{
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

INLINE vf maximum(vf a, vf b)
{
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
}

INLINE vf minimum(vf a, vf b)
{
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
}

INLINE vi maximum_int(vi a, vi b)
{
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
}

INLINE int32_t largest_int(vi v)
{
    __m128i upper = _mm256_extracti128_si256((__m256i)v, 1);
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), upper);
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}

INLINE int32_t sum_ints(vi v)
{
    __m128i upper = _mm256_extracti128_si256((__m256i)v, 1);
    __m128i m = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), upper);
    m = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}

INLINE float largest_lane(vf v)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

INLINE float sum_lanes(vf v)
{
    __m128 m = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    m = _mm_add_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_add_ss(m, _mm_movehdup_ps(m)));
}

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

/* Two products of unsigned and signed bytes are added in 16 bits, which must not overflow: wide
 * bytes go as their low seven bits and their highest. */
INLINE vi dot_bytes(vi sums, vu weights, int32_t four, int wide)
{
    __m256i w = (__m256i)weights, x = _mm256_set1_epi32(four);
    if (!wide)
        return sums + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
    __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(w, _mm256_set1_epi8(127)), x);
    __m256i highest = (__m256i)((weights >> 7) & 0x01010101u);
    __m256i high = _mm256_maddubs_epi16(highest, x);
    return sums + (vi)_mm256_madd_epi16(low, _mm256_set1_epi16(1)) +
           (vi)_mm256_madd_epi16(high, _mm256_set1_epi16(128));
}

INLINE vu look_up(const uint8_t table[16], vu indices)
{
    __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (vu)_mm256_shuffle_epi8(t, (__m256i)indices);
}

/* table[index] for every 16-bit half. A gather reads 32 bits from every even address. */
INLINE vu look_up_16(const uint16_t *table, int n, vu indices)
{
    (void)n;
    const int *words = (const int *)(const void *)table;
    vu low = (vu)_mm256_i32gather_epi32(words, (__m256i)(indices & 0xffffu), 2);
    vu high = (vu)_mm256_i32gather_epi32(words, (__m256i)(indices >> 16), 2);
    return (low & 0xffffu) | (high << 16);
}

INLINE vf load_floats(const float *p)
{
    return (vf)_mm256_loadu_ps(p);
}

INLINE void store_floats(float *p, vf v)
{
    _mm256_storeu_ps(p, (__m256)v);
}

INLINE void store_some(float *p, vf v, int n)
{
    float lanes[LANES];
    _mm256_storeu_ps(lanes, (__m256)v);
    memcpy(p, lanes, 4 * (size_t)n);
}

INLINE void store_bytes(int8_t *p, vi v)
{
    __m256i words = _mm256_packs_epi32((__m256i)v, (__m256i)v);
    __m256i bytes = _mm256_packs_epi16(words, words);
    int32_t low = _mm256_extract_epi32(bytes, 0), high = _mm256_extract_epi32(bytes, 4);
    memcpy(p, &low, 4);
    memcpy(p + 4, &high, 4);
}

INLINE vf load_halves(const uint8_t *p)
{
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

INLINE void store_halves(uint8_t *p, vf v)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}

INLINE vf load_bytes(const uint8_t *p)
{
    __m256i words = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
    return (vf)_mm256_cvtepi32_ps(words);
}
