// A transformer's layers and LM head in one kernel that stays on every multiprocessor.
//
// Its table holds operations. Products are those of layers.cu. Attention's tasks (a split of one KV head) are
// divided among the blocks' teams of four warps; when all are over, all warps share the merging of queries.
// Before and after attention all blocks wait for each other; other products begin as their input arrives
// (UNWRITTEN). Meanwhile one warp of each block reads weights ahead (units.cu), and others bring the factors of
// the next product. The kernels of several ranks (SHARDED) run at the same time: a block sends its sums of o and
// down, and waits for those of the other ranks for its own columns.
//
// Every number is computed as by the kernels of attention.cu, rows.cu and skinny.cu, bit for bit.

// A task of one KV head for a team, and where its keys and values lie.
struct Item {
  Task task;
  Reach reach;
  __device__ __forceinline__ Item(const Model& model, int number)
      : task(model.tasks[number / model.cache.kv_heads]),
        reach(model.cache, Rows(model.seats, model.most_rows), task, number % model.cache.kv_heads) {}
};
static_assert(sizeof(Item) <= ITEM_BYTES, "KEPT items of each team");

// The items of a team: every `step`-th from `start` on, of which the first KEPT are kept for all layers.
struct Items {
  int start, step, count;
  Item* kept;
  __device__ __forceinline__ int number(int k) const { return start + k * step; }
  __device__ __forceinline__ Item at(int k, const Model& model) const {
    return k < KEPT ? kept[k] : Item(model, number(k));
  }
};

// Asks for a task's keys or values in the last-level cache, by one thread.
__device__ __forceinline__ void fetch(const Source& source) {
  const int stop = min(source.stop, source.start + SPLIT), edge = min(source.edge, stop);
  if (edge > source.start) fetch_bytes(source.page, 2 * HEAD * (edge - source.start));
  const int first = max(source.edge, source.start);
  if (stop > first) fetch_bytes(source.lane + (first - source.edge) * HEAD, 2 * HEAD * (stop - first));
}

// Merges the splits of all queries, by all warps of all blocks.
__device__ __forceinline__ void merge_queries(const Operation& op, int rows_here, int items, const Watch& watch) {
  const Model& model = the_model();
  const int heads = model.attention.heads, queries = rows_here * heads;
  if ((int)blockIdx.x >= queries) return;
  wait_for_blocks(model.merged + op.layer, items, watch);
  for (int q = blockIdx.x + threadIdx.x / 32 * gridDim.x; q < queries; q += WARPS * gridDim.x) {
    const int row = q / heads;
    const Seat& seat = seat_of(row);
    if (seat.lane < -1 || seat.position < SPLIT) continue;
    merge_splits(model.attention, row, q % heads, seat.position / SPLIT + 1,
                 model.attention.out + (long long)q * HEAD);
  }
}

// items: how many tasks there are, of all KV heads. (Not inline, so that it has the registers for itself.)
__device__ __noinline__ void run_attention(const Operation& op, int rows_here, int items, bool merges,
                                           const Items& own, const Watch& watch) {
  const Model& model = the_model();
  const int* positions = (const int*)(block_memory() + POSITIONS_AT);
  const int mine = threadIdx.x / ATTEND_THREADS, kv_heads = model.cache.kv_heads;
  const Team team = {(int)threadIdx.x % ATTEND_THREADS, 2 + mine, (u32)(COLUMNS_AT + mine * ATTEND_BYTES)};
  const auto sources_of = [&](const Reach& reach) {
    return Sources(model.cache, reach, op.layer * model.page_layer, op.layer * model.lane_layer);
  };
  if (own.count) {  // what is there already comes during the wait
    const Sources sources = sources_of(own.kept->reach);
    copy_values(sources.values, 0, team);
    if (team.thread == 0) fetch(sources.keys);
  }
  wait_for_blocks(model.finished + op.after, gridDim.x, watch);
  mark_unwritten(model, rows_here);
  for (int k = 0; k < own.count; ++k) {
    const Item item = own.at(k, model);
    const Sources sources = sources_of(item.reach);
    if (k)
      copy_values(sources.values, 0, team);
    else
      refresh_values(sources.values, seat_of(item.task.row).fresh, team);
    if (team.thread == 0 && k + 1 < min(own.count, KEPT)) {
      const Sources next = sources_of(own.kept[k + 1].reach);
      fetch(next.keys);
      fetch(next.values);
    }
    finish_task(model.attention, sources.keys, positions, item.task, kv_heads, own.number(k) % kv_heads, team);
  }
  if (!merges) return;
  if (own.count && team.thread == 0) add_release(model.merged + op.layer, own.count);
  merge_queries(op, rows_here, items, watch);
}

// Starts a copy of an operation to its place, by one warp.
__device__ __forceinline__ void fetch_operation(const Operation* operations, int number) {
  const int i = (int)threadIdx.x - (MULTIPLIERS - 32);
  if (i >= 0 && i < (int)sizeof(Operation) / 16)
    copy_own(shared_address(&operation(number)) + 16 * i, (const u16*)(operations + number) + 8 * i, true);
  end_of_copies();
}

// The other ranks' inboxes, and how many exchanges a forward makes; see `done` in inbox.cu.
struct Ranks {
  const Peers* peers;
  int exchanges, done_counts;
};

// Takes the peers, and the number of exchanges so far: all blocks read it before block 0 changes it.
__device__ __forceinline__ void meet_ranks(const Ranks& ranks) {
  if (threadIdx.x) return;
  the_peers() = *ranks.peers;
  ((Model*)(block_memory() + MODEL_AT))->exchanges = *ranks.peers->done;
}

__device__ __forceinline__ void count_exchanges(const Ranks& ranks, int operations, const Watch& watch) {
  if (blockIdx.x) return;
  wait_for_blocks(the_model().finished + operations - 1, gridDim.x, watch);
  for (int i = threadIdx.x; i < ranks.done_counts; i += MULTIPLIERS)
    the_peers().done[i] = the_model().exchanges + ranks.exchanges;
}

__device__ __forceinline__ void run_operations(const Operation* operations, int count, const Model* given,
                                               int rows, const Ranks& ranks, const Watch& watch, u32 memory) {
  const Place at = {(int)threadIdx.x / 32, (int)threadIdx.x % 32};
  Ring ring(memory);
  u32 turn = 0;  // of the factors' barrier
  if (threadIdx.x < MODEL_WORDS)
    ((u32*)(block_memory() + MODEL_AT))[threadIdx.x] = ((const u32*)given)[threadIdx.x];
  fetch_operation(operations, 0);
  wait_for_copies<0>();
  wait_for_last();
  sync_some(MULTIPLIERS);
  if (SHARDED) meet_ranks(ranks);
  const Model& model = the_model();
  int* positions = (int*)(block_memory() + POSITIONS_AT);
  if ((int)threadIdx.x < rows) {
    const Seat seat = found_seat(model, threadIdx.x, rows);
    ((Seat*)(block_memory() + SEATS_AT))[threadIdx.x] = seat;
    positions[threadIdx.x] = seat.position;
  }
  const int items = *model.task_count * model.cache.kv_heads, team = threadIdx.x / ATTEND_THREADS;
  Items own = {(int)(blockIdx.x + team * gridDim.x), (int)(TEAMS * gridDim.x), 0};
  if (team < TEAMS && own.start < items) own.count = (items - own.start - 1) / own.step + 1;
  own.kept = (Item*)(block_memory() + ITEMS_AT + team * KEPT * ITEM_BYTES);
  const int kept = threadIdx.x % ATTEND_THREADS;
  if (kept < min(own.count, KEPT)) own.kept[kept] = Item(model, own.number(kept));
  sync_some(MULTIPLIERS);
  bool merges = false;
  for (int row = 0; row < rows; ++row) merges |= positions[row] >= SPLIT;
  for (int p = 0; p < count; ++p) {
    const Operation& op = operation(p);
    if (p + 1 < count) fetch_operation(operations, p + 1);
    if (op.kind == ATTEND)
      run_attention(op, rows, items, merges, own, watch);
    else
      run_product(Operation(op), ring, turn, watch, at);
    wait_for_copies<0>();
    const bool is_product = op.kind != ATTEND, is_awaited = op.awaited;
    sync_some(MULTIPLIERS);  // the place of op is used again behind the barrier
    if (threadIdx.x) continue;
    if (is_product) barrier_arrive(factors_used());
    if (is_awaited) add_release(model.finished + p);
  }
  if (SHARDED) count_exchanges(ranks, count, watch);
}

// Brings the factors of one product after another, by the helpers.
__device__ void bring_all_factors(const Operation* operations, int count, const Model& model, const Watch& watch) {
  const Place at = {(int)threadIdx.x / 32 - WARPS - 1, (int)threadIdx.x % 32};
  u32 turn = 0;
  wait_for_last();
  for (int row = at.warp + HELPERS * at.lane; row < operations->rows; row += 32 * HELPERS)
    power_of(row) = model.powers[row];
  for (int number = 0; number < count; ++number) {
    const Operation& op = operations[number];
    if (op.kind == ATTEND) continue;
    if (number) {
      barrier_wait(factors_used(), turn);
      turn ^= 1;
    }
    if (op.kind != ADD) bring_factors(op, model, watch, at);
    sync_lanes();
    if (at.lane == 0) barrier_arrive(factors_there());
  }
}

// grid: as many blocks as can be there at once, one a multiprocessor. Counters are 0 (late_norm).
extern "C" __global__ void __launch_bounds__(WHOLE_THREADS, 1)
    whole(const Operation* operations, int count, const Model* model, int rows, const Peers* peers, int exchanges,
          int done_counts, int* stop, u64 limit) {
  const u32 memory = shared_address(block_memory());
  const Ranks ranks = {peers, exchanges, done_counts};
  const Watch watch = {stop, limit};
  if (threadIdx.x == 0) {
    barrier_make(factors_there(), HELPERS);
    barrier_make(factors_used(), 1);
    make_ring(memory);
  }
  sync_block();
  if (threadIdx.x >= CHAIN_THREADS) {
    bring_all_factors(operations, count, *model, watch);
  } else if (threadIdx.x >= MULTIPLIERS) {
    if (threadIdx.x == MULTIPLIERS) read_weights(operations, count, memory);
  } else {
    run_operations(operations, count, model, rows, ranks, watch, memory);
  }
}
