// Brings x to the warps that multiply, some slots ahead.
struct Place {
  int warp, lane;
};

// A lane's part of x for one slot: row lane / 4 of each row tile, for the warp's two pairs.
typedef uint4 Columns[PARTS][ROW_TILES];

// Whether one of two float16 is not finite; of eight, whether one is not written yet (UNWRITTEN in layers.cu).
__device__ __forceinline__ u32 not_finite(u32 halves) { return ((halves & 0x7C007C00u) + 0x04000400u) & 0x80008000u; }
__device__ __forceinline__ bool lacks(const uint4& v) {
  return not_finite(v.x) | not_finite(v.y) | not_finite(v.z) | not_finite(v.w);
}

// Prefetches the columns of the next AHEAD slots into places that no other lane reads.
class ColumnsAhead {
 public:
  __device__ __forceinline__ ColumnsAhead(u32 memory, const Place& at)
      : memory_(memory + COLUMNS_AT + 16 * (32 * at.warp + at.lane)), at_(at) {}

  // Starts a product of so many units; each unit runs through the whole depth once.
  __device__ __forceinline__ void start(const Product& product, const Depth& depth, int units) {
    left_ = units * depth.slots;
    unseen_ = ORDERED && product.after < 0 ? depth.slots + AHEAD - 1 : 0;  // copies that may be too early
    slot_ = place_ = free_ = 0;
#pragma unroll
    for (int i = 0; i < AHEAD - 1; ++i) fetch(product, depth);
  }

  // Returns the columns of the next slot, and starts the copy of those AHEAD - 1 slots later.
  __device__ __forceinline__ void take(Columns& x, const Product& product, const Depth& depth, const Watch& watch) {
    wait_for_copies<AHEAD - 2>();
    const u32 from = memory_ + place_ * X_BYTES;
#pragma unroll
    for (int i = 0; i < PARTS * ROW_TILES; ++i)
      x[i / ROW_TILES][i % ROW_TILES] = load_shared(from + i * (16 * MULTIPLIERS));
    if (++place_ == AHEAD) place_ = 0;
    fetch(product, depth);  // into the place that was read last
    if (ORDERED && unseen_ > 0) see(x, product, depth, watch);
  }

 private:
  // Loads again what other blocks had not written when it was copied.
  __device__ __forceinline__ void see(Columns& x, const Product& product, const Depth& depth, const Watch& watch) {
    const int slot = (depth.slots + AHEAD - 1 - unseen_--) % depth.slots;
    const int pair = depth.start(slot) + PARTS * at_.warp;
    const u16* from = product.x + (long long)(at_.lane / 4) * product.x_step + 32 * pair + 8 * (at_.lane % 4);
    Patience patience(watch);
    bool whole = false;
    while (!whole && !patience.over()) {
      whole = true;
#pragma unroll
      for (int i = 0; i < PARTS * ROW_TILES; ++i) {
        uint4& part = x[i / ROW_TILES][i % ROW_TILES];
        if (!lacks(part)) continue;
        const long long place = (long long)(i % ROW_TILES * 8) * product.x_step + 32 * (i / ROW_TILES);
        part = load_relaxed((const uint4*)(from + place));
        whole = false;
      }
    }
    sync_lanes();
  }

  __device__ __forceinline__ void fetch(const Product& product, const Depth& depth) {
    const u32 to = memory_ + free_ * X_BYTES;
    if (left_ > 0) {
      const int pair = depth.start(slot_) + PARTS * at_.warp;
#pragma unroll
      for (int i = 0; i < PARTS * ROW_TILES; ++i) {
        const int row = i % ROW_TILES * 8 + at_.lane / 4, mine = pair + i / ROW_TILES;
        const bool wanted = mine < depth.pairs && row < product.rows;
        const u16* from = product.x + (long long)row * product.x_step + 32 * mine +
                          8 * (at_.lane % 4);
        copy_own(to + i * (16 * MULTIPLIERS), wanted ? from : product.x, wanted);
      }
      if (++slot_ == depth.slots) slot_ = 0;
      --left_;
    }
    end_of_copies();
    if (++free_ == AHEAD) free_ = 0;
  }
  u32 memory_;
  const Place& at_;
  int left_ = 0, slot_ = 0, place_ = 0, free_ = 0;
  int unseen_ = 0;
};
