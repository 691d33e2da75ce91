/* Forwards the three CBLAS products that MLX's CPU backend calls to the OpenBLAS of the scipy-openblas32 wheel, whose
 * symbols carry a prefix. Loaded with RTLD_GLOBAL before MLX, these definitions win over the reference BLAS that MLX
 * links. Enumerations are ints in the CBLAS interface. */

#define REAL_GEMM(name, real)                                                                                        \
  extern void scipy_##name(int, int, int, int, int, int, real, const real *, int, const real *, int, real, real *,   \
                           int);                                                                                     \
  void name(int order, int transa, int transb, int m, int n, int k, real alpha, const real *a, int lda,              \
            const real *b, int ldb, real beta, real *c, int ldc) {                                                   \
    scipy_##name(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                               \
  }

REAL_GEMM(cblas_sgemm, float)
REAL_GEMM(cblas_dgemm, double)

extern void scipy_cblas_cgemm(int, int, int, int, int, int, const void *, const void *, int, const void *, int,
                              const void *, void *, int);
void cblas_cgemm(int order, int transa, int transb, int m, int n, int k, const void *alpha, const void *a, int lda,
                 const void *b, int ldb, const void *beta, void *c, int ldc) {
  scipy_cblas_cgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
