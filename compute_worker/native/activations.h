/* Preparing activations, and exp and SiLU. Included once per instruction set.
 *
 * A group with NaN or infinity gets the scale NaN, so that rounding does not hide it. A group below
 * TINY is taken as zero: its inverse scale would not be a float32.
 */
#define TINY 1e-30f
#define LARGEST_24 8355000.0f /* all digits 127 are 8355711; the product may round up */

INLINE float largest_magnitude(const float *x)
{
    vf largest = {0};
    UNROLL for (int i = 0; i < GROUP; i += LANES)
        largest = maximum(largest, (vf)((vu)load_floats(x + i) & 0x7fffffffu));
    return largest_lane(largest);
}

/* 0 where all values are finite, NaN otherwise. */
INLINE float finite_check(const float *x)
{
    vf zeros = {0};
    for (int i = 0; i < GROUP; i += LANES)
        zeros += load_floats(x + i) * all_floats(0.0f);
    return sum_lanes(zeros);
}

/* One group: integers and their signed base-256 digits; digits of plane p lie p * plane_bytes on. */
INLINE void prepare_group(int planes, const float *x, int8_t *bytes, size_t plane_bytes, float *scale,
                          group_sums *sums)
{
    float most = planes == 1 ? 127.0f : LARGEST_24;
    float largest = largest_magnitude(x);
    vf inverse = all_floats(largest > TINY ? most / largest : 0.0f);
    UNROLL for (int i = 0; i < GROUP; i += LANES) {
        vi rest = round_to_int(load_floats(x + i) * inverse);
        UNROLL for (int p = 0; p < planes; p++) {
            vi digit = (rest << 24) >> 24;
            store_bytes(bytes + (size_t)p * plane_bytes + i, digit);
            rest = (rest - digit) >> 8;
        }
    }
    sums->halves[0] = sums->halves[1] = 0.0f;
    UNROLL for (int p = planes - 1; p >= 0; p--)
        UNROLL for (int half = 0; half < 2; half++) {
            const int8_t *digits = bytes + (size_t)p * plane_bytes + 16 * half;
            int32_t sum = 0;
            for (int i = 0; i < 16; i++)
                sum += digits[i];
            sums->planes[p][half] = sum;
            sums->halves[half] = sums->halves[half] * 256.0f + (float)sum;
        }
    sums->whole = sums->halves[0] + sums->halves[1];
    *scale = largest / most + finite_check(x);
}

static void prepare(activations *input, int token, int begin, int end)
{
    size_t n_groups = (size_t)input->n_groups, planes = (size_t)input->planes;
    for (size_t g = (size_t)begin; g < (size_t)end; g++) {
        size_t at = (size_t)token * n_groups + g;
        const float *x = input->values + GROUP * at;
        int8_t *bytes = input->bytes + GROUP * ((size_t)token * n_groups * planes + g);
        if (planes == 1)
            prepare_group(1, x, bytes, GROUP * n_groups, input->scales + at, input->sums + at);
        else
            prepare_group(MAX_PLANES, x, bytes, GROUP * n_groups, input->scales + at,
                          input->sums + at);
    }
}

/* exp, relative error below 1e-7 for |x| <= 87; smaller arguments give exp(-87), larger exp(88).
 * x = n ln 2 + r with |r| <= ln 2 / 2, and the Taylor series of exp(r) up to r^7, whose rest is
 * below 6e-9. NaN stays NaN. */
INLINE vf exponential(vf x)
{
    x = minimum(all_floats(88.0f), maximum(all_floats(-87.0f), x));
    vi n = round_to_int(x * all_floats(1.44269504f));
    vf count = to_float(n);
    vf r = multiply_add(count, all_floats(-0.693359375f), x); /* ln 2 in two parts: exact product */
    r = multiply_add(count, all_floats(2.12194440e-4f), r);
    vf e = all_floats(1.0f / 5040);
    e = multiply_add(e, r, all_floats(1.0f / 720));
    e = multiply_add(e, r, all_floats(1.0f / 120));
    e = multiply_add(e, r, all_floats(1.0f / 24));
    e = multiply_add(e, r, all_floats(1.0f / 6));
    e = multiply_add(e, r, all_floats(0.5f));
    e = multiply_add(e, r, all_floats(1.0f));
    e = multiply_add(e, r, all_floats(1.0f));
    vf power = (vf)((n + 127) << 23);
    return e * power;
}

static void silu_product(const float *gate, const float *up, float *out, int n)
{
    for (int i = 0; i < n; i += LANES) {
        vf g = load_floats(gate + i);
        vf sigmoid = all_floats(1.0f) / (all_floats(1.0f) + exponential(-g));
        store_floats(out + i, g * sigmoid * load_floats(up + i));
    }
}
