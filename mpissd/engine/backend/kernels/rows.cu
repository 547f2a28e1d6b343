// A transformer's operations on whole rows: embedding, residual sum with RMSNorm, and q, k, v on
// their way to the cache. Float32 rows, one block or warp a row, so no row depends on another.

// The tokens may be in page-locked host memory, so only one thread a row reads them.
extern "C" __global__ void embed(const u16* table, int entries, int width, const int* tokens,
                                 float* out) {
  int* token = (int*)block_memory();
  may_start_next();
  wait_for_last();
  if (threadIdx.x == 0) *token = min(max(tokens[blockIdx.x], 0), entries - 1);
  __syncthreads();
  const u16* from = table + (long long)*token * width;
  for (int c = threadIdx.x; c < width; c += blockDim.x)
    out[(long long)blockIdx.x * width + c] = to_float(from[c]);
}

constexpr int NORM_THREADS = 512, NORM_TILES = 16;  // tiles a thread: rows of up to 16384

__device__ __forceinline__ float value_of(float x) { return x; }
__device__ __forceinline__ float value_of(u16 x) { return to_float(x); }

// What norms keep of each row (see arithmetic.cu): the squares of its tiles, 1 / rms, the power of two
// of x, and the factor of the sums over x.
struct Norms {
  float *squares, *norms, *powers, *factors;
};

// hidden += delta (where there is one); x = hidden * weight * power. Eight threads have a tile.
template <class Delta>
__device__ __forceinline__ void norm_row(float* hidden, const Delta* delta, const float* weight, u16* x,
                                         const Norms& to, int width, float eps) {
  float* squares = (float*)block_memory();
  may_start_next();
  wait_for_last();
  const int row = blockIdx.x, tiles = width / 16, group = threadIdx.x / 8, c = threadIdx.x % 8;
  const long long from = (long long)row * width + c;
  Both values[NORM_TILES], deltas[NORM_TILES];
  float power = delta ? power_of_two(to.norms[row]) : 0;
#pragma unroll
  for (int j = 0; j < NORM_TILES; ++j) {  // all loads are under way before the first store
    const int tile = group + j * (NORM_THREADS / 8), i = 16 * tile;
    values[j] = deltas[j] = {0, 0};
    if (tile >= tiles) continue;
    values[j] = {hidden[from + i], hidden[from + i + 8]};
    if (delta) deltas[j] = {value_of(delta[from + i]), value_of(delta[from + i + 8])};
  }
#pragma unroll
  for (int j = 0; j < NORM_TILES; ++j) {
    const int tile = group + j * (NORM_THREADS / 8), i = 16 * tile;
    if (j * (NORM_THREADS / 8) >= tiles) break;
    if (delta && tile < tiles) {
      values[j] = {values[j].a + deltas[j].a, values[j].b + deltas[j].b};
      hidden[from + i] = values[j].a;
      hidden[from + i + 8] = values[j].b;
    }
    const float sum = squares_of_tile(values[j]);
    if (tile < tiles && c == 0) squares[tile] = to.squares[(long long)row * tiles + tile] = sum;
  }
  __syncthreads();
  const float mine = squares_of_lane([&](int t) { return squares[t]; }, tiles);
  const float norm = norm_of_row(mine, tiles, eps);
  if (!delta) power = power_of_two(norm);
#pragma unroll
  for (int j = 0; j < NORM_TILES; ++j) {
    const int tile = group + j * (NORM_THREADS / 8), i = 16 * tile;
    if (tile >= tiles) break;
    x[from + i] = before_norm(values[j].a, weight[c + i], power);
    x[from + i + 8] = before_norm(values[j].b, weight[c + i + 8], power);
  }
  if (threadIdx.x) return;
  to.norms[row] = norm;
  to.powers[row] = power;
  to.factors[row] = __fmul_rn(norm, inverse(power));
}

#define NORMS float *squares, float *norms, float *powers, float *factors
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    norm_float32(float* hidden, const float* delta, const float* weight, u16* x, NORMS, int width,
                 float eps) {
  norm_row(hidden, delta, weight, x, {squares, norms, powers, factors}, width, eps);
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    norm_float16(float* hidden, const u16* delta, const float* weight, u16* x, NORMS, int width,
                 float eps) {
  norm_row(hidden, delta, weight, x, {squares, norms, powers, factors}, width, eps);
}

// gathered: [ranks][words] of two float16; out = their sums in rank order, rounded once.
extern "C" __global__ void add_ranks(const u32* gathered, int ranks, long long words, u32* out) {
  may_start_next();
  wait_for_last();
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= words) return;
  float low = 0, high = 0;
  for (int r = 0; r < ranks; ++r) {
    const u32 word = gathered[r * words + i];
    low += to_float(word & 0xFFFF);
    high += to_float(word >> 16);
  }
  out[i] = finite_halves(low, high);
}
