// A chunk of a prompt: many consecutive positions of one slot, with products by cuBLAS.
//
// Behind attention.cu, whose macros, cache and `rotate` it shares. A row's numbers depend on its own
// query and on the positions before it alone: tiles of TILE_POSITIONS from position 0 on, in rising
// order, with one online softmax a row.
constexpr int TILE_POSITIONS = 64, CHUNK_THREADS = 128, CHUNK_STEP = HEAD + 8;
static_assert(2 * CHUNK_STEP == VALUE_STEP, "add_values reads this layout");
constexpr int CHUNK_TILE = TILE_POSITIONS * CHUNK_STEP;  // elements of a tile of keys, or of values

// host: slot, first position, rows of the chunk; further rows are padding. Also brings the page table.
extern "C" __global__ void begin_chunk(const int* host, int most_rows, int* seats, const int* pages,
                                       int* table, int words) {
  may_start_next();
  wait_for_last();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < words) table[i] = pages[i];
  if (i >= most_rows) return;
  seats[i] = i < host[2] ? host[0] : -1;
  seats[most_rows + i] = seats[3 * most_rows + i] = host[1] + i;
  seats[2 * most_rows + i] = -1;
}

// From the order of skinny.cu to rows of outputs, [columns][depth]. A tile's first 8 columns go to
// `left`, the others to `right`, each `step` columns from tile to tile.
extern "C" __global__ void unpack_rows(const uint4* packed, long long lanes, int pairs, u16* left,
                                       u16* right, int left_columns, int right_columns, int step) {
  may_start_next();
  wait_for_last();
  packed += blockIdx.y * lanes * 2;
  left += blockIdx.y * (left_columns + right_columns) * (32LL * pairs);
  right += blockIdx.y * (left_columns + right_columns) * (32LL * pairs);
  const long long all = (long long)gridDim.x * blockDim.x, depth = 32LL * pairs;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < lanes; i += all) {
    const int lane = i % 32, pair = i / 32 % pairs, column = (int)(i / 32 / pairs) * step + lane / 4;
    const uint4 a = packed[i / 32 * 64 + lane], b = packed[i / 32 * 64 + 32 + lane];
    const long long to = column * depth + 32 * pair + 8 * (lane % 4);
    if (column < left_columns) *(uint4*)(left + to) = make_uint4(a.x, a.z, b.x, b.z);
    if (column < right_columns) *(uint4*)(right + to) = make_uint4(a.y, a.w, b.y, b.w);
  }
}

__device__ __forceinline__ u32 silu_times(u32 gate, u32 up) {
  const float a = to_float(gate & 0xFFFF), b = to_float(gate >> 16);
  return finite_halves(a / (1.0f + exp2_of(-1.44269504f * a)) * to_float(up & 0xFFFF),
                b / (1.0f + exp2_of(-1.44269504f * b)) * to_float(up >> 16));
}

// both [rows][2 width]: gate, then up. A thread writes 8 of inner's values [rows][width].
extern "C" __global__ void swiglu_chunk(const uint4* both, uint4* inner, int words, long long count) {
  may_start_next();
  wait_for_last();
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const uint4 g = both[i / words * 2 * words + i % words], u = both[(i / words * 2 + 1) * words + i % words];
  inner[i] = make_uint4(silu_times(g.x, u.x), silu_times(g.y, u.y), silu_times(g.z, u.z),
                        silu_times(g.w, u.w));
}

// Starts the copies of a tile's keys and values to `at`, keys first.
__device__ __forceinline__ void copy_tile(u32 at, const Cache& cache, int slot, int head, int tile) {
  const long long from = cache.in_page(slot, head, tile * TILE_POSITIONS);
#pragma unroll 4
  for (int i = threadIdx.x; i < TILE_POSITIONS * BLOCKS; i += CHUNK_THREADS) {
    const int row = i / BLOCKS, word = i % BLOCKS;
    const u32 to = at + 2 * (row * CHUNK_STEP + 8 * word);
    copy_own(to, cache.keys + from + row * HEAD + 8 * word, true);
    copy_own(to + 2 * CHUNK_TILE, cache.values + from + row * HEAD + 8 * word, true);
  }
  end_of_copies();
}

typedef float Scores[TILE_POSITIONS / 8][4];

__device__ __forceinline__ void score_tile(Scores& scores, const u32 (&query)[HEAD / 16][4], u32 keys) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < TILE_POSITIONS / 8; ++t) {
#pragma unroll
    for (int n = 0; n < 4; ++n) scores[t][n] = 0;
    const u32 row = keys + 2 * ((8 * t + lane % 8) * CHUNK_STEP + 8 * (lane / 8));
#pragma unroll
    for (int j = 0; j < HEAD / 16; j += 2) {
      const uint4 k = load_blocks(row + 32 * j);
      multiply_add(scores[t], query[j][0], query[j][1], query[j][2], query[j][3], k.x, k.y);
      multiply_add(scores[t], query[j + 1][0], query[j + 1][1], query[j + 1][2], query[j + 1][3], k.z, k.w);
    }
  }
}

// Turns the scores of rows l / 4 (half 0) or l / 4 + 8 (half 1) into weights; returns by how much the
// sums so far shrink. seen: the positions of this tile that the row sees.
__device__ __forceinline__ float weigh_tile(Scores& scores, int half, int seen, float& most, float& sum) {
  const float2 here = weigh(scores, half, seen, most);
  const float by = exp2_of(most - here.x);
  most = here.x;
  sum = sum * by + here.y;
  return by;
}

// queries, out: [rows][heads][HEAD]. grid (blocks of 64 rows, heads); a warp has 16 rows. The chunk
// begins at a multiple of TILE_POSITIONS, so that every row sees a position of each of its tiles.
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
    attend_chunk(const u16* queries, const int* seats, int most_rows, CACHE, int heads, u16* out) {
  const Rows rows(seats, most_rows);
  const Cache cache = THE_CACHE;
  may_start_next();
  wait_for_last();
  const int block = gridDim.x - 1 - blockIdx.x, first = block * TILE_POSITIONS, slot = rows.slots[first];
  if (slot < 0) return;
  const int head = blockIdx.y, kv_head = head / (heads / cache.kv_heads);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = first + 16 * warp + lane / 4;
  const int position = rows.positions[first] + 16 * warp + lane / 4;
  const int last_tile = rows.positions[first] / TILE_POSITIONS;
  const u32 memory = shared_address(block_memory());
  const u16* from = queries + ((long long)row * heads + head) * HEAD + 2 * (lane % 4);
  const long long down = 8LL * heads * HEAD;  // to the row 8 below
  u32 query[HEAD / 16][4];
#pragma unroll
  for (int j = 0; j < HEAD / 16; ++j) {
    query[j][0] = *(const u32*)(from + 16 * j);
    query[j][1] = *(const u32*)(from + down + 16 * j);
    query[j][2] = *(const u32*)(from + 16 * j + 8);
    query[j][3] = *(const u32*)(from + down + 16 * j + 8);
  }
  float sums[BLOCKS][4] = {}, most[2] = {NONE, NONE}, sum[2] = {0, 0};
  copy_tile(memory, cache, slot, kv_head, 0);
  for (int tile = 0; tile <= last_tile; ++tile) {
    const u32 here = memory + tile % 2 * 4 * CHUNK_TILE, next = memory + (tile + 1) % 2 * 4 * CHUNK_TILE;
    if (tile < last_tile) {
      copy_tile(next, cache, slot, kv_head, tile + 1);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    Scores scores;
    score_tile(scores, query, here);
    const int seen = position + 1 - tile * TILE_POSITIONS;
    const float by[2] = {weigh_tile(scores, 0, seen, most[0], sum[0]),
                         weigh_tile(scores, 1, seen + 8, most[1], sum[1])};
#pragma unroll
    for (int d = 0; d < BLOCKS; ++d)
#pragma unroll
      for (int n = 0; n < 4; ++n) sums[d][n] *= by[n / 2];
    add_values(sums, scores, here + 2 * CHUNK_TILE);
    __syncthreads();  // the tile after the next takes this one's place
  }
  u16* to = out + ((long long)row * heads + head) * HEAD + 2 * (lane % 4);
#pragma unroll
  for (int d = 0; d < BLOCKS; ++d) {
    *(u32*)(to + 8 * d) = finite_halves(sums[d][0] / sum[0], sums[d][1] / sum[0]);
    *(u32*)(to + down + 8 * d) = finite_halves(sums[d][2] / sum[1], sums[d][3] / sum[1]);
  }
}
