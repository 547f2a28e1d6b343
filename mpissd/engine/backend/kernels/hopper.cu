// Instructions of compute capability 9.0, each behind a name, so that the kernels that use them read
// as programs (and can run on a host that emulates these functions). Addresses within shared memory
// are 32-bit offsets.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
  u32 at;
  asm("{\n.reg .u64 wide;\ncvta.to.shared.u64 wide, %1;\ncvt.u32.u64 %0, wide;\n}"
      : "=r"(at) : "l"(pointer));
  return at;
}

// A barrier in shared memory: a phase ends when `arrivals` threads and all bytes have arrived.
__device__ __forceinline__ void barrier_make(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barriers_made() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  u32 over = 0;
  while (!over)
    asm volatile("{\n.reg .pred over;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, over;\n}"
                 : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
}

// Starts a copy of `bytes` (a multiple of 16) from device memory; the barrier counts its bytes.
// Data that are read once should not evict data that are read again.
__device__ __forceinline__ u64 read_once() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_in(u32 to, const void* from, u32 bytes, u32 barrier,
                                        u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
               " [%0], [%1], %2, [%3], %4;"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
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
__device__ __forceinline__ void copy_own(u32 to, const u16* from, bool wanted) {
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
__device__ __forceinline__ void multiply_add(float (&sums)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// A barrier for `threads` threads of a block.
__device__ __forceinline__ void sync_some(int threads) {
  asm volatile("barrier.cta.sync 1, %0;" ::"r"(threads) : "memory");
}

__device__ __forceinline__ void sync_lanes() { __syncwarp(); }

__device__ __forceinline__ void add_release(u32* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ u32 load_acquire(const u32* counter) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
