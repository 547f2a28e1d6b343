// The scheduler of cuda.hpp's threads, and the functions that need containers: compiled once, and
// linked to each kernel.
#include "cuda.hpp"

namespace emulator {

std::vector<Grid> grids;
std::vector<Block*> all_blocks;
std::vector<Fibre*> fibres;
std::vector<std::vector<char>> stacks;  // that no fibre uses
Fibre* current = nullptr;
jmp_buf scheduler;
Random random_;
u64 clock_ = 0;

// Jumps between stacks: swapcontext would call the kernel for the signal mask each time.
__attribute__((noinline)) void give_way() {
  if (!_setjmp(current->at)) _longjmp(scheduler, 1);
}

__attribute__((noinline)) void resume(Fibre* fibre) {
  current = fibre;
  if (_setjmp(scheduler)) return;
  if (fibre->started) _longjmp(fibre->at, 1);
  fibre->started = true;
  setcontext(&fibre->context);
}

void start() {
  current->body();
  current->over = true;
  give_way();
}

void launch(int blocks, int threads, u32 bytes, std::function<void()> body) {
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

u32 late = 0;  // of seven places, the one whose copies arrive much later than those issued after them
void deliver(bool some) {
  for (Block* block : all_blocks)
    for (size_t i = 0; i < block->copies.size();) {
      Copy& copy = block->copies[i];
      if (some && random_() % (copy.to / 4096 % 7 == late ? 1024 : 4)) {
        ++i;
        continue;
      }
      memcpy(block->memory.data() + copy.to, copy.from.data(), copy.bytes);
      Barrier& barrier = block->barriers[copy.barrier];
      barrier.bytes -= (int)copy.bytes;
      barrier.settle();
      block->copies.erase(block->copies.begin() + i);
    }
}

// Runs until every thread is over; false where nothing ended within so many rounds.
bool run(u64 rounds) {
  size_t left = fibres.size();
  late = random_() % 7;
  for (u64 round = 0; left && round < rounds; ++round) {
    const size_t first = random_() % fibres.size();
    for (size_t i = 0; i < fibres.size(); ++i) {
      Fibre* fibre = fibres[(first + i) % fibres.size()];
      if (fibre->over || fibre->waits()) continue;
      if (fibre->block->asleep_until > round || random_() % 8 == 0) continue;
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

Barrier& barrier(u32 at) { return current->block->barriers.at(at); }
Meeting& meeting(int number) { return current->block->meetings[number]; }

}  // namespace emulator

void barrier_make(u32 at, u32 arrivals) {
  emulator::block().barriers[at] = {(int)arrivals, (int)arrivals, 0, 0};
}
void copy_in(u32 to, const void* from, u32 bytes, u32 barrier, u64) {
  const unsigned char* source = (const unsigned char*)from;
  if (bytes % 16 || (uintptr_t)from % 16 || to % 16 || to + bytes > emulator::block().memory.size())
    abort();
  memset(emulator::block().memory.data() + to, 0xFF, bytes);
  emulator::block().copies.push_back({to, bytes, barrier, {source, source + bytes}});
}
void copy_own(u32 to, const u16* from, bool wanted) {
  if ((uintptr_t)from % 16 || to % 16 || to + 16 > emulator::block().memory.size()) abort();
  emulator::OwnCopy copy = {to, {}};
  if (wanted) memcpy(copy.bytes, from, 16);
  memset(emulator::block().memory.data() + to, 0xFF, 16);
  if (emulator::current->copies.empty()) emulator::current->copies.emplace_back();
  emulator::current->copies.back().push_back(copy);
}
void end_of_copies() {
  if (emulator::current->copies.empty()) emulator::current->copies.emplace_back();
  emulator::current->copies.emplace_back();
}
void wait_for_copies(size_t pending) {
  auto& groups = emulator::current->copies;  // the last one has not ended yet
  while (groups.size() > pending + 1) {
    for (auto& copy : groups.front())
      memcpy(emulator::block().memory.data() + copy.to, copy.bytes, 16);
    groups.erase(groups.begin());
  }
}

void multiply_add(float (&sums)[4], const uint4& a, u32 b0, u32 b1) {
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
