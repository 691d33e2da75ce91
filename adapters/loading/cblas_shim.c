/* Forwards the three CBLAS products that MLX's CPU backend calls to the OpenBLAS of the scipy-openblas32 wheel, whose
 * symbols carry a prefix. Loaded with RTLD_GLOBAL before MLX, these definitions win over the reference BLAS that MLX
 * links. Enumerations are ints in the CBLAS interface.
 *
 * Small products run on one thread. OpenBLAS's threads wait for each other by spinning: on a machine whose cores are
 * busy each product then costs a scheduler's time slice, and a step of a small model is hundreds of products. The
 * bounds are where a second thread begins to save more than it risks: a matrix of 8 MB, or 32 million
 * multiplications. */

#define MATRIX_ELEMENTS (1L << 21)
#define MULTIPLICATIONS (1L << 25)

extern int scipy_openblas_get_num_threads(void);
extern void scipy_openblas_set_num_threads(int);

static void choose_threads(long m, long n, long k) {
  static int most = 0, current = 0;
  if (most == 0) most = current = scipy_openblas_get_num_threads();
  int wanted = n * k >= MATRIX_ELEMENTS || m * n * k >= MULTIPLICATIONS ? most : 1;
  if (wanted != current) scipy_openblas_set_num_threads(current = wanted);
}

#define REAL_GEMM(name, real)                                                                                        \
  extern void scipy_##name(int, int, int, int, int, int, real, const real *, int, const real *, int, real, real *,   \
                           int);                                                                                     \
  void name(int order, int transa, int transb, int m, int n, int k, real alpha, const real *a, int lda,              \
            const real *b, int ldb, real beta, real *c, int ldc) {                                                   \
    choose_threads(m, n, k);                                                                                         \
    scipy_##name(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                               \
  }

REAL_GEMM(cblas_sgemm, float)
REAL_GEMM(cblas_dgemm, double)

extern void scipy_cblas_cgemm(int, int, int, int, int, int, const void *, const void *, int, const void *, int,
                              const void *, void *, int);
void cblas_cgemm(int order, int transa, int transb, int m, int n, int k, const void *alpha, const void *a, int lda,
                 const void *b, int ldb, const void *beta, void *c, int ldc) {
  choose_threads(m, n, k);
  scipy_cblas_cgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
