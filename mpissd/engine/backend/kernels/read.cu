// Reads `words` 16-byte words `passes` times and leaves each block's sum in sums[block], so that
// no load can be optimised away and a test can see that every word was read.
// Loads bypass the first-level cache, so that a small buffer is read from the last-level cache.
__device__ __forceinline__ uint4 load(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ u32 total(uint4 v) { return v.x + v.y + v.z + v.w; }

extern "C" __global__ void __launch_bounds__(256)
    read_words(const uint4* buffer, long long words, int passes, u32* sums) {
  __shared__ u32 warp_sums[8];
  long long step = (long long)gridDim.x * blockDim.x;
  u32 sum = 0;
  for (int pass = 0; pass < passes; ++pass) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < words; i += 4 * step) {  // four loads in flight a thread
      uint4 a = load(buffer + i), b = load(buffer + i + step);
      uint4 c = load(buffer + i + 2 * step), d = load(buffer + i + 3 * step);
      sum += total(a) + total(b) + total(c) + total(d);
    }
    for (; i < words; i += step) sum += total(load(buffer + i));
  }
  for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < 8; ++w) sum += warp_sums[w];
    sums[blockIdx.x] = sum;
  }
}
