// A transformer's operations on whole rows: embedding, residual sum with RMSNorm, and q, k, v on
// their way to the cache. Float32 rows, one block or warp a row, so no row depends on another.

// The tokens may be in page-locked host memory, so only one thread a row reads them.
extern "C" __global__ void embed(const u16* table, int entries, int width, const int* tokens,
                                 float* out) {
  int* token = (int*)block_memory();
  may_start_next();
  wait_for_last();
  if (threadIdx.x == 0) *token = min(max(tokens[blockIdx.x], 0), entries - 1);
  __syncthreads();
  const u16* from = table + (long long)*token * width;
  for (int c = threadIdx.x; c < width; c += blockDim.x)
    out[(long long)blockIdx.x * width + c] = to_float(from[c]);
}

// Hidden states by slot and position, for a draft that reads them. seats: [4][most], see cache.Seats.
// The state after a trunk row is kept in front of the next position, if there is one. factors: of each
// row of x, see arithmetic.cu; null: 1.
extern "C" __global__ void keep(const u16* x, const float* factors, const int* seats, int most,
                                int positions, int width, u16* states) {
  may_start_next();
  wait_for_last();
  const int m = blockIdx.x, slot = seats[m], position = seats[most + m] + 1;
  if (slot < 0 || seats[2 * most + m] >= 0 || position >= positions) return;
  u16* to = states + ((long long)slot * positions + position) * width;
  const u16* from = x + (long long)m * width;
  for (int c = threadIdx.x; c < width; c += blockDim.x)
    to[c] = factors ? to_finite_half(__fmul_rn(to_float(from[c]), factors[m])) : from[c];
}

// Brings the state in front of each row's position; after its trunk it is the draft's own.
extern "C" __global__ void recall(const u16* states, const u16* own, const int* seats, int most,
                                  int positions, int width, float* out) {
  may_start_next();
  wait_for_last();
  const int m = blockIdx.x, slot = seats[m], position = seats[most + m];
  const int trunk = seats[3 * most + m];
  const u16* from = trunk >= 0 && position > trunk ? own : states;
  from += ((long long)max(slot, 0) * positions + position) * width;
  for (int c = threadIdx.x; c < width; c += blockDim.x)
    out[(long long)m * width + c] = slot < 0 ? 0.0f : to_float(from[c]);
}

constexpr int NORM_THREADS = 512, NORM_WORDS = 8;  // of 16 bytes a thread: rows of up to 16384

__device__ __forceinline__ float sum_of_block(float sum) {
  float* warps = (float*)block_memory();
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int w = 0; w < NORM_THREADS / 32; ++w) sum += warps[w];
  return sum;
}

__device__ __forceinline__ float4 four(const float* from, int i) { return ((const float4*)from)[i]; }

__device__ __forceinline__ float4 four(const u16* from, int i) {
  const uint2 v = ((const uint2*)from)[i];
  return make_float4(to_float(v.x & 0xFFFF), to_float(v.x >> 16), to_float(v.y & 0xFFFF),
                     to_float(v.y >> 16));
}

// hidden += delta (where there is one); out = hidden / rms(hidden) * weight.
template <class Delta>
__device__ __forceinline__ void norm_row(float* hidden, const Delta* delta, const float* weight,
                                         u16* out, int width, float eps) {
  may_start_next();
  wait_for_last();
  const long long row = (long long)blockIdx.x * width;
  float4 values[NORM_WORDS];
  float sum = 0;
#pragma unroll
  for (int j = 0; j < NORM_WORDS; ++j) {
    const int i = threadIdx.x + j * NORM_THREADS;
    if (4 * i >= width) break;
    float4 v = four(hidden + row, i);
    if (delta) {
      const float4 d = four(delta + row, i);
      v = make_float4(v.x + d.x, v.y + d.y, v.z + d.z, v.w + d.w);
      ((float4*)(hidden + row))[i] = v;
    }
    values[j] = v;
    sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  const float scale = 1.0f / sqrtf(sum_of_block(sum) / width + eps);
#pragma unroll
  for (int j = 0; j < NORM_WORDS; ++j) {
    const int i = threadIdx.x + j * NORM_THREADS;
    if (4 * i >= width) break;
    const float4 v = values[j], w = four(weight, i);
    uint2 words;
    words.x = finite_halves(v.x * scale * w.x, v.y * scale * w.y);
    words.y = finite_halves(v.z * scale * w.z, v.w * scale * w.w);
    ((uint2*)(out + row))[i] = words;
  }
}

#define NORM(name, Delta)                                                                    \
  extern "C" __global__ void __launch_bounds__(NORM_THREADS) name(                            \
      float* hidden, const Delta* delta, const float* weight, u16* out, int width, float eps) { \
    norm_row(hidden, delta, weight, out, width, eps);                                          \
  }
NORM(norm_float32, float)
NORM(norm_float16, u16)

// gathered: [ranks][words] of two float16; out = their sums in rank order, rounded once.
extern "C" __global__ void add_ranks(const u32* gathered, int ranks, long long words, u32* out) {
  may_start_next();
  wait_for_last();
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= words) return;
  float low = 0, high = 0;
  for (int r = 0; r < ranks; ++r) {
    const u32 word = gathered[r * words + i];
    low += to_float(word & 0xFFFF);
    high += to_float(word >> 16);
  }
  out[i] = finite_halves(low, high);
}
