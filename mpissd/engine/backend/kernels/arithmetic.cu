// Float32 steps that several kernels take with the same bits: a product is fused with a sum only where
// this says so.
// A sixteenth of the largest power of two that is not above x > 0.
__device__ __forceinline__ float power_of_two(float x) {
  return __fmul_rn(__uint_as_float(__float_as_uint(x) & 0x7F800000u), 0.0625f);
}

__device__ __forceinline__ float sum_of_lanes(float sum) {
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
  return sum;
}

// RMSNorm in two parts. Who writes a row of the residual stream writes x = hidden * weight * power
// beside it, and the squares of each tile of 16 columns, added up. Who multiplies x by a matrix knows
// from these the whole row's 1 / rms, and multiplies the sums by 1 / rms / power. The power of two
// keeps x in float16's range: it is that of the norm before, or for the first norm its own. A sixteenth
// of it leaves room for rows whose rms grows a thousandfold within one block (massive activations), and
// values of the usual size, some 2^-4, keep all bits.
__device__ __forceinline__ float squares_of_tile(const Both& v) {  // of 8 neighbouring lanes
  float sum = __fmaf_rn(v.a, v.a, __fmul_rn(v.b, v.b));
#pragma unroll
  for (int lanes = 1; lanes < 8; lanes *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
  return sum;
}

// A lane's share of some rows' squares; squares(row, tile) loads one. Loads are under way together.
template <int ROWS, class Squares>
__device__ __forceinline__ void squares_of_lane(float (&sums)[ROWS], int tiles, const Squares& squares) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) sums[i] = 0;
  for (int first = threadIdx.x % 32; first < tiles; first += 256) {
    float parts[ROWS][8];
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) parts[i][j] = first + 32 * j < tiles ? squares(i, first + 32 * j) : 0.0f;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[i] += parts[i][j];
  }
}

// 1 / rms of a row from its lanes' squares; all lanes of a warp call it.
__device__ __forceinline__ float norm_of_row(float squares_of_lane, int tiles, float eps) {
  return rsqrtf(__fmaf_rn(sum_of_lanes(squares_of_lane), 1.0f / (float)(16 * tiles), eps));
}

// 1 / a power of two.
__device__ __forceinline__ float inverse(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

__device__ __forceinline__ u16 before_norm(float hidden, float weight, float power) {
  return to_finite_half(__fmul_rn(__fmul_rn(hidden, weight), power));
}

// Rotates a pair by an angle given as cosine and sine.
__device__ __forceinline__ Both turned(const Both& pair, const float2& turn) {
  return {__fmaf_rn(pair.a, turn.x, -__fmul_rn(pair.b, turn.y)),
          __fmaf_rn(pair.b, turn.x, __fmul_rn(pair.a, turn.y))};
}

__device__ __forceinline__ u16 gated(float gate, float up) {
  return to_finite_half(__fmul_rn(gate / (1.0f + __expf(-gate)), up));
}
