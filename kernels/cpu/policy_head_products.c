/* A bf16 product with an fp32 result on a CPU; torch has the kernel but no operator for it.
 *
 * oneDNN multiplies, through ATen's brgemm, whose address products.py passes. Every element of the
 * result is one kernel's sum over all of K, in an order that depends on no other size: it has the
 * same bits in every tile, on any number of threads and at every split of the columns.
 */

#include <stdint.h>
#include <stdlib.h>

#define COLUMNS 64 /* columns of the result for which b is packed at once */
#define ROWS 64    /* rows of the result per call: oneDNN compiles a kernel per shape */
#define PATCH 16

typedef void (*brgemm_t)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc,
                         _Bool add, const void *a, const void *b, float *c, _Bool is_packed);
typedef void (*release_t)(_Bool is_packed);

/* Copy rows of b, as pairs along K, into columns: the layout of the processor's bf16 instructions. */
static void pack(const uint32_t *b, int64_t num_rows, int64_t num_pairs, int64_t stride,
                 uint32_t *packed) {
    for (int64_t row = 0; row < num_rows; row += PATCH)
        for (int64_t pair = 0; pair < num_pairs; pair += PATCH) {
            int64_t last_row = row + PATCH < num_rows ? row + PATCH : num_rows;
            int64_t last_pair = pair + PATCH < num_pairs ? pair + PATCH : num_pairs;
            for (int64_t r = row; r < last_row; r++)
                for (int64_t p = pair; p < last_pair; p++)
                    packed[p * num_rows + r] = b[r * stride + p];
        }
}

/* out [m, n] fp32 = a [m, k] b [n, k]^T for even k and even strides; return -1 if out of memory. */
int megadapo_product(brgemm_t brgemm, release_t release, const uint16_t *a, const uint16_t *b,
                     float *out, int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb,
                     int64_t ldc, int threads) {
    int failures = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failures)
    {
        uint32_t *packed = aligned_alloc(64, (size_t)(COLUMNS * k * 2 + 63) / 64 * 64);
        failures += packed == NULL;
#pragma omp for schedule(static)
        for (int64_t column = 0; column < n; column += COLUMNS) {
            int64_t width = n - column < COLUMNS ? n - column : COLUMNS;
            if (packed == NULL) continue;
            pack((const uint32_t *)(b + column * ldb), width, k / 2, ldb / 2, packed);
            for (int64_t row = 0; row < m; row += ROWS)
                brgemm(m - row < ROWS ? m - row : ROWS, width, k, lda, width, ldc, 0,
                       a + row * lda, packed, out + row * ldc + column, 1);
        }
        release(1);
        free(packed);
    }
    return failures ? -1 : 0;
}
