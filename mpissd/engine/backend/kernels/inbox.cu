// One-shot exchange between the GPUs of a host. Every rank has an inbox in its own memory, mapped by
// all others: [2 slots][senders][capacity] messages of 8 bytes, a word of two float16 and, in the
// same store, the number of the exchange. The sender writes it across NVLink; the reader polls its
// own memory until the number is there. Numbers rise by one an exchange and choose the slot. A rank
// sends exchange n + 2 only when it has n + 1 from all ranks, each of which read n before it sent
// n + 1: two slots are enough, and nothing is ever cleared.
constexpr int MAX_RANKS = 8;

struct Peers {
  u64* inbox[MAX_RANKS];  // of every rank
  u32* done;              // finished exchanges, one count for each block of `exchange`
  int rank, size;
  long long capacity;
};

// Ends a wait for a peer that never answers, or for blocks that do not run: when the host sets the
// stop word, or after this many nanoseconds, when the kernel sets the word itself.
struct Watch {
  int* stop;
  u64 limit;
};

class Patience {
 public:
  __device__ __forceinline__ explicit Patience(const Watch& watch) : watch_(watch) {}

  // Call this after every poll that found nothing.
  __device__ __forceinline__ bool over() {
    if (++polls_ & 1023) return false;
    u64 now = nanoseconds();
    if (!since_) since_ = now;
    if (now - since_ > watch_.limit) store_host(watch_.stop, 1);
    return load_host(watch_.stop) != 0;
  }

 private:
  const Watch& watch_;
  u32 polls_ = 0;
  u64 since_ = 0;
};

__device__ __forceinline__ u64* place_of(const Peers& peers, int to, int from, u32 number,
                                         long long index) {
  return peers.inbox[to] + ((number & 1) * peers.size + from) * peers.capacity + index;
}

__device__ __forceinline__ u64 message(u32 word, u32 number) { return (u64)number << 32 | word; }
__device__ __forceinline__ bool is_of(u64 message, u32 number) { return message >> 32 == number; }

__device__ __forceinline__ float low(u32 word) { return to_float(word & 0xFFFFu); }
__device__ __forceinline__ float high(u32 word) { return to_float(word >> 16); }

__device__ __forceinline__ u32 halves(float a, float b) {
  return to_half(a) | (u32)to_half(b) << 16;
}

constexpr u32 POISON = 0x7FFF7FFFu;  // two NaN

// Sends a word to all other ranks. (Not inline, so that it does not separate the code of one rank.)
__device__ __noinline__ void send(const Peers& peers, u32 number, long long index, u32 own) {
#pragma unroll
  for (int r = 0; r < MAX_RANKS; ++r)
    if (r < peers.size && r != peers.rank)
      push(place_of(peers, r, peers.rank, number, index), message(own, number));
}

// Waits for all ranks and returns the sum of their two float16, added in float32 in rank order, so
// that all ranks get the same bits. NaN if a rank never sent.
__device__ __noinline__ u32 sum_over_ranks(const Peers& peers, u32 number, long long index, u32 own,
                                           const Watch& watch) {
  u64 words[MAX_RANKS];
  Patience patience(watch);
  bool whole = false;
  while (!whole) {
#pragma unroll
    for (int r = 0; r < MAX_RANKS; ++r) {
      words[r] = message(own, number);
      if (r < peers.size && r != peers.rank)
        words[r] = peek(place_of(peers, peers.rank, r, number, index));
    }
    whole = true;
#pragma unroll
    for (int r = 0; r < MAX_RANKS; ++r) whole = whole && is_of(words[r], number);
    if (!whole && patience.over()) return POISON;
  }
  float a = 0, b = 0;
#pragma unroll
  for (int r = 0; r < MAX_RANKS; ++r)
    if (r < peers.size) {
      a += low((u32)words[r]);
      b += high((u32)words[r]);
    }
  return halves(a, b);
}
