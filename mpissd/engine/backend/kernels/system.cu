// Memory accesses that other GPUs and the host see, undivided.
__device__ __forceinline__ void sync_block() { __syncthreads(); }

// 8 bytes, a word and its flag, are written and read as a whole, also across NVLink.
__device__ __forceinline__ void push(u64* to, u64 message) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(to), "l"(message) : "memory");
}

__device__ __forceinline__ u64 peek(const u64* from) {
  u64 message;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(message) : "l"(from) : "memory");
  return message;
}

__device__ __forceinline__ void push_two(u64* to, u64 first, u64 second) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};"
               ::"l"(to), "l"(first), "l"(second) : "memory");
}

__device__ __forceinline__ void peek_two(const u64* from, u64& first, u64& second) {
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second) : "l"(from) : "memory");
}

__device__ __forceinline__ int load_host(const int* from) {
  int value;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_host(int* to, int value) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
