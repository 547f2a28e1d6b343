// The chain's table of products (chain_plan.py), its division among blocks, and the layout of a
// block's shared memory.
//
// Macro ORDERED: with 1 (whole.cu), all blocks begin at depth 0, so that a sum is added in the order of skinny.cu;
// a thread then adds up columns c and c + 8 of a tile; and x itself says where it is not written, if after < 0. SHARED_ROUNDS: rounds whose sums lie in shared memory at once.
#ifndef ORDERED
#define ORDERED 0
#endif
#ifndef SHARED_ROUNDS
#define SHARED_ROUNDS 1
#endif
#ifndef TEAM_BYTES  // that other work needs in the place of x and the sums
#define TEAM_BYTES 0
#endif
constexpr int WARPS = 8, MULTIPLIERS = 32 * WARPS, CHAIN_THREADS = MULTIPLIERS + 32;
constexpr int PAIR_BYTES = 1024, SLOT_PAIRS = 16, SLOT_BYTES = SLOT_PAIRS * PAIR_BYTES;
constexpr int ROUND = 4;                            // tiles whose sums are added at once
constexpr int HALF_WORDS = ORDERED ? 64 : 65;       // 64 sums of 8 columns
constexpr int TILE_WORDS = ORDERED ? 129 : 130;     // 128 sums, padded against bank conflicts
constexpr int PARTS = SLOT_PAIRS / WARPS;           // a warp's pairs of a slot
constexpr int WARP_WORDS = ROUND * TILE_WORDS;
constexpr int GROUPS = (TILES + ROUND - 1) / ROUND, ROUNDS = ROW_TILES * GROUPS;
constexpr int LANE_BYTES = PARTS * ROW_TILES * 16;  // bytes of x for one slot
constexpr int X_BYTES = LANE_BYTES * MULTIPLIERS, ROUND_BYTES = 4 * WARPS * WARP_WORDS;
constexpr int COLUMNS_AT = SLOTS * SLOT_BYTES;
constexpr int SUMS_AT = COLUMNS_AT + AHEAD * X_BYTES;
constexpr int SUMS_END = SUMS_AT + SHARED_ROUNDS * ROUND_BYTES, TEAM_END = COLUMNS_AT + TEAM_BYTES;
constexpr int BARRIERS_AT = SUMS_END > TEAM_END ? SUMS_END : TEAM_END;
constexpr int FACTORS_BARRIERS = BARRIERS_AT + 2 * SLOTS * 8, PEERS_AT = FACTORS_BARRIERS + 2 * 8 * ORDERED;
constexpr int CHAIN_BYTES = PEERS_AT + (int)sizeof(Peers);
static_assert(FLYING <= SLOTS, "a block cannot wait for a slot that was not filled");
static_assert(CHAIN_BYTES <= 227 << 10, "more shared memory than a block can have");

struct Product {
  const u16* weight;
  const u16* x;
  u16* out;
  int x_step, out_step;  // elements from row to row
  int rows, pairs, tiles;
  int after;        // the product that all blocks must have finished before this one; or -1
  int awaited;      // whether some product waits for this one
  int exchange;     // n: out is the n-th sum over the ranks, if there are several; 0: it is not summed
  int group_tiles;  // tiles of its group: products with the same x, divided as one
  int before;       // tiles of the group before this product's
};

struct Share {  // the part of a product that one block computes
  int first, last;  // tiles
  int units;
};

__device__ __forceinline__ Share share_of(const Product& product) {
  const int blocks = gridDim.x, block = blockIdx.x;
  Share s;
  s.first = min(product.tiles, max(0, product.group_tiles * block / blocks - product.before));
  s.last = min(product.tiles, max(0, product.group_tiles * (block + 1) / blocks - product.before));
  s.units = (s.last - s.first + TILES - 1) / TILES;
  return s;
}

__device__ __forceinline__ int unit_start(const Share& share, int unit) {
  return share.first + (share.last - share.first) * unit / share.units;
}

// The depth in slots. Unless ORDERED, blocks start at different ones and so read different parts of x.
struct Depth {
  int pairs = 0, slots = 0, first = 0;
  __device__ __forceinline__ Depth() {}
  __device__ __forceinline__ explicit Depth(const Product& product)
      : pairs(product.pairs), slots((pairs + SLOT_PAIRS - 1) / SLOT_PAIRS),
        first(ORDERED ? 0 : blockIdx.x % slots) {}
  __device__ __forceinline__ int start(int i) const {  // the first pair of slot i
    int slot = first + i;
    return SLOT_PAIRS * (slot < slots ? slot : slot - slots);
  }
};

class Ring {
 public:
  __device__ __forceinline__ explicit Ring(u32 memory) : memory_(memory) {}
  __device__ __forceinline__ u32 slot() const { return memory_ + slot_ * SLOT_BYTES; }
  __device__ __forceinline__ u32 full() const { return memory_ + BARRIERS_AT + 8 * slot_; }
  __device__ __forceinline__ u32 empty() const { return full() + 8 * SLOTS; }
  __device__ __forceinline__ u32 turn() const { return turn_; }
  __device__ __forceinline__ void next() {
    if (++slot_ == SLOTS) {
      slot_ = 0;
      turn_ ^= 1;
    }
  }

 private:
  u32 memory_, slot_ = 0, turn_ = 0;
};
