// The separate kernels with the bits of whole.cu: RMSNorm in two parts (arithmetic.cu), and columns of q,
// k and v in the order of whole.cu's weights. They compute what one kernel does not: more rows than Whole.suits.
constexpr int NORM_THREADS = 512, NORM_TILES = 16;  // tiles a thread: rows of up to 16384

// What norms keep of each row: the squares of its tiles, 1 / rms, the power of two of x, and the factor
// of the sums over x.
struct Norms {
  float *squares, *norms, *powers, *factors;
};

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
  const float norm = norm_of_row(squares_of_lane([&](int t) { return squares[t]; }, tiles), tiles, eps);
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

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    late_norm_float32(float* hidden, const float* delta, const float* weight, u16* x, float* squares,
                      float* norms, float* powers, float* factors, int width, float eps,
                      u32* counters, int counter_words) {
  norm_row(hidden, delta, weight, x, squares, norms, powers, factors, width, eps, counters,
           counter_words);
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    late_norm_float16(float* hidden, const u16* delta, const float* weight, u16* x, float* squares,
                      float* norms, float* powers, float* factors, int width, float eps,
                      u32* counters, int counter_words) {
  norm_row(hidden, delta, weight, x, squares, norms, powers, factors, width, eps, counters,
           counter_words);
}

// Where the sums of a product over such x go (skinny.cu): each is multiplied by its row's factor.
struct Scaled {
  void* out;
  const float* factors;  // of the block's first row on
  __device__ __forceinline__ float by(int m, int row) const { return factors[8 * m + row]; }
};

struct ScaledFloat32 {
  static constexpr int WIDTH = 16;
  static __device__ __forceinline__ void put(void* to, long long at, const float* words, int tile,
                                             int m, int row, int column) {
    const Scaled& scaled = *(const Scaled*)to;
    ((float*)scaled.out)[at] = __fmul_rn(sum_of_warps(words, tile, m, row, column), scaled.by(m, row));
  }
};

struct ScaledGated {
  static constexpr int WIDTH = 8;
  static __device__ __forceinline__ void put(void* to, long long at, const float* words, int tile,
                                             int m, int row, int column) {
    const Scaled& scaled = *(const Scaled*)to;
    const float by = scaled.by(m, row);
    const float gate = __fmul_rn(sum_of_warps(words, tile, m, row, column), by);
    const float up = __fmul_rn(sum_of_warps(words, tile, m, row, column + 8), by);
    ((u16*)scaled.out)[at] = gated(gate, up);
  }
};

extern "C" __global__ void __launch_bounds__(SKINNY_THREADS)
    late_float32(const u16* x, long long x_step, const u16* weight, int pairs, void* out,
                 long long out_step, int rows, int columns, const float* factors) {
  Scaled to = {out, factors + first_row_of(rows)};
  skinny<ScaledFloat32>(x, x_step, weight, pairs, &to, out_step, rows, columns);
}

extern "C" __global__ void __launch_bounds__(SKINNY_THREADS)
    late_gated(const u16* x, long long x_step, const u16* weight, int pairs, void* out,
               long long out_step, int rows, int columns, const float* factors) {
  Scaled to = {out, factors + first_row_of(rows)};
  skinny<ScaledGated>(x, x_step, weight, pairs, &to, out_step, rows, columns);
}

// As `keep` of rows.cu, for such x.
extern "C" __global__ void late_keep(const u16* x, const float* factors, const int* seats, int most,
                                     int positions, int width, u16* states) {
  may_start_next();
  wait_for_last();
  const int m = blockIdx.x, slot = seats[m], position = seats[most + m] + 1;
  if (slot < 0 || seats[2 * most + m] >= 0 || position >= positions) return;
  u16* to = states + ((long long)slot * positions + position) * width;
  for (int c = threadIdx.x; c < width; c += blockDim.x)
    to[c] = to_finite_half(__fmul_rn(to_float(x[(long long)m * width + c]), factors[m]));
}
