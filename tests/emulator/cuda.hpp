// Runs kernels of mpissd/backend/kernels on a processor: every thread of every block, of the grids of
// several "devices" at once, is a fibre that gives way wherever it would wait. It stands for
// types.cu and hopper.cu, whose functions are the only ones that hold machine instructions.
//
// Copies into shared memory arrive late, at a random moment, the order in which threads run is random
// too, and blocks stop for a while: what is not synchronised is likely to be seen.
#undef _FORTIFY_SOURCE  // it takes a jump to another stack for an error
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

using std::isfinite;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct uint4 {
  u32 x, y, z, w;
};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct Both {
  float a, b;
};
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }

inline u16 to_half(float value) {
  _Float16 half = (_Float16)value;
  u16 bits;
  memcpy(&bits, &half, 2);
  return bits;
}

inline float to_float(u16 bits) {
  _Float16 half;
  memcpy(&half, &bits, 2);
  return (float)half;
}

namespace emulator {

struct Barrier {
  int arrivals = 0, pending = 0, bytes = 0;
  u32 phase = 0;
  void settle() {
    if (pending == 0 && bytes == 0) {
      ++phase;
      pending = arrivals;
    }
  }
};

struct Meeting {  // of a number of threads; what they bring is kept until all are there
  int there = 0;
  u64 round = 0;
};

struct Warp {
  Meeting lanes, product;
  u64 brought[32];
  float* sums[32];
  uint4 a[32];
  u32 b[32][2];
};

struct Copy {
  u32 to, bytes, barrier;
  std::vector<unsigned char> from;
};

struct Block {
  int index, grid;
  std::vector<unsigned char> memory;
  std::map<u32, Barrier> barriers;
  std::vector<Warp> warps;
  std::map<int, Meeting> meetings;
  std::vector<Copy> copies;
  u64 asleep_until = 0;
};

struct OwnCopy {
  u32 to;
  unsigned char bytes[16];
};

struct Fibre {
  ucontext_t context;  // of its start
  std::vector<char> stack;
  std::function<void()> body;
  Block* block;
  int thread;
  bool over = false;
  // What it waits for, which the scheduler looks at in its place: the end of a round of a meeting,
  // or of a phase of a barrier.
  const Meeting* met = nullptr;
  u64 since = 0;
  const Barrier* barrier = nullptr;
  u32 parity = 0;
  bool waits() const {
    return (met && met->round == since) || (barrier && (barrier->phase & 1) == parity);
  }
  std::vector<std::vector<OwnCopy>> copies;  // by group
  bool started = false;
  jmp_buf at;  // where it gave way
};

struct Grid {
  int blocks, threads;
};

extern std::vector<Grid> grids;
extern std::vector<Block*> all_blocks;
extern Fibre* current;
struct Random {  // xorshift64*: <random> takes longer to compile than a kernel
  u64 state = 1;
  void seed(u32 seed) { state = seed + 1ull; }
  u32 operator()() {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (u32)(state * 0x2545F4914F6CDD1Dull >> 32);
  }
};
extern Random random_;
extern u64 clock_;

void give_way();
void launch(int blocks, int threads, u32 bytes, std::function<void()> body);
bool run(u64 rounds);
Barrier& barrier(u32 at);
Meeting& meeting(int number);

template <typename Last>
void meet(Meeting& meeting, int count, Last last) {
  const u64 round = meeting.round;
  if (++meeting.there == count) {
    last();
    meeting.there = 0;
    ++meeting.round;
  } else {
    current->met = &meeting;
    current->since = round;
    give_way();  // until all are there
    current->met = nullptr;
  }
}

inline Block& block() { return *current->block; }
inline Warp& warp() { return block().warps[current->thread / 32]; }
// A block of this one's cluster, of four.
inline Block& block_of_cluster(int rank) {
  for (Block* other : all_blocks)
    if (other->grid == block().grid && other->index == block().index / 4 * 4 + rank) return *other;
  abort();
}
inline Grid& grid() { return grids[block().grid]; }
struct Index {
  int x;
};

}  // namespace emulator

#define threadIdx (emulator::Index{emulator::current->thread})
#define blockIdx (emulator::Index{emulator::block().index})
#define gridDim (emulator::Index{emulator::grid().blocks})
#define blockDim (emulator::Index{emulator::grid().threads})

inline unsigned char* block_memory() { return emulator::block().memory.data(); }
inline u32 shared_address(const void* p) {
  return (u32)((const unsigned char*)p - emulator::block().memory.data());
}

void barrier_make(u32 at, u32 arrivals);
inline void barriers_made() {}
inline void barrier_arrive(u32 at) {
  emulator::Barrier& barrier = emulator::barrier(at);
  --barrier.pending;
  barrier.settle();
}
inline void barrier_arrive_expecting(u32 at, u32 bytes) {
  emulator::barrier(at).bytes += (int)bytes;
  barrier_arrive(at);
}
inline void barrier_wait(u32 at, u32 parity) {
  emulator::Fibre& fibre = *emulator::current;
  fibre.barrier = &emulator::barrier(at);
  fibre.parity = parity;
  if (fibre.waits()) emulator::give_way();
  fibre.barrier = nullptr;
}
inline int cluster_rank() { return emulator::block().index % 4; }
inline void sync_cluster() {
  emulator::meet(emulator::block_of_cluster(0).meetings[-1], 4 * emulator::grid().threads, [] {});
}
struct Far {
  u32 at;
  emulator::Block* block;
  Far(u32 at, int rank) : at(at), block(&emulator::block_of_cluster(rank)) {}
};
inline void send_sums(const Far& to, const Far& barrier, const float (&sums)[4]) {
  const unsigned char* from = (const unsigned char*)sums;
  memset(to.block->memory.data() + to.at, 0xFF, 16);
  to.block->copies.push_back({to.at, 16, barrier.at, {from, from + 16}});
}
inline void barrier_arrive(const Far& barrier) {
  emulator::Barrier& there = barrier.block->barriers.at(barrier.at);
  --there.pending;
  there.settle();
}
inline u32 load_word(u32 at) {
  emulator::give_way();
  u32 word;
  memcpy(&word, emulator::block().memory.data() + at, 4);
  return word;
}
inline void store_word(u32 at, u32 word) { memcpy(emulator::block().memory.data() + at, &word, 4); }
inline u64 read_once() { return 0; }
inline void fetch_bytes(const void* from, u32 bytes) {
  if ((uintptr_t)from % 16 || bytes % 16) abort();
}
void copy_in(u32 to, const void* from, u32 bytes, u32 barrier, u64);
inline uint4 load_shared(u32 at) {
  uint4 v;
  memcpy(&v, emulator::block().memory.data() + at, 16);
  return v;
}
// A thread's own copies arrive when it waits for them, as they were when they began.
void copy_own(u32 to, const u16* from, bool wanted);
void end_of_copies();
void wait_for_copies(size_t pending);
template <int PENDING>
inline void wait_for_copies() {
  wait_for_copies(PENDING);
}
inline void barrier_arrive_copied(u32 at) {
  emulator::give_way();
  end_of_copies();
  wait_for_copies(0);
  barrier_arrive(at);
}

void multiply_add(float (&sums)[4], const uint4& a, u32 b0, u32 b1);
inline void sync_some(int threads) {
  emulator::meet(emulator::meeting(1), threads, [] {});
}
inline void sync_team(int barrier, int threads) {
  emulator::meet(emulator::meeting(barrier), threads, [] {});
}
inline void sync_block() {
  emulator::meet(emulator::meeting(0), emulator::grid().threads, [] {});
}
inline void sync_lanes() { emulator::meet(emulator::warp().lanes, 32, [] {}); }
inline void add_release(u32* counter, u32 count = 1) { *counter += count; }
inline u32 load_acquire(const u32* counter) {
  emulator::give_way();
  return *(const volatile u32*)counter;
}
inline u32 load_relaxed(const u32* counter) { return load_acquire(counter); }
inline uint4 load_relaxed(const uint4* from) {
  emulator::give_way();
  const volatile u32* words = (const volatile u32*)from;
  return {words[0], words[1], words[2], words[3]};
}
inline void push(u64* to, u64 message) { *to = message; }
inline u64 peek(const u64* from) {
  emulator::give_way();
  return *(const volatile u64*)from;
}
inline void push_two(u64* to, u64 first, u64 second) {
  if ((uintptr_t)to % 16) abort();
  to[0] = first;
  to[1] = second;
}
inline void peek_two(const u64* from, u64& first, u64& second) {
  emulator::give_way();
  first = ((const volatile u64*)from)[0];
  second = ((const volatile u64*)from)[1];
}
inline int load_host(const int* from) { return *(const volatile int*)from; }
inline void store_host(int* to, int value) { *to = value; }
inline u64 nanoseconds() { return emulator::clock_ + 1; }
