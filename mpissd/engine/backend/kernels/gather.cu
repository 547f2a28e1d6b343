// out[row] = table[tokens[row] mod entries], one block a row. The tokens may be in page-locked host
// memory, so only one thread a row reads them across the bus.
extern "C" __global__ void gather(const u16* table, int entries, int width, const int* tokens,
                                  u16* out, long long stride) {
  __shared__ int entry;
  if (threadIdx.x == 0) {
    entry = tokens[blockIdx.x] % entries;
    if (entry < 0) entry += entries;
  }
  __syncthreads();
  const u16* from = table + (long long)entry * width;
  u16* to = out + blockIdx.x * stride;
  if (width % 8 == 0 && (((u64)from | (u64)to) & 15) == 0) {
    for (int c = threadIdx.x; c < width / 8; c += blockDim.x)
      ((uint4*)to)[c] = ((const uint4*)from)[c];
  } else {
    for (int c = threadIdx.x; c < width; c += blockDim.x) to[c] = from[c];
  }
}
