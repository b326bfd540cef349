/* Causal attention inside packed sequences in fp32 on a CPU; see attention.py.
 *
 * Compiled at first use by native.py. A task is a sequence and a head of keys, with all heads of
 * queries that read it: a sequence has the same bits in every batch and on any number of threads.
 * Four queries at a time are multiplied with all keys up to their own position.
 */

#include "vectors.h"

#include <stdlib.h>

#define QUERIES 4

/* same layout as attention.py:_AttentionProblem */
struct tensor { /* [tokens, heads, size], the last dimension contiguous */
    const float *first;
    int64_t token_stride, head_stride;
};

struct problem {
    struct tensor query, key, value;
    const int32_t *starts; /* [num_sequences + 1] first token of each sequence */
    int64_t num_sequences, longest, num_heads, num_groups, size;
    float scale;
    int threads;
};

/* Memory of one thread for its current task. width and depth are the length of the sequence and the
 * size of a head, rounded up to LANES; the padding is 0. */
struct scratch {
    float *keys_t;   /* [size, width], the transpose of keys */
    float *values_t; /* [size, width], the transpose of values */
    float *keys;     /* [width, depth] */
    float *values;   /* [width, depth] */
    float *d_keys;   /* [width, depth] */
    float *d_values; /* [width, depth] */
    float *queries;  /* [QUERIES, depth] */
    float *d_outs;   /* [QUERIES, depth] */
    float *scores;   /* [QUERIES, width] */
    float *d_scores; /* [QUERIES, width] */
    float *memory;   /* one allocation for all of the above */
    int64_t width, depth;
};

struct task {
    int64_t first, length; /* tokens */
    int64_t group;         /* head of keys */
};

struct block {
    int64_t token, head;
    int64_t begin, num; /* queries of the sequence */
    int64_t num_keys;   /* number of keys that the last query reads */
    int64_t width;      /* num_keys rounded up to LANES */
};

static inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

static inline const float *row_of(struct tensor x, int64_t token, int64_t head) {
    return x.first + token * x.token_stride + head * x.head_stride;
}

static int reserve(struct scratch *s, int64_t longest, int64_t size) {
    int64_t width = padded(longest), depth = padded(size), total = 0;
    float **parts[] = {&s->keys_t,   &s->values_t, &s->keys,   &s->values, &s->d_keys,
                       &s->d_values, &s->queries,  &s->d_outs, &s->scores, &s->d_scores};
    int64_t sizes[] = {size * width,    size * width,    width * depth,   width * depth,
                       width * depth,   width * depth,   QUERIES * depth, QUERIES * depth,
                       QUERIES * width, QUERIES * width};
    int count = sizeof sizes / sizeof *sizes;
    for (int i = 0; i < count; i++) total += padded(sizes[i]);
    s->memory = aligned_alloc(64, ((size_t)total * sizeof(float) + 63) / 64 * 64);
    float *next = s->memory;
    for (int i = 0; i < count && next != NULL; next += padded(sizes[i++])) *parts[i] = next;
    return s->memory == NULL ? -1 : 0;
}

static void copy_rows(const float *from, int64_t stride, int64_t n, int64_t size, float *to,
                      int64_t width, int64_t depth) {
    if (n < width || size < depth) memset(to, 0, (size_t)(width * depth) * sizeof(float));
    for (int64_t row = 0; row < n; row++)
        memcpy(to + row * depth, from + row * stride, (size_t)size * sizeof(float));
}

static void transpose_rows(const float *from, int64_t stride, int64_t n, int64_t size, float *to,
                           int64_t width) {
    memset(to, 0, (size_t)(size * width) * sizeof(float));
    for (int64_t row = 0; row < n; row++)
        for (int64_t i = 0; i < size; i++) to[i * width + row] = from[row * stride + i];
}

static inline void store(float *p, vf x) { memcpy(p, &x, sizeof x); }

/* LANES columns of c [QUERIES, columns] = a [QUERIES, terms] b [terms, columns] */
static inline void narrow_product(const float *a, int64_t a_stride, const float *b,
                                  int64_t b_stride, int64_t terms, float *c, int64_t c_stride) {
    vf sums[QUERIES] = {{0}};
    for (int64_t i = 0; i < terms; i++) {
        vf row = load(b + i * b_stride);
        for (int q = 0; q < QUERIES; q++)
            sums[q] = fused(broadcast(a[q * a_stride + i]), row, sums[q]);
    }
    for (int q = 0; q < QUERIES; q++) store(c + q * c_stride, sums[q]);
}

/* The same for all columns, as many at a time as the registers allow. */
static inline void product(const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                           int64_t terms, int64_t columns, float *c, int64_t c_stride) {
    int64_t at = 0;
    for (; at + 2 * LANES <= columns; at += 2 * LANES) {
        vf left[QUERIES] = {{0}}, right[QUERIES] = {{0}};
        for (int64_t i = 0; i < terms; i++) {
            vf one = load(b + i * b_stride + at), two = load(b + i * b_stride + at + LANES);
            for (int q = 0; q < QUERIES; q++) {
                vf factor = broadcast(a[q * a_stride + i]);
                left[q] = fused(factor, one, left[q]);
                right[q] = fused(factor, two, right[q]);
            }
        }
        for (int q = 0; q < QUERIES; q++) {
            store(c + q * c_stride + at, left[q]);
            store(c + q * c_stride + at + LANES, right[q]);
        }
    }
    if (at < columns) narrow_product(a, a_stride, b + at, b_stride, terms, c + at, c_stride);
}

/* c [n, columns] += a [QUERIES, n]^T b [QUERIES, columns] */
static inline void add_outer(const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                             int64_t n, int64_t columns, float *c) {
    for (int64_t at = 0; at < columns; at += LANES) {
        vf b0 = load(b + at), b1 = load(b + b_stride + at);
        vf b2 = load(b + 2 * b_stride + at), b3 = load(b + 3 * b_stride + at);
        for (int64_t j = 0; j < n; j++) {
            vf sum = load(c + j * b_stride + at);
            sum = fused(broadcast(a[j]), b0, sum);
            sum = fused(broadcast(a[a_stride + j]), b1, sum);
            sum = fused(broadcast(a[2 * a_stride + j]), b2, sum);
            store(c + j * b_stride + at, fused(broadcast(a[3 * a_stride + j]), b3, sum));
        }
    }
}

/* Replace the first n of scores [width] by e^(score scale - shift), the rest by 0; return the sum. */
static inline float exponentiate(float *scores, int64_t n, int64_t width, float scale,
                                 float shift) {
    for (int64_t j = n; j < width; j++) scores[j] = MASKED_LOGIT;
    vf sum = {0};
    for (int64_t j = 0; j < width; j += LANES) {
        vf e = exponential(load(scores + j) * scale - shift);
        store(scores + j, e);
        sum += e;
    }
    return sum_of(sum);
}

static inline float largest(float *scores, int64_t n, int64_t width) {
    for (int64_t j = n; j < width; j++) scores[j] = MASKED_LOGIT;
    vf best = load(scores);
    for (int64_t j = LANES; j < width; j += LANES) best = larger(load(scores + j), best);
    float result = best[0];
    for (int lane = 1; lane < LANES; lane++) result = best[lane] > result ? best[lane] : result;
    return result;
}

static inline struct block block_of(const struct task *t, int64_t head, int64_t begin) {
    int64_t left = t->length - begin, num = left < QUERIES ? left : QUERIES;
    return (struct block){t->first + begin, head, begin, num, begin + num, padded(begin + num)};
}

/* Run `work` for every four queries of all heads that read the task's keys. */
#define FOR_BLOCKS(p, t, b, work)                                                                  \
    for (int64_t b##_head = 0; b##_head < (p)->num_heads / (p)->num_groups; b##_head++)            \
        for (int64_t b##_begin = 0; b##_begin < (t)->length; b##_begin += QUERIES) {               \
            int64_t head = (t)->group * ((p)->num_heads / (p)->num_groups) + b##_head;             \
            struct block b = block_of(t, head, b##_begin);                                         \
            work;                                                                                  \
        }

static void attend(const struct problem *p, struct scratch *s, const struct block *b, float *out,
                   float *log_sums) {
    float sums[QUERIES];
    copy_rows(row_of(p->query, b->token, b->head), p->query.token_stride, b->num, p->size,
              s->queries, QUERIES, s->depth);
    product(s->queries, s->depth, s->keys_t, s->width, p->size, b->width, s->scores, s->width);
    for (int64_t q = 0; q < QUERIES; q++) {
        int64_t num_keys = b->begin + (q < b->num ? q + 1 : b->num);
        float *row = s->scores + q * s->width;
        float best = largest(row, num_keys, b->width) * p->scale;
        sums[q] = exponentiate(row, num_keys, b->width, p->scale, best);
        if (q < b->num) log_sums[(b->token + q) * p->num_heads + b->head] = best + logf(sums[q]);
    }
    product(s->scores, s->width, s->values, s->depth, b->num_keys, s->depth, s->queries, s->depth);
    for (int64_t q = 0; q < b->num; q++) {
        float *row = out + ((b->token + q) * p->num_heads + b->head) * p->size;
        for (int64_t i = 0; i < p->size; i++) row[i] = s->queries[q * s->depth + i] / sums[q];
    }
}

static void attend_all(const struct problem *p, struct scratch *s, const struct task *t, float *out,
                       float *log_sums) {
    transpose_rows(row_of(p->key, t->first, t->group), p->key.token_stride, t->length, p->size,
                   s->keys_t, s->width);
    copy_rows(row_of(p->value, t->first, t->group), p->value.token_stride, t->length, p->size,
              s->values, s->width, s->depth);
    FOR_BLOCKS(p, t, b, attend(p, s, &b, out, log_sums))
}

struct results { /* results of the forward pass, and buffers for gradients; all contiguous */
    const float *out, *log_sums, *d_out;
    float *d_query, *d_key, *d_value;
};

static void differentiate(const struct problem *p, struct scratch *s, const struct block *b,
                          const struct results *r) {
    int64_t stride = p->num_heads * p->size, at = b->token * stride + b->head * p->size;
    copy_rows(row_of(p->query, b->token, b->head), p->query.token_stride, b->num, p->size,
              s->queries, QUERIES, s->depth);
    copy_rows(r->d_out + at, stride, b->num, p->size, s->d_outs, QUERIES, s->depth);
    product(s->queries, s->depth, s->keys_t, s->width, p->size, b->width, s->scores, s->width);
    product(s->d_outs, s->depth, s->values_t, s->width, p->size, b->width, s->d_scores,
            s->width);
    for (int64_t q = 0; q < QUERIES; q++) {
        float *row = s->scores + q * s->width, *d_row = s->d_scores + q * s->width;
        if (q >= b->num) {
            memset(row, 0, (size_t)b->width * sizeof(float));
            memset(d_row, 0, (size_t)b->width * sizeof(float));
            continue;
        }
        float log_sum = r->log_sums[(b->token + q) * p->num_heads + b->head], through_sum = 0.0f;
        exponentiate(row, b->begin + q + 1, b->width, p->scale, log_sum);
        for (int64_t i = 0; i < p->size; i++)
            through_sum += r->d_out[at + q * stride + i] * r->out[at + q * stride + i];
        for (int64_t j = 0; j < b->width; j++)
            d_row[j] = row[j] * (d_row[j] - through_sum) * p->scale;
    }
    add_outer(s->scores, s->width, s->d_outs, s->depth, b->num_keys, s->depth, s->d_values);
    add_outer(s->d_scores, s->width, s->queries, s->depth, b->num_keys, s->depth, s->d_keys);
    product(s->d_scores, s->width, s->keys, s->depth, b->num_keys, s->depth, s->queries, s->depth);
    for (int64_t q = 0; q < b->num; q++)
        memcpy(r->d_query + at + q * stride, s->queries + q * s->depth,
               (size_t)p->size * sizeof(float));
}

static void differentiate_all(const struct problem *p, struct scratch *s, const struct task *t,
                              const struct results *r) {
    const float *keys = row_of(p->key, t->first, t->group);
    size_t row_bytes = (size_t)p->size * sizeof(float);
    transpose_rows(keys, p->key.token_stride, t->length, p->size, s->keys_t, s->width);
    transpose_rows(row_of(p->value, t->first, t->group), p->value.token_stride, t->length, p->size,
                   s->values_t, s->width);
    copy_rows(keys, p->key.token_stride, t->length, p->size, s->keys, s->width, s->depth);
    memset(s->d_keys, 0, (size_t)(s->width * s->depth) * sizeof(float));
    memset(s->d_values, 0, (size_t)(s->width * s->depth) * sizeof(float));
    FOR_BLOCKS(p, t, b, differentiate(p, s, &b, r))
    for (int64_t row = 0; row < t->length; row++) {
        int64_t at = ((t->first + row) * p->num_groups + t->group) * p->size;
        memcpy(r->d_key + at, s->d_keys + row * s->depth, row_bytes);
        memcpy(r->d_value + at, s->d_values + row * s->depth, row_bytes);
    }
}

static inline struct task task_of(const struct problem *p, struct scratch *s, int64_t number) {
    int64_t sequence = number / p->num_groups, first = p->starts[sequence];
    struct task t = {first, p->starts[sequence + 1] - first, number % p->num_groups};
    s->width = padded(t.length), s->depth = padded(p->size);
    return t;
}

/* Run `work` for every task t with a scratch s per thread; return -1 if out of memory. */
#define FOR_TASKS(p, s, t, work)                                                                   \
    int failures = 0;                                                                              \
    _Pragma("omp parallel num_threads((p)->threads) reduction(+ : failures)") {                    \
        struct scratch s;                                                                          \
        int failed = reserve(&s, (p)->longest, (p)->size);                                         \
        failures += failed != 0;                                                                   \
        _Pragma("omp for schedule(dynamic, 4)") for (int64_t number = 0;                           \
                                                     number < (p)->num_sequences * (p)->num_groups; \
                                                     number++) {                                   \
            if (failed) continue;                                                                  \
            struct task t = task_of(p, &s, number);                                                \
            work;                                                                                  \
        }                                                                                          \
        free(s.memory);                                                                            \
    }                                                                                              \
    return failures ? -1 : 0;

/* Write out [tokens, heads, size], and the log-sum-exp of each query's scores [tokens, heads]. */
int megadapo_attention(const struct problem *p, float *out, float *log_sums) {
    FOR_TASKS(p, s, t, attend_all(p, &s, &t, out, log_sums))
}

int megadapo_attention_grads(const struct problem *p, const float *out, const float *log_sums,
                             const float *d_out, float *d_query, float *d_key, float *d_value) {
    struct results r = {out, log_sums, d_out, d_query, d_key, d_value};
    FOR_TASKS(p, s, t, differentiate_all(p, &s, &t, &r))
}
