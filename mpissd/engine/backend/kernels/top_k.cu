// The k largest of each row, descending, ties to the smaller id.
// A row is cut into at most 32 chunks, a block each. Every warp of a block lists the top k of its
// own columns, warp 0 merges the lists; where there are several chunks, top_k_merge merges theirs.
// A key orders (value, column) in 32 bits: the float16's bits made monotonic above the complement
// of the column within its chunk (at most 65536 columns). Keys differ; 0 stands for none.
__device__ __forceinline__ u32 key_of(u32 bits, int column) {
  if (bits == 0x8000u) bits = 0;  // -0 ties with 0
  u32 ordered = bits & 0x8000u ? ~bits & 0xFFFFu : bits | 0x8000u;
  return ordered << 16 | (0xFFFFu - column);
}

__device__ __forceinline__ int column_of(u32 key) { return 0xFFFF - (key & 0xFFFFu); }

__device__ __forceinline__ float value_of(u32 key) {
  u32 ordered = key >> 16;
  return to_float(ordered & 0x8000u ? ordered ^ 0x8000u : ~ordered & 0xFFFFu);
}

__device__ __forceinline__ u32 larger(u32 best, u32 key, u32 below) {
  return key < below ? max(best, key) : best;
}

// The largest key under `below` among the 8 columns of `group`; 0 where there is none.
__device__ __forceinline__ u32 group_max(const u16* chunk, int group, int columns, bool aligned,
                                         u32 below) {
  int c = 8 * group;
  u32 best = 0;
  if (aligned && c + 8 <= columns) {
    uint4 v = *(const uint4*)(chunk + c);
    u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      best = larger(best, key_of(words[j] & 0xFFFFu, c + 2 * j), below);
      best = larger(best, key_of(words[j] >> 16, c + 2 * j + 1), below);
    }
  } else {
    for (int j = c; j < columns && j < c + 8; ++j) best = larger(best, key_of(chunk[j], j), below);
  }
  return best;
}

__device__ __forceinline__ u32 warp_max(u32 key) {
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) key = max(key, __shfl_xor_sync(0xFFFFFFFFu, key, lanes));
  return key;
}

// grid (chunks, rows); with one chunk the result goes to ids and tops, else keys to `merged`.
extern "C" __global__ void __launch_bounds__(512)
    top_k(const u16* values, long long stride, int width, int chunk_columns, int k, u32* merged,
          int* ids, float* tops) {
  extern __shared__ u32 lists[];  // [warps][k]
  const u16* chunk = values + blockIdx.y * stride + blockIdx.x * chunk_columns;
  int columns = min(chunk_columns, width - (int)blockIdx.x * chunk_columns);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int groups = (columns + 7) / 8, threads = blockDim.x;
  bool aligned = ((u64)chunk & 15) == 0;
  u32 best = 0;
  for (int g = threadIdx.x; g < groups; g += threads)
    best = max(best, group_max(chunk, g, columns, aligned, 0xFFFFFFFFu));
  for (int i = 0; i < k; ++i) {
    u32 top = warp_max(best);
    if (lane == 0) lists[warp * k + i] = top;
    if (i + 1 == k) break;
    // The warp searches the winner's columns again, for its largest key below the one taken.
    int winner = __ffs(__ballot_sync(0xFFFFFFFFu, best == top)) - 1;
    u32 next = 0;
    for (int g = warp * 32 + winner + lane * threads; g < groups; g += 32 * threads)
      next = max(next, group_max(chunk, g, columns, aligned, top));
    next = warp_max(next);
    if (lane == winner) best = next;
  }
  __syncthreads();
  if (warp) return;
  long long to = (long long)blockIdx.y * gridDim.x + blockIdx.x;
  int taken = 0;
  for (int i = 0; i < k; ++i) {
    u32 head = lane < warps && taken < k ? lists[lane * k + taken] : 0;
    u32 top = warp_max(head);
    if (head == top) ++taken;
    if (lane == 0 && gridDim.x > 1) merged[to * k + i] = top;
    if (lane == 0 && gridDim.x == 1) {
      ids[to * k + i] = column_of(top);
      tops[to * k + i] = value_of(top);
    }
  }
}

// One warp a row: lane c takes from chunk c's list. Of equal values the smaller chunk's is first.
extern "C" __global__ void top_k_merge(const u32* merged, int chunks, int chunk_columns, int k,
                                       int* ids, float* tops) {
  extern __shared__ u32 lists[];  // [chunks][k]
  int lane = threadIdx.x;
  const u32* row = merged + (long long)blockIdx.x * chunks * k;
  for (int i = lane; i < chunks * k; i += 32) lists[i] = row[i];
  __syncwarp();
  int taken = 0;
  for (int i = 0; i < k; ++i) {
    u32 head = lane < chunks && taken < k ? lists[lane * k + taken] : 0;
    u32 key = head ? (head & 0xFFFF0000u) | (32 - lane) : 0;
    u32 top = warp_max(key);
    if (key && key == top) {
      ids[blockIdx.x * k + i] = lane * chunk_columns + column_of(head);
      tops[blockIdx.x * k + i] = value_of(head);
      ++taken;
    }
  }
}
