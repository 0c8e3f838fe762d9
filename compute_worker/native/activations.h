/* Preparing activations, and exp and SiLU. Included once per instruction set.
 *
 * A group with NaN or infinity gets the scale NaN, so that rounding does not hide it. A group below
 * TINY is taken as zero: its inverse scale would not be a float32.
 */
#define TINY 1e-30f
#define LARGEST_24 8355000.0f /* all digits 127 are 8355711; the product may round up */
#define LARGEST_16 32639.0f
#define LARGEST_8 127.0f

/* Largest magnitude of a group; NaN or infinity where there is one. Magnitudes compare as integers:
 * those of infinity and NaN are the largest. */
INLINE float largest_magnitude(const float *x)
{
    vi largest = {0};
    UNROLL for (int i = 0; i < GROUP; i += LANES)
        largest = maximum_int(largest, (vi)((vu)load_floats(x + i) & 0x7fffffffu));
    int32_t bits = largest_int(largest);
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* One lane of a record. */
INLINE void fill_record(uint8_t *record, int planes, int width, int lane, const float *x)
{
    int8_t digits[MAX_PLANES * GROUP] __attribute__((aligned(64)));
    float most = planes == 1 ? LARGEST_8 : planes == 2 ? LARGEST_16 : LARGEST_24;
    float largest = largest_magnitude(x);
    float sums[N_SUMS] = {0.0f, 0.0f, 0.0f}, scale = largest / most;
    float inverse = largest > TINY ? most / largest : 0.0f;
    vi sum[2][MAX_PLANES] = {{{0}}};
    if (!(largest < __builtin_inff()))
        scale = __builtin_nanf("");
    UNROLL for (int i = 0; i < GROUP; i += LANES) {
        vi rest = round_to_int(load_floats(x + i) * all_floats(inverse));
        UNROLL for (int p = 0; p < planes; p++) {
            vi digit = (rest << 24) >> 24;
            store_bytes(digits + GROUP * p + i, digit);
            sum[i / 16][p] += digit;
            rest = (rest - digit) >> 8;
        }
    }
    UNROLL for (int p = planes - 1; p >= 0; p--) {
        sums[FIRST_16] = sums[FIRST_16] * 256.0f + (float)sum_ints(sum[0][p]);
        sums[LAST_16] = sums[LAST_16] * 256.0f + (float)sum_ints(sum[1][p]);
        UNROLL for (int j = 0; j < GROUP / 4; j++)
            memcpy(record + word_at(width, p, j, lane), digits + GROUP * p + 4 * j, 4);
    }
    sums[ALL_32] = sums[FIRST_16] + sums[LAST_16];
    memcpy(record + scale_at(planes, width, lane), &scale, 4);
    UNROLL for (int kind = 0; kind < N_SUMS; kind++)
        memcpy(record + sum_at(planes, width, kind, lane), sums + kind, 4);
}

INLINE void fill_records(activations *input, int planes, int width, int i, int g, int n,
                         const float *x)
{
    size_t group = (size_t)(i / width) * (size_t)input->n_groups + (size_t)g;
    uint8_t *record = input->records + group * record_bytes(planes, width);
    for (int j = 0; j < n; j++, record += record_bytes(planes, width), x += GROUP)
        fill_record(record, planes, width, i % width, x);
}

static void prepare(activations *input, int i, int g, int n, const float *x)
{
    int width = input->width;
    size_t group = (size_t)(i / width) * (size_t)input->n_groups + (size_t)g;
    if (input->values) {
        float *values = input->values + GROUP * group * (size_t)width + i % width;
        for (int k = 0; k < GROUP * n; k++)
            values[k * width] = x[k];
    }
    UNROLL for (int planes = 1; planes <= MAX_PLANES; planes++) {
        if (input->planes == planes && width == 1)
            fill_records(input, planes, 1, i, g, n, x);
        else if (input->planes == planes)
            fill_records(input, planes, SIDE_BY_SIDE, i, g, n, x);
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
