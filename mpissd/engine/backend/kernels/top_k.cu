// The k largest of each row, descending, ties to the smaller id, of float16 or float32 values.
// A row is cut into at most 32 chunks, a block each. Every warp of a block lists the top k of its
// own columns, warp 0 merges the lists; where there are several chunks, top_k_merge merges theirs.
// A key orders (value, column): the value's bits made monotonic above the complement of the column
// within its chunk (at most 65536 columns). Keys differ; 0 stands for none.
template <class Word, class Bits, int SHIFT>
struct Keys {
  typedef Word Key;
  typedef Bits Value;
  static constexpr int GROUP = 16 / sizeof(Bits);  // columns that one load brings
  static constexpr Bits SIGN = (Bits)((Bits)1 << (8 * sizeof(Bits) - 1));
  static constexpr Key COLUMNS = ((Key)1 << SHIFT) - 1;

  static __device__ __forceinline__ Key of(Bits bits, int column) {
    if (bits == SIGN) bits = 0;  // -0 ties with 0
    const Bits ordered = bits & SIGN ? (Bits)~bits : (Bits)(bits | SIGN);
    return (Key)ordered << SHIFT | (COLUMNS - column);
  }
  static __device__ __forceinline__ int column(Key key) { return (int)(COLUMNS - (key & COLUMNS)); }
  static __device__ __forceinline__ Bits bits(Key key) {
    const Bits ordered = (Bits)(key >> SHIFT);
    return ordered & SIGN ? (Bits)(ordered ^ SIGN) : (Bits)~ordered;
  }
};

struct HalfKeys : Keys<u32, u16, 16> {
  static __device__ __forceinline__ float value(u32 key) { return to_float(bits(key)); }
};

struct FloatKeys : Keys<u64, u32, 32> {
  static __device__ __forceinline__ float value(u64 key) { return __uint_as_float(bits(key)); }
};

template <class K>
__device__ __forceinline__ typename K::Key larger(typename K::Key best, typename K::Key key,
                                                  typename K::Key below) {
  return key < below ? max(best, key) : best;
}

// The largest key under `below` among the columns of `group`; 0 where there is none.
template <class K>
__device__ __forceinline__ typename K::Key group_max(const typename K::Value* chunk, int group,
                                                     int columns, bool aligned, typename K::Key below) {
  const int c = K::GROUP * group;
  typename K::Key best = 0;
  if (aligned && c + K::GROUP <= columns) {
    union {
      uint4 word;
      typename K::Value values[K::GROUP];
    } v;
    v.word = *(const uint4*)(chunk + c);
#pragma unroll
    for (int j = 0; j < K::GROUP; ++j) best = larger<K>(best, K::of(v.values[j], c + j), below);
  } else {
    for (int j = c; j < columns && j < c + K::GROUP; ++j)
      best = larger<K>(best, K::of(chunk[j], j), below);
  }
  return best;
}

template <class Key>
__device__ __forceinline__ Key warp_max(Key key) {
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) key = max(key, __shfl_xor_sync(0xFFFFFFFFu, key, lanes));
  return key;
}

// grid (chunks, rows); with one chunk the result goes to ids and tops, else keys to `merged`.
// lists: [warps][k] in shared memory.
template <class K>
__device__ __forceinline__ void top_of_chunk(const typename K::Value* values, long long stride,
                                             int width, int chunk_columns, int k,
                                             typename K::Key* merged, int* ids, float* tops,
                                             typename K::Key* lists) {
  typedef typename K::Key Key;
  const typename K::Value* chunk = values + blockIdx.y * stride + blockIdx.x * chunk_columns;
  int columns = min(chunk_columns, width - (int)blockIdx.x * chunk_columns);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int groups = (columns + K::GROUP - 1) / K::GROUP, threads = blockDim.x;
  bool aligned = ((u64)chunk & 15) == 0;
  Key best = 0;
  for (int g = threadIdx.x; g < groups; g += threads)
    best = max(best, group_max<K>(chunk, g, columns, aligned, ~(Key)0));
  for (int i = 0; i < k; ++i) {
    Key top = warp_max(best);
    if (lane == 0) lists[warp * k + i] = top;
    if (i + 1 == k) break;
    // The warp searches the winner's columns again, for its largest key below the one taken.
    int winner = __ffs(__ballot_sync(0xFFFFFFFFu, best == top)) - 1;
    Key next = 0;
    for (int g = warp * 32 + winner + lane * threads; g < groups; g += 32 * threads)
      next = max(next, group_max<K>(chunk, g, columns, aligned, top));
    next = warp_max(next);
    if (lane == winner) best = next;
  }
  __syncthreads();
  if (warp) return;
  long long to = (long long)blockIdx.y * gridDim.x + blockIdx.x;
  int taken = 0;
  for (int i = 0; i < k; ++i) {
    Key head = lane < warps && taken < k ? lists[lane * k + taken] : 0;
    Key top = warp_max(head);
    if (head == top) ++taken;
    if (lane == 0 && gridDim.x > 1) merged[to * k + i] = top;
    if (lane == 0 && gridDim.x == 1) {
      ids[to * k + i] = K::column(top);
      tops[to * k + i] = K::value(top);
    }
  }
}

// One warp a row: lane c takes from chunk c's list. Of equal values the smaller chunk's is first.
// lists: [chunks][k] in shared memory.
template <class K>
__device__ __forceinline__ void merge_chunks(const typename K::Key* merged, int chunks,
                                             int chunk_columns, int k, int* ids, float* tops,
                                             typename K::Key* lists) {
  typedef typename K::Key Key;
  int lane = threadIdx.x;
  const Key* row = merged + (long long)blockIdx.x * chunks * k;
  for (int i = lane; i < chunks * k; i += 32) lists[i] = row[i];
  __syncwarp();
  int taken = 0;
  for (int i = 0; i < k; ++i) {
    Key head = lane < chunks && taken < k ? lists[lane * k + taken] : 0;
    Key key = head ? (head & ~K::COLUMNS) | (32 - lane) : 0;
    Key top = warp_max(key);
    if (key && key == top) {
      ids[blockIdx.x * k + i] = lane * chunk_columns + K::column(head);
      tops[blockIdx.x * k + i] = K::value(head);
      ++taken;
    }
  }
}

extern "C" __global__ void __launch_bounds__(512)
    top_k(const u16* values, long long stride, int width, int chunk_columns, int k, u32* merged,
          int* ids, float* tops) {
  u32* lists = (u32*)block_memory();
  top_of_chunk<HalfKeys>(values, stride, width, chunk_columns, k, merged, ids, tops, lists);
}

extern "C" __global__ void __launch_bounds__(512)
    top_k_float32(const u32* values, long long stride, int width, int chunk_columns, int k, u64* merged,
                  int* ids, float* tops) {
  u64* lists = (u64*)block_memory();
  top_of_chunk<FloatKeys>(values, stride, width, chunk_columns, k, merged, ids, tops, lists);
}

extern "C" __global__ void top_k_merge(const u32* merged, int chunks, int chunk_columns, int k,
                                       int* ids, float* tops) {
  u32* lists = (u32*)block_memory();
  merge_chunks<HalfKeys>(merged, chunks, chunk_columns, k, ids, tops, lists);
}

extern "C" __global__ void top_k_merge_float32(const u64* merged, int chunks, int chunk_columns,
                                               int k, int* ids, float* tops) {
  u64* lists = (u64*)block_memory();
  merge_chunks<FloatKeys>(merged, chunks, chunk_columns, k, ids, tops, lists);
}
