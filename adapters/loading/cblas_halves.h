/* Matrices whose floats are all bfloat16, kept a second time in half the bytes.
 *
 * Decoding reads every weight once a step and waits for memory. Weights of most checkpoints are bfloat16, and float32
 * holds them with 16 zeros at the end: the upper halves say it all, and a product that reads those has the same bits. A
 * matrix is known by its address, so whoever hands one over keeps it alive until it is dropped. */

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  const float *whole;
  uint16_t *upper;
  long rows, length;
} halved;

static halved *kept;
static long kept_count, kept_room;
/* a product reads under it what may be dropped on another thread */
static pthread_rwlock_t kept_lock = PTHREAD_RWLOCK_INITIALIZER;

static long kept_index(const float *whole) {
  for (long i = 0; i < kept_count; i++)
    if (kept[i].whole == whole) return i;
  return -1;
}

/* 1 where the matrix is bfloat16 and now kept, 0 where it is not: then nothing changes. */
int shim_keep(const float *whole, long rows, long length) {
  const long count = rows * length;
  uint16_t *upper = malloc(2 * (size_t)count + 64); /* the last prefetches and loads may reach behind the end */
  if (!upper) return 0;
  uint32_t lost = 0;
  for (long i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, whole + i, 4);
    lost |= bits << 16;
    upper[i] = (uint16_t)(bits >> 16);
  }
  int done = 0;
  pthread_rwlock_wrlock(&kept_lock);
  if (!lost && kept_index(whole) < 0) {
    if (kept_count == kept_room) {
      halved *larger = realloc(kept, (2 * (size_t)kept_room + 64) * sizeof *kept);
      if (larger) kept = larger, kept_room = 2 * kept_room + 64;
    }
    if (kept_count < kept_room) kept[kept_count++] = (halved){whole, upper, rows, length}, done = 1;
  }
  pthread_rwlock_unlock(&kept_lock);
  if (!done) free(upper);
  return done;
}

/* Forget a matrix; called before its memory may hold another. */
void shim_drop(const float *whole) {
  pthread_rwlock_wrlock(&kept_lock);
  const long i = kept_index(whole);
  if (i >= 0) {
    free(kept[i].upper);
    kept[i] = kept[--kept_count];
  }
  pthread_rwlock_unlock(&kept_lock);
}

/* The upper halves of a matrix, 0 where it is not kept in that shape; under kept_lock. */
static const uint16_t *upper_of(const float *whole, long rows, long length) {
  const long i = kept_index(whole);
  return i >= 0 && kept[i].rows == rows && kept[i].length == length ? kept[i].upper : 0;
}
