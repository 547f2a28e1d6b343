// Runs one grid of a kernel on a processor, block after block or all together. Beside cuda.hpp it stands for
// ampere.cu and for the few functions of CUDA that the transformer's kernels call by their names.
#include "cuda.hpp"

#include <tuple>
#include <utility>

struct uint2 {
  u32 x, y;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline u32 max(u32 a, u32 b) { return a < b ? b : a; }
inline u64 max(u64 a, u64 b) { return a < b ? b : a; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline int __ffs(u32 x) { return __builtin_ffs((int)x); }
inline u32 __float_as_uint(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

namespace emulator {

struct Index2 {
  int x, y;
};
inline Index2 grid_size, block_size;

inline int lane() { return current->thread % 32; }
inline void meet_lanes() { meet(warp().lanes, 32, [] {}); }

// Returns what the lane `from` of this warp brings.
template <typename T>
T exchange_lanes(T value, int from) {
  static_assert(sizeof(T) <= 8);
  memcpy(&warp().brought[lane()], &value, sizeof(T));
  meet_lanes();
  T other;
  memcpy(&other, &warp().brought[from], sizeof(T));
  meet_lanes();
  return other;
}

template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
  kernel(*(std::remove_reference_t<A>*)args[I]...);
}

// All blocks at once, as the persistent kernels need it.
template <typename... A>
int run_together(void (*kernel)(A...), void** args, const int* sizes, u32 bytes, u32 seed) {
  random_.seed(seed);
  grid_size = {sizes[0], 1};
  block_size = {sizes[2], 1};
  launch(sizes[0], sizes[2], bytes, [=] { call(kernel, args, std::index_sequence_for<A...>()); });
  return run(20000000) ? (int)sizeof...(A) : 0;
}

template <typename... A>
int run_grid(void (*kernel)(A...), void** args, const int* sizes, u32 bytes, u32 seed) {
  random_.seed(seed);
  grid_size = {sizes[0], sizes[1]};
  block_size = {sizes[2], sizes[3]};
  for (int b = 0; b < sizes[0] * sizes[1]; ++b) {
    launch(1, sizes[2] * sizes[3], bytes, [=] { call(kernel, args, std::index_sequence_for<A...>()); });
    all_blocks.back()->index = b;
    if (!run(1000000)) return 0;
  }
  return (int)sizeof...(A);
}

}  // namespace emulator

#undef threadIdx
#undef blockIdx
#undef gridDim
#undef blockDim
#define threadIdx                                                       \
  (emulator::Index2{emulator::current->thread % emulator::block_size.x, \
                    emulator::current->thread / emulator::block_size.x})
#define blockIdx                                                   \
  (emulator::Index2{emulator::block().index % emulator::grid_size.x, \
                    emulator::block().index / emulator::grid_size.x})
#define gridDim (emulator::grid_size)
#define blockDim (emulator::block_size)

inline void __syncthreads() {
  const int threads = emulator::block_size.x * emulator::block_size.y;
  emulator::meet(emulator::meeting(0), threads, [] {});
}
inline void __syncwarp() { emulator::meet_lanes(); }
template <typename T>
T __shfl_xor_sync(u32, T value, int lanes) {
  return emulator::exchange_lanes(value, emulator::lane() ^ lanes);
}
template <typename T>
T __shfl_up_sync(u32, T value, int lanes) {
  const int from = emulator::lane() - lanes;
  return emulator::exchange_lanes(value, from < 0 ? emulator::lane() : from);
}
template <typename T>
T __shfl_sync(u32, T value, int from) {
  return emulator::exchange_lanes(value, from);
}
inline u32 __ballot_sync(u32, bool vote) {
  u32 votes = 0;
  for (int l = 0; l < 32; ++l) votes |= (u32)emulator::exchange_lanes(vote, l) << l;
  return votes;
}

inline void multiply_add(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  multiply_add(sums, uint4{a0, a1, a2, a3}, b0, b1);
}
inline uint4 load_blocks(u32 at) {
  u32 words[4];
  for (int b = 0; b < 4; ++b) {
    const u32 from = emulator::exchange_lanes(at, 8 * b + emulator::lane() / 4);
    if (from % 16) abort();
    memcpy(&words[b], emulator::block().memory.data() + from + 4 * (emulator::lane() % 4), 4);
  }
  return {words[0], words[1], words[2], words[3]};
}
inline uint4 load_transposed(u32 at) {
  u32 words[4];
  const int row = 2 * (emulator::lane() % 4), column = emulator::lane() / 4;
  for (int b = 0; b < 4; ++b) {
    u16 two[2];
    for (int j = 0; j < 2; ++j) {
      const u32 from = emulator::exchange_lanes(at, 8 * b + row + j);
      if (from % 16) abort();
      memcpy(&two[j], emulator::block().memory.data() + from + 2 * column, 2);
    }
    words[b] = two[0] | (u32)two[1] << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}
inline float exp2_of(float x) { return exp2f(x); }
inline u16 to_finite_half(float x) { return to_half(fminf(fmaxf(x, -65504.0f), 65504.0f)); }
inline u32 finite_halves(float low, float high) {
  return to_finite_half(low) | (u32)to_finite_half(high) << 16;
}
inline uint4 load_fresh(const void* from) { return *(const uint4*)from; }
inline float2 load_fresh_two(const float2* from) { return *from; }
inline float load_fresh_one(const float* from) { return *from; }
inline void fetch_ahead(const void*) {}
inline void poll_again() { emulator::give_way(); }
inline void may_start_next() {}
inline void wait_for_last() {}
