/* Row passes of the policy head on a CPU; see policy_head/rows.py for their definition.
 *
 * Compiled at first use by native.py for the processor it runs on. A row has the same bits in every
 * tile, on any number of threads and at every tensor-parallel size.
 */

#include "vectors.h"

#define UNROLL 4
#define STEP (LANES * UNROLL)
#define BLOCK (STEP * 32) /* columns per set of partial sums: limits the rounding error in fp32 */

typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

static float maximum_of(const float *z, int64_t n, float scale) {
    vf best[UNROLL];
    for (int u = 0; u < UNROLL; u++) best[u] = broadcast(MASKED_LOGIT);
    int64_t i = 0;
    for (; i + STEP <= n; i += STEP)
        for (int u = 0; u < UNROLL; u++) best[u] = larger(load(z + i + u * LANES), best[u]);
    for (; i + LANES <= n; i += LANES) best[0] = larger(load(z + i), best[0]);
    if (i < n) best[0] = larger(load_some(z + i, n - i, MASKED_LOGIT), best[0]);
    for (int u = 1; u < UNROLL; u++) best[0] = larger(best[u], best[0]);
    float result = best[0][0];
    for (int lane = 1; lane < LANES; lane++) result = best[0][lane] > result ? best[0][lane] : result;
    return result * scale;
}

/* Square of e; 0 in the lane at hole, which may be outside of the vector. */
static inline vf square_but(vf e, int64_t hole) {
    vf squares = e * e;
    if ((uint64_t)hole < LANES) squares[hole] = 0.0f;
    return squares;
}

struct sums {
    float total;    /* of e^(z scale - m) */
    float weighted; /* of e^(z scale - m) (z scale - m) */
    float squares;  /* of e^(2 (z scale - m)) but the target's */
};

static struct sums sums_of(const float *z, int64_t n, float scale, float m, int64_t target) {
    vf totals = {0}, products = {0}, squares = {0};
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        int64_t end = begin + BLOCK < n ? begin + BLOCK : n, i = begin;
        vf t[UNROLL] = {{0}}, w[UNROLL] = {{0}}, s[UNROLL] = {{0}};
        for (; i + STEP <= end; i += STEP)
            for (int u = 0; u < UNROLL; u++) {
                __builtin_prefetch(z + n + i + u * LANES);
                vf c = load(z + i + u * LANES) * scale - m;
                vf e = exponential(c);
                t[u] += e;
                w[u] += e * larger(c, broadcast(SMALLEST));
                s[u] += square_but(e, target - i - u * LANES);
            }
        for (; i < end; i += LANES) {
            int64_t left = end - i;
            vf c = (left < LANES ? load_some(z + i, left, -INFINITY) : load(z + i)) * scale - m;
            vf e = exponential(c);
            t[0] += e;
            w[0] += e * larger(c, broadcast(SMALLEST));
            s[0] += square_but(e, target - i);
        }
        totals += (t[0] + t[1]) + (t[2] + t[3]);
        products += (w[0] + w[1]) + (w[2] + w[3]);
        squares += (s[0] + s[1]) + (s[2] + s[3]);
    }
    return (struct sums){sum_of(totals), sum_of(products), sum_of(squares)};
}

/* stats [num_shards, 5, num_rows]: maximum, sum, target's logit, weighted sum, squares. */
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
            float m = maximum_of(z, valid, scale);
            struct sums sums = sums_of(z, valid, scale, m, target);
            float *out = stats + shard * 5 * num_rows + row;
            out[0] = m;
            out[num_rows] = sums.total;
            out[2 * num_rows] = target >= 0 && target < valid ? z[target] * scale : MASKED_LOGIT;
            out[3 * num_rows] = sums.weighted;
            out[4 * num_rows] = sums.squares;
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
    return has_slope ? p * (row.slope * larger(log_p, broadcast(SMALLEST)) + row.constant)
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
        store(out, is_bf16, i, gradient(load_some(z + i, n - i, MASKED_LOGIT), row, has_slope), n - i);
}

/* d_logits = (onehot - p) d_logprob - p (log p + entropy) d_entropy, times scale.
 *
 * Rows whose coefficients are both 0 become zeros, also if logits are not finite. out may be logits.
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
            /* 1 - p without cancellation if p is nearly 1 */
            float through_entropy = expf(log_p) * (fmaxf(log_p, SMALLEST) + entropy[row]);
            vf value = {scale * (-expm1f(log_p) * a - through_entropy * b)};
            store(to, is_bf16, target, value, 1);
        }
    }
}
