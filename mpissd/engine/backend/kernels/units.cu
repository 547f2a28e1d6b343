// What the persistent kernels share (chain.cu, whole.cu): a warp that reads all weights ahead, products
// of a few tiles of columns, and the wait for all blocks. The layout of weights: chain.cu.
__device__ __forceinline__ void make_ring(u32 memory) {
  for (int slot = 0; slot < SLOTS; ++slot) {
    barrier_make(memory + BARRIERS_AT + 8 * slot, 1);
    barrier_make(memory + BARRIERS_AT + 8 * (SLOTS + slot), WARPS);
  }
  barriers_made();
}

template <class Table>
__device__ void read_weights(const Table* products, int count, u32 memory) {
  Ring ring(memory), arriving(memory);
  int flying = 0;
  const u64 policy = read_once();
  Product product = products[0];
  for (int p = 0; p < count; ++p) {
    const Product next = products[min(p + 1, count - 1)];  // loaded early, before it is needed
    const Share share = share_of(product);
    const Depth depth(product);
    for (int unit = 0; unit < share.units; ++unit) {
      const int tile = unit_start(share, unit), stop = unit_start(share, unit + 1);
      for (int i = 0; i < depth.slots; ++i) {
        const int pair = depth.start(i), pairs = min(SLOT_PAIRS, depth.pairs - pair);
        for (int t = tile; t < stop; ++t) {
          const u16* from = product.weight + ((long long)t * product.pairs + pair) * (PAIR_BYTES / 2);
          if (++flying > FLYING) {
            barrier_wait(arriving.full(), arriving.turn());
            arriving.next();
          }
          barrier_wait(ring.empty(), ring.turn() ^ 1);
          barrier_arrive_expecting(ring.full(), pairs * PAIR_BYTES);
          copy_in(ring.slot(), from, pairs * PAIR_BYTES, ring.full(), policy);
          ring.next();
        }
      }
    }
    product = next;
  }
}

typedef float Sums[TILES][ROW_TILES][4];

// A lane's part of a slot's weights: the two steps of each of its warp's pairs.
typedef uint4 Part[PARTS][2];

__device__ __forceinline__ bool has_pair(int p, int pairs, const Place& at) {
  return PARTS * at.warp + p < pairs;
}

__device__ __forceinline__ void load_part(Part& part, int p, u32 slot, const Place& at) {
  const u32 from = slot + (PARTS * at.warp + p) * PAIR_BYTES + 16 * at.lane;
  part[p][0] = load_shared(from);
  part[p][1] = load_shared(from + PAIR_BYTES / 2);
}

__device__ __forceinline__ void multiply_pair(float (&sums)[ROW_TILES][4], const Columns& x,
                                              const Part& part, int p) {
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) multiply_add(sums[m], part[p][0], x[p][m].x, x[p][m].y);
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) multiply_add(sums[m], part[p][1], x[p][m].z, x[p][m].w);
}

__device__ __forceinline__ void set_zero(Sums& sums) {
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[t][m][j] = 0;
}

__device__ __forceinline__ void multiply_unit(Sums& sums, const Product& product, const Depth& depth,
                                              int tiles, ColumnsAhead& ahead, Ring& ring,
                                              const Watch& watch, const Place& at) {
  set_zero(sums);
  for (int i = 0; i < depth.slots; ++i) {
    Columns x;
    ahead.take(x, product, depth, watch);
    const int pairs = depth.pairs - depth.start(i);
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      if (t >= tiles) break;
      barrier_wait(ring.full(), ring.turn());
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
        if (has_pair(p, pairs, at)) {
          Part part;
          load_part(part, p, ring.slot(), at);
          multiply_pair(sums[t], x, part, p);
        }
      sync_lanes();
      if (at.lane == 0) barrier_arrive(ring.empty());
      ring.next();
    }
  }
}

// The place of a warp's sums of a tile: sum j of lane l is row 2 (l % 4) + j % 2 of x and column
// l / 4 + 8 (j / 2) of the tile.
__device__ __forceinline__ int word_of(int tile, int j, int lane) {
  return tile * TILE_WORDS + j / 2 * HALF_WORDS + j % 2 * 32 + lane;
}

// Adds the sums of all warps for two columns of tile lane / 8 in row `warp`: 2 (lane % 8) and the next,
// or if ORDERED lane % 8 and that 8 behind it.
__device__ __forceinline__ Both sum_of_warps(const float* sums, const Place& at) {
  const int column = ORDERED ? at.lane % 8 : 2 * (at.lane % 8);
  const float* from = sums + word_of(at.lane / 8, column / 8 * 2 + at.warp % 2,
                                     column % 8 * 4 + at.warp / 2);
  Both both = {0, 0};
  constexpr int NEXT = ORDERED ? HALF_WORDS : 4;  // to the other column
#pragma unroll
  for (int w = 0; w < WARPS * WARP_WORDS; w += 2 * WARP_WORDS) {  // two by two, as a block of wide.cu has two
    both.a += from[w] + from[w + WARP_WORDS];
    both.b += from[w + NEXT] + from[w + WARP_WORDS + NEXT];
  }
  return both;
}

// Where the sums of a round lie in shared memory.
__device__ __forceinline__ float* round_sums(int r) {
  return (float*)(block_memory() + SUMS_AT + r % SHARED_ROUNDS * ROUND_BYTES);
}

// Brings a round's sums to shared memory: those of row tile r / GROUPS, and of ROUND tiles from
// r % GROUPS * ROUND on.
__device__ __forceinline__ void share_round(const Sums& sums, int r, int tiles, const Place& at) {
  float* memory = round_sums(r) + at.warp * WARP_WORDS;
  const int m = r / GROUPS, t = r % GROUPS * ROUND;
#pragma unroll
  for (int u = 0; u < ROUND; ++u)
    if (t + u < TILES && t + u < tiles)
#pragma unroll
      for (int j = 0; j < 4; ++j) memory[word_of(u, j, at.lane)] = sums[t + u][m][j];
}

// Adds each round's sums.
__device__ __forceinline__ void add_up(Both (&both)[ROUNDS], const Sums& sums, const Product& product,
                                       int tiles, const Place& at) {
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
    both[r] = {0, 0};
    if (r % GROUPS * ROUND < tiles && r / GROUPS * 8 < product.rows) {
      sync_some(MULTIPLIERS);  // wait until the sums of the round before were read
      share_round(sums, r, tiles, at);
      sync_some(MULTIPLIERS);
      both[r] = sum_of_warps(round_sums(r), at);
    }
  }
}

// Waits until `count` blocks have counted.
__device__ __forceinline__ void wait_for_blocks(const u32* counter, u32 count, const Watch& watch) {
  if (threadIdx.x == 0) {
    Patience patience(watch);
    while ((int)(load_relaxed(counter) - count) < 0 && !patience.over()) {
    }
    load_acquire(counter);
  }
  sync_some(MULTIPLIERS);
}
