// out = x @ weight for a few rows of x, in float32 sums whose order never depends on the rows.
//
// The weight is in the order of chain.cu: [tile of 16 columns][pair of 16 rows][2][lane][8]. A block
// has TILES tiles of columns and ROW_TILES tiles of 8 rows. Of each 16 pairs of the depth, warp w
// multiplies 2 w and the next, in rising order, and the block adds the sums of its warps two by two, the pairs in
// rising order; so each output is the same sum for any number of rows, any row, and any TILES and ROW_TILES.
//
// Every lane copies its own part of the weights and of x into STAGES places in shared memory, which
// no other lane reads: nothing waits but for its own copies. Weights do not depend on what kernels
// before this one compute, so their first copies start before it waits for them.
//
// grid: (blocks of columns) x (groups of 8 ROW_TILES rows), the groups of one block side by side,
// so that they find the weights in the cache.
constexpr int SKINNY_WARPS = 8, SKINNY_THREADS = 32 * SKINNY_WARPS;
constexpr int PAIR_BYTES = 1024;
constexpr int TILE_BYTES = 32 * SKINNY_THREADS;  // the warps' pairs of one tile
constexpr int ROWS_BYTES = 16 * SKINNY_THREADS;  // the warps' parts of one tile of rows
constexpr int STAGE_BYTES = TILES * TILE_BYTES + ROW_TILES * ROWS_BYTES;
constexpr int SKINNY_BYTES = STAGES * STAGE_BYTES;
constexpr int SUM_WORDS = TILES * ROW_TILES * 128;  // the sums of a warp
static_assert(SUM_WORDS * SKINNY_WARPS * 4 <= SKINNY_BYTES, "the sums take the place of the stages");

struct Depth {  // this warp's pairs
  const u16* weight;
  const u16* x;
  long long tile_step, x_step;  // elements
  int pairs, rows;
  u32 memory;
  int warp, lane;

  __device__ __forceinline__ int pair(int i) const { return i / 2 * (2 * SKINNY_WARPS) + 2 * warp + i % 2; }

  __device__ __forceinline__ void copy_weights(int i, int place) const {
    const bool wanted = pair(i) < pairs;
    const u16* from = weight + (long long)(wanted ? pair(i) : 0) * (PAIR_BYTES / 2) + 8 * lane;
    const u32 to = memory + place * STAGE_BYTES + 16 * (32 * warp + lane);
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      copy_own(to + t * TILE_BYTES, from + t * tile_step, wanted);
      copy_own(to + t * TILE_BYTES + TILE_BYTES / 2, from + t * tile_step + PAIR_BYTES / 4, wanted);
    }
  }

  __device__ __forceinline__ void copy_rows(int i, int place) const {
    const u32 to = memory + place * STAGE_BYTES + TILES * TILE_BYTES + 16 * (32 * warp + lane);
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      const int row = 8 * m + lane / 4;
      const bool wanted = pair(i) < pairs && row < rows;
      const u16* from = x + (wanted ? row * x_step + 32 * pair(i) + 8 * (lane % 4) : 0);
      copy_own(to + m * ROWS_BYTES, from, wanted);
    }
  }
};

typedef float Sums[TILES][ROW_TILES][4];

__device__ __forceinline__ void multiply_stage(Sums& sums, const Depth& depth, int place) {
  const u32 from = depth.memory + place * STAGE_BYTES + 16 * (32 * depth.warp + depth.lane);
  uint4 x[ROW_TILES];
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) x[m] = load_shared(from + TILES * TILE_BYTES + m * ROWS_BYTES);
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    const uint4 a = load_shared(from + t * TILE_BYTES);
    const uint4 b = load_shared(from + t * TILE_BYTES + TILE_BYTES / 2);
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
      multiply_add(sums[t][m], a.x, a.y, a.z, a.w, x[m].x, x[m].y);
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
      multiply_add(sums[t][m], b.x, b.y, b.z, b.w, x[m].z, x[m].w);
  }
}

__device__ __forceinline__ void multiply(Sums& sums, const Depth& depth) {
  const int steps = 2 * ((depth.pairs + 2 * SKINNY_WARPS - 1) / (2 * SKINNY_WARPS));
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) depth.copy_weights(i, i);
  wait_for_last();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    depth.copy_rows(i, i);
    end_of_copies();  // the first group holds all weights copied so far
  }
  int place = 0, free = STAGES - 1;
  for (int i = 0; i < steps; ++i) {
    wait_for_copies<STAGES - 2>();
    if (i + STAGES - 1 < steps) {
      depth.copy_weights(i + STAGES - 1, free);
      depth.copy_rows(i + STAGES - 1, free);
    }
    end_of_copies();
    multiply_stage(sums, depth, place);
    if (++place == STAGES) place = 0;
    if (++free == STAGES) free = 0;
  }
  wait_for_copies<0>();
}

// The sums of all warps for columns c and c + 8 of a tile, and a row of a row tile. Sum j of lane l is column
// l / 4 + 8 (j / 2) of the tile, row 2 (l % 4) + j % 2 of the row tile.
__device__ __forceinline__ Both sum_of_warps(const float* words, int tile, int m, int row, int c) {
  const float* from = words + (tile * ROW_TILES + m) * 128 + 32 * (row % 2) + 4 * c + row / 2;
  Both sum = {0, 0};
#pragma unroll
  for (int w = 0; w < SKINNY_WARPS * SUM_WORDS; w += 2 * SUM_WORDS) {
    sum.a += from[w] + from[w + SUM_WORDS];
    sum.b += from[w + 64] + from[w + SUM_WORDS + 64];
  }
  return sum;
}

// factors: of each row of x, see arithmetic.cu; null: 1.
template <class Out>
__device__ __forceinline__ void skinny(const u16* x, long long x_step, const u16* weight, int pairs,
                                       void* out, long long out_step, int rows,
                                       int columns, const float* factors) {
  const int groups = (rows + 8 * ROW_TILES - 1) / (8 * ROW_TILES);
  const int first_row = (int)blockIdx.x % groups * 8 * ROW_TILES;
  const int first = (int)blockIdx.x / groups * TILES;
  may_start_next();
  Depth depth;
  depth.tile_step = (long long)pairs * (PAIR_BYTES / 2);
  depth.weight = weight + first * depth.tile_step;
  depth.x = x + first_row * x_step;
  depth.x_step = x_step;
  depth.pairs = pairs;
  depth.rows = min(rows - first_row, 8 * ROW_TILES);
  depth.memory = shared_address(block_memory());
  depth.warp = threadIdx.x / 32;
  depth.lane = threadIdx.x % 32;
  Sums sums;
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[t][m][j] = 0;
  multiply(sums, depth);
  __syncthreads();
  float* words = (float*)block_memory();
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[depth.warp * SUM_WORDS + (t * ROW_TILES + m) * 128 + 32 * j + depth.lane] = sums[t][m][j];
  __syncthreads();
  for (int i = threadIdx.x; i < depth.rows * TILES * 8; i += SKINNY_THREADS) {
    const int row = i / (TILES * 8), tile = i / 8 % TILES, c = i % 8;
    put_sums<Out>(out, out_step, first_row + row, first + tile, c, columns, factors,
                  sum_of_warps(words, tile, row / 8, row % 8, c));
  }
}

#define SKINNY(name, Out)                                                                          \
  extern "C" __global__ void __launch_bounds__(SKINNY_THREADS)                                      \
      name(const u16* x, long long x_step, const u16* weight, int pairs, void* out,                 \
           long long out_step, int rows, int columns, const float* factors) {                       \
    skinny<Out>(x, x_step, weight, pairs, out, out_step, rows, columns, factors);                   \
  }
SKINNY(skinny_float32, Float32)
SKINNY(skinny_float16, Float16)
SKINNY(skinny_gated, Gated)
