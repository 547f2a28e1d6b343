// Instructions of compute capability 8.0 that the transformer's kernels use, each behind a name.
// Addresses within shared memory are 32-bit offsets.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
  u32 at;
  asm("{\n.reg .u64 wide;\ncvta.to.shared.u64 wide, %1;\ncvt.u32.u64 %0, wide;\n}"
      : "=r"(at) : "l"(pointer));
  return at;
}

__device__ __forceinline__ uint4 load_shared(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}

// Starts a copy of 16 bytes by this thread, or of zeros if `wanted` is false. It bypasses the
// first-level cache, which does not see the writes of other multiprocessors. The thread waits for
// all copies between two calls of end_of_copies together.
__device__ __forceinline__ void copy_own(u32 to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}

__device__ __forceinline__ void end_of_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {  // leaves the last PENDING groups under way
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// sums[16, 8] += a[16, 16] b[16, 8], float16 into float32; a warp's lanes hold the parts.
__device__ __forceinline__ void multiply_add(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3,
                                             u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A barrier for `threads` threads of a block, which has 16 of them; number 0 is that of the block.
__device__ __forceinline__ void sync_team(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void sync_lanes() { __syncwarp(); }

// Loads what other multiprocessors may have written since this kernel began.
__device__ __forceinline__ uint4 load_fresh(const void* from) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ float2 load_fresh_two(const float2* from) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ float load_fresh_one(const float* from) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
  return v;
}

// Asks for the 128 bytes around an address in the last-level cache.
__device__ __forceinline__ void fetch_ahead(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// Four 8 x 8 blocks of float16 from shared memory, transposed: lane l gives the address of row l % 8
// of block l / 8, and receives rows 2 (l % 4) and the next of column l / 4 of each block.
__device__ __forceinline__ uint4 load_transposed(u32 at) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two float16 values as one word; values beyond its range become the largest.
__device__ __forceinline__ u16 to_finite_half(float x) {
  return to_half(fminf(fmaxf(x, -65504.0f), 65504.0f));
}

__device__ __forceinline__ u32 finite_halves(float low, float high) {
  return to_finite_half(low) | (u32)to_finite_half(high) << 16;
}

// Kernels of a forward overlap where they are launched so: the next one may start when all blocks
// of this one have called may_start_next, and reads what this one wrote behind wait_for_last.
__device__ __forceinline__ void may_start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_last() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
