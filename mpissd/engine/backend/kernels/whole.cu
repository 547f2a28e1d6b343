// A transformer's layers and LM head in one kernel that stays on every multiprocessor.
//
// Its table holds operations. A block owns some columns of each product; the epilogue of q, k, v rotates
// and stores K and V, that of o and down adds to the residual stream and prepares the next norm
// (arithmetic.cu), that of gate and up is SwiGLU. Attention's tasks (a split of one KV head) are divided
// among the blocks' two teams of four warps; when all tasks of a head are over, their teams share the
// merging of its queries. Between two operations all blocks wait for each other, while one warp of each
// reads weights ahead (units.cu).
//
// Every number is computed as by the kernels of attention.cu, rows.cu and skinny.cu, bit for bit.
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
  float *squares, *powers;  // [2 norms][norm_rows][width / 16] and [2 norms][norm_rows]
  Cache cache;            // of layer 0
  const int* seats;
  const float2* turns;
  Attended attention;
  u16* queries;
  const int* task_count;
  const Task* tasks;
  u32 *finished, *merged;  // blocks by operation; tasks by layer and KV head
  long long page_layer, lane_layer;  // elements of the cache from layer to layer
  int most_rows, width;
  int norm_rows;  // of squares and powers
  int gap;
  float eps, scale;
};

// Where a row's K and V go: elements from a layer's first, and from KV head to KV head.
struct Seat {
  long long at;
  int position, head_step;
  int fresh;  // what the row sees below this position was there before this forward
  int lane;  // -1: none, -2: a padding row
};

constexpr int MODEL_AT = (CHAIN_BYTES + 15) / 16 * 16;
constexpr int SEATS_AT = MODEL_AT + (int)sizeof(Model);
constexpr int OPERATIONS_AT = (SEATS_AT + 8 * ROW_TILES * (int)sizeof(Seat) + 15) / 16 * 16;
constexpr int FACTORS_AT = OPERATIONS_AT + 2 * (int)sizeof(Operation);
constexpr int WHOLE_BYTES = FACTORS_AT + 8 * ROW_TILES * 4;
constexpr int MODEL_WORDS = sizeof(Model) / 4;
#ifndef TEAMS  // that attend tasks in a block
#define TEAMS 2
#endif
static_assert(TEAMS * ATTEND_THREADS <= MULTIPLIERS, "a team has 128 threads");
static_assert(TEAMS * ATTEND_BYTES <= TEAM_BYTES, "attention's shared memory");
static_assert(WHOLE_BYTES <= SHARED_BYTES, "more shared memory than the launch gives");

__device__ __forceinline__ const Model& the_model() { return *(const Model*)(block_memory() + MODEL_AT); }
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

// What a lane brings to the epilogue of ADD for its columns of a round.
struct Brought {
  Both hidden, weight;
};

// The factor of a row's sums (ADD: the power of two of the next x); each warp has its own rows.
__device__ __forceinline__ float& factor_of(int row) { return ((float*)(block_memory() + FACTORS_AT))[row]; }

// The place of a lane's r-th pair of columns within a unit.
struct Spot {
  int row, tile, c;  // columns 16 tile + c and 8 behind it
  bool mine;
  __device__ __forceinline__ Spot(const Product& product, int r, int first, int tiles, const Place& at)
      : row(r / GROUPS * 8 + at.warp), tile(first + r % GROUPS * ROUND + at.lane / 8),
        c(at.lane % 8), mine(row < product.rows && tile < first + tiles) {}
  __device__ __forceinline__ long long in(int width) const { return (long long)row * width + 16 * tile + c; }
};

// Brings the factors of this warp's rows.
__device__ __forceinline__ void bring_factors(const Operation& op, const Place& at) {
  const Model& model = the_model();
  const int tiles = model.width / 16, first = op.norm * model.norm_rows;
  float powers[ROW_TILES], squares[ROW_TILES];
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) {
    const int own = 8 * m + at.warp, row = first + min(own, op.rows - 1);
    const int there_are = own < op.rows ? tiles : 0;
    const float* of_row = model.squares + (long long)row * tiles;
    powers[m] = load_fresh_one(model.powers + row);
    squares[m] = squares_of_lane([&](int t) { return load_fresh_one(of_row + t); }, there_are);
  }
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) {
    const float norm = norm_of_row(squares[m], tiles, model.eps);
    if (at.lane == 0)
      factor_of(8 * m + at.warp) = op.kind == ADD ? power_of_two(norm) : __fmul_rn(norm, inverse(powers[m]));
  }
  sync_lanes();
}

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
                                            const Both& sum) {
  const Model& model = the_model();
  const int next = (1 - op.norm) * model.norm_rows + spot.row;
  const float power = factor_of(spot.row);
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
  model.squares[(long long)next * (model.width / 16) + spot.tile] = squares;
  if (spot.tile == 0) model.powers[next] = power;
}

__device__ __forceinline__ void store_round(const Operation& op, const Spot& spot, const Brought& brought,
                                            const Both& sum) {
  if (op.kind == ADD) return store_added(op, spot, brought, sum);
  if (!spot.mine) return;
  const float by = factor_of(spot.row);
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

// Returns the sum over the block's warps of a round's sums.
__device__ __forceinline__ Both sum_of_round(const Sums& sums, int r, int tiles, const Place& at) {
  sync_some(MULTIPLIERS);  // wait until the sums of the round before were read
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i)
    if (i == r) share_round(sums, i, tiles, at);
  sync_some(MULTIPLIERS);
  return sum_of_warps((const float*)(block_memory() + SUMS_AT), at);
}

// Adds up and stores a unit's sums, round by round. (The loop is not unrolled: what a block runs once an
// operation waits for its instructions.)
__device__ __forceinline__ void finish_operation(const Sums& sums, const Operation& op, int first,
                                                 int tiles, Brought& brought, const Place& at) {
#pragma unroll 1
  for (int r = 0; r < ROUNDS; ++r) {
    if (r % GROUPS * ROUND >= tiles || r / GROUPS * 8 >= op.rows) continue;
    const Spot spot(op, r, first, tiles, at);
    const Both sum = sum_of_round(sums, r, tiles, at);
    const Brought now = brought;
    if (r + 1 < ROUNDS) bring_hidden(brought, op, Spot(op, r + 1, first, tiles, at));
    store_round(op, spot, now, sum);
  }
}

// The counter of the blocks that have finished the operation before this one; null before the first.
__device__ __forceinline__ const u32* before(int number) {
  return number ? the_model().finished + number - 1 : nullptr;
}

__device__ __forceinline__ void run_product(const Operation& op, int number, Ring& ring,
                                            const Watch& watch, const Place& at) {
  const Product product = op;  // in registers
  const Share share = share_of(product);
  if (!share.units) return;
  const Depth depth(product);
  if (op.kind == ADD && threadIdx.x <= (unsigned)(share.last - share.first) / 2)  // 128 bytes: 2 tiles
    fetch_ahead(op.vector + 16 * min(share.first + 2 * (int)threadIdx.x, share.last - 1));
  int first = share.first, stop = unit_start(share, 1);
  ColumnsAhead ahead(shared_address(block_memory()), at);
  if (number) wait_for_blocks(before(number), gridDim.x, watch);
  ahead.start(product, depth, share.units);
  bring_factors(op, at);
  Sums sums;
  for (int unit = 0; unit < share.units; ++unit) {
    const int tiles = stop - first;
    Brought brought;
    bring_hidden(brought, op, Spot(product, 0, first, tiles, at));
    multiply_unit(sums, product, depth, tiles, ahead, ring, at);
    finish_operation(sums, op, first, tiles, brought, at);
    first = stop;
    if (unit + 1 < share.units) stop = unit_start(share, unit + 2);
  }
}

__device__ __forceinline__ Cache cache_of(const Model& model, int layer) {
  Cache cache = model.cache;
  cache.keys += layer * model.page_layer;
  cache.values += layer * model.page_layer;
  cache.lane_keys += layer * model.lane_layer;
  cache.lane_values += layer * model.lane_layer;
  return cache;
}

__device__ __forceinline__ void merge_queries(const Operation& op, int number, int head, int tasks,
                                              int queries, const Watch& watch, const Team& team) {
  const Model& model = the_model();
  const int heads = model.attention.heads, shared = heads / model.cache.kv_heads;
  if (number >= queries) return;
  if (team.thread == 0) {
    Patience patience(watch);
    const u32* over = model.merged + op.layer * model.cache.kv_heads + head;
    while ((int)(load_acquire(over) - (u32)tasks) < 0 && !patience.over()) {
    }
  }
  team.sync();
  for (int q = number + team.warp() * tasks; q < queries; q += ATTEND_WARPS * tasks) {
    const int row = q / shared, of = head * shared + q % shared;
    const Seat& seat = seat_of(row);
    if (seat.lane < -1) continue;
    merge_splits(model.attention, row, of, seat.position / SPLIT + 1,
                 op.out + ((long long)row * heads + of) * HEAD);
  }
}

// tasks: the tasks of one KV head. (Not inline, so that it has the registers for itself.)
__device__ __noinline__ void run_attention(const Operation& op, int number, int rows_here, int tasks,
                                              const Watch& watch) {
  const Model& model = the_model();
  const Rows rows(model.seats, model.most_rows);
  const int own = threadIdx.x / ATTEND_THREADS, kv_heads = model.cache.kv_heads, items = tasks * kv_heads;
  const Team team = {(int)threadIdx.x % ATTEND_THREADS, 2 + own, (u32)(COLUMNS_AT + own * ATTEND_BYTES)};
  const int start = own < TEAMS ? blockIdx.x + own * gridDim.x : items, step = TEAMS * gridDim.x;
  if ((int)blockIdx.x >= items) return;
  for (int item = start;; item += step) {
    const bool is_there = item < items;
    const int head = item % kv_heads;
    const Task task = model.tasks[is_there ? item / kv_heads : 0];
    const Sources sources(cache_of(model, op.layer), rows, task, head);
    if (is_there) {  // what is there already comes during the wait
      copy_values(sources.values, 0, team);
      if (item == start) fetch_keys(sources.keys, team);
    }
    if (item == start) {
      wait_for_blocks(before(number), gridDim.x, watch);
    }
    if (!is_there) break;
    refresh_values(sources.values, seat_of(task.row).fresh, team);
    finish_task(model.attention, sources.keys, rows, task, kv_heads, head, team);
    if (team.thread == 0) add_release(model.merged + op.layer * kv_heads + head);
  }
  const int queries = rows_here * (model.attention.heads / kv_heads);
  for (int item = start; item < items; item += step)
    merge_queries(op, item / kv_heads, item % kv_heads, tasks, queries, watch, team);
}

// Starts a copy of an operation to its place, by one warp.
__device__ __forceinline__ void fetch_operation(const Operation* operations, int number) {
  const int i = (int)threadIdx.x - (MULTIPLIERS - 32);
  if (i >= 0 && i < (int)sizeof(Operation) / 16)
    copy_own(shared_address(&operation(number)) + 16 * i, (const u16*)(operations + number) + 8 * i, true);
  end_of_copies();
}

__device__ __forceinline__ void run_operations(const Operation* operations, int count, const Model* given,
                                               int rows, const Watch& watch, u32 memory) {
  const Place at = {(int)threadIdx.x / 32, (int)threadIdx.x % 32};
  Ring ring(memory);
  if (threadIdx.x < MODEL_WORDS)
    ((u32*)(block_memory() + MODEL_AT))[threadIdx.x] = ((const u32*)given)[threadIdx.x];
  fetch_operation(operations, 0);
  wait_for_copies<0>();
  wait_for_last();
  sync_some(MULTIPLIERS);
  const Model& model = the_model();
  if ((int)threadIdx.x < rows)
    ((Seat*)(block_memory() + SEATS_AT))[threadIdx.x] = found_seat(model, threadIdx.x, rows);
  const int tasks = *model.task_count;
  sync_some(MULTIPLIERS);
  for (int p = 0; p < count; ++p) {
    const Operation& op = operation(p);
    if (p + 1 < count) fetch_operation(operations, p + 1);
    if (op.kind == ATTEND)
      run_attention(op, p, rows, tasks, watch);
    else
      run_product(op, p, ring, watch, at);
    wait_for_copies<0>();
    sync_some(MULTIPLIERS);  // the place of op is used again behind the barrier
    if (threadIdx.x == 0) add_release(model.finished + p);
  }
}

// grid: as many blocks as can be there at once, one a multiprocessor. Counters are 0 (late_norm).
extern "C" __global__ void __launch_bounds__(CHAIN_THREADS, 1)
    whole(const Operation* operations, int count, const Model* model, int rows, int* stop, u64 limit) {
  const u32 memory = shared_address(block_memory());
  if (threadIdx.x == 0) make_ring(memory);
  sync_block();
  if (threadIdx.x >= MULTIPLIERS) {
    if (threadIdx.x == MULTIPLIERS) read_weights(operations, count, memory);
  } else {
    run_operations(operations, count, model, rows, {stop, limit}, memory);
  }
}
