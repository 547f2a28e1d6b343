// Attention of a few rows by kernels of its own: see splits.cu.
// CuPy passes no structures by value.
#define CACHE                                                                                  \
  u16 *keys, u16 *values, u16 *lane_keys, u16 *lane_values, const int *table, int most_pages, \
      int kv_heads, int steps
#define THE_CACHE \
  { keys, values, lane_keys, lane_values, table, most_pages, kv_heads, steps }

// q, k and v of a forward [rows][heads + 2 kv_heads][HEAD], float32: adds the biases, normalises and
// rotates; q goes to `queries` in float16, scaled, k and v to the cache. One warp a row and head.
extern "C" __global__ void rotate(const float* qkv, const float* bias, const float* q_weight,
                                  const float* k_weight, float eps, const float2* turns,
                                  const int* seats, int most_rows, CACHE, int heads, float scale,
                                  u16* queries) {
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
      low[j] = from[i];
      high[j] = from[i + HEAD / 2];
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
  if (!is_q) {
    const int kv = (head - heads) % cache.kv_heads, own = rows.lanes[row];
    u16* pages = is_k ? cache.keys : cache.values;
    u16* lanes = is_k ? cache.lane_keys : cache.lane_values;
    to = own < 0 ? pages + cache.in_page(slot, kv, position)
                 : lanes + cache.in_lane(own, kv, position - rows.trunks[row]);
  }
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    const int i = lane + 32 * j;
    if (i >= HEAD / 2) continue;
    float a = low[j], b = high[j];
    if (is_q || is_k) {
      const float2 turn = turns[(long long)position * (HEAD / 2) + i];  // cosine, sine
      a = low[j] * turn.x - high[j] * turn.y;
      b = high[j] * turn.x + low[j] * turn.y;
    }
    const float by = is_q ? scale : 1.0f;
    to[i] = to_finite_half(a * by);
    to[i + HEAD / 2] = to_finite_half(b * by);
  }
}

// Brings the seats of a forward (see cache.Seats) from page-locked host memory, and lists its tasks:
// rows side by side with one slot, and one trunk if they are lanes, share the splits that they all
// see in pages; a lane's other splits are its own. Block 0 does the rows, the others the page table.
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
  for (int r = 0; r < count;) {  // every thread finds the same runs of rows
    const bool lane = lanes[r] >= 0;
    int stop = r, most = positions[r];
    while (stop < count && slots[stop] == slots[r] && (lanes[stop] >= 0) == lane &&
           (!lane || trunks[stop] == trunks[r]))
      most = max(most, positions[stop++]);
    const int splits = slots[r] < 0 ? 0 : lane ? trunks[r] / SPLIT : most / SPLIT + 1;
    const int tiles = ((stop - r) * shared + QUERIES - 1) / QUERIES;
    for (int t = threadIdx.x; t < splits * tiles; t += blockDim.x)
      tasks[next + t] = {r, (stop - r) << 1, t % tiles * QUERIES, t / tiles};
    next += splits * tiles;
    r = stop;
  }
  if (threadIdx.x == 0) *task_count = next;
}

// The scores of this warp's 32 positions; element j of block t of lane l: query row l / 4 + 8 (j / 2),
// position 8 t + 2 (l % 4) + j % 2.
__device__ __forceinline__ void score(float (&scores)[QUERY_TILES][4][4],
                                      const uint4 (&query)[QUERY_TILES][2][CHUNKS],
                                      const Source& keys, int first) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int i = first + 8 * t + lane / 4;
    const u16* from = keys.at(keys.there(i) ? i : 0) + 8 * (lane % 4);
    uint4 key[CHUNKS];
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) key[j] = *(const uint4*)(from + 32 * j);
#pragma unroll
    for (int m = 0; m < QUERY_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) scores[m][t][n] = 0;
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        const uint4 a = query[m][0][j], b = query[m][1][j], k = key[j];
        multiply_add(scores[m][t], a.x, b.x, a.y, b.y, k.x, k.y);
        multiply_add(scores[m][t], a.z, b.z, a.w, b.w, k.z, k.w);
      }
    }
  }
}

// grid (blocks that share the tasks, kv heads). partial: [row][head][splits][HEAD], and largest and
// sum [row][head][splits], for combine.
extern "C" __global__ void __launch_bounds__(ATTEND_THREADS)
    attend(const u16* queries, const int* seats, int most_rows, CACHE, int heads, const int* count,
           const Task* tasks, int splits, float* partial, float2* tops) {
  const Rows rows(seats, most_rows);
  const Cache cache = THE_CACHE;
  float* all = (float*)block_memory();  // first the values, then the warps' sums
  float2(*warp_tops)[QUERIES] = (float2(*)[QUERIES])(block_memory() + TOPS_AT);
  may_start_next();
  wait_for_last();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
  const int shared = heads / cache.kv_heads, total = *count;
  for (int number = blockIdx.x; number < total; number += gridDim.x) {
    const Task task = tasks[number];
    const int slot = rows.slots[task.row], start = task.split * SPLIT, queries_here = task.rows() * shared;
    const int own = task.own() ? rows.lanes[task.row] : -1;
    const int edge = own < 0 ? start + SPLIT : rows.trunks[task.row];
    const int stop = own < 0 ? start + SPLIT : rows.positions[task.row] + 1;
    const long long in_page = cache.in_page(slot, head, start);
    const long long in_lane = cache.in_lane(max(own, 0), head, 0);
    const Source from_keys = {keys + in_page, lane_keys + in_lane, start, edge, stop};
    const Source from_values = {values + in_page, lane_values + in_lane, start, edge, stop};
    const u32 mine = shared_address(block_memory()) + 32 * warp * VALUE_STEP;
#pragma unroll
    for (int i = lane; i < 32 * BLOCKS; i += 32) {
      const int position = i / BLOCKS, there = from_values.there(32 * warp + position);
      copy_own(mine + position * VALUE_STEP + 16 * (i % BLOCKS),
               from_values.at(there ? 32 * warp + position : 0) + 8 * (i % BLOCKS), there);
    }
    end_of_copies();
    float scores[QUERY_TILES][4][4], sums[QUERY_TILES][BLOCKS][4];
    {
      uint4 query[QUERY_TILES][2][CHUNKS];
      load_queries(query, queries, task, heads, cache.kv_heads, head,
                   [](const u16* from) { return *(const uint4*)from; });
      score(scores, query, from_keys, 32 * warp);
    }
#pragma unroll
    for (int m = 0; m < QUERY_TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int q = 16 * m + 8 * half + lane / 4, row = task.row + (task.first + q) / shared;
        const int seen = task.first + q < queries_here ? rows.positions[row] + 1 - start - 32 * warp : 0;
        const float2 top = weigh(scores[m], half, seen);
        if (lane % 4 == 0) warp_tops[warp][q] = top;
      }
    wait_for_copies<0>();
    __syncwarp();
#pragma unroll
    for (int m = 0; m < QUERY_TILES; ++m) add_values(sums[m], scores[m], mine);
    __syncthreads();  // the sums take the place of the values
#pragma unroll
    for (int m = 0; m < QUERY_TILES; ++m)
#pragma unroll
      for (int d = 0; d < BLOCKS; ++d)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int q = 16 * m + 8 * half + lane / 4;
          *(float2*)(all + (warp * QUERIES + q) * SUM_STEP + 8 * d + 2 * (lane % 4)) =
              make_float2(sums[m][d][2 * half], sums[m][d][2 * half + 1]);
        }
    __syncthreads();
    for (int i = threadIdx.x; i < QUERIES * HEAD; i += ATTEND_THREADS) {
      const int q = i / HEAD, d = i % HEAD, index = task.first + q;
      if (index >= queries_here) break;
      float most = NONE, sum = 0, weight = 0;
#pragma unroll
      for (int w = 0; w < ATTEND_WARPS; ++w) most = fmaxf(most, warp_tops[w][q].x);
#pragma unroll
      for (int w = 0; w < ATTEND_WARPS; ++w) {
        const float2 top = warp_tops[w][q];
        const float by = exp2_of(top.x - most);
        weight = __fmaf_rn(by, top.y, weight);
        sum = __fmaf_rn(by, all[(w * QUERIES + q) * SUM_STEP + d], sum);
      }
      const long long at =
          ((long long)(task.row + index / shared) * heads + head * shared + index % shared) * splits +
          task.split;
      partial[at * HEAD + d] = sum;
      if (d == 0) tops[at] = make_float2(most, weight);
    }
    __syncthreads();
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
