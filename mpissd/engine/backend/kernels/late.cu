// RMSNorm in two parts (arithmetic.cu) as a separate kernel with the bits of whole.cu, for forwards of more
// rows than MegakernelOps.most_rows.
constexpr int NORM_THREADS = 512, NORM_TILES = 16;  // tiles a thread: rows of up to 16384

__device__ __forceinline__ float one(const float* from, long long i) { return from[i]; }
__device__ __forceinline__ float one(const u16* from, long long i) { return to_float(from[i]); }

// hidden += delta (where there is one); x = hidden * weight * power. Eight threads have a tile.
// counters: set to 0 by the first row (null: there are none).
template <class Delta>
__device__ __forceinline__ void norm_row(float* hidden, const Delta* delta, const float* weight, u16* x,
                                         float* all_squares, float* norms, float* powers,
                                         float* factors, int width, float eps, u32* counters,
                                         int counter_words) {
  float* squares = (float*)block_memory();
  may_start_next();
  wait_for_last();
  const int row = blockIdx.x, tiles = width / 16, group = threadIdx.x / 8, c = threadIdx.x % 8;
  const long long from = (long long)row * width + c;
  if (row == 0)
    for (int i = threadIdx.x; i < counter_words; i += NORM_THREADS) counters[i] = 0;
  Both values[NORM_TILES], deltas[NORM_TILES];
  float power = delta ? power_of_two(norms[row]) : 0;
#pragma unroll
  for (int j = 0; j < NORM_TILES; ++j) {  // all loads are under way before the first store
    const int tile = group + j * (NORM_THREADS / 8), i = 16 * tile;
    values[j] = deltas[j] = {0, 0};
    if (tile >= tiles) continue;
    values[j] = {hidden[from + i], hidden[from + i + 8]};
    if (delta) deltas[j] = {one(delta, from + i), one(delta, from + i + 8)};
  }
#pragma unroll
  for (int j = 0; j < NORM_TILES; ++j) {
    const int tile = group + j * (NORM_THREADS / 8), i = 16 * tile;
    if (j * (NORM_THREADS / 8) >= tiles) break;
    if (delta && tile < tiles) {
      values[j] = {__fadd_rn(values[j].a, deltas[j].a), __fadd_rn(values[j].b, deltas[j].b)};
      hidden[from + i] = values[j].a;
      hidden[from + i + 8] = values[j].b;
    }
    const float sum = squares_of_tile(values[j]);
    if (tile < tiles && c == 0) squares[tile] = all_squares[(long long)row * tiles + tile] = sum;
  }
  __syncthreads();
  float of_lane[1];
  squares_of_lane(of_lane, tiles, [&](int, int t) { return squares[t]; });
  const float norm = norm_of_row(of_lane[0], tiles, eps);
  if (!delta) power = power_of_two(norm);
#pragma unroll
  for (int j = 0; j < NORM_TILES; ++j) {
    const int tile = group + j * (NORM_THREADS / 8), i = 16 * tile;
    if (tile >= tiles) break;
    x[from + i] = before_norm(values[j].a, weight[c + i], power);
    x[from + i + 8] = before_norm(values[j].b, weight[c + i + 8], power);
  }
  if (threadIdx.x) return;
  norms[row] = norm;
  powers[row] = power;
  factors[row] = __fmul_rn(norm, inverse(power));
}

#define LATE_NORM(name, Delta)                                                                     \
  extern "C" __global__ void __launch_bounds__(NORM_THREADS)                                        \
      name(float* hidden, const Delta* delta, const float* weight, u16* x, float* squares,          \
           float* norms, float* powers, float* factors, int width, float eps, u32* counters,        \
           int counter_words) {                                                                     \
    norm_row(hidden, delta, weight, x, squares, norms, powers, factors, width, eps, counters,       \
             counter_words);                                                                        \
  }
LATE_NORM(late_norm_float32, float)
LATE_NORM(late_norm_float16, u16)
