// The table of a forward's operations (megakernel.py), and the products of whole.cu: a block owns some columns of
// each; the epilogue of q, k, v rotates and stores K and V, that of o and down adds to the residual stream and
// prepares the next norm (arithmetic.cu), that of gate and up is SwiGLU.
//
// Macro SHARDED: o and down are sums over ranks (inbox.cu), each rank with its share of the depth.
#ifndef SHARDED
#define SHARDED 0
#endif
enum Kind { QKV, ATTEND, ADD, GATED, LOGITS };

struct Operation : Product {  // an attention has no tiles
  const float* vector;        // QKV: the bias or null; ADD: the weight of the norm that follows
  int kind, layer;
  int columns;  // of `out`
  int norm;     // which of the two norms x was last through (0: attention's or the head's, 1: the FFN's)
  u64 padding;  // to whole 16 bytes, as fetch_operation copies
};

struct Model {
  float* hidden;          // [rows][width]
  float* squares;         // [2 norms][norm_rows][width / 16]
  const float* powers;    // [rows], of the first x
  u16 *x, *other_x, *inner;  // what products write and the next ones read as they arrive; see UNWRITTEN
  Cache cache;            // of layer 0
  const int* seats;
  const float2* turns;
  Attended attention;
  u16* queries;
  const int* task_count;
  const Task* tasks;
  u32 *finished, *merged;  // blocks by operation; tasks by layer
  long long page_layer, lane_layer;  // elements of the cache from layer to layer
  int most_rows, width;
  int inner_width;
  int norm_rows;  // of squares
  u32 exchanges;  // of the inboxes before this forward
  float eps, scale;
};

// Where a row's K and V go: elements from a layer's first, and from KV head to KV head.
struct Seat {
  long long at;
  int position, head_step;
  int fresh;  // what the row sees below this position was there before this forward
  int lane;  // -1: none, -2: a padding row
};

// TEAMS: that attend tasks in a block. HELPERS: warps beside those that multiply and the one that reads weights.
constexpr int WHOLE_THREADS = CHAIN_THREADS + 32 * HELPERS;
constexpr int MODEL_AT = (CHAIN_BYTES + 15) / 16 * 16;
constexpr int SEATS_AT = MODEL_AT + (int)sizeof(Model);
constexpr int OPERATIONS_AT = (SEATS_AT + 8 * ROW_TILES * (int)sizeof(Seat) + 15) / 16 * 16;
constexpr int FACTORS_AT = OPERATIONS_AT + 2 * (int)sizeof(Operation);
constexpr int POWERS_AT = FACTORS_AT + 8 * ROW_TILES * 4;
constexpr int POSITIONS_AT = POWERS_AT + 8 * ROW_TILES * 4;  // of rows
constexpr int KEPT = 16, ITEM_BYTES = 48;                     // of attention, see whole.cu
constexpr int ITEMS_AT = POSITIONS_AT + 8 * ROW_TILES * 4;
constexpr int WHOLE_BYTES = ITEMS_AT + TEAMS * KEPT * ITEM_BYTES;
constexpr int MODEL_WORDS = sizeof(Model) / 4;
static_assert(TEAMS * ATTEND_THREADS <= MULTIPLIERS, "a team has 128 threads");
static_assert(TEAMS * ATTEND_BYTES <= TEAM_BYTES, "attention's shared memory");
static_assert(WHOLE_BYTES <= SHARED_BYTES, "more shared memory than the launch gives");

__device__ __forceinline__ const Model& the_model() { return *(const Model*)(block_memory() + MODEL_AT); }
__device__ __forceinline__ Peers& the_peers() { return *(Peers*)(block_memory() + PEERS_AT); }
__device__ __forceinline__ const Seat& seat_of(int row) {
  return ((const Seat*)(block_memory() + SEATS_AT))[row];
}
__device__ __forceinline__ Operation& operation(int number) {
  return ((Operation*)(block_memory() + OPERATIONS_AT))[number % 2];
}

__device__ __forceinline__ Seat found_seat(const Model& model, int row, int count) {
  const Rows rows(model.seats, model.most_rows);
  const Cache& cache = model.cache;
  const int slot = rows.slots[row], lane = rows.lanes[row], position = rows.positions[row];
  int fresh = 1 << 30;
  for (int r = 0; r < count; ++r)
    if (rows.slots[r] == slot && (rows.lanes[r] < 0 || rows.lanes[r] == lane))
      fresh = min(fresh, rows.positions[r]);
  if (slot < 0) return {0, 0, 0, 0, -2};
  if (lane < 0) return {cache.in_page(slot, 0, position), position, PAGE * HEAD, fresh, -1};
  return {cache.in_lane(lane, 0, position - rows.trunks[row]), position, cache.steps * HEAD, fresh, lane};
}

// What a lane brings to the epilogue of ADD for a pair of columns.
struct Brought {
  Both hidden, weight;
};

// The factor of a row's sums, and the power of two in the next x of that row; see bring_factors.
__device__ __forceinline__ float& factor_of(int row) { return ((float*)(block_memory() + FACTORS_AT))[row]; }
__device__ __forceinline__ float& power_of(int row) { return ((float*)(block_memory() + POWERS_AT))[row]; }

// Where a pair of sums goes: a row, and columns 16 tile + c and 8 behind it. mine: whether it exists.
struct Spot {
  int row, tile, c;
  bool mine;
  __device__ __forceinline__ long long in(int width) const { return (long long)row * width + 16 * tile + c; }
};

// The barriers of a product's factors: that they are there, and that the product is over.
__device__ __forceinline__ u32 factors_there() { return shared_address(block_memory()) + FACTORS_BARRIERS; }
__device__ __forceinline__ u32 factors_used() { return factors_there() + 8; }

// Values that are not written yet: float16 that are not finite, and sums of squares below 0. A reader loads them until
// they are there, which is faster than to count blocks: a fence, the count and its reader's fence fall away. They are
// marked again while the layer attends, between the waits of all blocks before and after it.
constexpr u32 UNWRITTEN = 0xFFFFFFFFu, UNWRITTEN_SQUARES = 0xFF7FFFFFu;

__device__ __forceinline__ void mark_unwritten(const Model& model, int rows) {
  const auto mark = [&](void* memory, long long words, u32 word) {
    for (long long i = blockIdx.x * MULTIPLIERS + threadIdx.x; i < words; i += gridDim.x * MULTIPLIERS)
      ((u32*)memory)[i] = word;
  };
  const long long words = (long long)rows * model.width / 2, tiles = (long long)rows * (model.width / 16);
  mark(model.x, words, UNWRITTEN);
  mark(model.other_x, words, UNWRITTEN);
  mark(model.inner, (long long)rows * model.inner_width / 2, UNWRITTEN);
  mark(model.squares, tiles, UNWRITTEN_SQUARES);
  mark(model.squares + (long long)model.norm_rows * (model.width / 16), tiles, UNWRITTEN_SQUARES);
}

// Brings the factors of a product after a norm; each of the HELPERS has some rows, FEW of which are under way together.
__device__ __forceinline__ void bring_factors(const Operation& op, const Model& model, const Watch& watch,
                                              const Place& at) {
  constexpr int FEW = 3;
  const int tiles = model.width / 16, first = op.norm * model.norm_rows;
#pragma unroll 1
  for (int start = at.warp; start < op.rows; start += HELPERS * FEW) {
    float squares[FEW];
    const auto row = [&](int i) { return min(start + HELPERS * i, op.rows - 1); };
    Patience patience(watch);
    bool whole = false;
    while (!whole && !patience.over()) {
      squares_of_lane(squares, tiles, [&](int i, int tile) {
        return __uint_as_float(load_relaxed((const u32*)model.squares + (long long)(first + row(i)) * tiles + tile));
      });
      whole = true;
#pragma unroll
      for (int i = 0; i < FEW; ++i) whole = whole && !(squares[i] < 0);
    }
    sync_lanes();
#pragma unroll
    for (int i = 0; i < FEW; ++i) {
      const float norm = norm_of_row(squares[i], tiles, model.eps);
      if (at.lane || start + HELPERS * i >= op.rows) continue;
      factor_of(row(i)) = __fmul_rn(norm, inverse(power_of(row(i))));
      power_of(row(i)) = power_of_two(norm);
    }
  }
}

// The thread that adds to these columns after attention does so after the FFN, too: o and down have equal tiles.
__device__ __forceinline__ void bring_hidden(Brought& brought, const Operation& op, const Spot& spot) {
  const Model& model = the_model();
  if (op.kind != ADD || !spot.mine) return;
  const float* hidden = model.hidden + spot.in(model.width);
  const float* weight = op.vector + 16 * spot.tile + spot.c;
  brought.hidden = {load_fresh_one(hidden), load_fresh_one(hidden + 8)};
  brought.weight = {weight[0], weight[8]};
}

__device__ __forceinline__ void store_qkv(const Operation& op, const Spot& spot, Both v) {
  const Model& model = the_model();
  const Seat& seat = seat_of(spot.row);
  if (seat.lane < -1) return;
  const int head = spot.tile / (HEAD / 16), i = spot.tile % (HEAD / 16) * 8 + spot.c;
  const int heads = model.attention.heads, kv_heads = model.cache.kv_heads;
  if (op.vector) {
    const float* bias = op.vector + head * HEAD + i;
    v = {__fadd_rn(v.a, bias[0]), __fadd_rn(v.b, bias[HEAD / 2])};
  }
  if (head < heads + kv_heads) v = turned(v, model.turns[(long long)seat.position * (HEAD / 2) + i]);
  u16* to = model.queries + ((long long)spot.row * heads + head) * HEAD + i;
  const int lane = head < heads ? -1 : seat.lane;
  if (head < heads) {
    v = {__fmul_rn(v.a, model.scale), __fmul_rn(v.b, model.scale)};
  } else {
    const bool is_key = head < heads + kv_heads;
    const Cache& cache = model.cache;
    u16* pages = is_key ? cache.keys : cache.values;
    u16* lanes = is_key ? cache.lane_keys : cache.lane_values;
    to = (lane < 0 ? pages + op.layer * model.page_layer : lanes + op.layer * model.lane_layer) +
         seat.at + (long long)((head - heads) % kv_heads) * seat.head_step + i;
  }
  model.cache.store(to, lane, v.a, v.b);
}

__device__ __forceinline__ void store_added(const Operation& op, const Spot& spot, const Brought& brought,
                                            float power, const Both& sum) {
  const Model& model = the_model();
  Both v = {0, 0};
  if (spot.mine) {
    v = {__fadd_rn(brought.hidden.a, sum.a), __fadd_rn(brought.hidden.b, sum.b)};
    const long long to = spot.in(model.width);
    model.hidden[to] = v.a;
    model.hidden[to + 8] = v.b;
    op.out[to] = before_norm(v.a, brought.weight.a, power);
    op.out[to + 8] = before_norm(v.b, brought.weight.b, power);
  }
  const float squares = squares_of_tile(v);
  if (!spot.mine || spot.c) return;
  const int next = (1 - op.norm) * model.norm_rows + spot.row;
  model.squares[(long long)next * (model.width / 16) + spot.tile] = squares;
}

__device__ __forceinline__ void store_round(const Operation& op, const Spot& spot, const Brought& brought,
                                            float by, const Both& sum) {
  if (op.kind == ADD) return store_added(op, spot, brought, by, sum);
  if (!spot.mine) return;
  const Both v = {__fmul_rn(sum.a, by), __fmul_rn(sum.b, by)};
  if (op.kind == QKV) {
    store_qkv(op, spot, v);
  } else if (op.kind == GATED) {
    const int column = 8 * spot.tile + spot.c;
    if (column < op.columns) op.out[(long long)spot.row * op.out_step + column] = gated(v.a, v.b);
  } else {
    float* to = (float*)op.out + spot.in(op.out_step);
    if (16 * spot.tile + spot.c < op.columns) to[0] = v.a;
    if (16 * spot.tile + spot.c + 8 < op.columns) to[8] = v.b;
  }
}

// Waits for the factors of this product; turn: the phase of their barrier.
__device__ __forceinline__ void wait_for_factors(u32& turn) {
  barrier_wait(factors_there(), turn);
  turn ^= 1;
}

__device__ __forceinline__ Spot spot_of(const Product& product, int r, int first, int tiles, const Place& at) {
  const int row = r / GROUPS * 8 + at.warp, tile = first + r % GROUPS * ROUND + at.lane / 8;
  return {row, tile, at.lane % 8, row < product.rows && tile < first + tiles};
}

// Columns c and c + 8 of a tile, as the words of two neighbouring columns that the kernel `exchange` sends, and back:
// a lane of even c has c and c + 1, the next lane c + 8 and c + 9.
__device__ __forceinline__ Both swapped(const Both& v, int c) {
  const float other = __shfl_xor_sync(0xFFFFFFFFu, c % 2 ? v.a : v.b, 1);
  return c % 2 ? Both{other, v.b} : Both{v.a, other};
}

// Adds some rounds' sums over the ranks, in float16. All words are sent before any is waited for.
__device__ __forceinline__ void add_ranks(Both (&found)[SHARED_ROUNDS], const Operation& op, int start, int first,
                                          int tiles, const Watch& watch, const Place& at) {
  const Peers& peers = the_peers();
  const u32 number = the_model().exchanges + op.exchange;
  u32 words[SHARED_ROUNDS];
  const auto index = [&](const Spot& spot) {
    return (long long)spot.row * (the_model().width / 2) + 8 * spot.tile + spot.c / 2 + spot.c % 2 * 4;
  };
#pragma unroll
  for (int i = 0; i < SHARED_ROUNDS; ++i) {
    const Spot spot = spot_of(op, start + i, first, tiles, at);
    const Both pair = swapped(found[i], spot.c);
    words[i] = finite_halves(pair.a, pair.b);
    if (spot.mine) send(peers, number, index(spot), words[i]);
  }
#pragma unroll
  for (int i = 0; i < SHARED_ROUNDS; ++i) {
    const Spot spot = spot_of(op, start + i, first, tiles, at);
    if (spot.mine) words[i] = sum_over_ranks(peers, number, index(spot), words[i], watch);
    found[i] = swapped({low(words[i]), high(words[i])}, spot.c);
  }
}

// Adds up and stores a unit's sums, SHARED_ROUNDS at a time.
__device__ __forceinline__ void finish_operation(const Sums& sums, const Operation& op, int first, int tiles,
                                                 Brought& brought, const Watch& watch, const Place& at) {
  static_assert(ROUNDS % SHARED_ROUNDS == 0, "all rounds of a pass exist");
  const auto is_there = [&](int r) { return r % GROUPS * ROUND < tiles && r / GROUPS * 8 < op.rows; };
#pragma unroll 1
  for (int start = 0; start < ROUNDS; start += SHARED_ROUNDS) {
    sync_some(MULTIPLIERS);  // wait until the sums before these were read
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r)
      if (r / SHARED_ROUNDS * SHARED_ROUNDS == start && is_there(r)) share_round(sums, r, tiles, at);
    sync_some(MULTIPLIERS);
    Both found[SHARED_ROUNDS];  // before the first store: loads are not moved across it
    float factors[SHARED_ROUNDS];
#pragma unroll
    for (int i = 0; i < SHARED_ROUNDS; ++i) {
      found[i] = sum_of_warps(round_sums(start + i), at);
      const int row = spot_of(op, start + i, first, tiles, at).row;
      factors[i] = op.kind == ADD ? power_of(row) : factor_of(row);
    }
    if (SHARDED && op.kind == ADD) add_ranks(found, op, start, first, tiles, watch, at);
#pragma unroll
    for (int i = 0; i < SHARED_ROUNDS; ++i) {
      if (!is_there(start + i)) continue;
      const Brought now = brought;
      bring_hidden(brought, op, spot_of(op, start + i + 1, first, tiles, at));
      store_round(op, spot_of(op, start + i, first, tiles, at), now, factors[i], found[i]);
    }
  }
}

__device__ __forceinline__ void run_product(const Operation& op, Ring& ring, u32& turn, const Watch& watch,
                                            const Place& at) {
  const Share share = share_of(op);
  const u32* awaited = the_model().finished + op.after;
  if (!share.units) {
    if (op.after >= 0) wait_for_blocks(awaited, gridDim.x, watch);
    return wait_for_factors(turn);
  }
  const Depth depth(op);
  if (op.kind == ADD && threadIdx.x <= (unsigned)(share.last - share.first) / 2)  // 128 bytes: 2 tiles
    fetch_ahead(op.vector + 16 * min(share.first + 2 * (int)threadIdx.x, share.last - 1));
  int first = share.first, stop = unit_start(share, 1);
  ColumnsAhead ahead(shared_address(block_memory()), at);
  if (op.after >= 0) wait_for_blocks(awaited, gridDim.x, watch);
  ahead.start(op, depth, share.units);
  Sums sums;
  for (int unit = 0; unit < share.units; ++unit) {
    const int tiles = stop - first;
    Brought brought;
    bring_hidden(brought, op, spot_of(op, 0, first, tiles, at));
    multiply_unit(sums, op, depth, tiles, ahead, ring, watch, at);
    if (unit == 0) wait_for_factors(turn);
    finish_operation(sums, op, first, tiles, brought, watch, at);
    first = stop;
    if (unit + 1 < share.units) stop = unit_start(share, unit + 2);
  }
}
