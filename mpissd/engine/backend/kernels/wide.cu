// out = x @ weight for many rows of x, with the bits of skinny.cu, by clusters of four blocks.
//
// A cluster computes some columns, in units of up to 4 TILES tiles, for ROW_TILES tiles of rows. Its block r has
// the depth of warps 2 r and 2 r + 1 of skinny.cu, so that four times as many columns share what a block reads of
// x. Of a block's eight multiplying warps each has every fourth tile and half of the rows. One more warp reads
// weights, one reads x: 16 bytes a lane, as a bulk copy of a row's 256 bytes takes 65 cycles to start (H200). At the
// end of a unit a warp sends its sums to the same warp of the other blocks: block r adds up row tile r of each half,
// in the order of the depth.
//
// Groups of rows that do not fit in a cluster are divided among neighbouring clusters, which find each other's
// weights in the cache. grid: any number of clusters; they share the tiles.
constexpr int WARPS = 8, MULTIPLIERS = 32 * WARPS, WIDE_THREADS = MULTIPLIERS + 64;
constexpr int PAIR_BYTES = 1024, CLUSTER = 4, COLUMN_SETS = 4, HALF = ROW_TILES / 2;
constexpr int STEP_PAIRS = 16, OWN_PAIRS = STEP_PAIRS / CLUSTER;  // OWN: of a block in a step
constexpr int TILE_BYTES = OWN_PAIRS * PAIR_BYTES, SLOT_BYTES = TILES * TILE_BYTES;
constexpr int ROW_BYTES = 64 * OWN_PAIRS;
constexpr int ODD_AT = 4 * ROW_TILES * ROW_BYTES + 64;  // odd rows use other banks than even ones
constexpr int STAGE_BYTES = 2 * ODD_AT;
constexpr int SENT_BYTES = 512, WARP_BYTES = (CLUSTER - 1) * TILES * SENT_BYTES;
constexpr int STAGES_AT = SLOTS * SLOT_BYTES, SENT_AT = STAGES_AT + STAGES * STAGE_BYTES;
constexpr int BARRIERS_AT = SENT_AT + WARPS * WARP_BYTES;
constexpr int WIDE_BYTES = BARRIERS_AT + 16 * (SLOTS + STAGES + WARPS);
static_assert(ROW_TILES % 2 == 0 && HALF <= CLUSTER, "a block adds up at most one row tile of each half");
// A warp waits only for slots of its set. That of the round before in the same place has to be full by then, or it
// would be taken for its own: all warps have read it, as the warp has x of a step, STAGES after the slot's.
static_assert(SLOTS >= COLUMN_SETS * STAGES, "a warp cannot tell its slot from one that it skipped");
static_assert(WIDE_BYTES <= 227 << 10, "more shared memory than a block can have");

// Places that are filled and emptied in turn, each with two barriers.
template <int COUNT>
class Places {
 public:
  __device__ __forceinline__ Places(u32 memory, u32 bytes, u32 barriers)
      : memory_(memory), bytes_(bytes), barriers_(barriers) {}
  __device__ __forceinline__ u32 place() const { return memory_ + place_ * bytes_; }
  __device__ __forceinline__ u32 full() const { return barriers_ + 16 * place_; }
  __device__ __forceinline__ u32 empty() const { return full() + 8; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full(), turn_); }
  __device__ __forceinline__ void wait_empty() const { barrier_wait(empty(), turn_ ^ 1); }
  __device__ __forceinline__ void make(u32 writers, u32 readers) const {
    for (int i = 0; i < COUNT; ++i) {
      barrier_make(barriers_ + 16 * i, writers);
      barrier_make(barriers_ + 16 * i + 8, readers);
    }
  }
  __device__ __forceinline__ void skip(int places) {
    place_ += places;
    if (place_ < COUNT) return;
    place_ -= COUNT;
    turn_ ^= 1;
  }

 private:
  u32 memory_, bytes_, barriers_, turn_ = 0;
  int place_ = 0;
};

struct Slots : Places<SLOTS> {
  __device__ __forceinline__ explicit Slots(u32 memory) : Places(memory, SLOT_BYTES, memory + BARRIERS_AT) {}
};
struct Stages : Places<STAGES> {
  __device__ __forceinline__ explicit Stages(u32 memory)
      : Places(memory + STAGES_AT, STAGE_BYTES, memory + BARRIERS_AT + 16 * SLOTS) {}
};
__device__ __forceinline__ u32 sums_there(u32 memory, int warp) {
  return memory + BARRIERS_AT + 16 * (SLOTS + STAGES + warp);
}
__device__ __forceinline__ u32 sums_read(u32 memory, int warp) { return sums_there(memory, warp) + 8; }

// By one thread.
__device__ __forceinline__ void make_places(u32 memory) {
  Slots(memory).make(1, 2);
  Stages(memory).make(32, WARPS);
  for (int warp = 0; warp < WARPS; ++warp) {
    barrier_make(sums_there(memory, warp), 1);
    barrier_make(sums_read(memory, warp), CLUSTER - 1);
  }
  barriers_made();
}

// What this block computes of a product: units of tiles from `first` on, for `rows` rows from first_row on.
struct Share {
  int rank, first, last, units, first_row, rows, steps, pairs;
  __device__ __forceinline__ Share(int all_rows, int tiles, int all_pairs) : rank(cluster_rank()), pairs(all_pairs) {
    const int groups = (all_rows + 8 * ROW_TILES - 1) / (8 * ROW_TILES);
    const int cluster = (int)blockIdx.x / CLUSTER, columns = (int)gridDim.x / CLUSTER / groups;
    const int mine = cluster / groups;
    first_row = cluster % groups * 8 * ROW_TILES;
    rows = min(all_rows - first_row, 8 * ROW_TILES);
    first = mine < columns ? (int)((long long)tiles * mine / columns) : 0;
    last = mine < columns ? (int)((long long)tiles * (mine + 1) / columns) : 0;
    units = (last - first + COLUMN_SETS * TILES - 1) / (COLUMN_SETS * TILES);
    steps = (pairs + STEP_PAIRS - 1) / STEP_PAIRS;
  }
  __device__ __forceinline__ int start(int unit) const { return first + (last - first) * unit / units; }
  __device__ __forceinline__ int pair(int step) const { return STEP_PAIRS * step + OWN_PAIRS * rank; }
  __device__ __forceinline__ int pairs_of(int step) const { return max(0, min(OWN_PAIRS, pairs - pair(step))); }
};

// The tiles of a unit of so many that a column set has.
__device__ __forceinline__ int tiles_of(int set, int tiles) { return (tiles - set + COLUMN_SETS - 1) / COLUMN_SETS; }

// By a warp, a lane a tile: one thread starts a bulk copy each 175 cycles (H200).
__device__ __forceinline__ void read_weights(const u16* weight, const Share& share, u32 memory) {
  Slots slots(memory);
  const u64 policy = read_once();
  const int lane = threadIdx.x % 32;
  const long long tile_step = (long long)share.pairs * (PAIR_BYTES / 2);
  for (int unit = 0; unit < share.units; ++unit) {
    const int first = share.start(unit), tiles = share.start(unit + 1) - first;
    const u16* of_unit = weight + (first + COLUMN_SETS * lane) * tile_step;
    for (int step = 0; step < share.steps; ++step) {
      const u32 bytes = share.pairs_of(step) * PAIR_BYTES;
      const u16* from = of_unit + share.pair(step) * (PAIR_BYTES / 2);
      for (int set = 0; set < min(COLUMN_SETS, tiles); ++set) {
        const int mine = tiles_of(set, tiles);
        slots.wait_empty();
        sync_lanes();
        if (lane == 0) barrier_arrive_expecting(slots.full(), mine * bytes);
        if (bytes && lane < mine) copy_in(slots.place() + lane * TILE_BYTES, from, bytes, slots.full(), policy);
        from += tile_step;
        slots.skip(1);
      }
    }
  }
}

// By a warp; 16 lanes have a row.
__device__ __forceinline__ void read_rows(const u16* x, long long x_step, const Share& share, u32 memory) {
  Stages stages(memory);
  constexpr int LANES = ROW_BYTES / 16;
  const int column = threadIdx.x % LANES, odd = threadIdx.x % 32 / LANES;
  for (int i = 0; i < share.units * share.steps; ++i) {
    const int step = i % share.steps;
    stages.wait_empty();
    if (column < 4 * share.pairs_of(step)) {
      const u16* from = x + (share.first_row + odd) * x_step + 32 * share.pair(step) + 8 * column;
      u32 to = stages.place() + odd * ODD_AT + 16 * column;
#pragma unroll 8
      for (int row = odd; row < share.rows; row += 2) {
        copy_own(to, from, true);
        from += 2 * x_step;
        to += ROW_BYTES;
      }
    }
    barrier_arrive_copied(stages.full());
    stages.skip(1);
  }
}

typedef float Sums[2][TILES][HALF][4];  // of both warps of skinny.cu

// The halves of a set are on two of the four schedulers, as some sets have a tile more than others.
struct Place {
  int warp, lane, half, set;
  __device__ __forceinline__ Place()
      : warp(threadIdx.x / 32), lane(threadIdx.x % 32), half(warp / COLUMN_SETS), set((warp + 2 * half) % COLUMN_SETS) {}
};

// Multiplies COUNT tiles; x: this lane's part of the first pair of row tile 0.
template <int COUNT>
__device__ __forceinline__ void multiply_pair(float (&sums)[TILES][HALF][4], u32 weights, u32 x) {
  uint4 rows[HALF];
#pragma unroll
  for (int m = 0; m < HALF; ++m) rows[m] = load_shared(x + 4 * m * ROW_BYTES);
#pragma unroll
  for (int t = 0; t < COUNT; ++t) {
    const u32 from = weights + t * TILE_BYTES;
    const uint4 a = load_shared(from), b = load_shared(from + PAIR_BYTES / 2);
#pragma unroll
    for (int m = 0; m < HALF; ++m) multiply_add(sums[t][m], a.x, a.y, a.z, a.w, rows[m].x, rows[m].y);
#pragma unroll
    for (int m = 0; m < HALF; ++m) multiply_add(sums[t][m], b.x, b.y, b.z, b.w, rows[m].z, rows[m].w);
  }
}

template <int COUNT>
__device__ __forceinline__ void multiply_tiles(Sums& sums, int pairs, int tiles, u32 weights, u32 x) {
  if constexpr (COUNT > 1) {
    if (tiles < COUNT) return multiply_tiles<COUNT - 1>(sums, pairs, tiles, weights, x);
  }
  if (pairs == OWN_PAIRS) {  // without a branch, so that the compiler moves loads ahead
#pragma unroll
    for (int p = 0; p < OWN_PAIRS; ++p) multiply_pair<COUNT>(sums[p / 2], weights + p * PAIR_BYTES, x + 64 * p);
  } else {
#pragma unroll
    for (int p = 0; p < OWN_PAIRS; ++p)
      if (p < pairs) multiply_pair<COUNT>(sums[p / 2], weights + p * PAIR_BYTES, x + 64 * p);
  }
}

__device__ __forceinline__ void multiply_step(Sums& sums, int pairs, int tiles, u32 slot, u32 stage, const Place& at) {
  const u32 x = stage + at.lane / 4 % 2 * ODD_AT + (4 * HALF * at.half + at.lane / 8) * ROW_BYTES + 16 * (at.lane % 4);
  multiply_tiles<TILES>(sums, pairs, tiles, slot + 16 * at.lane, x);
}

// Where the sums of a tile that block `from` sends to block `to` arrive, for this lane.
__device__ __forceinline__ u32 sent(u32 memory, int from, int to, int t, const Place& at) {
  const int place = (from - to - 1) & (CLUSTER - 1);
  return memory + SENT_AT + at.warp * WARP_BYTES + (place * TILES + t) * SENT_BYTES + 16 * at.lane;
}

// This block's sums of a tile and row tile m.
__device__ __forceinline__ void add_own(float (&own)[4], const Sums& sums, int t, int m) {
#pragma unroll
  for (int j = 0; j < 4; ++j) own[j] = sums[0][t][m][j] + sums[1][t][m][j];
}

// Sends a unit's sums: of this warp's half, row tile r to block r. A block without a row tile gets a word from all
// others too: so none is a unit ahead, and says twice that it has read.
__device__ __forceinline__ void send_unit(const Sums& sums, int tiles, int rank, u32 memory, const Place& at) {
#pragma unroll
  for (int block = 0; block < CLUSTER; ++block) {
    if (block == rank) continue;
    const Far there(sums_there(memory, at.warp), block);
#pragma unroll
    for (int t = 0; t < TILES; ++t)
      if (block < HALF ? t < tiles : t + at.lane == 0) {
        float own[4];
        add_own(own, sums, t, min(block, HALF - 1));
        send_sums(Far(sent(memory, rank, block, t, at), block), there, own);
      }
  }
  const u32 bytes = (CLUSTER - 1) * (rank < HALF ? tiles * SENT_BYTES : 16);
  if (at.lane == 0) barrier_arrive_expecting(sums_there(memory, at.warp), bytes);
}

// Adds up all blocks' sums of tile t. Sum j of a lane is column lane / 4 + 8 (j / 2) of the tile and row
// 2 (lane % 4) + j % 2 of the row tile.
__device__ __forceinline__ void add_blocks(float (&all)[4], const Sums& sums, int t, int rank, u32 memory,
                                           const Place& at) {
#pragma unroll
  for (int j = 0; j < 4; ++j) all[j] = 0;
#pragma unroll
  for (int block = 0; block < CLUSTER; ++block) {
    const bool is_own = block == rank;
    float own[4];
    add_own(own, sums, t, min(block, HALF - 1));
    const uint4 part = load_shared(sent(memory, is_own ? block + 1 : block, rank, t, at));
    const u32 words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) all[j] += is_own ? own[j] : __uint_as_float(words[j]);
  }
}

__device__ __forceinline__ void multiply_unit(Sums& sums, const Share& share, int tiles, Slots& slots, Stages& stages,
                                              const Place& at) {
  const int mine = tiles_of(at.set, tiles);
#pragma unroll
  for (int i = 0; i < 2 * TILES * HALF * 4; ++i) (&sums[0][0][0][0])[i] = 0;
  for (int step = 0; step < share.steps; ++step) {
    stages.wait_full();
    if (mine > 0) {
      Slots slot = slots;
      slot.skip(at.set);
      slot.wait_full();
      multiply_step(sums, share.pairs_of(step), mine, slot.place(), stages.place(), at);
      sync_lanes();
      if (at.lane == 0) barrier_arrive(slot.empty());
    }
    sync_lanes();
    if (at.lane == 0) barrier_arrive(stages.empty());
    stages.skip(1);
    slots.skip(min(COLUMN_SETS, tiles));
  }
}

template <class Out>
__device__ __forceinline__ void multiply_units(void* out, long long out_step, int columns, const float* factors,
                                               const Share& share, u32 memory) {
  const Place at;
  Slots slots(memory);
  Stages stages(memory);
  u32 turn = 0;  // of the sums' barriers
  for (int unit = 0; unit < share.units; ++unit) {
    const int first = share.start(unit), tiles = share.start(unit + 1) - first, mine = tiles_of(at.set, tiles);
    Sums sums;
    multiply_unit(sums, share, tiles, slots, stages, at);
    if (mine <= 0) continue;
    barrier_wait(sums_read(memory, at.warp), turn ^ 1);
    sync_lanes();  // none of them misses this phase
    send_unit(sums, mine, share.rank, memory, at);
    barrier_wait(sums_there(memory, at.warp), turn);
    const int row = 8 * (HALF * at.half + share.rank) + at.lane % 4 * 2;
    if (share.rank < HALF)
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        if (t >= mine) break;
        float all[4];
        add_blocks(all, sums, t, share.rank, memory, at);
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (row + i < share.rows)
            put_sums<Out>(out, out_step, share.first_row + row + i, first + at.set + COLUMN_SETS * t, at.lane / 4,
                          columns, factors, {all[i], all[i + 2]});
      }
    sync_lanes();
    if (at.lane < CLUSTER && at.lane != share.rank) barrier_arrive(Far(sums_read(memory, at.warp), at.lane));
    turn ^= 1;
  }
}

template <class Out>
__device__ __forceinline__ void wide(const u16* x, long long x_step, const u16* weight, int pairs, void* out,
                                     long long out_step, int rows, int columns, const float* factors, int tiles) {
  const u32 memory = shared_address(block_memory());
  const Share share(rows, tiles, pairs);
  may_start_next();
  if (threadIdx.x == 0) make_places(memory);
  sync_cluster();
  if (threadIdx.x / 32 == WARPS) {
    read_weights(weight, share, memory);
  } else {
    wait_for_last();
    if (threadIdx.x < MULTIPLIERS)
      multiply_units<Out>(out, out_step, columns, factors, share, memory);
    else
      read_rows(x, x_step, share, memory);
  }
  sync_cluster();  // no block leaves while others send to it
}

#define WIDE(name, Out)                                                                                     \
  extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(WIDE_THREADS, 1)             \
      name(const u16* x, long long x_step, const u16* weight, int pairs, void* out, long long out_step,     \
           int rows, int columns, const float* factors, int tiles) {                                        \
    wide<Out>(x, x_step, weight, pairs, out, out_step, rows, columns, factors, tiles);                      \
  }
WIDE(wide_float32, Float32)
WIDE(wide_float16, Float16)
WIDE(wide_gated, Gated)
