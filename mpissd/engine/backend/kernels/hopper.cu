// Instructions of compute capability 9.0 beside those of ampere.cu, each behind a name, so that the
// kernels that use them read as programs (and can run on a host that emulates these functions).
// Addresses within shared memory are 32-bit offsets.
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

// Arrives when this thread's own copies so far (copy_own) have.
__device__ __forceinline__ void barrier_arrive_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
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

// Asks for `bytes` (a multiple of 16) in the last-level cache.
__device__ __forceinline__ void fetch_bytes(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// The same as multiply_add of ampere.cu, with the lane's part of a in one value.
__device__ __forceinline__ void multiply_add(float (&sums)[4], const uint4& a, u32 b0, u32 b1) {
  multiply_add(sums, a.x, a.y, a.z, a.w, b0, b1);
}

// A barrier for `threads` threads of a block.
__device__ __forceinline__ void sync_some(int threads) {
  asm volatile("barrier.cta.sync 1, %0;" ::"r"(threads) : "memory");
}

__device__ __forceinline__ void add_release(u32* counter, u32 count = 1) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(count) : "memory");
}

// Without the order of load_acquire, which empties the multiprocessor's cache.
__device__ __forceinline__ u32 load_relaxed(const u32* counter) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

__device__ __forceinline__ uint4 load_relaxed(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ u32 load_acquire(const u32* counter) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// A cluster of blocks: this block's number in it, a barrier of all their threads, and addresses in the shared
// memory of one of them.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

struct Far {
  u32 address;
  __device__ __forceinline__ Far(u32 at, int block) {
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(at), "r"(block));
  }
};

// Sends four sums to another block, whose barrier counts their bytes.
__device__ __forceinline__ void send_sums(const Far& to, const Far& barrier, const float (&sums)[4]) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(to.address), "f"(sums[0]), "f"(sums[1]), "f"(sums[2]), "f"(sums[3]), "r"(barrier.address)
               : "memory");
}

// Says that data were read; no later access depends on it.
__device__ __forceinline__ void barrier_arrive(const Far& barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier.address) : "memory");
}
