// One forward of a Llama-shaped model over a short window of tokens, as one persistent kernel.
//
// A grid of one block per multiprocessor walks through the layers; grid barriers stand between the phases of a layer
// (queries, keys and values; attention; output; gate and up; down). Small windows are bound by the latency of launches
// and by the bytes of the weights, so the weights of the next phase are fetched into the L2 cache while the present one
// runs.
//
// Bits: every sum has an order that depends on the place in the sum alone. Products split their inner axis over the
// eight warps of a group in a fixed way; attention cuts the keys by absolute position. So the logits of a token are a
// function of its own history, and of none of: the width of the window, its place in it, the row, the other rows.
//
// The host defines: LAYERS HIDDEN HEADS KV_HEADS HEAD_SIZE MLP VOCAB EPS, HALF_IS_BF16, HAS_BIAS, ROWS (tokens that a
// product holds, a multiple of 8), SPLIT_KEYS (keys of one work item of attention), SHARED_BYTES, PARAMETERS and TABLE
// (the weights of all layers, see cuda_llama.py).

typedef unsigned short u16;
typedef unsigned int u32;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr int THREADS = 512;
constexpr int GROUPS = 2;  // of eight warps; each works on tiles of its own
constexpr int WARPS = 8;
constexpr int GROUP_THREADS = 32 * WARPS;
constexpr int TOKEN_TILES = (ROWS + 15) / 16;
constexpr int BUFFERS = ROWS > 16 ? 1 : 2;  // of the sums: two save a wait
constexpr int QKV_HEADS = HEADS + 2 * KV_HEADS;
constexpr int PER_KV_HEAD = HEADS / KV_HEADS;
constexpr int REDUCTION_FLOATS = GROUPS * BUFFERS * WARPS * ROWS * 8;
constexpr int ROTATION_BYTES = ROWS * (HEAD_SIZE / 2) * 8;
constexpr int STAGE_BYTES = SHARED_BYTES - 4 * REDUCTION_FLOATS - ROTATION_BYTES;

// ---- numbers ----

__device__ __forceinline__ float to_float(u32 bits) {
#if HALF_IS_BF16
  return __uint_as_float(bits << 16);
#else
  float value;
  asm("{ .reg .b16 h; mov.b32 {h, _}, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(bits));
  return value;
#endif
}

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 bits;
#if HALF_IS_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#endif
  return bits;
}

__device__ __forceinline__ float low_of(u32 bits) { return to_float(bits & 0xffffu); }
__device__ __forceinline__ float high_of(u32 bits) { return to_float(bits >> 16); }
__device__ __forceinline__ u16 rounded(float value) { return static_cast<u16>(pack(value, 0.0f) & 0xffffu); }
__device__ __forceinline__ float round_trip(float value) { return low_of(pack(value, 0.0f)); }

// c[16, 8] += a[16, 16] b[16, 8]: rows are tokens or queries, columns are outputs or keys
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if HALF_IS_BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- memory ----

__device__ __forceinline__ uint4 load_weight(const u16* at) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(at));
  return value;
}

// what this kernel wrote itself is read past the L1 cache, which other multiprocessors' writes do not reach
__device__ __forceinline__ uint4 load_fresh(const u16* at) {
  uint4 value;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(at)
               : "memory");
  return value;
}

__device__ __forceinline__ u32 load_fresh_pair(const u16* at) {
  u32 value;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ float load_fresh_float(const float* at) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ void prefetch(const u16* at, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
}

// ---- order ----

// The first block adds what makes the top bit flip once all others have added one, so the counter needs no reset.
__device__ __forceinline__ void grid_barrier(u32* counter) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const u32 step = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
    u32 before, now;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(step) : "memory");
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    } while (((before ^ now) & 0x80000000u) == 0);
  }
  __syncthreads();
}

struct Place {
  int group, warp, lane, row, column;  // row: lane / 4; column: lane % 4
  int thread;                          // in the group
  __device__ Place() {
    thread = threadIdx.x % GROUP_THREADS;
    group = threadIdx.x / GROUP_THREADS;
    warp = thread / 32;
    lane = thread % 32;
    row = lane / 4;
    column = lane % 4;
  }
  __device__ __forceinline__ void wait() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(GROUP_THREADS) : "memory");
  }
};

// ---- products ----

// Inputs of a product in shared memory: rows of K numbers, padded so that eight lanes reading 16 bytes each of two rows
// meet no bank twice.
template <int K>
struct Stage {
  static constexpr int STRIDE = (K * 2) % 128 == 64 ? K : K + 32;
  static constexpr bool FITS = ROWS * STRIDE * 2 <= STAGE_BYTES;
};

// RMS norm of every row on the way. Four warps share a row; each place of a row always goes to the same lane.
template <int K, class RowAt>
__device__ __forceinline__ void stage_normed(u16* stage, int tokens, const u16* weight, RowAt row_at) {
  static_assert(Stage<K>::FITS, "the inputs of a normed product must fit shared memory");
  constexpr int PARTS = 4, WORDS = K / 8, EACH = ceil_div(WORDS, 32 * PARTS);
  __shared__ float squares[ROWS][PARTS];
  const int lane = threadIdx.x % 32, items = tokens * PARTS;
  uint4 next[EACH];
  const auto load = [&](int item) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int word = item % PARTS * 32 + lane + i * 32 * PARTS;
      if (item < items && word < WORDS) next[i] = load_fresh(row_at(item / PARTS) + word * 8);
    }
  };
  load(threadIdx.x / 32);
#pragma unroll 1
  for (int item = threadIdx.x / 32; item < items; item += THREADS / 32) {
    uint4 v[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) v[i] = next[i];
    load(item + THREADS / 32);  // on its way while this one is added up
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int word = item % PARTS * 32 + lane + i * 32 * PARTS;
      if (word >= WORDS) continue;
      *reinterpret_cast<uint4*>(stage + item / PARTS * Stage<K>::STRIDE + word * 8) = v[i];
      const u32 words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum = fmaf(low_of(words[j]), low_of(words[j]), sum);
        sum = fmaf(high_of(words[j]), high_of(words[j]), sum);
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) squares[item / PARTS][item % PARTS] = sum;
  }
  constexpr bool SAME_PLACE = THREADS % WORDS == 0;  // whether a thread meets one place of every row
  uint4 w = load_weight(weight + threadIdx.x % WORDS * 8);
  __syncthreads();
#pragma unroll 1
  for (int index = threadIdx.x; index < tokens * WORDS; index += THREADS) {
    const int token = index / WORDS, k = index % WORDS * 8;
    if (!SAME_PLACE) w = load_weight(weight + k);
    uint4* at = reinterpret_cast<uint4*>(stage + token * Stage<K>::STRIDE + k);
    const uint4 v = *at;
    const float* parts = squares[token];
    const float scale = rsqrtf((parts[0] + parts[1] + parts[2] + parts[3]) / K + EPS);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    const u32 by[4] = {w.x, w.y, w.z, w.w};
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = pack(round_trip(low_of(words[i]) * scale) * low_of(by[i]),
                    round_trip(high_of(words[i]) * scale) * high_of(by[i]));
    }
    *at = make_uint4(out[0], out[1], out[2], out[3]);
  }
  __syncthreads();
}

template <int K>
__device__ __forceinline__ void stage_plain(u16* stage, int tokens, const u16* from) {
  for (int index = threadIdx.x; index < tokens * (K / 8); index += THREADS) {
    const int token = index / (K / 8), k = index % (K / 8) * 8;
    *reinterpret_cast<uint4*>(stage + token * Stage<K>::STRIDE + k) = load_fresh(from + token * K + k);
  }
  __syncthreads();
}

// the batch of loads in flight: the one that pads least, the longest among those
__host__ __device__ constexpr int batch_of(int each) {
  if (each <= 8) return each;
  int best = 8;
  for (int size = 9; size >= 5; --size)
    if (ceil_div(each, size) * size < ceil_div(each, best) * best) best = size;
  return best;
}

// How the warps of a group share the inner axis of a product: chunks of 32, two neighbours (a line of the cache) at a
// time in turns; a batch of them is loaded ahead.
template <int K>
struct Plan {
  static_assert(K % 32 == 0, "the inner axis goes in chunks of 32");
  static constexpr int CHUNKS = K / 32;
  // of two neighbours a warp may get both at the ragged end
  static constexpr int EACH = CHUNKS < 2 * WARPS ? ceil_div(CHUNKS, WARPS) : 2 * ceil_div(CHUNKS, 2 * WARPS);
  static constexpr int BATCH = batch_of(EACH);
  static constexpr int BATCHES = ceil_div(EACH, BATCH);
  static constexpr bool RAGGED = BATCHES * BATCH * WARPS != CHUNKS;
  __device__ __forceinline__ static int chunk(int warp, int turn) {
    if (CHUNKS < 2 * WARPS) return warp + WARPS * turn;
    return warp * 2 + turn % 2 + WARPS * 2 * (turn / 2);
  }
};

template <int K>
struct Held {
  uint4 words[Plan<K>::BATCH];
  __device__ __forceinline__ void load(int u, const u16* row, int chunk) {
    words[u] = Plan<K>::RAGGED && chunk >= Plan<K>::CHUNKS ? make_uint4(0, 0, 0, 0) : load_weight(row + chunk * 32);
  }
};

__device__ __forceinline__ int first_tile(const Place& at) { return blockIdx.x + gridDim.x * at.group; }

// Asks for the first weights of a product before what it multiplies is there: they arrive while the grid waits.
template <int K, class RowOf>
__device__ __forceinline__ Held<K> begin(const u16* weight, int tiles, RowOf row_of) {
  const Place at;
  const int tile = min(first_tile(at), tiles - 1);
  const u16* row = weight + static_cast<size_t>(row_of(tile, at.row)) * K + at.column * 8;
  Held<K> held;
#pragma unroll
  for (int u = 0; u < Plan<K>::BATCH; ++u) held.load(u, row, Plan<K>::chunk(at.warp, u));
  return held;
}

// Every group takes tiles of eight columns. `row_of(tile, column)` says which row of the weight a column is;
// `finish.store(tile, token, pair, first, second, early)` gets the sums of columns 2 * pair and 2 * pair + 1, and what
// `finish.early(tile, token, pair)` has read ahead. `from` is the stage where STAGED, else rows of K numbers in global
// memory.
template <int K, bool STAGED, class RowOf, class Finish>
__device__ __forceinline__ void product(Held<K>& held, const u16* weight, int tiles, const u16* from, int tokens,
                                        float* reduction, RowOf row_of, Finish finish) {
  using P = Plan<K>;
  constexpr int STRIDE = STAGED ? Stage<K>::STRIDE : K;
  static_assert(ROWS * 4 <= GROUP_THREADS, "one thread of a group for each pair of sums");
  const Place at;
  const int step = gridDim.x * GROUPS;
  float* sums = reduction + at.group * BUFFERS * WARPS * ROWS * 8;
  int tile = first_tile(at);
  if (tile >= tiles) return;
  const u16* inputs[ROWS / 8];
#pragma unroll
  for (int i = 0; i < ROWS / 8; ++i)
    inputs[i] = from + min(i * 8 + at.row, tokens - 1) * STRIDE + at.column * 8;
  const u16* row = weight + static_cast<size_t>(row_of(tile, at.row)) * K + at.column * 8;
  const int token = at.thread / 4, pair = at.thread % 4;
  for (int parity = 0;; parity ^= BUFFERS - 1) {
    const int next_tile = tile + step;
    const bool more = next_tile < tiles;
    const u16* next_row = more ? weight + static_cast<size_t>(row_of(next_tile, at.row)) * K + at.column * 8 : row;
    const u32 early = token < tokens ? finish.early(tile, token, pair) : 0;
    float c[TOKEN_TILES][4] = {};
#pragma unroll 1
    for (int batch = 0; batch < P::BATCHES; ++batch) {
      const bool last = batch + 1 == P::BATCHES;
      const u16* ahead = last ? next_row : row;
      const int first = last ? 0 : (batch + 1) * P::BATCH;
#pragma unroll
      for (int u = 0; u < P::BATCH; ++u) {
        const uint4 w = held.words[u];
        if (!last || more) held.load(u, ahead, P::chunk(at.warp, first + u));
        const int chunk = P::chunk(at.warp, batch * P::BATCH + u);
        if (P::RAGGED && chunk >= P::CHUNKS) continue;
#pragma unroll
        for (int i = 0; i < TOKEN_TILES; ++i) {
          const u16* low = inputs[2 * i] + chunk * 32;
          const uint4 x = STAGED ? *reinterpret_cast<const uint4*>(low) : load_fresh(low);
          uint4 y = make_uint4(0, 0, 0, 0);
          if (i * 16 + 8 < ROWS) {
            const u16* high = inputs[min(2 * i + 1, ROWS / 8 - 1)] + chunk * 32;
            y = STAGED ? *reinterpret_cast<const uint4*>(high) : load_fresh(high);
          }
          // the four lanes of a row hold eight neighbours each: any order will do, so long as both sides have it
          multiply(c[i], x.x, y.x, x.y, y.y, w.x, w.y);
          multiply(c[i], x.z, y.z, x.w, y.w, w.z, w.w);
        }
      }
    }
    float* mine = sums + (parity * WARPS + at.warp) * ROWS * 8;
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; ++i) {
      *reinterpret_cast<float2*>(mine + (i * 16 + at.row) * 8 + at.column * 2) = make_float2(c[i][0], c[i][1]);
      if (i * 16 + 8 < ROWS)
        *reinterpret_cast<float2*>(mine + (i * 16 + 8 + at.row) * 8 + at.column * 2) = make_float2(c[i][2], c[i][3]);
    }
    at.wait();
    if (token < tokens) {
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp) {
        const float2 part = *reinterpret_cast<const float2*>(
            sums + ((parity * WARPS + warp) * ROWS + token) * 8 + pair * 2);
        sum.x += part.x;
        sum.y += part.y;
      }
      finish.store(tile, token, pair, sum.x, sum.y, early);
    }
    if (!more) return;
    if (BUFFERS == 1) at.wait();  // the next tile overwrites what was read
    tile = next_tile;
    row = next_row;
  }
}

// The rows of a block's first tiles, asked of memory while something else runs.
template <int K>
__device__ __forceinline__ void fetch_ahead(const u16* weight, int tiles) {
  const int tile = blockIdx.x + gridDim.x * threadIdx.x;
  if (threadIdx.x < GROUPS && tile < tiles)
    prefetch(weight + static_cast<size_t>(tile) * 8 * K, 8 * K * 2);
}

struct RowsInPairs {  // of a head: (i, i + HEAD_SIZE / 2), which the rotation mixes
  __device__ __forceinline__ int operator()(int tile, int column) const {
    constexpr int PER_HEAD = HEAD_SIZE / 8;
    return tile / PER_HEAD * HEAD_SIZE + tile % PER_HEAD * 4 + column / 2 + column % 2 * (HEAD_SIZE / 2);
  }
};

struct GateAndUp {
  __device__ __forceinline__ int operator()(int tile, int column) const {
    return tile * 4 + column / 2 + column % 2 * MLP;
  }
};

struct InOrder {
  __device__ __forceinline__ int operator()(int tile, int column) const { return tile * 8 + column; }
};

struct Vocabulary {
  __device__ __forceinline__ int operator()(int tile, int column) const { return min(tile * 8 + column, VOCAB - 1); }
};
