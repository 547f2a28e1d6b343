// The kernels under the emulator, callable from Python: grids are queued, then run together.
#include "cuda.cpp"
#include "inbox.cu"
#include "exchange.cu"
#include "plan.cu"
#include "columns.cu"
#include "units.cu"
#include "chain.cu"

extern "C" {

void queue_chain(int blocks, const void* products, int count, u32* finished, const void* peers,
                 int exchanges, int done_counts, int* stop, u64 limit) {
  emulator::launch(blocks, CHAIN_THREADS, CHAIN_BYTES, [=] {
    chain((const Product*)products, count, finished, (const Peers*)peers, exchanges, done_counts,
          stop, limit);
  });
}

void queue_exchange(int blocks, int threads, const void* peers, const u32* from, u32* out,
                    long long words, int mode, int* stop, u64 limit) {
  emulator::launch(blocks, threads, 0, [=] {
    exchange((const Peers*)peers, from, out, words, mode, stop, limit);
  });
}

int run_queued(u64 rounds, u32 seed) {
  emulator::random_.seed(seed);
  return emulator::run(rounds);
}

int chain_bytes() { return CHAIN_BYTES; }
}
