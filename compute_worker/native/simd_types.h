/* Vector types of LANES 32-bit elements, and what can be said for every width. A lane is a row. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 64")
#define ROLLED _Pragma("GCC unroll 1")

typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef float vf __attribute__((vector_size(4 * LANES)));
typedef uint8_t vb __attribute__((vector_size(4 * LANES)));

INLINE vf all_floats(float x)
{
    return x - (vf){0};
}

INLINE vi all_ints(int32_t x)
{
    return x - (vi){0};
}

/* Byte i of each lane, zero-extended or sign-extended. */
INLINE vi unsigned_byte(vu v, int i)
{
    return (vi)((v >> (8 * i)) & 255u);
}

INLINE vi signed_byte(vu v, int i)
{
    return ((vi)(v << (24 - 8 * i))) >> 24;
}

/* Byte by byte, modulo 256. */
INLINE vu subtract_bytes(vu a, vu b)
{
    return (vu)((vb)a - (vb)b);
}

/* a where the mask is all ones, b where it is zero. */
INLINE vf choose(vi mask, vf a, vf b)
{
    return (vf)((mask & (vi)a) | (~mask & (vi)b));
}

INLINE int32_t four_bytes(const void *p)
{
    int32_t word;
    memcpy(&word, p, 4);
    return word;
}

/* Where LANES rows begin: every fourth one, and the distance of neighbours. */
typedef struct {
    const uint8_t *fourth[LANES / 4];
    size_t stride, three_strides;
} row_pointers;

INLINE row_pointers point_rows(const uint8_t *first, size_t stride)
{
    row_pointers rows = {.stride = stride, .three_strides = 3 * stride};
    UNROLL for (int i = 0; i < LANES / 4; i++)
        rows.fourth[i] = first + 4 * (size_t)i * stride;
    return rows;
}

/* Address of a row. The compiler must not know that distances of one load are those of the next, or
 * it keeps sixteen pointers, more than there are registers: see HIDE_DISTANCES. */
#define HIDE_DISTANCES(rows)                                                                      \
    size_t one = (rows)->stride, three = (rows)->three_strides;                                   \
    __asm__ volatile("" : "+r"(one), "+r"(three))
#define ROW_AT(rows, lane, at)                                                                    \
    ((rows)->fourth[(lane) / 4] +                                                                 \
     ((lane) % 4 == 3 ? three : (size_t)((lane) % 4) * one) + (at))

/* The 32-bit word at byte `at` of each row. */
INLINE vu load_words(const row_pointers *rows, int at)
{
    vu words;
    HIDE_DISTANCES(rows);
    UNROLL for (int lane = 0; lane < LANES; lane++)
        words[lane] = (uint32_t)four_bytes(ROW_AT(rows, lane, at));
    return words;
}
