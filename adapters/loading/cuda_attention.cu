// Attention of a window over the cache and the window's own keys and values. Included behind cuda_llama.cu.
//
// Work item of a block: one row, one key head, up to 16 of its queries (query head x place in the window), SPLIT_KEYS
// keys from an absolute multiple on. The warps take 16 keys at a time in turns. Whoever finishes the last item of a row,
// head and query tile adds up their parts, in the order of the keys.
//
// The cache is [row, keys and values, LAYERS, KV_HEADS, C, HEAD_SIZE], the window's own part the same with the width for C.

constexpr int BLOCK_WARPS = THREADS / 32;

struct Keys {
  const u16 *cached, *fresh;  // of this row, layer and head: [C, HEAD_SIZE] and [width, HEAD_SIZE]
  int position, width;
  __device__ __forceinline__ const u16* at(int key) const {
    key = min(key, position + width - 1);  // what lies behind is masked, but must be finite
    return key < position ? cached + static_cast<size_t>(key) * HEAD_SIZE
                          : fresh + static_cast<size_t>(key - position) * HEAD_SIZE;
  }
};

#define NO_SCORE (-__int_as_float(0x7f800000))  // minus infinity

constexpr int HEAD_CHUNKS = HEAD_SIZE / 32;
constexpr int TURNS = SPLIT_KEYS / (BLOCK_WARPS * 16);
constexpr int HEAD_BLOCKS = HEAD_SIZE / 64;
constexpr int MOST_SPLITS = 32;

struct __align__(16) AttentionShared {
  float output[BLOCK_WARPS][16][HEAD_SIZE + 8];  // places of the head in the order of `stored_at`
  float highest[BLOCK_WARPS][16], total[BLOCK_WARPS][16], weight[BLOCK_WARPS][16];
  float part_highest[MOST_SPLITS][16], part_total[MOST_SPLITS][16];
  u32 is_last;
};

// a lane of the product holds places 16 c + j and 16 c + 8 + j of a block of 64: side by side, banks do not collide
__device__ __forceinline__ int stored_at(int place) { return place / 64 * 64 + place % 8 * 8 + place / 8 % 8; }

// queries: of this lane's first and second query
__device__ __forceinline__ void attend_keys(AttentionShared& shared, const Keys& keys, const Keys& values, int first,
                                            int end, int first_query, int queries, const u16* const (&query_at)[2],
                                            const Place& at) {
  const int warp = threadIdx.x / 32;
  float output[HEAD_SIZE / 8][4] = {};
  float highest[2] = {NO_SCORE, NO_SCORE}, total[2] = {0.0f, 0.0f};
  const float scale = rsqrtf(static_cast<float>(HEAD_SIZE)) * 1.4426950408889634f;  // exp(x) = 2^(x log2 e)
  int reach[2];  // the last key that each of the two queries of this lane may see
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = min(first_query + half * 8 + at.row, queries - 1);
    reach[half] = keys.position + query % keys.width;
  }
#pragma unroll 1
  for (int turn = 0; turn < TURNS; ++turn) {
    const int base = first + (turn * BLOCK_WARPS + warp) * 16;
    if (base >= end) break;
    float scores[2][4] = {};
    uint4 k[2][HEAD_CHUNKS];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const u16* from = keys.at(base + tile * 8 + at.row) + at.column * 8;
#pragma unroll
      for (int chunk = 0; chunk < HEAD_CHUNKS; ++chunk) k[tile][chunk] = load_fresh(from + chunk * 32);
    }
#pragma unroll
    for (int chunk = 0; chunk < HEAD_CHUNKS; ++chunk) {
      const uint4 x = load_fresh(query_at[0] + chunk * 32 + at.column * 8);
      const uint4 y = load_fresh(query_at[1] + chunk * 32 + at.column * 8);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        multiply(scores[tile], x.x, y.x, x.y, y.y, k[tile][chunk].x, k[tile][chunk].y);
        multiply(scores[tile], x.z, y.z, x.w, y.w, k[tile][chunk].z, k[tile][chunk].w);
      }
    }
    const int mine = base + at.column * 2;  // keys of this lane: mine, mine + 1, mine + 8, mine + 9
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = highest[half];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float& score = scores[tile][half * 2 + odd];
          score = mine + tile * 8 + odd <= reach[half] ? score * scale : NO_SCORE;
          most = fmaxf(most, score);
        }
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      const float base_of = most == NO_SCORE ? 0.0f : most;
      shrink[half] = exp2f(highest[half] - base_of);
      highest[half] = most;
      float sum = 0.0f;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float& score = scores[tile][half * 2 + odd];
          score = exp2f(score - base_of);
          sum += score;
        }
      total[half] = total[half] * shrink[half] + sum;
    }
    const u32 p0 = pack(scores[0][0], scores[0][1]), p1 = pack(scores[0][2], scores[0][3]);
    const u32 p2 = pack(scores[1][0], scores[1][1]), p3 = pack(scores[1][2], scores[1][3]);
    const u16* v0 = values.at(mine) + at.row * 8;
    const u16* v1 = values.at(mine + 1) + at.row * 8;
    const u16* v2 = values.at(mine + 8) + at.row * 8;
    const u16* v3 = values.at(mine + 9) + at.row * 8;
#pragma unroll
    for (int block = 0; block < HEAD_BLOCKS; ++block) {
      const uint4 a = load_fresh(v0 + block * 64), b = load_fresh(v1 + block * 64);
      const uint4 c = load_fresh(v2 + block * 64), d = load_fresh(v3 + block * 64);
      const u32 as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
      const u32 cs[4] = {c.x, c.y, c.z, c.w}, ds[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        // column `row` of this product is place row * 8 + j of the head
        const u32 pick = j % 2 ? 0x7632u : 0x5410u;
        const u32 low = __byte_perm(as[j / 2], bs[j / 2], pick), high = __byte_perm(cs[j / 2], ds[j / 2], pick);
        float(&sum)[4] = output[block * 8 + j];
        if (TURNS > 1) {
          sum[0] *= shrink[0];
          sum[1] *= shrink[0];
          sum[2] *= shrink[1];
          sum[3] *= shrink[1];
        }
        multiply(sum, p0, p1, p2, p3, low, high);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
    total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
    if (at.column == 0) {
      shared.highest[warp][half * 8 + at.row] = highest[half];
      shared.total[warp][half * 8 + at.row] = total[half];
    }
#pragma unroll
    for (int block = 0; block < HEAD_BLOCKS; ++block)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float(&sum)[4] = output[block * 8 + j];
        float* to = shared.output[warp][half * 8 + at.row] + block * 64 + j * 8 + at.column * 2;
        *reinterpret_cast<float2*>(to) = make_float2(sum[half * 2], sum[half * 2 + 1]);
      }
  }
}

struct AttentionInputs {
  const int* position;  // in shared memory
  const u16 *queries, *cached, *fresh;
  u16* attended;  // [tokens, HEADS * HEAD_SIZE]
  float* parts;   // [row, key head, query tile, split, 16, HEAD_SIZE + 2]
  u32* counters;  // [row, key head, query tile], zero between launches
  int batch, width, capacity, splits, layer;
};

constexpr int PART = 16 * (HEAD_SIZE + 2);

struct Item {  // what a block works on
  int tile, split, query_tile, head, row, position, end, used;
  __device__ __forceinline__ Item(const AttentionInputs& in, int index, int query_tiles) {
    const int tiles = in.batch * KV_HEADS * query_tiles;
    tile = index % tiles;
    split = index / tiles;
    query_tile = tile % query_tiles;
    head = tile / query_tiles % KV_HEADS;
    row = tile / query_tiles / KV_HEADS;
    position = min(in.position[row], in.capacity);  // a draft may run on behind a row's end
    end = min(position + in.width, in.capacity);  // what lies behind is never emitted
    used = ceil_div(end, SPLIT_KEYS);
  }
  __device__ __forceinline__ size_t plane(int layer, int which) const {  // which: 0 keys, 1 values
    return ((static_cast<size_t>(row) * 2 + which) * LAYERS + layer) * KV_HEADS + head;
  }
};

// Asks for the cached keys and values of this block's item while the products before attention run.
__device__ __forceinline__ void fetch_keys_ahead(const AttentionInputs& in) {
  const int query_tiles = ceil_div(PER_KV_HEAD * in.width, 16);
  if (threadIdx.x >= 2 || blockIdx.x >= in.batch * KV_HEADS * query_tiles * in.splits) return;
  const Item item(in, blockIdx.x, query_tiles);
  const int first = item.split * SPLIT_KEYS, keys = min(item.position, first + SPLIT_KEYS) - first;
  if (keys > 0)
    prefetch(in.cached + (item.plane(in.layer, threadIdx.x) * in.capacity + first) * HEAD_SIZE, keys * HEAD_SIZE * 2);
}

// Whoever comes last adds up the parts of all splits.
template <class AttendedAt>
__device__ __forceinline__ void add_parts(AttentionShared& shared, const AttentionInputs& in, const float* parts,
                                          const Item& item, int here, AttendedAt attended_at) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const u32 before = atomicAdd(in.counters + item.tile, 1u);
    shared.is_last = before + 1 == static_cast<u32>(item.used);
    if (shared.is_last) in.counters[item.tile] = 0;
    __threadfence();
  }
  __syncthreads();
  if (!shared.is_last) return;
  for (int index = threadIdx.x; index < here * item.used; index += THREADS) {
    const float* part = parts + index / here * PART + index % here * (HEAD_SIZE + 2) + HEAD_SIZE;
    shared.part_highest[index / here][index % here] = load_fresh_float(part);
    shared.part_total[index / here][index % here] = load_fresh_float(part + 1);
  }
  __syncthreads();
  for (int index = threadIdx.x; index < here * HEAD_SIZE; index += THREADS) {
    const int local = index / HEAD_SIZE, k = index % HEAD_SIZE;
    const float* part = parts + local * (HEAD_SIZE + 2) + k;
    float most = NO_SCORE, total = 0.0f, output = 0.0f;
    for (int s = 0; s < item.used; ++s) most = fmaxf(most, shared.part_highest[s][local]);
#pragma unroll 4
    for (int s = 0; s < item.used; ++s) {
      const float weight = exp2f(shared.part_highest[s][local] - most);
      total = fmaf(shared.part_total[s][local], weight, total);
      output = fmaf(load_fresh_float(part + s * PART), weight, output);
    }
    in.attended[attended_at(local) + k] = rounded(output / total);
  }
}

__device__ __forceinline__ void attention(AttentionShared& shared, const AttentionInputs& in) {
  const Place at;
  const int queries = PER_KV_HEAD * in.width, query_tiles = ceil_div(queries, 16);
  const int items = in.batch * KV_HEADS * query_tiles * in.splits;
  for (int index = blockIdx.x; index < items; index += gridDim.x) {
    const Item item(in, index, query_tiles);
    if (item.split >= item.used) continue;
    const size_t keys_at = item.plane(in.layer, 0), values_at = item.plane(in.layer, 1);
    const Keys keys{in.cached + keys_at * in.capacity * HEAD_SIZE, in.fresh + keys_at * in.width * HEAD_SIZE,
                    item.position, in.width};
    const Keys values{in.cached + values_at * in.capacity * HEAD_SIZE, in.fresh + values_at * in.width * HEAD_SIZE,
                      item.position, in.width};
    const int first_query = item.query_tile * 16, here = min(16, queries - first_query);
    const auto attended_at = [&](int local) {
      const int query = first_query + local;
      return ((item.row * in.width + query % in.width) * HEADS + item.head * PER_KV_HEAD + query / in.width) *
             HEAD_SIZE;
    };
    const u16* const query_at[2] = {in.queries + attended_at(min(at.row, here - 1)),
                                    in.queries + attended_at(min(at.row + 8, here - 1))};
    const int first = item.split * SPLIT_KEYS;
    attend_keys(shared, keys, values, first, min(item.end, first + SPLIT_KEYS), first_query, queries, query_at, at);
    __syncthreads();
    if (threadIdx.x < BLOCK_WARPS * 16) {
      const int local = threadIdx.x % 16;
      float most = NO_SCORE;
#pragma unroll 4
      for (int warp = 0; warp < BLOCK_WARPS; ++warp) most = fmaxf(most, shared.highest[warp][local]);
      const float mine = shared.highest[threadIdx.x / 16][local];
      shared.weight[threadIdx.x / 16][local] = exp2f(mine - (most == NO_SCORE ? 0.0f : most));
      if (threadIdx.x < 16) shared.part_highest[0][local] = most;
    }
    __syncthreads();
    float* parts = in.parts + static_cast<size_t>(item.tile) * in.splits * PART;
    for (int place = threadIdx.x; place < here * HEAD_SIZE; place += THREADS) {
      const int local = place / HEAD_SIZE, k = place % HEAD_SIZE;
      float total = 0.0f, output = 0.0f;
#pragma unroll 4
      for (int warp = 0; warp < BLOCK_WARPS; ++warp) {
        total = fmaf(shared.total[warp][local], shared.weight[warp][local], total);
        output = fmaf(shared.output[warp][local][stored_at(k)], shared.weight[warp][local], output);
      }
      if (item.used == 1) {
        in.attended[attended_at(local) + k] = rounded(output / total);
      } else {
        float* part = parts + item.split * PART + local * (HEAD_SIZE + 2);
        part[k] = output;
        if (k == 0) {
          part[HEAD_SIZE] = shared.part_highest[0][local];
          part[HEAD_SIZE + 1] = total;
        }
      }
    }
    if (item.used > 1) add_parts(shared, in, parts, item, here, attended_at);
    __syncthreads();  // the next item overwrites what was read
  }
}
