// Attention of a few rows over a paged cache, split at absolute positions.
//
// A split is SPLIT positions from a multiple of SPLIT on. For each query row a block gives a split's
// largest score, its sum of weights and its weighted sum of values; combine adds the splits up in
// rising order. Within a split every warp has 32 positions, added up in rising order too. What a
// row gets from a split depends on nothing but its own query, and keys and values of the positions
// that it sees: not on other rows, nor on whether they lie in pages or in a lane's scratch.
constexpr int ATTEND_WARPS = SPLIT / 32, ATTEND_THREADS = 32 * ATTEND_WARPS;
constexpr int QUERIES = 16 * QUERY_TILES, CHUNKS = HEAD / 32, BLOCKS = HEAD / 8;
constexpr int VALUE_STEP = 2 * HEAD + 16;  // bytes from position to position: no bank conflicts
constexpr int VALUE_BYTES = SPLIT * VALUE_STEP, SUM_STEP = HEAD + 4;
constexpr int SUMS_BYTES = 4 * ATTEND_WARPS * QUERIES * SUM_STEP;
constexpr int TOPS_AT = VALUE_BYTES > SUMS_BYTES ? VALUE_BYTES : SUMS_BYTES;  // of shared memory
constexpr float NONE = -1e30f;  // the score of a position that is not seen

// The keys, or the values, of this task's positions: in pages below `edge`, from it on in the lane.
struct Source {
  const u16 *page, *lane;  // of the split's first position, and of position `edge`
  int start, edge, stop;   // positions from `stop` on are not read
  __device__ __forceinline__ const u16* at(int i) const {
    const int position = start + i;
    return position < edge ? page + i * HEAD : lane + (position - edge) * HEAD;
  }
  __device__ __forceinline__ bool there(int i) const { return start + i < stop; }
};

__device__ __forceinline__ void load_queries(uint4 (&query)[QUERY_TILES][2][CHUNKS], const u16* queries,
                                             const Task& task, int heads, int kv_heads, int head) {
  const int lane = threadIdx.x % 32, shared = heads / kv_heads;
#pragma unroll
  for (int m = 0; m < QUERY_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int q = task.first + 16 * m + 8 * half + lane / 4;
      const bool there = q < task.rows() * shared;
      const long long row = task.row + (there ? q / shared : 0);
      const u16* from = queries + (row * heads + head * shared + (there ? q % shared : 0)) * HEAD;
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j)
        query[m][half][j] = load_fresh(from + 32 * j + 8 * (lane % 4));
    }
}

// Turns scores of 8 T positions into weights 2^(score - largest); returns the largest, at least `most`,
// and the sum of a query row. seen: how many of these positions the row sees.
template <int T>
__device__ __forceinline__ float2 weigh(float (&scores)[T][4], int half, int seen, float most = NONE) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < T; ++t)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float& s = scores[t][2 * half + n];
      if (8 * t + 2 * (lane % 4) + n >= seen) s = NONE;
      most = fmaxf(most, s);
    }
  most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 1));
  most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, 2));
  float sum = 0;
#pragma unroll
  for (int t = 0; t < T; ++t)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float& s = scores[t][2 * half + n];
      s = s > NONE ? exp2_of(s - most) : 0.0f;
      sum += s;
    }
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
  return make_float2(most, sum);
}

// sums[16 query rows][HEAD] += weights of 8 T positions times their values.
template <int T>
__device__ __forceinline__ void add_values(float (&sums)[BLOCKS][4], const float (&weights)[T][4],
                                           u32 values) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < T / 2; ++step) {
    const float(&low)[4] = weights[2 * step], (&high)[4] = weights[2 * step + 1];
    const u32 a0 = finite_halves(low[0], low[1]), a1 = finite_halves(low[2], low[3]);
    const u32 a2 = finite_halves(high[0], high[1]), a3 = finite_halves(high[2], high[3]);
    const u32 row = values + (16 * step + lane % 16) * VALUE_STEP + lane / 16 * 16;
#pragma unroll
    for (int d = 0; d < BLOCKS; d += 2) {
      const uint4 v = load_transposed(row + 16 * d);
      multiply_add(sums[d], a0, a1, a2, a3, v.x, v.y);
      multiply_add(sums[d + 1], a0, a1, a2, a3, v.z, v.w);
    }
  }
}
