// Brings x to the warps that multiply, some slots ahead, in the order of depth of skinny.cu.
//
// Macro ARRIVE: with 1, x may not be there yet. Its places hold 0xFFFF until then, which no float16 is that
// a kernel stores (to_finite_half), so that the values themselves say that they have arrived, and nobody
// waits for a counter first. With 2, the parts of attention's splits do so as well, which are float32.
struct Place {
  int warp, lane;
};

// A lane's part of x for one slot: row lane / 4 of each row tile, for the warp's pairs.
typedef uint4 Columns[PARTS][ROW_TILES];

// Whether none of two float16 is 0xFFFF.
__device__ __forceinline__ bool arrived(u32 word) { return !((~word - 0x00010001u) & word & 0x80008000u); }
__device__ __forceinline__ bool arrived(const uint4& v) {
  return arrived(v.x) & arrived(v.y) & arrived(v.z) & arrived(v.w);
}

// Prefetches the columns of the next AHEAD slots into places that no other lane reads.
class ColumnsAhead {
 public:
  __device__ __forceinline__ ColumnsAhead(u32 memory, const Place& at, const Watch& watch)
      : memory_(memory + COLUMNS_AT + 16 * (32 * at.warp + at.lane)), at_(at), watch_(watch) {}

  // Starts a product of so many units; each unit runs through the whole depth once. wanted: bit m says
  // whether the lane's row of row tile m is read.
  __device__ __forceinline__ void start(const Product& product, const Depth& depth, int units, u32 wanted) {
    left_ = units * depth.slots;
    started_ = min(left_, AHEAD - 1);
    wanted_ = wanted;
    mine_ = product.x + (long long)(at_.lane / 4) * product.x_step + 32 * Depth::pair_of(at_.warp) +
            8 * (at_.lane % 4);
    slot_ = place_ = free_ = taken_ = 0;
#pragma unroll
    for (int i = 0; i < AHEAD - 1; ++i) fetch(product, depth);
  }

  // Waits until one value has arrived of each of up to 256 tiles of a row of x, from all who write it: looks
  // at all that is needed would delay weights. Lanes whose value is there look no more.
  __device__ __forceinline__ void probe(const Product& product, int row) const {
    const int tile = (at_.lane * WARPS + at_.warp) * (2 * product.pairs) / MULTIPLIERS;
    const u16* from = product.x + (long long)row * product.x_step + 16 * tile;
    Patience patience(watch_);
    while (!arrived(load_fresh(from)) && !patience.over()) poll_again();
    sync_lanes();
  }

  // Waits for the slots that were started; returns whether x has arrived in them.
  __device__ __forceinline__ bool there() const {
    wait_for_copies<0>();
    bool all = true;
    for (int i = 0; i < started_; ++i)
#pragma unroll
      for (int j = 0; j < PARTS * ROW_TILES; ++j)
        all &= arrived(load_shared(memory_ + i * (LANE_BYTES * MULTIPLIERS) + j * (16 * MULTIPLIERS)));
    return all;
  }

  // Returns the columns of the next slot, and starts the copy of those AHEAD - 1 slots later.
  __device__ __forceinline__ void take(Columns& x, const Product& product, const Depth& depth) {
    wait_for_copies<AHEAD - 2>();
    const u32 from = memory_ + place_ * (LANE_BYTES * MULTIPLIERS);
#pragma unroll
    for (int i = 0; i < PARTS * ROW_TILES; ++i)
      x[i / ROW_TILES][i % ROW_TILES] = load_shared(from + i * (16 * MULTIPLIERS));
    if (++place_ == AHEAD) place_ = 0;
    fetch(product, depth);  // into the place that was read last
    if (ARRIVE) {
      await(x, product, depth);
      if (++taken_ == depth.slots) taken_ = 0;
    }
  }

 private:
  __device__ __forceinline__ bool wanted(const Depth& depth, int pair, int p, int m) const {
    return pair + p * PAIR_STEP < depth.pairs && (wanted_ >> m & 1);
  }
  __device__ __forceinline__ const u16* part(const Product& product, int first, int p, int m) const {
    return mine_ + 32 * first + 8 * m * (long long)product.x_step + 32 * p * PAIR_STEP;
  }

  // Loads what has not arrived again and again.
  __device__ __forceinline__ void await(Columns& x, const Product& product, const Depth& depth) const {
    const int first = depth.start(taken_), pair = first + Depth::pair_of(at_.warp);
    Patience patience(watch_);
#pragma unroll
    for (int i = 0; i < PARTS * ROW_TILES; ++i) {
      const int m = i % ROW_TILES, p = i / ROW_TILES;
      while (!arrived(x[p][m]) && wanted(depth, pair, p, m) && !patience.over()) {
        poll_again();
        x[p][m] = load_fresh(part(product, first, p, m));
      }
    }
    sync_lanes();
  }

  __device__ __forceinline__ void fetch(const Product& product, const Depth& depth) {
    const u32 to = memory_ + free_ * (LANE_BYTES * MULTIPLIERS);
    if (left_ > 0) {
      const int first = depth.start(slot_), pair = first + Depth::pair_of(at_.warp);
#pragma unroll
      for (int i = 0; i < PARTS * ROW_TILES; ++i) {
        const int m = i % ROW_TILES, p = i / ROW_TILES;
        const bool is_wanted = wanted(depth, pair, p, m);
        copy_own(to + i * (16 * MULTIPLIERS), is_wanted ? part(product, first, p, m) : product.x, is_wanted);
      }
      if (++slot_ == depth.slots) slot_ = 0;
      --left_;
    }
    end_of_copies();
    if (++free_ == AHEAD) free_ = 0;
  }

  u32 memory_;
  const u16* mine_;  // the lane's part of the first row tile
  const Place& at_;
  const Watch& watch_;
  u32 wanted_ = 0;
  int left_ = 0, started_ = 0, slot_ = 0, place_ = 0, free_ = 0, taken_ = 0;
};
