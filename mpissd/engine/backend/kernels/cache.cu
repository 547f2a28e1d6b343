// The paged cache and the places of a forward's rows, as kernels read them.
//
// Macros: HEAD (head_dim, a multiple of 32), PAGE (positions of a page, a multiple of SPLIT),
// QUERY_TILES (of 16 query rows in a task).
constexpr int SPLIT = 128;  // positions of a split of the attention

constexpr int SPAN = 1 << 20;  // as in forwards.py: a lane plus n SPAN also stores in the n lanes after it

// Where rows of a forward lie: a slot (-1: padding), a position, a lane (-1: none) and its trunk.
struct Rows {
  const int *slots, *positions, *lanes, *trunks;
  __device__ __forceinline__ Rows(const int* seats, int most_rows)
      : slots(seats), positions(seats + most_rows), lanes(seats + 2 * most_rows),
        trunks(seats + 3 * most_rows) {}
};

// One layer's cache: pages [page][kv head][PAGE][HEAD], lanes [lane][kv head][step][HEAD].
struct Cache {
  u16 *keys, *values, *lane_keys, *lane_values;
  const int* table;  // [slot][most_pages]
  int most_pages, kv_heads, steps;

  __device__ __forceinline__ long long in_page(int slot, int head, int position) const {
    const int page = max(0, table[slot * most_pages + position / PAGE]);
    return (((long long)page * kv_heads + head) * PAGE + position % PAGE) * HEAD;
  }
  __device__ __forceinline__ void store(u16* to, int lane, float low, float high) const {
    for (int n = max(lane, 0) / SPAN; n >= 0; --n, to += (long long)kv_heads * steps * HEAD) {
      to[0] = to_finite_half(low);
      to[HEAD / 2] = to_finite_half(high);
    }
  }
  __device__ __forceinline__ long long in_lane(int lane, int head, int step) const {
    return (((long long)(lane % SPAN) * kv_heads + head) * steps + step) * HEAD;
  }
};

// A task: query rows from `first` on of `rows` rows from row `row` on, which have one slot and see
// the same cache; the split; and whether row `row` (then alone) also sees its lane's scratch.
struct Task {
  int row, rows_and_own, first, split;
  __device__ __forceinline__ int rows() const { return rows_and_own >> 1; }
  __device__ __forceinline__ bool own() const { return rows_and_own & 1; }
};
