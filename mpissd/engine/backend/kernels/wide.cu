// out = x @ weight for many rows of x, with the bits of skinny.cu, by clusters of four blocks.
//
// A cluster computes some columns, units of up to 4 TILES tiles, for ROW_TILES tiles of rows. Its block r has
// the depth of warp r of skinny.cu, so that four times as many columns share what a block reads of x. Of a
// block's eight multiplying warps each has every fourth tile and half of the rows. One more warp reads weights,
// two read x: 16 bytes a thread, as a bulk copy of a row's 256 bytes takes some 65 cycles to start (H200). At the end of a unit a warp sends its sums to the same warp of the other blocks: block r adds up row
// tile r of each four, in the order of the depth.
//
// grid: any number of clusters; they share the tiles. Groups of rows that do not fit in a cluster are divided
// among neighbouring clusters, which find each other's weights in the cache.
constexpr int CLUSTER = 4, COLUMN_SETS = 4, WIDE_WARPS = 2 * COLUMN_SETS, READERS = 2;
constexpr int WIDE_THREADS = 32 * (WIDE_WARPS + 1 + READERS);  // READERS: warps that read x
constexpr int HALF = ROW_TILES / 2, ROUNDS = (HALF + CLUSTER - 1) / CLUSTER;  // ROUNDS: of sending sums
constexpr int PAIR_BYTES = 1024, STEP_PAIRS = 16, OWN_PAIRS = STEP_PAIRS / CLUSTER;  // OWN: of a block in a step
constexpr int TILE_BYTES = OWN_PAIRS * PAIR_BYTES, SLOT_BYTES = TILES * TILE_BYTES;
constexpr int ROW_BYTES = 64 * OWN_PAIRS;
constexpr int ODD_AT = 4 * ROW_TILES * ROW_BYTES + 64;  // odd rows use other banks than even ones
constexpr int STAGE_BYTES = 2 * ODD_AT;
constexpr int SENT_BYTES = 512, WARP_BYTES = (CLUSTER - 1) * TILES * SENT_BYTES;
constexpr int STAGES_AT = SLOTS * SLOT_BYTES, SENT_AT = STAGES_AT + STAGES * STAGE_BYTES;
constexpr int BARRIERS_AT = SENT_AT + WIDE_WARPS * WARP_BYTES;
constexpr int WIDE_BYTES = BARRIERS_AT + 8 * 2 * (SLOTS + STAGES + WIDE_WARPS);
static_assert(ROW_TILES % 2 == 0, "both halves have as many tiles");
static_assert(SLOTS >= 2 * COLUMN_SETS, "a warp cannot tell its slot from one that it skipped a round before");
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

// What this block computes: units of tiles from `first` on, for `rows` rows from first_row on.
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

// By the first TILES lanes of a warp: one after another a thread starts a bulk copy each 175 cycles (H200).
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
        if (lane == 0) barrier_arrive_expecting(slots.full(), mine * bytes);
        if (bytes && lane < mine) copy_in(slots.place() + lane * TILE_BYTES, from, bytes, slots.full(), policy);
        from += tile_step;
        slots.skip(1);
      }
    }
  }
}

// By some warps: thread t of them has 16 bytes of a row, and every so many rows.
__device__ __forceinline__ void read_rows(const u16* x, long long x_step, const Share& share, u32 memory) {
  Stages stages(memory);
  constexpr int COLUMNS = ROW_BYTES / 16, ROWS = 32 * READERS / COLUMNS;
  const int thread = (int)threadIdx.x - 32 * (WIDE_WARPS + 1), column = thread % COLUMNS, first = thread / COLUMNS;
  wait_for_last();
  for (int i = 0; i < share.units * share.steps; ++i) {
    const int step = i % share.steps;
    stages.wait_empty();
    if (column < 4 * share.pairs_of(step)) {
      const u16* from = x + (share.first_row + first) * x_step + 32 * share.pair(step) + 8 * column;
      u32 to = stages.place() + first % 2 * ODD_AT + first / 2 * ROW_BYTES + 16 * column;
      static_assert(ROWS % 2 == 0, "a thread's rows are all even or all odd");
#pragma unroll 8
      for (int row = first; row < share.rows; row += ROWS) {
        copy_own(to, from, true);
        from += ROWS * x_step;
        to += ROWS / 2 * ROW_BYTES;
      }
    }
    barrier_arrive_copied(stages.full());
    stages.skip(1);
  }
}

typedef float Sums[TILES][HALF][4];

struct WideWarp {
  int warp, lane, set, half;
  __device__ __forceinline__ explicit WideWarp(int thread)
      : warp(thread / 32), lane(thread % 32), set(warp % COLUMN_SETS), half(warp / COLUMN_SETS) {}
};

__device__ __forceinline__ void multiply_step(Sums& sums, int pairs, int tiles, u32 slot, u32 stage,
                                              const WideWarp& at) {
  const u32 rows = stage + at.lane / 4 % 2 * ODD_AT + (4 * HALF * at.half + at.lane / 8) * ROW_BYTES +
                   16 * (at.lane % 4);
#pragma unroll
  for (int p = 0; p < OWN_PAIRS; ++p) {
    if (p >= pairs) break;
    uint4 x[HALF];
#pragma unroll
    for (int m = 0; m < HALF; ++m) x[m] = load_shared(rows + 4 * m * ROW_BYTES + 64 * p);
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      if (t >= tiles) break;
      const u32 from = slot + t * TILE_BYTES + p * PAIR_BYTES + 16 * at.lane;
      const uint4 a = load_shared(from), b = load_shared(from + PAIR_BYTES / 2);
#pragma unroll
      for (int m = 0; m < HALF; ++m) multiply_add(sums[t][m], a.x, a.y, a.z, a.w, x[m].x, x[m].y);
#pragma unroll
      for (int m = 0; m < HALF; ++m) multiply_add(sums[t][m], b.x, b.y, b.z, b.w, x[m].z, x[m].w);
    }
  }
}

// Where the sums of a tile that block `from` sends to block `to` arrive, for this lane.
__device__ __forceinline__ u32 sent(u32 memory, int from, int to, int t, const WideWarp& at) {
  const int place = (from - to - 1) & (CLUSTER - 1);
  return memory + SENT_AT + at.warp * WARP_BYTES + (place * TILES + t) * SENT_BYTES + 16 * at.lane;
}

// Adds up row tile CLUSTER * round + rank of this warp's half over the blocks, and passes them on. A block without
// such a tile gets a word from all others too: so none is a round ahead, and says twice that it has read.
template <class Out>
__device__ __forceinline__ void finish_round(const Sums& sums, int round, int tiles, u32 turn, const Share& share,
                                             u32 memory, const WideWarp& at, const Out& out) {
  const int mine = CLUSTER * round + share.rank;
  barrier_wait(sums_read(memory, at.warp), turn ^ 1);
#pragma unroll
  for (int block = 0; block < CLUSTER; ++block) {
    const int m = CLUSTER * round + block;
    if (block == share.rank) continue;
    const Far there(sums_there(memory, at.warp), block);
#pragma unroll
    for (int t = 0; t < TILES; ++t)
      if (m < HALF ? t < tiles : t + at.lane == 0)
        send_sums(Far(sent(memory, share.rank, block, t, at), block), there, sums[t][m < HALF ? m : 0]);
  }
  const u32 bytes = (CLUSTER - 1) * (mine < HALF ? tiles * SENT_BYTES : 16);
  if (at.lane == 0) barrier_arrive_expecting(sums_there(memory, at.warp), bytes);
  barrier_wait(sums_there(memory, at.warp), turn);
  if (mine < HALF)
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      if (t >= tiles) break;
      float all[4] = {0, 0, 0, 0};
#pragma unroll
      for (int block = 0; block < CLUSTER; ++block) {
        const int m = CLUSTER * round + block;
        const bool is_own = block == share.rank;
        const uint4 part = load_shared(sent(memory, is_own ? block + 1 : block, share.rank, t, at));
        const u32 words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
          all[j] += is_own && m < HALF ? sums[t][m < HALF ? m : 0][j] : __uint_as_float(words[j]);
      }
      out(t, mine, all);
    }
  sync_lanes();
  if (at.lane < CLUSTER && at.lane != share.rank) barrier_arrive(Far(sums_read(memory, at.warp), at.lane));
}

template <class Out>
__device__ __forceinline__ void multiply_units(void* out, long long out_step, int columns, const float* factors,
                                               const Share& share, u32 memory) {
  const WideWarp at(threadIdx.x);
  Slots slots(memory);
  Stages stages(memory);
  u32 turn = 0;  // of the sums' barriers
  wait_for_last();
  if (!share.units) cluster_wait();
  for (int unit = 0; unit < share.units; ++unit) {
    const int first = share.start(unit), tiles = share.start(unit + 1) - first, mine = tiles_of(at.set, tiles);
    const int sets = min(COLUMN_SETS, tiles);
    Sums sums;
#pragma unroll
    for (int i = 0; i < TILES * HALF * 4; ++i) sums[i / (4 * HALF)][i / 4 % HALF][i % 4] = 0;
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
      if (at.lane == 0) barrier_arrive(stages.empty());
      stages.skip(1);
      slots.skip(sets);
    }
    if (unit == 0) cluster_wait();  // until the barriers of the others are made
    if (mine <= 0) continue;
    const auto store = [&](int t, int m, const float (&all)[4]) {
      const int tile = first + at.set + COLUMN_SETS * t;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * (HALF * at.half + m) + at.lane % 4 * 2 + i;
        if (row < share.rows)
          put_sums<Out>(out, out_step, share.first_row + row, tile, at.lane / 4, columns, factors,
                        {all[i], all[i + 2]});
      }
    };
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      finish_round(sums, round, mine, turn, share, memory, at, store);
      turn ^= 1;
    }
  }
}

template <class Out>
__device__ __forceinline__ void wide(const u16* x, long long x_step, const u16* weight, int pairs, void* out,
                                     long long out_step, int rows, int columns, const float* factors, int tiles) {
  const u32 memory = shared_address(block_memory());
  const Share share(rows, tiles, pairs);
  may_start_next();
  if (threadIdx.x == 0) {
    Slots(memory).make(1, 2);
    Stages(memory).make(32 * READERS, WIDE_WARPS);
    for (int warp = 0; warp < WIDE_WARPS; ++warp) {
      barrier_make(sums_there(memory, warp), 1);
      barrier_make(sums_read(memory, warp), CLUSTER - 1);
    }
    barriers_made();
  }
  sync_block();
  cluster_arrive();
  const int warp = threadIdx.x / 32;
  if (warp < WIDE_WARPS)
    multiply_units<Out>(out, out_step, columns, factors, share, memory);
  else if (warp > WIDE_WARPS)
    read_rows(x, x_step, share, memory);
  else if (threadIdx.x % 32 < TILES)
    read_weights(weight, share, memory);
  if (warp >= WIDE_WARPS) cluster_wait();
  cluster_arrive();
  cluster_wait();  // no block leaves while others send to it
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
