/* Parts of attention over one tile of the KV cache (64 positions of one head), once per set. The
 * scores come from the matrix product: a tile of keys is a matrix of 64 rows. */

/* LANES values of a row of the cache, from column `at` (a multiple of LANES; Q8_0: see
 * unpack_32.h) */
INLINE vf load_cached(int type, const uint8_t *row, int at)
{
    if (type == TYPE_F32)
        return load_floats((const float *)(const void *)row + at);
    if (type == TYPE_F16)
        return load_halves(row + 2 * at);
    const uint8_t *block = row + 34 * (at / 32);
    return load_bytes(block + 2 + at % 32) * all_floats(scalar_half(block));
}

/* n_vectors vectors of the outputs of n queries from column `at` on: their sums stay in registers,
 * and a value is unpacked once for all queries. */
INLINE void mix_columns(int type, const uint8_t *values, size_t row_bytes, int n,
                        const float *weights, int count, int at, int n_vectors, float *const *out)
{
    vf sums[MIXED_AT_ONCE][8];
    UNROLL for (int i = 0; i < n; i++)
        UNROLL for (int v = 0; v < n_vectors; v++)
            sums[i][v] = load_floats(out[i] + at + v * LANES);
    ROLLED for (int position = 0; position < count; position++) {
        const uint8_t *row = values + (size_t)position * row_bytes;
        UNROLL for (int v = 0; v < n_vectors; v++) {
            vf value = load_cached(type, row, at + v * LANES);
            UNROLL for (int i = 0; i < n; i++)
                sums[i][v] = multiply_add(value, all_floats(weights[i * KV_TILE + position]),
                                          sums[i][v]);
        }
    }
    UNROLL for (int i = 0; i < n; i++)
        UNROLL for (int v = 0; v < n_vectors; v++)
            store_floats(out[i] + at + v * LANES, sums[i][v]);
}

/* n and at_once, the vectors whose sums fit in registers, are constants to the compiler. */
INLINE void mix_values_of(int type, const uint8_t *values, size_t row_bytes, int head_width, int n,
                          int at_once, const float *weights, int count, float *const *out)
{
    int at = 0;
    for (; at + at_once * LANES <= head_width; at += at_once * LANES)
        mix_columns(type, values, row_bytes, n, weights, count, at, at_once, out);
    for (; at < head_width; at += LANES)
        mix_columns(type, values, row_bytes, n, weights, count, at, 1, out);
}

INLINE void mix_queries(int type, const void *values, int head_width, int n, int at_once,
                        const float *weights, int count, float *const *out)
{
    size_t width = (size_t)head_width;
    if (type == TYPE_F32)
        mix_values_of(TYPE_F32, values, 4 * width, head_width, n, at_once, weights, count, out);
    else if (type == TYPE_F16)
        mix_values_of(TYPE_F16, values, 2 * width, head_width, n, at_once, weights, count, out);
    else
        mix_values_of(TYPE_Q8_0, values, width / 32 * 34, head_width, n, at_once, weights, count,
                      out);
}

static void mix_values(int type, const void *values, int head_width, int n, const float *weights,
                       int count, float *const *out)
{
    if (n == MIXED_AT_ONCE)
        mix_queries(type, values, head_width, MIXED_AT_ONCE, TOKENS_PER_PASS, weights, count, out);
    else
        for (int i = 0; i < n; i++)
            mix_queries(type, values, head_width, 1, 8, weights + i * KV_TILE, count, out + i);
}

/* Running softmax: weights are relative to the largest score so far. */
static float soften(float *scores, int count, float scale, float *largest, float *total)
{
    vf most = all_floats(*largest);
    for (int i = 0; i < KV_TILE; i++)
        scores[i] = i < count ? scores[i] * scale : -__builtin_inff();
    for (int i = 0; i < KV_TILE; i += LANES)
        most = maximum(most, load_floats(scores + i));
    float new_largest = largest_lane(most);
    vf sum = {0};
    for (int i = 0; i < KV_TILE; i += LANES) {
        vf score = load_floats(scores + i);
        vi masked = (vi)(score == all_floats(-__builtin_inff()));
        vf weight = choose(masked, (vf){0}, exponential(score - all_floats(new_largest)));
        store_floats(scores + i, weight);
        sum += weight;
    }
    vf older = exponential(all_floats(*largest - new_largest));
    float rescale = *largest == -__builtin_inff() ? 0.0f : older[0];
    *total = *total * rescale + sum_lanes(sum);
    *largest = new_largest;
    return rescale;
}

/* One row of keys or values into the cache, n values (Q8_0: a multiple of 32). */
static void store_row(int type, const float *values, int n, void *out)
{
    uint8_t *bytes = out;
    if (type == TYPE_F32) {
        memcpy(out, values, 4 * (size_t)n);
    } else if (type == TYPE_F16) {
        for (int i = 0; i < n; i += LANES)
            store_halves(bytes + 2 * i, load_floats(values + i));
    } else {
        for (int i = 0; i < n; i += GROUP, bytes += 34) {
            float scale = largest_magnitude(values + i) / 127.0f;
            vf inverse = all_floats(scale > 0.0f ? 1.0f / scale : 0.0f);
            uint16_t half = half_from_float(scale);
            memcpy(bytes, &half, 2);
            for (int j = 0; j < GROUP; j += LANES) {
                vi integers = round_to_int(load_floats(values + i + j) * inverse);
                store_bytes((int8_t *)bytes + 2 + j, integers);
            }
        }
    }
}
