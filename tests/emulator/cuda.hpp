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
  std::vector<std::vector<OwnCopy>> copies;  // by group
  bool started = false;
  jmp_buf at;  // where it gave way
};

struct Grid {
  int blocks, threads;
};

inline std::vector<Grid> grids;
inline std::vector<Block*> all_blocks;
inline std::vector<Fibre*> fibres;
inline std::vector<std::vector<char>> stacks;  // that no fibre uses
inline Fibre* current = nullptr;
inline jmp_buf scheduler;
struct Random {  // xorshift64*: <random> takes longer to compile than a kernel
  u64 state = 1;
  void seed(u32 seed) { state = seed + 1ull; }
  u32 operator()() {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (u32)(state * 0x2545F4914F6CDD1Dull >> 32);
  }
};

inline Random random_;
inline u64 clock_ = 0;

// Jumps between stacks: swapcontext would call the kernel for the signal mask each time.
__attribute__((noinline)) inline void give_way() {
  if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}

__attribute__((noinline)) inline void resume(Fibre* fibre) {
  current = fibre;
  if (_setjmp(scheduler)) return;
  if (fibre->started) _longjmp(fibre->at, 1);
  fibre->started = true;
  setcontext(&fibre->context);
}

template <typename Last>
void meet(Meeting& meeting, int count, Last last) {
  const u64 round = meeting.round;
  if (++meeting.there == count) {
    last();
    meeting.there = 0;
    ++meeting.round;
  } else {
    while (meeting.round == round) give_way();
  }
}

inline void start() {
  current->body();
  current->over = true;
  give_way();
}

inline void launch(int blocks, int threads, u32 bytes, std::function<void()> body) {
  const int grid = (int)grids.size();
  grids.push_back({blocks, threads});
  for (int b = 0; b < blocks; ++b) {
    Block* block = new Block{b, grid, std::vector<unsigned char>(bytes, 0xFF), {}, {}, {}, {}, 0};
    block->warps.resize((threads + 31) / 32);
    all_blocks.push_back(block);
    for (int t = 0; t < threads; ++t) {
      Fibre* fibre = new Fibre{{}, {}, body, block, t};
      if (stacks.empty()) stacks.emplace_back(48 << 10);
      fibre->stack.swap(stacks.back());
      stacks.pop_back();
      getcontext(&fibre->context);
      fibre->context.uc_stack.ss_sp = fibre->stack.data();
      fibre->context.uc_stack.ss_size = fibre->stack.size();
      fibre->context.uc_link = nullptr;
      makecontext(&fibre->context, start, 0);
      fibres.push_back(fibre);
    }
  }
}

inline void deliver(bool some) {
  for (Block* block : all_blocks)
    for (size_t i = 0; i < block->copies.size();) {
      if (some && random_() % 4) {
        ++i;
        continue;
      }
      Copy& copy = block->copies[i];
      memcpy(block->memory.data() + copy.to, copy.from.data(), copy.bytes);
      Barrier& barrier = block->barriers[copy.barrier];
      barrier.bytes -= (int)copy.bytes;
      barrier.settle();
      block->copies.erase(block->copies.begin() + i);
    }
}

// Runs until every thread is over; false where nothing ended within so many rounds.
inline bool run(u64 rounds) {
  size_t left = fibres.size();
  for (u64 round = 0; left && round < rounds; ++round) {
    const size_t first = random_() % fibres.size();
    for (size_t i = 0; i < fibres.size(); ++i) {
      Fibre* fibre = fibres[(first + i) % fibres.size()];
      if (fibre->over || fibre->block->asleep_until > round || random_() % 8 == 0) continue;
      resume(fibre);
      if (fibre->over) --left;
    }
    deliver(true);
    for (Block* block : all_blocks)  // some fall far behind the others, now and then
      if (random_() % 256 == 0) block->asleep_until = round + random_() % 256;
    clock_ += 1000;
  }
  for (Fibre* fibre : fibres) {
    stacks.push_back(std::move(fibre->stack));
    delete fibre;
  }
  for (Block* block : all_blocks) delete block;
  fibres.clear();
  all_blocks.clear();
  grids.clear();
  return left == 0;
}

inline Block& block() { return *current->block; }
inline Warp& warp() { return block().warps[current->thread / 32]; }
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

inline void barrier_make(u32 at, u32 arrivals) {
  emulator::block().barriers[at] = {(int)arrivals, (int)arrivals, 0, 0};
}
inline void barriers_made() {}
inline void barrier_arrive(u32 at) {
  emulator::Barrier& barrier = emulator::block().barriers.at(at);
  --barrier.pending;
  barrier.settle();
}
inline void barrier_arrive_expecting(u32 at, u32 bytes) {
  emulator::block().barriers.at(at).bytes += (int)bytes;
  barrier_arrive(at);
}
inline void barrier_wait(u32 at, u32 parity) {
  while ((emulator::block().barriers.at(at).phase & 1) == parity) emulator::give_way();
}
inline u32 load_word(u32 at) {
  emulator::give_way();
  u32 word;
  memcpy(&word, emulator::block().memory.data() + at, 4);
  return word;
}
inline void store_word(u32 at, u32 word) { memcpy(emulator::block().memory.data() + at, &word, 4); }
inline u64 read_once() { return 0; }
inline void copy_in(u32 to, const void* from, u32 bytes, u32 barrier, u64) {
  const unsigned char* source = (const unsigned char*)from;
  if (bytes % 16 || (uintptr_t)from % 16 || to % 16 || to + bytes > emulator::block().memory.size())
    abort();
  memset(emulator::block().memory.data() + to, 0xFF, bytes);
  emulator::block().copies.push_back({to, bytes, barrier, {source, source + bytes}});
}
inline uint4 load_shared(u32 at) {
  uint4 v;
  memcpy(&v, emulator::block().memory.data() + at, 16);
  return v;
}
// A thread's own copies arrive when it waits for them, as they were when they began.
inline void copy_own(u32 to, const u16* from, bool wanted) {
  if ((uintptr_t)from % 16 || to % 16 || to + 16 > emulator::block().memory.size()) abort();
  emulator::OwnCopy copy = {to, {}};
  if (wanted) memcpy(copy.bytes, from, 16);
  memset(emulator::block().memory.data() + to, 0xFF, 16);
  if (emulator::current->copies.empty()) emulator::current->copies.emplace_back();
  emulator::current->copies.back().push_back(copy);
}
inline void end_of_copies() {
  if (emulator::current->copies.empty()) emulator::current->copies.emplace_back();
  emulator::current->copies.emplace_back();
}
template <int PENDING>
inline void wait_for_copies() {
  auto& groups = emulator::current->copies;  // the last one has not ended yet
  while (groups.size() > PENDING + 1) {
    for (auto& copy : groups.front())
      memcpy(emulator::block().memory.data() + copy.to, copy.bytes, 16);
    groups.erase(groups.begin());
  }
}

inline void multiply_add(float (&sums)[4], const uint4& a, u32 b0, u32 b1) {
  emulator::Warp& warp = emulator::warp();
  const int lane = emulator::current->thread % 32;
  warp.sums[lane] = sums;
  warp.a[lane] = a;
  warp.b[lane][0] = b0;
  warp.b[lane][1] = b1;
  emulator::meet(warp.product, 32, [&] {
    static float left[16][16], right[16][8];
    for (int l = 0; l < 32; ++l) {
      const int r = l / 4, c = 2 * (l % 4);
      const u32 words[4] = {warp.a[l].x, warp.a[l].y, warp.a[l].z, warp.a[l].w};
      for (int w = 0; w < 4; ++w)
        for (int h = 0; h < 2; ++h)
          left[r + w % 2 * 8][c + w / 2 * 8 + h] = to_float((u16)(words[w] >> 16 * h));
      for (int w = 0; w < 2; ++w)
        for (int h = 0; h < 2; ++h)
          right[c + 8 * w + h][r] = to_float((u16)(warp.b[l][w] >> 16 * h));
    }
    for (int l = 0; l < 32; ++l)
      for (int j = 0; j < 4; ++j) {
        const int row = l / 4 + j / 2 * 8, column = 2 * (l % 4) + j % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
        warp.sums[l][j] += sum;
      }
  });
}

inline void sync_some(int threads) {
  emulator::meet(emulator::block().meetings[1], threads, [] {});
}
inline void sync_block() {
  emulator::meet(emulator::block().meetings[0], emulator::grid().threads, [] {});
}
inline void sync_lanes() { emulator::meet(emulator::warp().lanes, 32, [] {}); }
inline void add_release(u32* counter) { ++*counter; }
inline u32 load_acquire(const u32* counter) {
  emulator::give_way();
  return *(const volatile u32*)counter;
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
