/* The three CBLAS products that MLX's CPU backend calls. Loaded with RTLD_GLOBAL before MLX, these definitions win over
 * the reference BLAS that MLX links. Enumerations are ints in the CBLAS interface.
 *
 * Decoding multiplies few rows (a window) by matrices that are read once, and its exactness rests on one property: a row's
 * result must not depend, to the last bit, on its place in the window or on how many rows there are. OpenBLAS does not
 * have it (its kernels treat the rows left over by a block of four in another order), and it copies the matrix into its
 * own layout first, which takes longer than the product. So float32 products of this kind are computed here, every sum in
 * an order that only the length k decides; the rest goes to OpenBLAS, whose functions `shim_bind` receives. */

#include <pthread.h>

#include "cblas_halves.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MOST_ROWS 1024             /* beyond, a product is no decoding */
#define MOST_HALVED 16             /* rows; more of them wait for arithmetic and not for memory */
#define PARALLEL_ELEMENTS (1L << 21) /* a matrix of 8 MB: from here on a second thread saves more than it risks */
#define PARALLEL_PRODUCTS (1L << 24)

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

#if defined(__x86_64__)
#define VECTORIZED __attribute__((target("avx2,fma")))
static int vectors_work(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
#define VECTORIZED
static int vectors_work(void) { return 1; }
#endif
#define INLINED VECTORIZED static inline __attribute__((always_inline))

#define LANES 8
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int indices __attribute__((vector_size(4 * LANES)));

typedef struct {
  long m, n, k, lda, ldb, ldc;
  const float *a, *b;
  float *c;
  const uint16_t *upper; /* of b, 0 where there are none */
} product;

/* Neighbours added: {x0+x1, x2+x3, y0+y1, y2+y3} and the same of the upper half. */
INLINED lanes add_pairs(lanes x, lanes y) {
  return __builtin_shuffle(x, y, (indices){0, 2, 8, 10, 4, 6, 12, 14}) +
         __builtin_shuffle(x, y, (indices){1, 3, 9, 11, 5, 7, 13, 15});
}

/* Eight floats of the matrix, from their upper halves alone where `half`. */
INLINED lanes matrix_lanes(const int half, const product *p, long column, long i) {
  if (!half) return *(const lanes *)(p->b + column * p->ldb + i);
  const uint16_t *upper = p->upper + column * p->ldb + i;
#if defined(__x86_64__)
  return (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)upper)), 16);
#else
  typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
  typedef uint32_t whole __attribute__((vector_size(4 * LANES)));
  return (lanes)(__builtin_convertvector(*(const halves *)upper, whole) << 16);
#endif
}

/* Once a cache line; left to itself the processor fetches the next rows of the matrix only when the sums wait for them. */
INLINED void prefetch(const int half, const int columns, const product *p, long column, long i) {
  if (i % (half ? 32 : 16)) return;
  for (long j = column; j < column + columns; j++)
    if (half) __builtin_prefetch(p->upper + j * p->ldb + i);
    else __builtin_prefetch(p->b + j * p->ldb + i);
}

/* The end of the dot products of one row: `column` and its neighbours, whose lanes hold the sums up to i. */
INLINED void finish(const int columns, const product *p, long row, long column, long i, const lanes *sum) {
  const lanes pairs = add_pairs(add_pairs(sum[0], sum[1]), add_pairs(sum[2], sum[3]));
  const lanes total = pairs + __builtin_shuffle(pairs, (indices){4, 5, 6, 7, 0, 1, 2, 3});
  float *c = p->c + row * p->ldc + column;
  if (columns == 4 && i == p->k) {
    memcpy(c, &total, 16);
    return;
  }
  for (int j = 0; j < columns; j++) {
    c[j] = total[j];
    for (long t = i; t < p->k; t++) c[j] = __builtin_fmaf(p->a[row * p->lda + t], p->b[(column + j) * p->ldb + t], c[j]);
  }
}

/* c[r][j] = dot(a[r], b[j]) for `rows` x `columns` dot products; both are constants after inlining. The order of a sum:
 * lane by lane, then ((0+1)+(2+3)) + ((4+5)+(6+7)), then the rest one by one. */
INLINED void dots(const int half, const int rows, const int columns, const product *p, long row, long column) {
  const float *a = p->a + row * p->lda;
  lanes sum[3][4], left[3];
  for (int r = 0; r < 3; r++)
    for (int j = 0; j < 4; j++) sum[r][j] = (lanes){0};
  long i = 0;
  for (; i + LANES <= p->k; i += LANES) {
    prefetch(half, columns, p, column + columns, i);
    for (int r = 0; r < rows; r++) left[r] = *(const lanes *)(a + r * p->lda + i);
    for (int j = 0; j < columns; j++) {
      const lanes right = matrix_lanes(half, p, column + j, i);
      for (int r = 0; r < rows; r++) sum[r][j] += left[r] * right;
    }
  }
#pragma GCC unroll 3
  for (int r = 0; r < rows; r++) finish(columns, p, row + r, column, i, sum[r]);
}

#if defined(__x86_64__)
/* The same sums, bit for bit, in registers of twice the width: each holds the eight lanes of two columns. */
#define WIDE __attribute__((target("avx2,fma,avx512f,avx512dq,avx512vl")))
static int wide_works(void) {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

WIDE static inline __attribute__((always_inline)) __m512 two_columns(const int half, const product *p, long j, long i) {
  if (half) {
    const __m128i first = _mm_loadu_si128((const __m128i *)(p->upper + j * p->ldb + i));
    const __m128i second = _mm_loadu_si128((const __m128i *)(p->upper + (j + 1) * p->ldb + i));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_set_m128i(second, first)), 16));
  }
  const __m512 first = _mm512_castps256_ps512(_mm256_loadu_ps(p->b + j * p->ldb + i));
  return _mm512_insertf32x8(first, _mm256_loadu_ps(p->b + (j + 1) * p->ldb + i), 1);
}

WIDE static inline __attribute__((always_inline)) void wide_dots(const int half, const int rows, const product *p, long row, long column) {
  const float *a = p->a + row * p->lda;
  __m512 sum[6][2], left[6];
  for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  long i = 0;
  for (; i + LANES <= p->k; i += LANES) {
    prefetch(half, 4, p, column + 4, i);
    for (int r = 0; r < rows; r++) left[r] = _mm512_broadcast_f32x8(_mm256_loadu_ps(a + r * p->lda + i));
    for (int j = 0; j < 2; j++) {
      const __m512 right = two_columns(half, p, column + 2 * j, i);
      for (int r = 0; r < rows; r++) sum[r][j] = _mm512_fmadd_ps(left[r], right, sum[r][j]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) {
    lanes halves[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) halves[j] = (lanes)_mm512_extractf32x8_ps(sum[r][j / 2], j % 2);
    finish(4, p, row + r, column, i, halves);
  }
}

WIDE static inline __attribute__((always_inline)) void wide_rows(const int half, const product *p, long column) {
  long r = 0;
  for (; p->m - r >= 6; r += 6) wide_dots(half, 6, p, r, column);
  if (p->m - r == 5) wide_dots(half, 5, p, r, column);
  if (p->m - r == 4) wide_dots(half, 4, p, r, column);
  if (p->m - r == 3) wide_dots(half, 3, p, r, column);
  if (p->m - r == 2) wide_dots(half, 2, p, r, column);
  if (p->m - r == 1) wide_dots(half, 1, p, r, column);
}

WIDE static void wide_four(const product *p, long column) {
  if (p->upper) wide_rows(1, p, column);
  else wide_rows(0, p, column);
}
#else
static int wide_works(void) { return 0; }
static void wide_four(const product *p, long column) { (void)p, (void)column; }
#endif

/* x @ W.T: a few rows of the matrix stay in the first cache while all rows of the window pass over them. */
INLINED void all_rows(const int half, const int columns, const product *p, long column) {
  long r = 0;
  for (; r + 3 <= p->m; r += 3) dots(half, 3, columns, p, r, column);
  if (p->m - r == 2) dots(half, 2, columns, p, r, column);
  if (p->m - r == 1) dots(half, 1, columns, p, r, column);
}

VECTORIZED static void transposed_block(const product *p, long block) {
  const long first = 64 * block, last = first + 64 < p->n ? first + 64 : p->n;
  long j = first;
  if ((p->m > 1 || p->upper) && wide_works())
    for (; j + 4 <= last; j += 4) wide_four(p, j);
  if (p->upper)
    for (; j + 4 <= last; j += 4) all_rows(1, 4, p, j);
  for (; j + 4 <= last; j += 4) all_rows(0, 4, p, j);
  for (; j < last; j++) all_rows(0, 1, p, j);
}

/* c[r][j..] = sum over i of a[r][i] * b[i][j..] for `rows` x (`vectors` x LANES) sums, each from i = 0 up. */
INLINED void columns_of(const int rows, const int vectors, const product *p, long row, long column) {
  lanes sum[3][4];
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vectors; v++) sum[r][v] = (lanes){0};
  for (long i = 0; i < p->k; i++)
    for (int v = 0; v < vectors; v++) {
      const lanes right = *(const lanes *)(p->b + i * p->ldb + column + v * LANES);
      for (int r = 0; r < rows; r++) sum[r][v] += p->a[(row + r) * p->lda + i] * right;
    }
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vectors; v++) *(lanes *)(p->c + (row + r) * p->ldc + column + v * LANES) = sum[r][v];
}

/* x @ W: attention's weighted sum of values. */
VECTORIZED static void plain_block(const product *p, long block) {
  const long first = 64 * block, last = first + 64 < p->n ? first + 64 : p->n;
  for (long r = 0; r < p->m; r += 3) {
    const long rows = p->m - r < 3 ? p->m - r : 3;
    long j = first;
    for (; j + 4 * LANES <= last; j += 4 * LANES) {
      if (rows == 3) columns_of(3, 4, p, r, j);
      if (rows == 2) columns_of(2, 4, p, r, j);
      if (rows == 1) columns_of(1, 4, p, r, j);
    }
    for (; j + LANES <= last; j += LANES)
      for (long s = r; s < r + rows; s++) columns_of(1, 1, p, s, j);
    for (; j < last; j++)
      for (long s = r; s < r + rows; s++) {
        float total = 0;
        for (long i = 0; i < p->k; i++) total = __builtin_fmaf(p->a[s * p->lda + i], p->b[i * p->ldb + j], total);
        p->c[s * p->ldc + j] = total;
      }
  }
}

/* One thread for small products: threads that wait for each other on a busy machine cost a time slice a product, and a
 * step of a small model is hundreds of products. Threads share out columns, so they do not change a bit. */
static int parallel(long m, long n, long k) { return n * k >= PARALLEL_ELEMENTS || m * n * k >= PARALLEL_PRODUCTS; }

typedef void sgemm_function(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
typedef void dgemm_function(int, int, int, int, int, int, double, const double *, int, const double *, int, double, double *,
                            int);
typedef void cgemm_function(int, int, int, int, int, int, const void *, const void *, int, const void *, int, const void *,
                            void *, int);
static sgemm_function *sgemm;
static dgemm_function *dgemm;
static cgemm_function *cgemm;
static void (*set_threads)(int);
static int most_threads;
static pthread_mutex_t library = PTHREAD_MUTEX_INITIALIZER;

/* Receive OpenBLAS's own functions; called once, before MLX is loaded. */
void shim_bind(sgemm_function *s, dgemm_function *d, cgemm_function *c, void (*set)(int), int threads) {
  sgemm = s, dgemm = d, cgemm = c, set_threads = set, most_threads = threads;
}

static void enter(long m, long n, long k) {
  static int current = -1;
  pthread_mutex_lock(&library); /* its number of threads is one for the whole process */
  const int wanted = parallel(m, n, k) ? most_threads : 1;
  if (wanted != current) set_threads(current = wanted);
}

static void leave(void) { pthread_mutex_unlock(&library); }

void cblas_sgemm(int order, int transa, int transb, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
  const int ours = order == ROW_MAJOR && transa == NO_TRANS && alpha == 1 && beta == 0 && m <= MOST_ROWS && vectors_work();
  if (ours && (transb == TRANS || transb == NO_TRANS)) {
    product p = {m, n, k, lda, ldb, ldc, a, b, c, 0};
    const int may_be_kept = transb == TRANS && m <= MOST_HALVED && ldb == k;
    if (may_be_kept) pthread_rwlock_rdlock(&kept_lock);
    if (may_be_kept) p.upper = upper_of(b, n, k);
#pragma omp parallel for schedule(static) num_threads(most_threads) if (most_threads > 1 && parallel(m, n, k))
    for (long block = 0; block < (p.n + 63) / 64; block++) {
      if (transb == TRANS) transposed_block(&p, block);
      if (transb == NO_TRANS) plain_block(&p, block);
    }
    if (may_be_kept) pthread_rwlock_unlock(&kept_lock);
    return;
  }
  enter(m, n, k);
  sgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  leave();
}

void cblas_dgemm(int order, int transa, int transb, int m, int n, int k, double alpha, const double *a, int lda,
                 const double *b, int ldb, double beta, double *c, int ldc) {
  enter(m, n, k);
  dgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  leave();
}

void cblas_cgemm(int order, int transa, int transb, int m, int n, int k, const void *alpha, const void *a, int lda,
                 const void *b, int ldb, const void *beta, void *c, int ldc) {
  enter(m, n, k);
  cgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  leave();
}
