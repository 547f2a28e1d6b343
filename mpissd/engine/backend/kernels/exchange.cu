// The all-reduce or all-gather as a separate kernel. A thread sends two words (16 bytes with their
// numbers) to all other ranks and waits for theirs. mode 0: out = the ranks' sums; 1: out[rank] = what it sent.
// The grid never changes, so that every block can count the exchanges by itself.
constexpr int EXCHANGE_SUM = 0;

__device__ __forceinline__ u32 word_at(const u32* from, long long i, long long words) {
  return i < words ? from[i] : 0;
}

__device__ __forceinline__ void put(u32* to, long long i, long long words, u32 word) {
  if (i < words) to[i] = word;
}

extern "C" __global__ void __launch_bounds__(256)
    exchange(const Peers* everybody, const u32* from, u32* out, long long words, int mode, int* stop,
             u64 limit) {
  const Peers peers = *everybody;
  const Watch watch = {stop, limit};
  const u32 number = peers.done[blockIdx.x] + 1;
  const long long step = 2LL * gridDim.x * blockDim.x;
  for (long long i = 2LL * (blockIdx.x * blockDim.x + threadIdx.x); i < words; i += step) {
    const u32 own[2] = {from[i], word_at(from, i + 1, words)};
    const u64 mine[2] = {message(own[0], number), message(own[1], number)};
#pragma unroll
    for (int r = 0; r < MAX_RANKS; ++r)
      if (r < peers.size && r != peers.rank)
        push_two(place_of(peers, r, peers.rank, number, i), mine[0], mine[1]);
    float sums[4] = {0, 0, 0, 0};
    u64 theirs[MAX_RANKS][2];
    Patience patience(watch);
    bool whole = false, given_up = false;
    while (!whole && !given_up) {
      whole = true;
#pragma unroll
      for (int r = 0; r < MAX_RANKS; ++r) {
        theirs[r][0] = mine[0];
        theirs[r][1] = mine[1];
        if (r < peers.size && r != peers.rank)
          peek_two(place_of(peers, peers.rank, r, number, i), theirs[r][0], theirs[r][1]);
      }
#pragma unroll
      for (int r = 0; r < MAX_RANKS; ++r)
        whole = whole && is_of(theirs[r][0], number) && is_of(theirs[r][1], number);
      given_up = !whole && patience.over();
    }
#pragma unroll
    for (int r = 0; r < MAX_RANKS; ++r)
      if (r < peers.size) {
        const u32 first = given_up ? POISON : (u32)theirs[r][0];
        const u32 second = given_up ? POISON : (u32)theirs[r][1];
        sums[0] += low(first);
        sums[1] += high(first);
        sums[2] += low(second);
        sums[3] += high(second);
        if (mode != EXCHANGE_SUM) {
          put(out, r * words + i, r * words + words, first);
          put(out, r * words + i + 1, r * words + words, second);
        }
      }
    if (mode == EXCHANGE_SUM) {
      out[i] = halves(sums[0], sums[1]);
      put(out, i + 1, words, halves(sums[2], sums[3]));
    }
  }
  sync_block();
  if (threadIdx.x == 0) peers.done[blockIdx.x] = number;
}
