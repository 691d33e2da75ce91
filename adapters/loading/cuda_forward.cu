// The kernel itself: embedding, layers, head. Included behind cuda_llama.cu and cuda_attention.cu.

struct Layer {
  const u16 *input_norm, *qkv, *bias, *output, *mlp_norm, *gate_up, *down;
};

constexpr int QKV_TILES = QKV_HEADS * HEAD_SIZE / 8;
constexpr int HIDDEN_TILES = HIDDEN / 8;
constexpr int GATE_UP_TILES = MLP / 4;
constexpr int VOCAB_TILES = ceil_div(VOCAB, 8);

static_assert(HIDDEN % 32 == 0 && MLP % 32 == 0 && HEAD_SIZE % 64 == 0 && HEADS % KV_HEADS == 0, "unsupported shape");
static_assert(sizeof(AttentionShared) <= STAGE_BYTES, "attention must fit shared memory");

template <int K>
__device__ __forceinline__ const u16* staged_or_not(u16* stage, int tokens, const u16* from) {
  if constexpr (Stage<K>::FITS) {
    stage_plain<K>(stage, tokens, from);
    return stage;
  }
  return from;
}

// what is done with the sums of a product

struct Rotate {  // queries and keys; values are stored alone
  const u16* bias;
  const float2* rotation;
  u16 *queries, *fresh;
  int width, layer;
  __device__ __forceinline__ u32 early(int, int, int) const { return 0; }
  __device__ __forceinline__ void store(int tile, int token, int pair, float first, float second, u32) const {
    constexpr int PER_HEAD = HEAD_SIZE / 8;
    const int which = tile / PER_HEAD, place = tile % PER_HEAD * 4 + pair;
#if HAS_BIAS
    first += to_float(__ldg(bias + which * HEAD_SIZE + place));
    second += to_float(__ldg(bias + which * HEAD_SIZE + place + HEAD_SIZE / 2));
#endif
    first = round_trip(first);
    second = round_trip(second);
    if (which < HEADS + KV_HEADS) {
      const float2 turn = rotation[token * (HEAD_SIZE / 2) + place];  // cosine, sine
      const float turned = first * turn.x - second * turn.y;
      second = first * turn.y + second * turn.x;
      first = turned;
    }
    u16* to;
    if (which < HEADS) {
      to = queries + (token * HEADS + which) * HEAD_SIZE;
    } else {
      const int row = token / width, column = token % width, head = (which - HEADS) % KV_HEADS;
      const size_t is_value = which >= HEADS + KV_HEADS;
      to = fresh + ((((row * 2 + is_value) * LAYERS + layer) * KV_HEADS + head) * width + column) * HEAD_SIZE;
    }
    to[place] = rounded(first);
    to[place + HEAD_SIZE / 2] = rounded(second);
  }
};

struct Activate {
  u16* activated;
  __device__ __forceinline__ u32 early(int, int, int) const { return 0; }
  __device__ __forceinline__ void store(int tile, int token, int pair, float gate, float up, u32) const {
    gate = round_trip(gate);
    activated[token * MLP + tile * 4 + pair] = rounded(gate / (1.0f + expf(-gate)) * round_trip(up));
  }
};

struct Add {  // to the residual stream
  u16* hidden;
  __device__ __forceinline__ u16* place(int tile, int token, int pair) const {
    return hidden + token * HIDDEN + tile * 8 + pair * 2;
  }
  __device__ __forceinline__ u32 early(int tile, int token, int pair) const {
    return load_fresh_pair(place(tile, token, pair));
  }
  __device__ __forceinline__ void store(int tile, int token, int pair, float first, float second, u32 before) const {
    *reinterpret_cast<u32*>(place(tile, token, pair)) =
        pack(low_of(before) + round_trip(first), high_of(before) + round_trip(second));
  }
};

struct Emit {
  float* logits;
  __device__ __forceinline__ u32 early(int, int, int) const { return 0; }
  __device__ __forceinline__ void store(int tile, int token, int pair, float first, float second, u32) const {
    const int id = tile * 8 + pair * 2;
    float* to = logits + static_cast<size_t>(token) * VOCAB + id;
    if (id < VOCAB) to[0] = first;
    if (id + 1 < VOCAB) to[1] = second;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    llama_forward(const int* ids, const int* position, const float* frequencies, const u16* cached,
                  const u16* embedding, const u16* last_norm, const u16* head, const int* scratch_counters,
                  const void* after, PARAMETERS float* logits, u16* fresh, u16* hidden, u16* queries, u16* attended, u16* activated,
                  float* parts, int batch, int width, int capacity) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Layer layers[LAYERS];
  __shared__ int starts[ROWS];
  if (threadIdx.x < batch) starts[threadIdx.x] = __ldg(position + threadIdx.x);
  if (threadIdx.x == 0) {
    const Layer table[LAYERS] = {TABLE};
    for (int i = 0; i < LAYERS; ++i) layers[i] = table[i];
  }
  __syncthreads();
  u16* stage = reinterpret_cast<u16*>(shared);
  float* reduction = reinterpret_cast<float*>(shared + STAGE_BYTES);
  AttentionShared& attention_shared = *reinterpret_cast<AttentionShared*>(shared);
  // kept by the host between launches and left as found: barrier, then attention's counters
  u32* counters = reinterpret_cast<u32*>(const_cast<int*>(scratch_counters));
  const int tokens = batch * width;
  const auto embedded = [&](int token) {
    return embedding + static_cast<size_t>(min(max(__ldg(ids + token), 0), VOCAB - 1)) * HIDDEN;
  };
  const auto in_stream = [&](int token) { return static_cast<const u16*>(hidden) + token * HIDDEN; };
  for (int token = blockIdx.x; token < tokens; token += gridDim.x)
    for (int k = threadIdx.x * 8; k < HIDDEN; k += THREADS * 8)
      *reinterpret_cast<uint4*>(hidden + token * HIDDEN + k) = load_fresh(embedded(token) + k);

  // angles of every place once for all layers
  float2* rotation = reinterpret_cast<float2*>(shared + STAGE_BYTES + 4 * REDUCTION_FLOATS);
  for (int index = threadIdx.x; index < tokens * (HEAD_SIZE / 2); index += THREADS) {
    const int token = index / (HEAD_SIZE / 2);
    const float place = static_cast<float>(starts[token / width] + token % width);
    float sine, cosine;
    sincosf(place * __ldg(frequencies + index % (HEAD_SIZE / 2)), &sine, &cosine);
    rotation[index] = make_float2(cosine, sine);
  }

  const Add add{hidden};
  Held<HIDDEN> held = begin<HIDDEN>(layers[0].qkv, QKV_TILES, RowsInPairs());
#pragma unroll 1
  for (int index = 0; index < LAYERS; ++index) {
    const Layer layer = layers[index];
    const AttentionInputs inputs{starts, queries, cached, fresh, attended, parts, counters + 32, batch, width, capacity,
                                 ceil_div(capacity, SPLIT_KEYS), index};

    fetch_keys_ahead(inputs);
    if (index == 0)
      stage_normed<HIDDEN>(stage, tokens, layer.input_norm, embedded);
    else
      stage_normed<HIDDEN>(stage, tokens, layer.input_norm, in_stream);
    const Rotate rotate{layer.bias, rotation, queries, fresh, width, index};
    product<HIDDEN, true>(held, layer.qkv, QKV_TILES, stage, tokens, reduction, RowsInPairs(), rotate);
    fetch_ahead<HEADS * HEAD_SIZE>(layer.output, HIDDEN_TILES);
    grid_barrier(counters);

    attention(attention_shared, inputs);
    auto held_output = begin<HEADS * HEAD_SIZE>(layer.output, HIDDEN_TILES, InOrder());
    grid_barrier(counters);

    const u16* attended_at = staged_or_not<HEADS * HEAD_SIZE>(stage, tokens, attended);
    product<HEADS * HEAD_SIZE, Stage<HEADS * HEAD_SIZE>::FITS>(held_output, layer.output, HIDDEN_TILES, attended_at,
                                                               tokens, reduction, InOrder(), add);
    held = begin<HIDDEN>(layer.gate_up, GATE_UP_TILES, GateAndUp());
    grid_barrier(counters);

    stage_normed<HIDDEN>(stage, tokens, layer.mlp_norm, in_stream);
    product<HIDDEN, true>(held, layer.gate_up, GATE_UP_TILES, stage, tokens, reduction, GateAndUp(),
                          Activate{activated});
    auto held_down = begin<MLP>(layer.down, HIDDEN_TILES, InOrder());
    grid_barrier(counters);

    const u16* activated_at = staged_or_not<MLP>(stage, tokens, activated);
    product<MLP, Stage<MLP>::FITS>(held_down, layer.down, HIDDEN_TILES, activated_at, tokens, reduction, InOrder(),
                                   add);
    held = index + 1 < LAYERS ? begin<HIDDEN>(layers[index + 1].qkv, QKV_TILES, RowsInPairs())
                              : begin<HIDDEN>(head, VOCAB_TILES, Vocabulary());
    grid_barrier(counters);
  }

  stage_normed<HIDDEN>(stage, tokens, last_norm, in_stream);
  product<HIDDEN, true>(held, head, VOCAB_TILES, stage, tokens, reduction, Vocabulary(), Emit{logits});
}
