// out = x @ weight for a weight in the order of chain.cu, one thread an output. It is slow and
// simple, takes any alignment and number of rows, and serves as the reference for the chain.
extern "C" __global__ void packed_product(const u16* x, long long x_step, const u16* weight, int pairs,
                                          u16* out, long long out_step, int columns) {
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  const u16* row = x + blockIdx.y * x_step;
  const u16* tile = weight + (long long)(column / 16) * pairs * 512;
  int across = column % 8 * 32 + column % 16 / 8 * 2;  // its lane's first element, and which words
  float sum = 0;
  for (int k = 0; k < 32 * pairs; ++k) {
    int pair = k / 32, c = k % 32 / 8, half = k % 8 / 4, word = k % 4 / 2 * 4 + k % 2;
    sum += to_float(row[k]) * to_float(tile[pair * 512 + half * 256 + across + c * 8 + word]);
  }
  out[blockIdx.y * out_step + column] = to_half(sum);
}
