/* Vectors of as many floats as a register holds, by GCC's vector extensions: the source alone fixes
 * the order of every sum on one kind of processor. No library of vector functions is needed.
 */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
#define LANES 8
#else
#define LANES 16
#endif
#define SMALLEST (-87.0f)      /* e^x is 0 up to here; replaces x so that 0 * x is 0 */
#define MASKED_LOGIT (-1e30f) /* policy_head/tiles.py: logit of padding, score of a hidden key */

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));

static inline vf broadcast(float x) { return x - (vf){0}; }

static inline vf load(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline vf load_some(const float *p, int64_t count, float filler) {
    vf x = broadcast(filler);
    memcpy(&x, p, (size_t)count * sizeof(float));
    return x;
}

static inline vf larger(vf a, vf b) {
    vi is_larger = a > b;
    return (vf)(((vi)a & is_larger) | ((vi)b & ~is_larger));
}

/* a b + c, rounded once if the processor can fuse */
static inline vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_FEATURE_FMA)
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

/* e^x to 1e-7 relative for x <= 0; 0 below e^-87; NaN stays NaN. */
static inline vf exponential(vf x) {
    /* the low bits of shifted are the nearest integer to x / log 2 */
    vf shifted = fused(x, broadcast(1.44269504088896341f), broadcast(12582912.0f));
    vf whole = shifted - 12582912.0f;
    vf rest = fused(whole, broadcast(-0.693359375f), x);
    rest = fused(whole, broadcast(2.12194440e-4f), rest);
    vf y = fused(rest, broadcast(1.9875691500e-4f), broadcast(1.3981999507e-3f));
    y = fused(y, rest, broadcast(8.3334519073e-3f));
    y = fused(y, rest, broadcast(4.1665795894e-2f));
    y = fused(y, rest, broadcast(1.6666665459e-1f));
    y = fused(y, rest, broadcast(5.0000001201e-1f));
    y = fused(y, rest * rest, rest) + 1.0f;
    vu power = ((vu)shifted - (vu)broadcast(12582912.0f) + 127) << 23; /* bits of 2^whole */
    return (vf)((vi)(y * (vf)power) & ~(x < SMALLEST));
}

static inline float sum_of(vf x) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}
