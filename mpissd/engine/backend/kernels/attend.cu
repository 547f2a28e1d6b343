// A task of attention, by a team of a block's warps: see splits.cu. A block of the kernel `attend` is one
// team, one of the kernel `whole` has several. Everything that other blocks wrote is loaded fresh.
constexpr int WEIGHTS_AT = TOPS_AT + 8 * ATTEND_WARPS * QUERIES, WHOLES_AT = WEIGHTS_AT + 16 * QUERIES;
constexpr int ATTEND_BYTES = WHOLES_AT + 4 * QUERIES;

// The threads that attend a task together: their numbers, barrier, and place in the block's memory.
struct Team {
  int thread, barrier;
  u32 at;
  __device__ __forceinline__ int warp() const { return thread / 32; }
  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ void sync() const { sync_team(barrier, ATTEND_THREADS); }
  __device__ __forceinline__ float2* tops() const { return (float2*)(block_memory() + at + TOPS_AT); }
  // Of each query row, what the sums of each warp are multiplied by.
  __device__ __forceinline__ float4* weights() const {
    return (float4*)(block_memory() + at + WEIGHTS_AT);
  }
  // Of each query row, the split's sum of weights.
  __device__ __forceinline__ float* wholes() const { return (float*)(block_memory() + at + WHOLES_AT); }
  __device__ __forceinline__ float* sums() const { return (float*)(block_memory() + at); }
};

// What attention reads and writes beside the cache: queries [row][head][HEAD]; of each query row and
// split its sums [HEAD], and its largest score with the sum of weights. out: where rows of one split are
// finished at once, [row][head][HEAD]; or null.
struct Attended {
  const u16* queries;
  u16* out;
  float* partial;
  float2* tops;
  int heads, splits;
  __device__ __forceinline__ long long part(int row, int head, int split) const {
    return ((long long)row * heads + head) * splits + split;
  }
};

// This warp's 32 keys, all under way together: of block t position 8 t + lane / 4.
typedef uint4 Keys[4][CHUNKS];

__device__ __forceinline__ void load_keys_of(uint4 (&key)[CHUNKS], const Source& keys, int first) {
  const int lane = threadIdx.x % 32, i = first + lane / 4;
  const u16* from = keys.at(keys.there(i) ? i : 0) + 8 * (lane % 4);
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j) key[j] = load_fresh(from + 32 * j);
}

__device__ __forceinline__ void load_keys(Keys& key, const Source& keys, int first) {
#pragma unroll
  for (int t = 0; t < 4; ++t) load_keys_of(key[t], keys, first + 8 * t);
}

// The scores of this warp's 32 positions; element j of block t of lane l: query row l / 4 + 8 (j / 2),
// position 8 t + 2 (l % 4) + j % 2.
__device__ __forceinline__ void score(float (&scores)[QUERY_TILES][4][4],
                                      const uint4 (&query)[QUERY_TILES][2][CHUNKS], const Keys& key) {
#pragma unroll
  for (int t = 0; t < 4; ++t)
#pragma unroll
    for (int m = 0; m < QUERY_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) scores[m][t][n] = 0;
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        const uint4 a = query[m][0][j], b = query[m][1][j], k = key[t][j];
        multiply_add(scores[m][t], a.x, b.x, a.y, b.y, k.x, k.y);
        multiply_add(scores[m][t], a.z, b.z, a.w, b.w, k.z, k.w);
      }
    }
}

// Where a task's positions lie in the cache of a layer.
struct Reach {
  long long in_page, in_lane;
  int start, edge, stop;
  __device__ __forceinline__ Reach(const Cache& cache, const Rows& rows, const Task& task, int head)
      : start(task.split * SPLIT) {
    const int own = task.own() ? rows.lanes[task.row] : -1;
    edge = own < 0 ? start + SPLIT : rows.trunks[task.row];
    stop = own < 0 ? start + SPLIT : rows.positions[task.row] + 1;
    in_page = cache.in_page(rows.slots[task.row], head, start);
    in_lane = cache.in_lane(max(own, 0), head, 0);
  }
};

// Keys and values of a task's positions.
struct Sources {
  Source keys, values;
  // in_pages, in_lanes: where the layer begins in pages and lanes.
  __device__ __forceinline__ Sources(const Cache& cache, const Reach& to, long long in_pages = 0,
                                     long long in_lanes = 0)
      : keys{cache.keys + in_pages + to.in_page, cache.lane_keys + in_lanes + to.in_lane, to.start, to.edge, to.stop},
        values{cache.values + in_pages + to.in_page, cache.lane_values + in_lanes + to.in_lane, to.start, to.edge,
               to.stop} {}
};

// Copies the values of this warp's positions, from its `first` on.
__device__ __forceinline__ void copy_values(const Source& values, int first, const Team& team) {
  const u32 mine = shared_address(block_memory()) + team.at + 32 * team.warp() * VALUE_STEP;
#pragma unroll 4
  for (int i = team.lane(); i < 32 * BLOCKS; i += 32) {
    const int position = i / BLOCKS, there = values.there(32 * team.warp() + position);
    if (position < first) continue;
    copy_own(mine + position * VALUE_STEP + 16 * (i % BLOCKS),
             values.at(there ? 32 * team.warp() + position : 0) + 8 * (i % BLOCKS), there);
  }
  end_of_copies();
}

// Finds what the warps' sums of a query row are multiplied by, and writes the split's top; one thread
// a query row.
__device__ __forceinline__ void weigh_warps(const Attended& to, const Task& task, int shared, int head,
                                            const Team& team) {
  static_assert(ATTEND_WARPS == 4 && QUERIES <= ATTEND_THREADS, "weights are float4");
  const int q = team.thread, index = task.first + q;
  if (q >= QUERIES || index >= task.rows() * shared) return;
  float most = NONE, weight = 0, by[ATTEND_WARPS];
#pragma unroll
  for (int w = 0; w < ATTEND_WARPS; ++w) most = fmaxf(most, team.tops()[w * QUERIES + q].x);
#pragma unroll
  for (int w = 0; w < ATTEND_WARPS; ++w) {
    const float2 top = team.tops()[w * QUERIES + q];
    by[w] = exp2_of(top.x - most);
    weight = __fmaf_rn(by[w], top.y, weight);
  }
  team.weights()[q] = make_float4(by[0], by[1], by[2], by[3]);
  team.wholes()[q] = weight;
  to.tops[to.part(task.row + index / shared, head * shared + index % shared, task.split)] =
      make_float2(most, weight);
}

// Adds the warps' sums of each query row, and writes them; a warp has every fourth query row.
__device__ __forceinline__ void add_warps(const Attended& to, const int* positions, const Task& task, int shared,
                                          int head, const Team& team) {
  const int queries = min(QUERIES, task.rows() * shared - task.first);
#pragma unroll 1
  for (int q = team.warp(); q < queries; q += ATTEND_WARPS) {
    const int index = task.first + q, row = task.row + index / shared, of = head * shared + index % shared;
    const long long at = to.part(row, of, task.split) * HEAD + team.lane();
    const bool is_whole = to.out && !task.split && positions[row] < SPLIT;
    u16* out = to.out + ((long long)row * to.heads + of) * HEAD + team.lane();
    const float* all = team.sums() + q * SUM_STEP + team.lane();
    const float4 by = team.weights()[q];
#pragma unroll
    for (int d = 0; d < HEAD; d += 32) {
      float sum = __fmul_rn(by.x, all[d]);
      sum = __fmaf_rn(by.y, all[QUERIES * SUM_STEP + d], sum);
      sum = __fmaf_rn(by.z, all[2 * QUERIES * SUM_STEP + d], sum);
      sum = __fmaf_rn(by.w, all[3 * QUERIES * SUM_STEP + d], sum);
      if (is_whole)
        out[d] = to_finite_half(sum / team.wholes()[q]);
      else
        to.partial[at + d] = sum;
    }
  }
}

// Copies once more the values that may have been written since: from position `fresh` on.
__device__ __forceinline__ void refresh_values(const Source& values, int fresh, const Team& team) {
  const int from = fresh - values.start - 32 * team.warp();  // within the warp's positions
  if (from >= 32) return;
  wait_for_copies<0>();
  sync_lanes();
  copy_values(values, max(from, 0), team);
}

// Attends a task for one KV head; its values are under way already.
__device__ __forceinline__ void finish_task(const Attended& to, const Source& keys, const int* positions,
                                            const Task& task, int kv_heads, int head,
                                            const Team& team) {
  const int warp = team.warp(), lane = team.lane(), start = task.split * SPLIT;
  const int shared = to.heads / kv_heads;
  float scores[QUERY_TILES][4][4];
  {
    uint4 query[QUERY_TILES][2][CHUNKS];
    Keys key;
    load_keys(key, keys, 32 * warp);
    load_queries(query, to.queries, task, to.heads, kv_heads, head);
    score(scores, query, key);
  }
#pragma unroll
  for (int m = 0; m < QUERY_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int q = 16 * m + 8 * half + lane / 4;
      const bool there = task.first + q < task.rows() * shared;
      const int row = task.row + (there ? (task.first + q) / shared : 0);
      const float2 top = weigh(scores[m], half, there ? positions[row] + 1 - start - 32 * warp : 0);
      if (lane % 4 == 0) team.tops()[warp * QUERIES + q] = top;
    }
  wait_for_copies<0>();
  sync_lanes();
  const u32 mine = shared_address(block_memory()) + team.at + 32 * warp * VALUE_STEP;
  float sums[QUERY_TILES][BLOCKS][4] = {};
#pragma unroll
  for (int m = 0; m < QUERY_TILES; ++m) add_values(sums[m], scores[m], mine);
  team.sync();  // the sums take the place of the values
  weigh_warps(to, task, shared, head, team);
#pragma unroll
  for (int m = 0; m < QUERY_TILES; ++m)
#pragma unroll
    for (int d = 0; d < BLOCKS; ++d)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int q = 16 * m + 8 * half + lane / 4;
        *(float2*)(team.sums() + (warp * QUERIES + q) * SUM_STEP + 8 * d + 2 * (lane % 4)) =
            make_float2(sums[m][d][2 * half], sums[m][d][2 * half + 1]);
      }
  team.sync();
  add_warps(to, positions, task, shared, head, team);
  team.sync();
}

// Some splits' parts of a query for one lane: its dimensions lane, lane + 32 ...
constexpr int MERGED = 4, MINE = HEAD / 32;
struct Parts {
  float2 tops[MERGED];
  float sums[MERGED][MINE];
  __device__ __forceinline__ void load(const Attended& from, long long at, int splits) {
#pragma unroll
    for (int i = 0; i < MERGED; ++i) {
      const long long split = at + min(i, splits - 1);
      tops[i] = load_fresh_two(from.tops + split);
#pragma unroll
      for (int j = 0; j < MINE; ++j)
        sums[i][j] = load_fresh_one(from.partial + split * HEAD + 32 * j + threadIdx.x % 32);
    }
  }
};

// A query's result: its `count` splits, added up in rising order by one warp. `to`: its HEAD values.
__device__ __forceinline__ void merge_splits(const Attended& from, int row, int head, int count, u16* to) {
  const int lane = threadIdx.x % 32;
  const long long at = from.part(row, head, 0);
  Parts parts;
  parts.load(from, at, count);
  float most = NONE, weight = 0, sums[MINE];
#pragma unroll
  for (int j = 0; j < MINE; ++j) sums[j] = 0;
  for (int s = lane; s < count; s += 32) most = fmaxf(most, load_fresh_two(from.tops + at + s).x);
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, lanes));
  for (int s = 0; s < count; s += MERGED) {
    const Parts now = parts;
    if (s + MERGED < count) parts.load(from, at + s + MERGED, count - s - MERGED);
#pragma unroll
    for (int i = 0; i < MERGED; ++i) {
      if (s + i >= count) break;
      const float by = exp2_of(now.tops[i].x - most);
      weight = __fmaf_rn(by, now.tops[i].y, weight);
#pragma unroll
      for (int j = 0; j < MINE; ++j) sums[j] = __fmaf_rn(by, now.sums[i][j], sums[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < MINE; ++j) to[32 * j + lane] = to_finite_half(sums[j] / weight);
}
