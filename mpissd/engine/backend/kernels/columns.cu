// Brings x to the warps that multiply, some slots ahead.
constexpr int CLASS_BARRIERS = 5;  // and the next three; layers.cu has those before them
struct Place {
  int warp, lane;
  __device__ __forceinline__ int of_depth() const { return warp % CLASSES; }
  __device__ __forceinline__ int set() const { return warp / CLASSES; }
};

// A lane's part of x for one slot: row lane / 4 of each row tile, for the pairs of the warp's class.
typedef uint4 Columns[PARTS][ROW_TILES];

// Prefetches the columns of the next AHEAD slots. The warps of a class read the same ones, and each of them
// copies some pairs.
class ColumnsAhead {
 public:
  __device__ __forceinline__ ColumnsAhead(u32 memory, const Place& at)
      : memory_(memory + COLUMNS_AT + at.of_depth() * CLASS_BYTES + 16 * at.lane), at_(at) {}

  // Starts a product of so many units; each unit runs through the whole depth once.
  __device__ __forceinline__ void start(const Product& product, const Depth& depth, int units) {
    left_ = units * depth.slots;
    slot_ = place_ = free_ = 0;
#pragma unroll
    for (int i = 0; i < AHEAD - 1; ++i) fetch(product, depth);
  }

  // Returns the columns of the next slot, and starts the copy of those AHEAD - 1 slots later.
  __device__ __forceinline__ void take(Columns& x, const Product& product, const Depth& depth) {
    wait_for_copies<AHEAD - 2>();
    sync_team(CLASS_BARRIERS + at_.of_depth(), 32 * SETS);  // and the slot before has been read
    const u32 from = memory_ + place_ * X_BYTES;
#pragma unroll
    for (int i = 0; i < PARTS * ROW_TILES; ++i)
      x[i / ROW_TILES][i % ROW_TILES] = load_shared(from + 512 * i);
    if (++place_ == AHEAD) place_ = 0;
    fetch(product, depth);  // into the place that was read last
  }

 private:
  __device__ __forceinline__ void fetch(const Product& product, const Depth& depth) {
    const u32 to = memory_ + free_ * X_BYTES;
    if (left_ > 0) {
      const int first = at_.set() * (PARTS / SETS), pair = depth.start(slot_) + PARTS * at_.of_depth() + first;
#pragma unroll
      for (int i = 0; i < PARTS / SETS * ROW_TILES; ++i) {
        const int row = i % ROW_TILES * 8 + at_.lane / 4, mine = pair + i / ROW_TILES;
        const bool wanted = mine < depth.pairs && row < product.rows;
        const u16* from = product.x + (long long)row * product.x_step + 32 * mine +
                          8 * (at_.lane % 4);
        copy_own(to + 512 * (first * ROW_TILES + i), wanted ? from : product.x, wanted);
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
};
