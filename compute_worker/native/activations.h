/* Preparing activations, and exp and SiLU. Included once per instruction set.
 *
 * FAST: per group of 32 values scale = largest magnitude / 127 and bytes = round(value / scale). A
 * group with NaN or infinity gets the scale NaN, so that it is not hidden by rounding.
 */

INLINE float largest_magnitude(const float *x)
{
    vf largest = {0};
    for (int i = 0; i < GROUP; i += LANES)
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

static void prepare_bytes(const float *x, int8_t *bytes, float *scale, float *sums)
{
    float largest = largest_magnitude(x);
    vf inverse = all_floats(largest > 0.0f ? 127.0f / largest : 0.0f);
    int32_t sum[2] = {0, 0};
    for (int i = 0; i < GROUP; i += LANES)
        store_bytes(bytes + i, round_to_int(load_floats(x + i) * inverse));
    for (int i = 0; i < GROUP; i++)
        sum[i / 16] += bytes[i];
    *scale = largest / 127.0f + finite_check(x);
    sums[0] = (float)sum[0];
    sums[1] = (float)sum[1];
    sums[2] = (float)(sum[0] + sum[1]);
}

static void prepare_sums(const float *x, float *sums)
{
    float sum[2] = {0.0f, 0.0f};
    for (int i = 0; i < GROUP; i++)
        sum[i / 16] += x[i];
    sums[0] = sum[0];
    sums[1] = sum[1];
    sums[2] = sum[0] + sum[1];
}

static void prepare(activations *input, int numerics, size_t begin, size_t end)
{
    for (size_t i = begin; i < end; i++)
        if (numerics == FAST)
            prepare_bytes(input->values + GROUP * i, input->bytes + GROUP * i, input->scales + i,
                          input->sums + 3 * i);
        else
            prepare_sums(input->values + GROUP * i, input->sums + 3 * i);
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
