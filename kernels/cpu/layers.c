/* RMSNorm, rotary embedding and SwiGLU in fp32 on a CPU, each in one pass over memory; see
 * rmsnorm.py, rotary.py and swiglu.py for what they compute.
 *
 * Compiled at first use by native.py for the processor it runs on. A row has the same bits in every
 * batch and on any number of threads.
 */

#include "vectors.h"

#define ROWS_OF_SUM 64 /* rows per partial sum over rows */

typedef const float *restrict in;
typedef float *restrict out;

/* The first `count` of LANES floats; count is a compile-time constant except at the end of a row. */
static inline vf get(in p, int64_t count) { return load_some(p, count, 0.0f); }

static inline void put(out p, vf x, int64_t count) { memcpy(p, &x, (size_t)count * sizeof(float)); }

/* In double: an error of a row's sum would affect every element. */
static double sum_of_squares(in a, int64_t size) {
    double sums[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            sums[lane] += (double)a[i + lane] * (double)a[i + lane];
    for (; i < size; i++) sums[0] += (double)a[i] * (double)a[i];
    for (int lane = 1; lane < LANES; lane++) sums[0] += sums[lane];
    return sums[0];
}

static double sum_of_products(in a, in b, in c, int64_t size) {
    double sums[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            sums[lane] += (double)a[i + lane] * (double)b[i + lane] * (double)c[i + lane];
    for (; i < size; i++) sums[0] += (double)a[i] * (double)b[i] * (double)c[i];
    for (int lane = 1; lane < LANES; lane++) sums[0] += sums[lane];
    return sums[0];
}

static void rmsnorm_row(in x, in weight, int64_t size, double inverse, out y) {
    for (int64_t i = 0; i < size; i++) y[i] = (float)((double)x[i] * inverse * (double)weight[i]);
}

/* y = x / rms(x) * weight, and 1 / rms(x) of each row */
void megadapo_rmsnorm(const float *x, const float *weight, int64_t num_rows, int64_t size,
                      float eps, float *y, float *inverse_rms, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < num_rows; row++) {
        const float *from = x + row * size;
        double inverse = 1.0 / sqrt(sum_of_squares(from, size) / (double)size + (double)eps);
        rmsnorm_row(from, weight, size, inverse, y + row * size);
        inverse_rms[row] = (float)inverse;
    }
}

static void rmsnorm_row_grads(in x, in weight, float inverse, in d_y, int64_t size, out d_x,
                              out d_weight) {
    double wide = (double)inverse;
    double through_rms = sum_of_products(x, d_y, weight, size) / (double)size * wide * wide;
    for (int64_t i = 0; i < size; i++) {
        double scaled = (double)d_y[i] * (double)weight[i];
        d_weight[i] += d_y[i] * (x[i] * inverse);
        d_x[i] = (float)((scaled - (double)x[i] * through_rms) * wide);
    }
}

/* d_x, and d_weights [ceil(num_rows / ROWS_OF_SUM), size], whose sum is the weight's gradient */
void megadapo_rmsnorm_grads(const float *x, const float *weight, const float *inverse_rms,
                            const float *d_y, int64_t num_rows, int64_t size, float *d_x,
                            float *d_weights, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t begin = 0; begin < num_rows; begin += ROWS_OF_SUM) {
        int64_t end = begin + ROWS_OF_SUM < num_rows ? begin + ROWS_OF_SUM : num_rows;
        float *d_weight = d_weights + begin / ROWS_OF_SUM * size;
        memset(d_weight, 0, (size_t)size * sizeof(float));
        for (int64_t row = begin; row < end; row++)
            rmsnorm_row_grads(x + row * size, weight, inverse_rms[row], d_y + row * size, size,
                              d_x + row * size, d_weight);
    }
}

static void rotary_head(in x, in cosine, in sine, float sign, int64_t half, out y) {
    for (int64_t i = 0; i < half; i++) {
        float s = sine[i] * sign, first = x[i], second = x[half + i];
        y[i] = first * cosine[i] - second * s;
        y[half + i] = second * cosine[i] + first * s;
    }
}

/* y [tokens, heads, size] = x with its first 2 half columns turned by each token's angles */
void megadapo_rotary(const float *x, int64_t token_stride, int64_t head_stride, const float *cosine,
                     const float *sine, float sign, int64_t num_tokens, int64_t num_heads,
                     int64_t size, int64_t half, float *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t head = 0; head < num_heads; head++) {
            const float *from = x + token * token_stride + head * head_stride;
            float *to = y + (token * num_heads + head) * size;
            rotary_head(from, cosine + token * half, sine + token * half, sign, half, to);
            memcpy(to + 2 * half, from + 2 * half, (size_t)(size - 2 * half) * sizeof(float));
        }
}

static inline vf chosen(vi condition, vf yes, vf no) {
    return (vf)(((vi)yes & condition) | ((vi)no & ~condition));
}

/* 1 / (1 + e^-x), and 1 minus it without cancellation */
static inline vf sigmoid_of(vf x, vf *rest) {
    vi is_negative = x < broadcast(0.0f);
    vf small = exponential(chosen(is_negative, x, -x)), large = 1.0f / (1.0f + small);
    small *= large;
    *rest = chosen(is_negative, large, small);
    return chosen(is_negative, small, large);
}

static inline void swiglu_piece(in gates, in ups, out y, int64_t count) {
    vf gate = get(gates, count), rest;
    put(y, gate * sigmoid_of(gate, &rest) * get(ups, count), count);
}

/* y [rows, size] = silu(gate) up for gate_up [rows, 2 size] */
void megadapo_swiglu(const float *gate_up, int64_t num_rows, int64_t size, float *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < num_rows; row++) {
        const float *gates = gate_up + row * 2 * size;
        float *to = y + row * size;
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            swiglu_piece(gates + i, gates + size + i, to + i, LANES);
        if (i < size) swiglu_piece(gates + i, gates + size + i, to + i, size - i);
    }
}

static inline void swiglu_grads_piece(in gates, in ups, in d_y, out d_gates, out d_ups,
                                      int64_t count) {
    vf gate = get(gates, count), rest, sigmoid = sigmoid_of(gate, &rest);
    vf d = get(d_y, count) * sigmoid;
    put(d_ups, d * gate, count);
    put(d_gates, d * get(ups, count) * fused(gate, rest, broadcast(1.0f)), count);
}

void megadapo_swiglu_grads(const float *gate_up, const float *d_y, int64_t num_rows, int64_t size,
                           float *d_gate_up, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < num_rows; row++) {
        const float *gates = gate_up + row * 2 * size;
        const float *from = d_y + row * size;
        float *to = d_gate_up + row * 2 * size;
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            swiglu_grads_piece(gates + i, gates + size + i, from + i, to + i, to + size + i, LANES);
        if (i < size)
            swiglu_grads_piece(gates + i, gates + size + i, from + i, to + i, to + size + i,
                               size - i);
    }
}
