// Fills packed weights (the order of skinny.cu) and embedding tables of a transformer.
//
// Columns c and c + 8 of a tile may come from two places ("halves") that advance by `step` columns a
// tile: step 16 and halves 8 apart give a matrix in its own order; step 8 puts gate beside up. What
// lies outside rows x columns of a half is zero.

__device__ __forceinline__ u32 pair_of(u16 low, u16 high) { return low | (u32)high << 16; }

// at: the float16 of (half, column of the half, row); a thread writes 16 bytes.
template <class At>
__device__ __forceinline__ void pack(uint4* out, long long lanes, int pairs, int depth, int left_columns,
                                     int right_columns, int step, const At& at) {
  const long long all = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < lanes; i += all) {
    const int lane = i % 32, half = i / 32 % 2, pair = i / 64 % pairs, tile = (int)(i / 64 / pairs);
    const int row = 32 * pair + 8 * (lane % 4) + 4 * half, column = tile * step + lane / 4;
    u32 words[4];
    for (int w = 0; w < 4; ++w) {
      const bool there = column < (w % 2 ? right_columns : left_columns);
      const int k = row + w / 2 * 2;
      words[w] = pair_of(there && k < depth ? at(w % 2, column, k) : 0,
                         there && k + 1 < depth ? at(w % 2, column, k + 1) : 0);
    }
    out[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// From matrices [columns][depth], as Hugging Face stores them.
extern "C" __global__ void pack_lanes(uint4* out, long long lanes, int pairs, int depth,
                                      const float* left, const float* right, long long stride,
                                      int left_columns, int right_columns, int step) {
  pack(out, lanes, pairs, depth, left_columns, right_columns, step, [=](int half, int column, int k) {
    return to_half((half ? right : left)[column * stride + k]);
  });
}

// The same from the random matrix of fill.cu: element (row, first column of the half + column).
extern "C" __global__ void pack_random(uint4* out, long long lanes, int pairs, int depth,
                                       u32 first_row, u32 left_key, u32 left, u32 right_key,
                                       u32 right, int left_columns, int right_columns, int step,
                                       float scale) {
  pack(out, lanes, pairs, depth, left_columns, right_columns, step, [=](int half, int column, int k) {
    const u32 hash = ((first_row + k) * 0x9E3779B1u) ^ (half ? right_key : left_key);
    return (u16)element(hash, column + (half ? right : left), scale);
  });
}

// table[t][c] = element (c, first + t) of a random matrix: the rows of an embedding.
extern "C" __global__ void fill_rows(u16* table, long long entries, int width, u32 key, u32 first,
                                     float scale) {
  const long long all = (long long)gridDim.x * blockDim.x, size = entries * width;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < size; i += all)
    table[i] = element((u32)(i % width) * 0x9E3779B1u ^ key, first + (u32)(i / width), scale);
}
