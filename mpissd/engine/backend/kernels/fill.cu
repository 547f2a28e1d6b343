// out[r][c] = hash of (key, first_row + r, first_column + c): the values of weights.py.
// The float32 operations and their order are those of NumPy, without fused multiply-adds, so the
// float16 values are bit-identical.
__device__ __forceinline__ u32 element(u32 row_hash, u32 column, float scale) {
  u32 h = row_hash ^ (column * 0x85EBCA77u);
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  h ^= h >> 16;
  float uniform = __fsub_rn(__fmul_rn((float)(h >> 8), 1.0f / 16777216.0f), 0.5f);
  return to_half(__fmul_rn(__fmul_rn(uniform, 3.46410155f), scale));  // times sqrt(12)
}

// A thread writes 8 columns (16 bytes where they are aligned) of every gridDim.y * blockDim.y-th row.
extern "C" __global__ void fill(u16* out, long long stride, u32 key, u32 first_row,
                                u32 first_column, int rows, int columns, float scale) {
  int c = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (c >= columns) return;
  u32 column = first_column + c;
  for (int r = blockIdx.y * blockDim.y + threadIdx.y; r < rows; r += gridDim.y * blockDim.y) {
    u32 row_hash = ((first_row + r) * 0x9E3779B1u) ^ key;
    u16* o = out + r * stride + c;
    if (c + 8 <= columns && ((u64)o & 15) == 0) {
      uint4 v;
      v.x = element(row_hash, column, scale) | element(row_hash, column + 1, scale) << 16;
      v.y = element(row_hash, column + 2, scale) | element(row_hash, column + 3, scale) << 16;
      v.z = element(row_hash, column + 4, scale) | element(row_hash, column + 5, scale) << 16;
      v.w = element(row_hash, column + 6, scale) | element(row_hash, column + 7, scale) << 16;
      *(uint4*)o = v;
    } else {
      for (int j = 0; j < 8 && c + j < columns; ++j) o[j] = element(row_hash, column + j, scale);
    }
  }
}
