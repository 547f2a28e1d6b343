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
      multiply_unit(sums, product, depth, tiles, ahead, ring, watch, at);
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
  if (threadIdx.x == 0) make_ring(memory);
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
