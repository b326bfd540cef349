/* The row passes of the policy head on a CPU; see policy_head_rows.py for what they compute.
 *
 * Compiled at first use by native.py, for the processor it then runs on. GCC's vector extensions
 * fix the order of every sum by the source alone: a row has the same bits in every tile, on every
 * thread and at every tensor-parallel size. Only plain arithmetic: no library of vector functions.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define UNROLL 4
#define STEP (LANES * UNROLL)
#define BLOCK (STEP * 32) /* columns that one set of partial sums adds up: keeps fp32 sums exact */
#define NEVER (-1e30f)    /* policy_head_types.NEVER */
#define SMALLEST (-87.0f) /* e^x is 0 from here down, and stands for x where 0 * x is meant */

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

static inline vf all(float x) { return x - (vf){0}; }

static inline vf load(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline vf load_some(const float *p, int64_t count, float filler) {
    vf x = all(filler);
    memcpy(&x, p, (size_t)count * sizeof(float));
    return x;
}

static inline vf larger(vf a, vf b) {
    vi is_larger = a > b;
    return (vf)(((vi)a & is_larger) | ((vi)b & ~is_larger));
}

/* a b + c, rounded once where the processor can */
static inline vf fused(vf a, vf b, vf c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

/* e^x to 1e-7 relative for x <= 0; 0 below e^-87; NaN stays NaN. */
static inline vf exponential(vf x) {
    vf shifted = fused(x, all(1.44269504088896341f), all(12582912.0f)); /* integer in low bits */
    vf whole = shifted - 12582912.0f;
    vf rest = fused(whole, all(-0.693359375f), x);
    rest = fused(whole, all(2.12194440e-4f), rest);
    vf y = fused(rest, all(1.9875691500e-4f), all(1.3981999507e-3f));
    y = fused(y, rest, all(8.3334519073e-3f));
    y = fused(y, rest, all(4.1665795894e-2f));
    y = fused(y, rest, all(1.6666665459e-1f));
    y = fused(y, rest, all(5.0000001201e-1f));
    y = fused(y, rest * rest, rest) + 1.0f;
    vu power = ((vu)shifted - (vu)all(12582912.0f) + 127) << 23; /* bits of 2^whole */
    return (vf)((vi)(y * (vf)power) & ~(x < SMALLEST));
}

static inline float sum_of(vf x) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}

static float maximum_of(const float *z, int64_t n, float scale) {
    vf best[UNROLL];
    for (int u = 0; u < UNROLL; u++) best[u] = all(NEVER);
    int64_t i = 0;
    for (; i + STEP <= n; i += STEP)
        for (int u = 0; u < UNROLL; u++) best[u] = larger(load(z + i + u * LANES), best[u]);
    for (; i + LANES <= n; i += LANES) best[0] = larger(load(z + i), best[0]);
    if (i < n) best[0] = larger(load_some(z + i, n - i, NEVER), best[0]);
    for (int u = 1; u < UNROLL; u++) best[0] = larger(best[u], best[0]);
    float result = best[0][0];
    for (int lane = 1; lane < LANES; lane++) result = best[0][lane] > result ? best[0][lane] : result;
    return result * scale;
}

/* sum of e^(z scale - m) and of e^(z scale - m) (z scale - m) */
static void sums_of(const float *z, int64_t n, float scale, float m, float *total, float *weighted) {
    vf totals = {0}, products = {0};
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        int64_t end = begin + BLOCK < n ? begin + BLOCK : n, i = begin;
        vf t[UNROLL] = {{0}}, w[UNROLL] = {{0}};
        for (; i + STEP <= end; i += STEP)
            for (int u = 0; u < UNROLL; u++) {
                __builtin_prefetch(z + n + i + u * LANES);
                vf c = load(z + i + u * LANES) * scale - m;
                vf e = exponential(c);
                t[u] += e;
                w[u] += e * larger(c, all(SMALLEST));
            }
        for (; i < end; i += LANES) {
            int64_t left = end - i;
            vf c = (left < LANES ? load_some(z + i, left, -INFINITY) : load(z + i)) * scale - m;
            vf e = exponential(c);
            t[0] += e;
            w[0] += e * larger(c, all(SMALLEST));
        }
        totals += (t[0] + t[1]) + (t[2] + t[3]);
        products += (w[0] + w[1]) + (w[2] + w[3]);
    }
    *total = sum_of(totals);
    *weighted = sum_of(products);
}

/* stats [num_shards, 4, num_rows]: maximum, sum, target's logit, weighted sum. */
void megadapo_row_stats(const float *logits, int64_t row_stride, int64_t num_rows,
                        int64_t num_shards, int64_t shard_size, int64_t num_valid, float scale,
                        const int64_t *targets, int64_t first_id, float *stats, int threads) {
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t shard = 0; shard < num_shards; shard++) {
            int64_t begin = shard * shard_size, valid = num_valid - begin;
            valid = valid < 0 ? 0 : valid < shard_size ? valid : shard_size;
            const float *z = logits + row * row_stride + begin;
            int64_t target = targets[row] - first_id - begin;
            float m = maximum_of(z, valid, scale), total, weighted;
            sums_of(z, valid, scale, m, &total, &weighted);
            float *out = stats + shard * 4 * num_rows + row;
            out[0] = m;
            out[num_rows] = total;
            out[2 * num_rows] = target >= 0 && target < valid ? z[target] * scale : NEVER;
            out[3 * num_rows] = weighted;
        }
}

static inline void store(void *out, int is_bf16, int64_t at, vf x, int64_t count) {
    if (!is_bf16) {
        memcpy((float *)out + at, &x, (size_t)count * sizeof(float));
        return;
    }
    vu bits = (vu)x;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to the nearest, ties to even */
    vh halves = __builtin_convertvector(bits, vh);
    memcpy((uint16_t *)out + at, &halves, (size_t)count * sizeof(uint16_t));
}

struct row {
    float scale, maximum, log_total, constant, slope;
};

static inline vf gradient(vf z, struct row row, int has_slope) {
    vf log_p = (z * row.scale - row.maximum) - row.log_total;
    vf p = exponential(log_p);
    return has_slope ? p * (row.slope * larger(log_p, all(SMALLEST)) + row.constant)
                     : p * row.constant;
}

/* Inlined once for each type of out, with and without an entropy term. */
static inline __attribute__((always_inline)) void gradient_row(const float *z, int64_t n,
                                                               struct row row, void *out,
                                                               int is_bf16, int has_slope) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store(out, is_bf16, i, gradient(load(z + i), row, has_slope), LANES);
    if (i < n)
        store(out, is_bf16, i, gradient(load_some(z + i, n - i, NEVER), row, has_slope), n - i);
}

/* d_logits = (onehot - p) d_logprob - p (log p + entropy) d_entropy, times scale.
 *
 * Rows whose coefficients are both 0 become zeros, whatever their logits. out may be logits.
 */
void megadapo_row_grads(const float *logits, int64_t row_stride, int64_t num_rows,
                        int64_t num_columns, int64_t num_valid, float scale, const float *maximum,
                        const float *log_total, const float *entropy, const float *d_logprobs,
                        const float *d_entropy, const int64_t *targets, int64_t first_id, void *out,
                        int64_t out_stride, int is_bf16, int threads) {
    int64_t itemsize = is_bf16 ? 2 : 4;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < num_rows; row++) {
        const float *z = logits + row * row_stride;
        char *to = (char *)out + row * out_stride * itemsize;
        float a = d_logprobs[row], b = d_entropy ? d_entropy[row] : 0.0f;
        if (a == 0.0f && b == 0.0f) {
            memset(to, 0, (size_t)(num_columns * itemsize));
            continue;
        }
        int64_t target = targets[row] - first_id;
        int is_here = target >= 0 && target < num_valid;
        float log_p = is_here ? (z[target] * scale - maximum[row]) - log_total[row] : 0.0f;
        struct row terms = {scale, maximum[row], log_total[row], -scale * (a + b * entropy[row]),
                            -scale * b};
        if (is_bf16 && b == 0.0f)
            gradient_row(z, num_valid, terms, to, 1, 0);
        else if (is_bf16)
            gradient_row(z, num_valid, terms, to, 1, 1);
        else if (b == 0.0f)
            gradient_row(z, num_valid, terms, to, 0, 0);
        else
            gradient_row(z, num_valid, terms, to, 0, 1);
        memset(to + num_valid * itemsize, 0, (size_t)((num_columns - num_valid) * itemsize));
        if (is_here) {
            /* 1 - p keeps its digits where p is nearly 1 */
            float through_entropy = expf(log_p) * (fmaxf(log_p, SMALLEST) + entropy[row]);
            vf value = {scale * (-expm1f(log_p) * a - through_entropy * b)};
            store(to, is_bf16, target, value, 1);
        }
    }
}
