/* What is done to rows of floats between the matrices: norms, rotation, softmax, sums. Included once
 * per instruction set. Rows may have any length; what is left of a whole vector goes one by one. */

/* out = x * weight / sqrt(mean(x * x) + epsilon); four sums, then added in a fixed order. */
static void rms_norm(const float *x, const float *weight, int n, float epsilon, float *out)
{
    vf sums[4] = {{0}, {0}, {0}, {0}};
    float rest = 0.0f;
    int i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        UNROLL for (int j = 0; j < 4; j++) {
            vf v = load_floats(x + i + j * LANES);
            sums[j] = multiply_add(v, v, sums[j]);
        }
    for (; i < n; i++)
        rest += x[i] * x[i];
    float total = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
    float scale = 1.0f / __builtin_sqrtf(total / (float)n + epsilon);
    for (i = 0; i + LANES <= n; i += LANES)
        store_floats(out + i, load_floats(x + i) * all_floats(scale) * load_floats(weight + i));
    for (; i < n; i++)
        out[i] = x[i] * scale * weight[i];
}

/* Pair i of x, its elements i and half + i, turns by the angle of cosines[i] and sines[i]. */
static void rotate(float *x, const float *cosines, const float *sines, int half)
{
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf a = load_floats(x + i), b = load_floats(x + half + i);
        vf c = load_floats(cosines + i), s = load_floats(sines + i);
        store_floats(x + i, a * c - b * s);
        store_floats(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cosines[i] - b * sines[i];
        x[half + i] = b * cosines[i] + a * sines[i];
    }
}

/* In place: exp(x - largest) / sum. One NaN makes all NaN. */
static void softmax(float *x, int n)
{
    float largest = x[0], total = 0.0f;
    for (int i = 1; i < n; i++)
        largest = x[i] > largest || x[i] != x[i] ? x[i] : largest;
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        store_floats(x + i, exponential(load_floats(x + i) - all_floats(largest)));
    for (; i < n; i++)
        x[i] = exponential(all_floats(x[i] - largest))[0];
    for (i = 0; i < n; i++)
        total += x[i];
    for (i = 0; i < n; i++)
        x[i] /= total;
}

/* rows[0] += rows[1] …, each times its weight: n_rows rows of n, one after another. */
static void add_weighted(float *rows, const float *weights, int n_rows, int n)
{
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf sum = load_floats(rows + i) * all_floats(weights[0]);
        for (int r = 1; r < n_rows; r++)
            sum += load_floats(rows + (size_t)r * (size_t)n + i) * all_floats(weights[r]);
        store_floats(rows + i, sum);
    }
    for (; i < n; i++) {
        float sum = rows[i] * weights[0];
        for (int r = 1; r < n_rows; r++)
            sum += rows[(size_t)r * (size_t)n + (size_t)i] * weights[r];
        rows[i] = sum;
    }
}
