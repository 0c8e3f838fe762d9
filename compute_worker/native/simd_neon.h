/* Four rows side by side: NEON with the dot product of ARMv8.2. */
#define LANES 4
#include "simd_types.h"

#include <arm_neon.h>

#define WIDE_DOT_IS_SIGNED 1 /* the dot product takes signed bytes on both sides */

INLINE void load_columns(const row_pointers *rows, int at, vu out[4])
{
    HIDE_DISTANCES(rows);
    uint32x4_t a = vreinterpretq_u32_u8(vld1q_u8(ROW_AT(rows, 0, at)));
    uint32x4_t b = vreinterpretq_u32_u8(vld1q_u8(ROW_AT(rows, 1, at)));
    uint32x4_t c = vreinterpretq_u32_u8(vld1q_u8(ROW_AT(rows, 2, at)));
    uint32x4_t d = vreinterpretq_u32_u8(vld1q_u8(ROW_AT(rows, 3, at)));
    uint64x2_t even01 = vreinterpretq_u64_u32(vtrn1q_u32(a, b));
    uint64x2_t even23 = vreinterpretq_u64_u32(vtrn1q_u32(c, d));
    uint64x2_t odd01 = vreinterpretq_u64_u32(vtrn2q_u32(a, b));
    uint64x2_t odd23 = vreinterpretq_u64_u32(vtrn2q_u32(c, d));
    out[0] = (vu)vtrn1q_u64(even01, even23);
    out[1] = (vu)vtrn1q_u64(odd01, odd23);
    out[2] = (vu)vtrn2q_u64(even01, even23);
    out[3] = (vu)vtrn2q_u64(odd01, odd23);
}

INLINE void load_lines(const row_pointers *rows, int at, vu out[4])
{
    load_columns(rows, at, out);
}

INLINE vf half_to_float(vu bits)
{
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)bits)));
}

INLINE vf to_float(vi v)
{
    return (vf)vcvtq_f32_s32((int32x4_t)v);
}

INLINE vi round_to_int(vf v)
{
    return (vi)vcvtnq_s32_f32((float32x4_t)v);
}

INLINE vf multiply_add(vf a, vf b, vf c)
{
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

INLINE vf maximum(vf a, vf b)
{
    return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
}

INLINE vf minimum(vf a, vf b)
{
    return (vf)vminq_f32((float32x4_t)a, (float32x4_t)b);
}

INLINE vi maximum_int(vi a, vi b)
{
    return (vi)vmaxq_s32((int32x4_t)a, (int32x4_t)b);
}

INLINE int32_t largest_int(vi v)
{
    return vmaxvq_s32((int32x4_t)v);
}

INLINE int32_t sum_ints(vi v)
{
    return vaddvq_s32((int32x4_t)v);
}

INLINE float largest_lane(vf v)
{
    return vmaxvq_f32((float32x4_t)v);
}

INLINE float sum_lanes(vf v)
{
    return vaddvq_f32((float32x4_t)v);
}

INLINE float scalar_half(const uint8_t *p)
{
    __fp16 half;
    memcpy(&half, p, 2);
    return (float)half;
}

INLINE uint16_t half_from_float(float x)
{
    __fp16 half = (__fp16)x;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}

/* Bytes below 128 are the same signed and unsigned; wide ones lose their offset of 128. */
INLINE vi dot_bytes(vi sums, vu weights, int32_t four, int wide)
{
    if (wide)
        weights ^= 0x80808080u;
    int8x16_t factors = vreinterpretq_s8_s32(vdupq_n_s32(four));
    return (vi)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, factors);
}

INLINE vu look_up(const uint8_t table[16], vu indices)
{
    return (vu)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)indices);
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
    return (vf)vld1q_f32(p);
}

INLINE void store_floats(float *p, vf v)
{
    vst1q_f32(p, (float32x4_t)v);
}

INLINE void store_some(float *p, vf v, int n)
{
    float lanes[LANES];
    vst1q_f32(lanes, (float32x4_t)v);
    memcpy(p, lanes, 4 * (size_t)n);
}

INLINE void store_bytes(int8_t *p, vi v)
{
    int8x8_t bytes = vmovn_s16(vcombine_s16(vmovn_s32((int32x4_t)v), vdup_n_s16(0)));
    int32_t four = vget_lane_s32(vreinterpret_s32_s8(bytes), 0);
    memcpy(p, &four, 4);
}

INLINE vf load_halves(const uint8_t *p)
{
    return (vf)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}

INLINE void store_halves(uint8_t *p, vf v)
{
    vst1_u8(p, vreinterpret_u8_f16(vcvt_f16_f32((float32x4_t)v)));
}

INLINE vf load_bytes(const uint8_t *p)
{
    int16x4_t words = vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four_bytes(p)))));
    return (vf)vcvtq_f32_s32(vmovl_s16(words));
}
