// Trees whose shape a round decides: see model/transformer/trees.py, whose NumPy twin says the same. A
// block a sequence. Needs chained.cu.
enum { TOKEN, ABOVE, SURE, SEAT };  // see Shapes.found
constexpr int WIDTH = 4, CHOICES = 8;  // as in trees.py
constexpr int EACH = 8;  // the most found nodes of a thread
constexpr float LEAST = -1e30f;  // also of a logit that is not finite
constexpr float CLOSED = -2e30f;  // in place of the log probability of a node that is not open

__device__ __forceinline__ int first_of(int level) {
  return level == 1 ? 0 : CHOICES * (1 + WIDTH * (level - 2));
}

// How many come before number i: larger ones, and equal ones before it.
__device__ __forceinline__ int rank_of(const float* sure, int first, int stop, int i) {
  int rank = 0;
  for (int j = first; j < stop; ++j) rank += sure[j] > sure[i] || (sure[j] == sure[i] && j < i);
  return rank;
}

// Finds a level's nodes. Those that the draft computes go to its next forward, with the copies that
// their lanes begin with; after the last level the chosen ones go to the target, with their parents.
extern "C" __global__ void find(int level, int depth, int nodes, int draft_lanes, int* every_found,
                                int* copies, int* tables, int* parents, const int* state,
                                const int* ids, const int* best, const float* tops,
                                int* draft_tokens, int* draft_seats, int draft_most,
                                int* target_tokens) {
  may_start_next();
  wait_for_last();
  const int s = blockIdx.x, i = threadIdx.x, size = first_of(depth + 1);
  int *tokens = every_found + s * 4 * size, *above = tokens + size, *seats = above + 2 * size;
  float *sures = (float*)(above + size), *sure = (float*)block_memory();
  int* number = (int*)(sure + size);  // of the node in the chosen tree; 0: none
  const int slot = state[4 * s], position = state[4 * s + 1];
  const int before = level == 1 ? 0 : first_of(level - 1), first = first_of(level);
  const int node = first + i, stop = first_of(level + 1);
  for (int j = i; j < first; j += blockDim.x) sure[j] = sures[j];
  __syncthreads();
  if (node < stop) {
    const int of = i / CHOICES, row = level == 1 ? 2 * s + 1 : s * WIDTH + of;
    int parent = -1;
    for (int j = before; j < first; ++j)
      if (seats[j] == of) parent = j;
    const float* top = tops + row * CHOICES;
    float sum = 0;
    for (int c = 0; c < CHOICES; ++c) sum += expf(top[c] - top[0]);
    const float own = top[i % CHOICES] - top[0] - logf(sum);
    const float all = (parent < 0 ? 0.0f : sure[parent]) + fminf(own, 0.0f);
    const int found = best[row * CHOICES + i % CHOICES];
    sure[node] = sures[node] = own == own && all > LEAST ? all : LEAST;
    tokens[node] = ids ? ids[found] : found;
    above[node] = parent;
  }
  __syncthreads();
  if (node < stop) {
    const int rank = rank_of(sure, first, stop, node);
    const bool is_computed = rank < WIDTH && level < depth;
    seats[node] = is_computed ? rank : -1;
    if (is_computed) {
      const int row = s * WIDTH + rank, lane = slot * draft_lanes + WIDTH * (level - 1);
      draft_tokens[row] = tokens[node];
      draft_seats[row] = slot;
      draft_seats[draft_most + row] = position + level;
      draft_seats[2 * draft_most + row] = lane + rank;
      draft_seats[3 * draft_most + row] = position + 1;
      copies[3 * row] = level > 1 && slot >= 0 ? lane - WIDTH + seats[above[node]] : -1;
      copies[3 * row + 1] = lane + rank;
      copies[3 * row + 2] = level - 1;
    }
  }
  if (level < depth) return;
  __syncthreads();
  for (int j = i; j < size; j += blockDim.x) number[j] = rank_of(sure, 0, size, j) < nodes;
  __syncthreads();
  int own[EACH];
  for (int j = i, n = 0; j < size; j += blockDim.x, ++n) {
    own[n] = number[j];
    for (int k = 0; own[n] && k < j; ++k) own[n] += number[k];
  }
  __syncthreads();
  for (int j = i, n = 0; j < size; j += blockDim.x, ++n) number[j] = own[n];
  __syncthreads();
  int* lanes = tables + (s * (KEPT + 1) + KEPT_LANE) * (nodes + 1);
  int* kept = lanes + nodes + 1;
  if (i == 0) {
    lanes[0] = -1;
    kept[0] = 0;
  }
  for (int j = i; j < size; j += blockDim.x) {
    const int chosen = number[j];
    if (!chosen) continue;
    target_tokens[s * (nodes + 1) + chosen] = tokens[j];
    parents[s * nodes + chosen - 1] = above[j] < 0 ? 0 : number[above[j]];
    const int at = seats[j] >= 0 ? j : above[j];  // the last node that the draft computed
    const int levels = at < 0 ? 0 : at < CHOICES ? 1 : (at / CHOICES - 1) / WIDTH + 2;
    lanes[chosen] = at < 0 ? -1 : WIDTH * (levels - 1) + seats[at];
    kept[chosen] = levels;
  }
}

// Chooses the likeliest nodes of a tree whose candidates of a level are the same after every node; see
// trees.search. One warp a sequence. Rows `reads` of a sequence's `rows` on have the candidates. Forced
// nodes (see chained.cu) replace those found.
extern "C" __global__ void search(int depth, int nodes, int rows, int reads, const int* forced,
                                  const int* ids, const int* best, const float* tops, int* parents,
                                  int* tokens) {
  may_start_next();
  wait_for_last();
  const int s = blockIdx.x, lane = threadIdx.x, size = depth * CHOICES;
  float *logs = (float*)block_memory(), *sure = logs + size, *opened = sure + nodes + 1;
  int *above = (int*)(opened + nodes + 1), *places = above + nodes + 1, *chosen = places + nodes + 1;
  best += (s * rows + reads) * CHOICES;
  tops += (s * rows + reads) * CHOICES;
  for (int i = lane; i < size; i += 32) {
    const float* top = tops + i / CHOICES * CHOICES;
    float sum = 0;
    for (int c = 0; c < CHOICES; ++c) sum += expf(top[c] - top[0]);
    logs[i] = top[i % CHOICES] - top[0] - logf(sum);
  }
  __syncwarp();
  const auto open = [&](int i, int parent, int place) {
    const float own = logs[place], all = sure[parent] + fminf(own, 0.0f);
    opened[i] = own == own && all > LEAST ? all : LEAST;
    above[i] = parent;
    places[i] = place;
  };
  if (lane == 0) {
    sure[0] = 0.0f;
    open(0, 0, 0);
  }
  for (int n = 1; n <= nodes; ++n) {
    __syncwarp();
    u64 top = 0;  // the largest log probability, which is at most 0, above the smallest index
    for (int i = lane; i < n; i += 32)
      top = max(top, (u64)~__float_as_uint(fabsf(opened[i])) << 32 | (u32)~i);
    for (int lanes = 16; lanes; lanes /= 2) top = max(top, __shfl_xor_sync(0xFFFFFFFFu, top, lanes));
    if (lane) continue;
    const int at = ~(int)top;
    const int place = places[at], parent = above[at], below = (place / CHOICES + 1) * CHOICES;
    sure[n] = opened[at];
    chosen[n] = place;
    parents[s * nodes + n - 1] = parent;
    opened[at] = opened[n] = CLOSED;
    if (place + 1 < below) open(at, parent, place + 1);
    if (below < size) open(n, n, below);
  }
  __syncwarp();
  for (int n = 1 + lane; n <= nodes; n += 32) {
    const int* force = forced + s * (2 * nodes + depth + 1) + n - 1;
    tokens[s * (nodes + 1) + n] = token_of(*force, ids, best[chosen[n]]);
    if (*force >= 0) parents[s * nodes + n - 1] = force[nodes];
  }
}

// Writes the tables of trees of these parents, and places them in the target's forward; all of their
// nodes are stored in lanes.
extern "C" __global__ void plant(int nodes, int lanes, int back, const int* parents, const int* state,
                                 int* tables, int* tokens, int* seats, int most) {
  may_start_next();
  wait_for_last();
  const int s = blockIdx.x, i = threadIdx.x, rows = nodes + 1;
  int *above = (int*)block_memory(), *leaves = above + rows, *lane = leaves + rows;
  int *level = lane + rows, *free = level + rows;
  const int* at = state + (3 + back) * s;
  const int slot = at[0], position = at[1], last = at[2];
  if (i <= nodes) {
    above[i] = i ? parents[s * nodes + i - 1] : -1;
    leaves[i] = 1;
    lane[i] = level[i] = free[i] = 0;
  }
  __syncthreads();
  if (i && i <= nodes) leaves[above[i]] = 0;
  __syncthreads();
  if (i == 0) {
    for (int n = nodes; n; --n) leaves[above[n]] += leaves[n];
    for (int n = 1; n <= nodes; ++n) {
      level[n] = level[above[n]] + 1;
      lane[n] = free[n] = free[above[n]];
      free[above[n]] += leaves[n];
    }
  }
  __syncthreads();
  if (i > nodes) return;
  int* table = tables + s * (KEPT + 1) * rows;
  table[PARENT * rows + i] = above[i];
  table[LEVEL * rows + i] = level[i];
  table[LANE * rows + i] = i ? lane[i] : -1;
  table[SPANS * rows + i] = i ? (leaves[i] - 1) << 20 : 0;
  table[FORK * rows + i] = i ? 1 : 0;
  const int row = s * rows + i;
  Side{tokens, seats, most}.put({table, nodes, lanes}, row, i, i ? tokens[row] : last, slot, position);
}
