// Attention of a few rows by kernels of its own: see splits.cu.
// CuPy passes no structures by value.
#define CACHE                                                                                  \
  u16 *keys, u16 *values, u16 *lane_keys, u16 *lane_values, const int *table, int most_pages, \
      int kv_heads, int steps
#define THE_CACHE \
  { keys, values, lane_keys, lane_values, table, most_pages, kv_heads, steps }

// q, k and v of a forward [rows][heads + 2 kv_heads][HEAD], float32: adds the biases, normalises and
// rotates; q goes to `queries` in float16, scaled, k and v to the cache. One warp a row and head.
// paired: columns are in the order of whole.cu's weights, 8 of a head's first half, then 8 that rotate
// with them.
extern "C" __global__ void rotate(const float* qkv, const float* bias, const float* q_weight,
                                  const float* k_weight, float eps, const float2* turns,
                                  const int* seats, int most_rows, CACHE, int heads, float scale,
                                  u16* queries, int paired) {
  const Rows rows(seats, most_rows);
  const Cache cache = THE_CACHE;
  may_start_next();
  wait_for_last();
  constexpr int PAIRS = (HEAD / 2 + 31) / 32;  // pairs a lane
  const int every = heads + 2 * cache.kv_heads;
  const int head = blockIdx.y * blockDim.y + threadIdx.y, row = blockIdx.x, lane = threadIdx.x;
  const int slot = rows.slots[row];
  if (head >= every || slot < 0) return;
  const int position = rows.positions[row];
  const float* from = qkv + ((long long)row * every + head) * HEAD;
  const bool is_q = head < heads, is_k = !is_q && head < heads + cache.kv_heads;
  float low[PAIRS], high[PAIRS], sum = 0;
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    const int i = lane + 32 * j;
    low[j] = high[j] = 0;
    if (i < HEAD / 2) {
      const int first = paired ? 2 * i - i % 8 : i;
      low[j] = from[first];
      high[j] = from[first + (paired ? 8 : HEAD / 2)];
      if (bias) {
        low[j] += bias[head * HEAD + i];
        high[j] += bias[head * HEAD + i + HEAD / 2];
      }
    }
    sum += low[j] * low[j] + high[j] * high[j];
  }
  const float* weight = is_q ? q_weight : is_k ? k_weight : nullptr;
  if (weight) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
    const float by = 1.0f / sqrtf(sum / HEAD + eps);
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      const int i = lane + 32 * j;
      if (i < HEAD / 2) {
        low[j] *= by * weight[i];
        high[j] *= by * weight[i + HEAD / 2];
      }
    }
  }
  u16* to = queries + ((long long)row * heads + head) * HEAD;
  const int own = is_q ? -1 : rows.lanes[row];
  if (!is_q) {
    const int kv = (head - heads) % cache.kv_heads;
    u16* pages = is_k ? cache.keys : cache.values;
    u16* lanes = is_k ? cache.lane_keys : cache.lane_values;
    to = own < 0 ? pages + cache.in_page(slot, kv, position)
                 : lanes + cache.in_lane(own, kv, position - rows.trunks[row]);
  }
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    const int i = lane + 32 * j;
    if (i >= HEAD / 2) continue;
    Both both = {low[j], high[j]};
    if (is_q || is_k) both = turned(both, turns[(long long)position * (HEAD / 2) + i]);
    const float by = is_q ? scale : 1.0f;
    cache.store(to + i, own, __fmul_rn(both.a, by), __fmul_rn(both.b, by));
  }
}

// Brings the seats of a forward (see cache.Seats) from page-locked host memory, and lists its tasks:
// rows side by side with one slot share the splits before their lanes, then those of the trunk, or of
// lanes that begin in one split, share the others in pages; a lane's other splits are its own. Block 0
// does the rows, the others the page table.
extern "C" __global__ void begin(const int* host, int* seats, int most_rows, int table_words, int count,
                                 int shared, int* task_count, Task* tasks) {
  may_start_next();
  wait_for_last();
  if (blockIdx.x) {
    const int i = ((int)blockIdx.x - 1) * blockDim.x + threadIdx.x;
    if (i < table_words) seats[4 * most_rows + i] = host[4 * most_rows + i];
    return;
  }
  int *slots = (int*)block_memory(), *positions = slots + count, *lanes = positions + count;
  int *trunks = lanes + count, *ends = trunks + count;  // where a row's tasks end
  for (int i = threadIdx.x; i < 4 * count; i += blockDim.x) {
    const int at = i / count * most_rows + i % count;
    slots[i] = seats[at] = host[at];
  }
  __syncthreads();
  const int tiles_of_one = (shared + QUERIES - 1) / QUERIES;
  for (int r = threadIdx.x; r < count; r += blockDim.x) {
    int tasks_here = 0;
    if (slots[r] >= 0 && lanes[r] >= 0)
      tasks_here = (positions[r] / SPLIT - trunks[r] / SPLIT + 1) * tiles_of_one;
    ends[r] = tasks_here;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int total = 0;
    for (int r = 0; r < count; ++r) total = ends[r] += total;
    ends[count] = total;  // own tasks; the shared ones follow
  }
  __syncthreads();
  for (int r = threadIdx.x; r < count; r += blockDim.x) {
    const int first = r ? ends[r - 1] : 0;
    for (int t = first; t < ends[r]; ++t)
      tasks[t] = {r, 1 << 1 | 1, (t - first) % tiles_of_one * QUERIES,
                  trunks[r] / SPLIT + (t - first) / tiles_of_one};
  }
  int next = ends[count];
  const auto share = [&](int first, int stop, int from, int to) {  // splits from … to - 1
    const int tiles = ((stop - first) * shared + QUERIES - 1) / QUERIES;
    for (int t = threadIdx.x; t < (to - from) * tiles; t += blockDim.x)
      tasks[next + t] = {first, (stop - first) << 1, t % tiles * QUERIES, from + t / tiles};
    next += max(to - from, 0) * tiles;
  };
  for (int r = 0, end; r < count; r = end) {  // every thread finds the same runs of rows
    int least = 1 << 30;
    for (end = r; end < count && slots[end] == slots[r]; ++end)
      if (lanes[end] >= 0) least = min(least, trunks[end] / SPLIT);
    if (slots[r] < 0) continue;
    const int common = least < 1 << 30 ? least : 0;
    share(r, end, 0, common);
    for (int stop = r; r < end; r = stop) {
      const bool lane = lanes[r] >= 0;
      int most = 0;
      while (stop < end && (lanes[stop] >= 0) == lane &&
             (!lane || trunks[stop] / SPLIT == trunks[r] / SPLIT))
        most = max(most, positions[stop++]);
      share(r, stop, common, lane ? trunks[r] / SPLIT : most / SPLIT + 1);
    }
  }
  if (threadIdx.x == 0) *task_count = next;
}

// Copies the first nodes of accepted lanes to the pages, all layers at once. grid (layers, sequences).
// moves: like Sheet.moves of device_rounds.py, of one cache, in page-locked host memory.
extern "C" __global__ void adopt(const int* moves, CACHE, long long page_layer,
                                 long long lane_layer) {
  may_start_next();
  wait_for_last();
  const int* move = moves + 4 * blockIdx.y;
  const int lane = move[0], slot = move[1], start = move[2], count = move[3];
  if (lane < 0) return;
  const Cache cache = THE_CACHE;
  const long long pages = blockIdx.x * page_layer, scratch = blockIdx.x * lane_layer;
  for (int i = threadIdx.x; i < count * kv_heads * BLOCKS; i += blockDim.x) {
    const int head = i / BLOCKS % kv_heads, step = i / BLOCKS / kv_heads, word = i % BLOCKS * 8;
    const long long to = pages + cache.in_page(slot, head, start + step) + word;
    const long long from = scratch + cache.in_lane(lane, head, step) + word;
    *(uint4*)(keys + to) = *(const uint4*)(lane_keys + from);
    *(uint4*)(values + to) = *(const uint4*)(lane_values + from);
  }
}

// Copies the beginnings of lanes to other lanes, all layers at once. grid (layers, copies). copies
// [copies][3]: from lane (-1: none), to lane, and how many steps.
extern "C" __global__ void inherit(const int* copies, CACHE, long long lane_layer) {
  may_start_next();
  wait_for_last();
  const int* copy = copies + 3 * blockIdx.y;
  if (copy[0] < 0) return;
  const Cache cache = THE_CACHE;
  for (int i = threadIdx.x; i < copy[2] * kv_heads * BLOCKS; i += blockDim.x) {
    const int head = i / BLOCKS % kv_heads, step = i / BLOCKS / kv_heads, word = i % BLOCKS * 8;
    const long long layer = blockIdx.x * lane_layer + word;
    const long long from = layer + cache.in_lane(copy[0], head, step);
    const long long to = layer + cache.in_lane(copy[1], head, step);
    *(uint4*)(lane_keys + to) = *(const uint4*)(lane_keys + from);
    *(uint4*)(lane_values + to) = *(const uint4*)(lane_values + from);
  }
}

// grid (blocks that share the tasks, kv heads). partial: [row][head][splits][HEAD], and largest and
// sum [row][head][splits], for combine.
extern "C" __global__ void __launch_bounds__(ATTEND_THREADS)
    attend(const u16* queries, const int* seats, int most_rows, CACHE, int heads, const int* count,
           const Task* tasks, int splits, float* partial, float2* tops) {
  const Rows rows(seats, most_rows);
  const Cache cache = THE_CACHE;
  const Attended to = {queries, nullptr, partial, tops, heads, splits};
  const Team team = {(int)threadIdx.x, 0, 0};
  may_start_next();
  wait_for_last();
  const int head = blockIdx.y, total = *count;
  for (int number = blockIdx.x; number < total; number += gridDim.x) {
    const Task task = tasks[number];
    const Sources sources(cache, Reach(cache, rows, task, head));
    copy_values(sources.values, 0, team);
    finish_task(to, sources.keys, rows.positions, task, cache.kv_heads, head, team);
  }
}

// Adds up a query row's splits in rising order. grid (rows, heads), HEAD threads.
extern "C" __global__ void combine(const int* seats, int most_rows, int heads, int splits,
                                   const float* partial, const float2* tops, u16* out) {
  const Rows rows(seats, most_rows);
  may_start_next();
  wait_for_last();
  const int row = blockIdx.x, d = threadIdx.x;
  if (rows.slots[row] < 0) return;
  const int count = rows.positions[row] / SPLIT + 1;
  const long long query = (long long)row * heads + blockIdx.y, at = query * splits;
  float most = NONE, weight = 0, sum = 0;
  for (int s = 0; s < count; ++s) most = fmaxf(most, tops[at + s].x);
#pragma unroll 4
  for (int s = 0; s < count; ++s) {
    const float2 top = tops[at + s];
    const float by = exp2_of(top.x - most);
    weight = __fmaf_rn(by, top.y, weight);
    sum = __fmaf_rn(by, partial[(at + s) * HEAD + d], sum);
  }
  out[query * HEAD + d] = to_finite_half(sum / weight);
}
