// Computes consecutive products out = x @ weight in one kernel that stays on every multiprocessor.
//
// Weights do not depend on computed values, so one warp of each block (the reader) copies the
// block's share of all weights, product after product, through a ring in shared memory, at the
// memory's full rate. The other warps multiply what has arrived. Between two products they wait until all blocks
// have written (2.2 us on an H200); meanwhile the ring, 176 KiB a block, keeps the memory busy.
//
// A block owns some columns of each product, 16 at a time (a tile), and multiplies at most TILES
// tiles at once (a unit). Its warps share the depth: a slot of the ring holds 512 rows of a tile, of
// which each warp multiplies 64. So every lane reads only its own part of x, some slots ahead, and
// the warps' sums are added at the end of a unit.
//
// Weights are stored in the order in which lanes read them (pack in chain_plan.py): [tile][pair of 16
// rows][2][lane][8]. Lane 4 r + c of step h holds columns r and r + 8, rows 8 c + 4 h to 8 c + 4 h + 3
// of the pair's 32; so its share of x for both steps is 16 bytes, rows 8 c to 8 c + 7.
//
// Macros: ROW_TILES (of 8 rows of x); SLOTS of the ring; AHEAD, slots of x that are
// prefetched; TILES of a unit, as many as fit in 168 registers a thread, the limit with nine warps;
// FLYING, copies that a block has under way. More than needed to keep the memory busy would only
// queue, and delay the blocks' messages to each other (8B, one row: 3.34 ms with 6, 3.25 with 3).
__device__ void read_weights(const Product* products, int count, u32 memory) {
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

__device__ __forceinline__ void multiply_slot(float (&sums)[ROW_TILES][4], const Columns& x, u32 slot,
                                              int pairs, const Place& at) {
#pragma unroll
  for (int p = 0; p < 2; ++p)
    if (2 * at.warp + p < pairs) {
      const u32 from = slot + (2 * at.warp + p) * PAIR_BYTES + 16 * at.lane;
      const uint4 first = load_shared(from), second = load_shared(from + PAIR_BYTES / 2);
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) multiply_add(sums[m], first, x[p][m].x, x[p][m].y);
#pragma unroll
      for (int m = 0; m < ROW_TILES; ++m) multiply_add(sums[m], second, x[p][m].z, x[p][m].w);
    }
}

__device__ __forceinline__ void multiply_unit(Sums& sums, const Product& product, const Depth& depth,
                                              int tiles, ColumnsAhead& ahead, Ring& ring,
                                              const Place& at) {
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[t][m][j] = 0;
  for (int i = 0; i < depth.slots; ++i) {
    Columns x;
    ahead.take(x, product, depth);
    const int pairs = depth.pairs - depth.start(i);
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      if (t >= tiles) break;
      barrier_wait(ring.full(), ring.turn());
      multiply_slot(sums[t], x, ring.slot(), pairs, at);
      sync_lanes();
      if (at.lane == 0) barrier_arrive(ring.empty());
      ring.next();
    }
  }
}

// The place of a warp's sums of a tile: sum j of lane l is row 2 (l % 4) + j % 2 of x and column
// l / 4 + 8 (j / 2) of the tile.
__device__ __forceinline__ int word_of(int tile, int j, int lane) {
  return tile * TILE_WORDS + j / 2 * 65 + j % 2 * 32 + lane;
}

struct Both {
  float a, b;
};

// Adds the sums of all warps for two neighbouring columns in one row: tile lane / 8, columns
// 2 (lane % 8) and the next, row `warp`.
__device__ __forceinline__ Both sum_of_warps(const float* sums, const Place& at) {
  const int column = 2 * (at.lane % 8);
  const float* from = sums + word_of(at.lane / 8, column / 8 * 2 + at.warp % 2,
                                     column % 8 * 4 + at.warp / 2);
  Both both = {0, 0};
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    both.a += from[w * WARP_WORDS];
    both.b += from[w * WARP_WORDS + 4];
  }
  return both;
}

// Adds a round's sums: those of row tile r / GROUPS, and of ROUND tiles from r % GROUPS * ROUND on.
__device__ __forceinline__ void add_up(Both (&both)[ROUNDS], const Sums& sums, const Product& product,
                                       int tiles, const Place& at) {
  float* memory = (float*)(block_memory() + SUMS_AT);
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
    const int m = r / GROUPS, t = r % GROUPS * ROUND;
    both[r] = {0, 0};
    if (t < tiles && 8 * m < product.rows) {
      sync_some(MULTIPLIERS);  // wait until the sums of the round before were read
#pragma unroll
      for (int u = 0; u < ROUND; ++u)
        if (t + u < TILES && t + u < tiles)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            memory[at.warp * WARP_WORDS + word_of(u, j, at.lane)] = sums[t + u][m][j];
      sync_some(MULTIPLIERS);
      both[r] = sum_of_warps(memory, at);
    }
  }
}

// Adds up a unit's sums, over the ranks too if the product is summed, and writes them. All messages
// are sent before any is waited for.
__device__ __forceinline__ void finish_unit(const Sums& sums, const Product& product, int first,
                                            int tiles, u32 number, const Watch& watch,
                                            const Place& at) {
  const Peers& peers = *(const Peers*)(block_memory() + PEERS_AT);
  Both both[ROUNDS];
  add_up(both, sums, product, tiles, at);
  u32 words[ROUNDS];
#pragma unroll
  for (int pass = 0; pass < 2; ++pass)
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      const int row = r / GROUPS * 8 + at.warp, tile = r % GROUPS * ROUND + at.lane / 8;
      if (row >= product.rows || tile >= tiles) continue;
      const int column = 16 * (first + tile) + 2 * (at.lane % 8);
      const long long index = (long long)row * (8 * product.tiles) + column / 2;
      if (pass == 0) {
        words[r] = halves(both[r].a, both[r].b);
        if (product.exchange) send(peers, number + product.exchange, index, words[r]);
      } else {
        if (product.exchange)
          words[r] = sum_over_ranks(peers, number + product.exchange, index, words[r], watch);
        *(u32*)(product.out + (long long)row * product.out_step + column) = words[r];
      }
    }
}

__device__ __forceinline__ void wait_for_blocks(const u32* counter, u32 count, const Watch& watch) {
  if (threadIdx.x == 0) {
    Patience patience(watch);
    while ((int)(load_acquire(counter) - count) < 0 && !patience.over()) {
    }
  }
  sync_some(MULTIPLIERS);
}

// number: the number of exchanges before this chain.
__device__ __forceinline__ void multiply(const Product* products, int count, u32* finished, u32 goal,
                                         u32 number, const Watch& watch, u32 memory) {
  const Place at = {(int)threadIdx.x / 32, (int)threadIdx.x % 32};
  Ring ring(memory);
  ColumnsAhead ahead(memory, at);
  Sums sums;
  int seen = -1;
  Product product = products[0];
  for (int p = 0; p < count; ++p) {
    const Product next = products[min(p + 1, count - 1)];  // loaded early, before it is needed
    const Share share = share_of(product);
    const Depth depth(product);
    if (share.units && product.after > seen) {
      seen = product.after;
      wait_for_blocks(finished + seen, goal, watch);
    }
    if (share.units) ahead.start(product, depth, share.units);
    for (int unit = 0; unit < share.units; ++unit) {
      const int first = unit_start(share, unit), tiles = unit_start(share, unit + 1) - first;
      multiply_unit(sums, product, depth, tiles, ahead, ring, at);
      finish_unit(sums, product, first, tiles, number, watch, at);
    }
    if (product.awaited) {
      sync_some(MULTIPLIERS);
      if (threadIdx.x == 0) add_release(finished + p);
    }
    product = next;
  }
}

// finished[count + 1]: for each awaited product (the last always is), how many blocks have finished
// it, over all launches; then the number of launches.
extern "C" __global__ void __launch_bounds__(CHAIN_THREADS, 1)
    chain(const Product* products, int count, u32* finished, const Peers* everybody, int exchanges,
          int done_counts, int* stop, u64 limit) {
  const u32 memory = shared_address(block_memory());
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < SLOTS; ++slot) {
      barrier_make(memory + BARRIERS_AT + 8 * slot, 1);
      barrier_make(memory + BARRIERS_AT + 8 * (SLOTS + slot), WARPS);
    }
    barriers_made();
  }
  const u32 launches = finished[count], goal = (launches + 1) * gridDim.x;
  const Watch watch = {stop, limit};
  Peers* peers = (Peers*)(block_memory() + PEERS_AT);
  if (exchanges && threadIdx.x == 0) *peers = *everybody;
  const u32 number = exchanges ? everybody->done[0] : 0;
  sync_block();
  if (threadIdx.x >= MULTIPLIERS) {
    if (threadIdx.x == MULTIPLIERS) read_weights(products, count, memory);
  } else {
    multiply(products, count, finished, goal, number, watch, memory);
    if (blockIdx.x == 0) {  // all blocks have read `launches` and `done`, so they may change now
      wait_for_blocks(finished + count - 1, goal, watch);
      if (threadIdx.x == 0) finished[count] = launches + 1;
      if (exchanges)
        for (int i = threadIdx.x; i < done_counts; i += MULTIPLIERS)
          peers->done[i] = number + exchanges;
    }
  }
}
