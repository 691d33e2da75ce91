/* The three CBLAS products that MLX's CPU backend calls. Loaded with RTLD_GLOBAL before MLX, these definitions win over the
 * reference BLAS that MLX links. Enumerations are ints in the CBLAS interface.
 *
 * Large products go to the OpenBLAS of the scipy-openblas32 wheel, whose symbols carry a prefix. Two things are done
 * here, since decoding multiplies few rows by matrices that just fit the memory bus:
 *
 * - A product of few rows with a matrix stored row by row (x @ W.T) is a set of dot products. OpenBLAS would first copy
 *   the matrix into its own layout, which takes longer than the product. Here every dot product adds up in the same order
 *   however many rows there are, so a row's result does not depend, to the last bit, on the other rows of its window.
 * - Small products run on one thread. OpenBLAS's threads wait for each other by spinning: on a machine whose cores are
 *   busy, each product then costs a scheduler's time slice, and a step of a small model is hundreds of products. */

#define MATRIX_ELEMENTS (1L << 21) /* 8 MB: from here on a second thread saves more than it risks */
#define MULTIPLICATIONS (1L << 25)
#define FEW_ROWS 64 /* measured: beyond, OpenBLAS wins what its copy costs */

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

#if defined(__x86_64__)
#define VECTORIZED __attribute__((target("avx2,fma")))
#define INLINED static inline __attribute__((always_inline, target("avx2,fma")))
static int vectors_work(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
#define VECTORIZED
#define INLINED static inline __attribute__((always_inline))
static int vectors_work(void) { return 1; }
#endif

#define LANES 8
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int indices __attribute__((vector_size(4 * LANES)));

/* Neighbours added: {x0+x1, x2+x3, y0+y1, y2+y3} and the same of the upper half. */
INLINED lanes add_pairs(lanes x, lanes y) {
  return __builtin_shuffle(x, y, (indices){0, 2, 8, 10, 4, 6, 12, 14}) +
         __builtin_shuffle(x, y, (indices){1, 3, 9, 11, 5, 7, 13, 15});
}

/* c[r][j] = dot(a[r], b[j]) for `rows` x 4 dot products; `rows` is a constant after inlining. Every sum is taken in the
 * same order whatever `rows` is: lane by lane, then ((0+1)+(2+3)) + ((4+5)+(6+7)), then the rest one by one. */
INLINED void dots(const int rows, long k, const float *a, long lda, const float *b, long ldb, float *c, long ldc) {
  lanes sum[3][4], left[3];
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < 4; j++) sum[r][j] = (lanes){0};
  long i = 0;
  for (; i + LANES <= k; i += LANES) {
    /* the next four rows of the matrix: left to itself the processor fetches them only when the sums wait for them */
    for (int j = 0; j < 4; j++) __builtin_prefetch(b + (j + 4) * ldb + i);
    for (int r = 0; r < rows; r++) left[r] = *(const lanes *)(a + r * lda + i);
    for (int j = 0; j < 4; j++) {
      const lanes right = *(const lanes *)(b + j * ldb + i);
      for (int r = 0; r < rows; r++) sum[r][j] += left[r] * right;
    }
  }
  for (int r = 0; r < rows; r++) {
    const lanes four = add_pairs(add_pairs(sum[r][0], sum[r][1]), add_pairs(sum[r][2], sum[r][3]));
    for (int j = 0; j < 4; j++) {
      float total = four[j] + four[j + 4];
      for (long t = i; t < k; t++) total += a[r * lda + t] * b[j * ldb + t];
      c[r * ldc + j] = total;
    }
  }
}

/* Four rows of the matrix stay in the first cache while all rows of the window pass over them, three at a time. */
VECTORIZED static void few_rows(long m, long n, long k, const float *a, long lda, const float *b, long ldb, float *c,
                                long ldc) {
  for (long j = 0; j < n; j += 4) {
    if (j + 4 > n) j = n - 4; /* the last four overlap the ones before, and compute the same again */
    long r = 0;
    for (; r + 3 <= m; r += 3) dots(3, k, a + r * lda, lda, b + j * ldb, ldb, c + r * ldc + j, ldc);
    if (m - r == 2) dots(2, k, a + r * lda, lda, b + j * ldb, ldb, c + r * ldc + j, ldc);
    if (m - r == 1) dots(1, k, a + r * lda, lda, b + j * ldb, ldb, c + r * ldc + j, ldc);
  }
}

extern int scipy_openblas_get_num_threads(void);
extern void scipy_openblas_set_num_threads(int);

static void choose_threads(long m, long n, long k) {
  static int most = 0, current = 0;
  if (most == 0) most = current = scipy_openblas_get_num_threads();
  int wanted = n * k >= MATRIX_ELEMENTS || m * n * k >= MULTIPLICATIONS ? most : 1;
  if (wanted != current) scipy_openblas_set_num_threads(current = wanted);
}

extern void scipy_cblas_sgemm(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *,
                              int);
void cblas_sgemm(int order, int transa, int transb, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
  const int shape = order == ROW_MAJOR && transa == NO_TRANS && transb == TRANS && m <= FEW_ROWS && n >= 4;
  if (shape && alpha == 1 && beta == 0 && (long)n * k < MATRIX_ELEMENTS && vectors_work()) {
    few_rows(m, n, k, a, lda, b, ldb, c, ldc);
    return;
  }
  choose_threads(m, n, k);
  scipy_cblas_sgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

extern void scipy_cblas_dgemm(int, int, int, int, int, int, double, const double *, int, const double *, int, double,
                              double *, int);
void cblas_dgemm(int order, int transa, int transb, int m, int n, int k, double alpha, const double *a, int lda,
                 const double *b, int ldb, double beta, double *c, int ldc) {
  choose_threads(m, n, k);
  scipy_cblas_dgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

extern void scipy_cblas_cgemm(int, int, int, int, int, int, const void *, const void *, int, const void *, int,
                              const void *, void *, int);
void cblas_cgemm(int order, int transa, int transb, int m, int n, int k, const void *alpha, const void *a, int lda,
                 const void *b, int ldb, const void *beta, void *c, int ldc) {
  choose_threads(m, n, k);
  scipy_cblas_cgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
