// Fills packed weights (the order of skinny.cu) and embedding tables of a transformer.
//
// Columns c and c + 8 of a tile may come from two places ("halves") that advance by `step` columns a
// tile: step 16 and halves 8 apart give a matrix in its own order; step 8 puts gate beside up. What
// lies outside rows x columns of a half is zero.

__device__ __forceinline__ u32 pair_of(u16 low, u16 high) { return low | (u32)high << 16; }

// From matrices [columns][depth], as Hugging Face stores them; a thread writes 16 bytes.
extern "C" __global__ void pack_lanes(uint4* out, long long lanes, int pairs, int depth,
                                      const float* left, const float* right, long long stride,
                                      int left_columns, int right_columns, int step) {
  const long long all = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < lanes; i += all) {
    const int lane = i % 32, half = i / 32 % 2, pair = i / 64 % pairs, tile = (int)(i / 64 / pairs);
    const int row = 32 * pair + 8 * (lane % 4) + 4 * half, column = tile * step + lane / 4;
    u32 words[4];
    for (int w = 0; w < 4; ++w) {
      const float* from = w % 2 ? right : left;
      const bool there = column < (w % 2 ? right_columns : left_columns);
      const int k = row + w / 2 * 2;
      words[w] = pair_of(to_half(there && k < depth ? from[column * stride + k] : 0.0f),
                         to_half(there && k + 1 < depth ? from[column * stride + k + 1] : 0.0f));
    }
    out[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// The same from the random matrix of fill.cu: element (row, first column of the half + column).
extern "C" __global__ void pack_random(uint4* out, long long lanes, int pairs, int depth,
                                       u32 first_row, u32 left_key, u32 left, u32 right_key,
                                       u32 right, int left_columns, int right_columns, int step,
                                       float scale) {
  const long long all = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < lanes; i += all) {
    const int lane = i % 32, half = i / 32 % 2, pair = i / 64 % pairs, tile = (int)(i / 64 / pairs);
    const int row = 32 * pair + 8 * (lane % 4) + 4 * half, column = tile * step + lane / 4;
    u32 words[4];
    for (int w = 0; w < 4; ++w) {
      const u32 key = w % 2 ? right_key : left_key, c = column + (w % 2 ? right : left);
      const bool there = column < (w % 2 ? right_columns : left_columns);
      const int k = row + w / 2 * 2;
      u16 two[2];
      for (int j = 0; j < 2; ++j) {
        const u32 hash = ((first_row + k + j) * 0x9E3779B1u) ^ key;
        two[j] = there && k + j < depth ? (u16)element(hash, c, scale) : 0;
      }
      words[w] = pair_of(two[0], two[1]);
    }
    out[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// table[t][c] = element (c, first + t) of a random matrix: the rows of an embedding.
extern "C" __global__ void fill_rows(u16* table, long long entries, int width, u32 key, u32 first,
                                     float scale) {
  const long long all = (long long)gridDim.x * blockDim.x, size = entries * width;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < size; i += all)
    table[i] = element((u32)(i % width) * 0x9E3779B1u ^ key, first + (u32)(i / width), scale);
}
