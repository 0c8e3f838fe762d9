/* Four rows side by side in plain C: the compiler's vector types become whatever the base of the
 * architecture has (SSE2, NEON), and the rest is written element by element. */
#define LANES 4
#include "simd_types.h"

#include <math.h>

#define WIDE_DOT_IS_SIGNED 0

typedef int16_t vh __attribute__((vector_size(4 * LANES)));

INLINE void load_columns(const row_pointers *rows, int at, vu out[4])
{
    vu r[4];
    HIDE_DISTANCES(rows);
    UNROLL for (int i = 0; i < 4; i++)
        memcpy(&r[i], ROW_AT(rows, i, at), 16);
    vu low01 = __builtin_shuffle(r[0], r[1], (vu){0, 4, 1, 5});
    vu low23 = __builtin_shuffle(r[2], r[3], (vu){0, 4, 1, 5});
    vu high01 = __builtin_shuffle(r[0], r[1], (vu){2, 6, 3, 7});
    vu high23 = __builtin_shuffle(r[2], r[3], (vu){2, 6, 3, 7});
    out[0] = __builtin_shuffle(low01, low23, (vu){0, 1, 4, 5});
    out[1] = __builtin_shuffle(low01, low23, (vu){2, 3, 6, 7});
    out[2] = __builtin_shuffle(high01, high23, (vu){0, 1, 4, 5});
    out[3] = __builtin_shuffle(high01, high23, (vu){2, 3, 6, 7});
}

INLINE void load_lines(const row_pointers *rows, int at, vu out[4])
{
    load_columns(rows, at, out);
}

INLINE vf to_float(vi v)
{
    return __builtin_convertvector(v, vf);
}

/* To nearest, halves away from zero; for |v| below 2^23. */
INLINE vi round_to_int(vf v)
{
    vf half = (vf)(((vu)v & 0x80000000u) | (vu)all_floats(0.5f));
    return __builtin_convertvector(v + half, vi);
}

/* Two roundings: a machine without fused multiply-add would take a library call for one. */
INLINE vf multiply_add(vf a, vf b, vf c)
{
    return a * b + c;
}

INLINE vf maximum(vf a, vf b)
{
    return choose((vi)(a > b), a, b);
}

INLINE vf minimum(vf a, vf b)
{
    return choose((vi)(a < b), a, b);
}

INLINE vi maximum_int(vi a, vi b)
{
    vi is_larger = a > b;
    return (is_larger & a) | (~is_larger & b);
}

INLINE int32_t largest_int(vi v)
{
    int32_t a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
}

INLINE int32_t sum_ints(vi v)
{
    return (v[0] + v[1]) + (v[2] + v[3]);
}

INLINE float largest_lane(vf v)
{
    float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
}

INLINE float sum_lanes(vf v)
{
    return (v[0] + v[2]) + (v[1] + v[3]);
}

/* The exponent of a half moves up by 112; the product with 2^112 does that and gets denormals
 * right. Infinity and NaN have all exponent bits set afterwards. */
INLINE vf half_to_float(vu bits)
{
    vu magnitude = (bits & 0x7fffu) << 13;
    vf value = (vf)magnitude * 5.192296858534828e33f;
    vu special = (vu)(magnitude >= 0x0f800000u) & 0x7f800000u;
    return (vf)((vu)value | special | ((bits & 0x8000u) << 16));
}

INLINE float scalar_half(const uint8_t *p)
{
    uint16_t bits;
    memcpy(&bits, p, 2);
    return half_to_float((vu){bits})[0];
}

/* To nearest even, as hardware does. */
INLINE uint16_t half_from_float(float x)
{
    uint32_t bits = (uint32_t)four_bytes(&x), sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (bits >= 0x477ff000u) /* 65520 and more round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (bits < 0x38800000u) { /* below 2^-14: steps of 2^-24 */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        float shifted = magnitude + 0.5f; /* 0.5 has steps of 2^-24 */
        return (uint16_t)(sign | ((uint32_t)four_bytes(&shifted) - 0x3f000000u));
    }
    bits += 0x0fffu + (bits >> 13 & 1u);
    return (uint16_t)(sign | ((bits - 0x38000000u) >> 13));
}

/* Two signed bytes as numbers of 16 bits, in one of 32. */
INLINE int32_t pair_of(int32_t low, int32_t high)
{
    return (int32_t)(((uint32_t)(int8_t)low & 0xffffu) | (uint32_t)(int8_t)high << 16);
}

/* Bytes 0 and 2 as two numbers of 16 bits, and 1 and 3 alike. A product of an unsigned and a signed
 * byte fits into 16 bits, the sum of two does not. */
INLINE vi dot_bytes(vi sums, vu weights, int32_t four, int wide)
{
    (void)wide;
    int32_t even = pair_of(four, four >> 16), odd = pair_of(four >> 8, four >> 24);
    vi first = (vi)((vh)(weights & 0x00ff00ffu) * (vh)all_ints(even));
    vi second = (vi)((vh)((weights >> 8) & 0x00ff00ffu) * (vh)all_ints(odd));
    return sums + ((first << 16) >> 16) + (first >> 16) + ((second << 16) >> 16) + (second >> 16);
}

/* Collected in two registers: bytes written one by one cannot be read back at once as a vector. */
INLINE vu look_up(const uint8_t table[16], vu indices)
{
    uint64_t in[2], out[2] = {0, 0};
    memcpy(in, &indices, sizeof in);
    UNROLL for (int i = 0; i < 8; i++) {
        out[0] |= (uint64_t)table[in[0] >> (8 * i) & 15u] << (8 * i);
        out[1] |= (uint64_t)table[in[1] >> (8 * i) & 15u] << (8 * i);
    }
    return (vu){(uint32_t)out[0], (uint32_t)(out[0] >> 32), (uint32_t)out[1],
                (uint32_t)(out[1] >> 32)};
}

INLINE vu look_up_16(const uint16_t *table, int n, vu indices)
{
    vu out;
    (void)n;
    for (int i = 0; i < LANES; i++)
        out[i] = table[indices[i] & 0xffffu] | (uint32_t)table[indices[i] >> 16] << 16;
    return out;
}

INLINE vf load_floats(const float *p)
{
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store_floats(float *p, vf v)
{
    memcpy(p, &v, sizeof v);
}

INLINE void store_some(float *p, vf v, int n)
{
    memcpy(p, &v, 4 * (size_t)n);
}

INLINE void store_bytes(int8_t *p, vi v)
{
    for (int i = 0; i < LANES; i++)
        p[i] = (int8_t)v[i];
}

INLINE vf load_halves(const uint8_t *p)
{
    uint16_t bits[4];
    memcpy(bits, p, 8);
    return half_to_float((vu){bits[0], bits[1], bits[2], bits[3]});
}

INLINE void store_halves(uint8_t *p, vf v)
{
    for (int i = 0; i < LANES; i++) {
        uint16_t half = half_from_float(v[i]);
        memcpy(p + 2 * i, &half, 2);
    }
}

INLINE vf load_bytes(const uint8_t *p)
{
    return to_float((vi){(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]});
}
