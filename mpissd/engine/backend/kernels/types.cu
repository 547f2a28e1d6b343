// Types and functions that the kernels share. float16 is passed as its bits, so that no header is
// needed.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Both {  // two columns of a tile of 16
  float a, b;
};

__device__ __forceinline__ u16 to_half(float x) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}

__device__ __forceinline__ float to_float(u16 h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}

// The block's dynamic shared memory.
__device__ __forceinline__ unsigned char* block_memory() {
  extern __shared__ __align__(128) unsigned char memory[];
  return memory;
}
