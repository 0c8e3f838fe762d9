/* Vector types of LANES 32-bit elements, and what can be said for every width. A lane is a row. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

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

/* The 32-bit word at p of each row. */
INLINE vu load_words(const uint8_t *p, size_t stride)
{
    vu words;
    for (int lane = 0; lane < LANES; lane++)
        words[lane] = (uint32_t)four_bytes(p + (size_t)lane * stride);
    return words;
}
