// Draws a token of each row's logits, and judges a drafted one: see model/transformer/cupy_ops/draws.py.
//
// One block a row. A warp sums neighbouring columns in a fixed order, so that a row's token depends on
// nothing but the row and what is asked of it. Everything is float64.
constexpr int DRAW_WARPS = DRAW_THREADS / 32;  // DRAW_THREADS is a macro
constexpr double EMPTY = 1e-14;  // as in law/sampling.py
enum { ACCEPTED, REPLACED, UNKNOWN, NOT_FINITE };

struct Ask {  // 64 bytes, in page-locked host memory
  double temperature, u, coin;
  double q;        // of a drafted token; 1: it was certain; 0: none was drafted
  double q_total;  // the sum of the row that it was drawn from
  float* kept;     // that row, or where the row that is drawn from is kept; may be null
  int row, token;  // of the logits; drafted
  int top;         // tokens that Saguaro damps, the first of tops; 0: none
  int unused;
};

struct Tell {  // 24 bytes: a drafted token's p, or a drawn token's weight and the sum of the weights
  double value, total;
  int token, verdict;
};

__device__ __forceinline__ double sum_of_lanes(double sum) {
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
  return sum;
}

// Neighbouring columns, of which warp w of a block has the w-th of DRAW_WARPS parts.
struct Columns {
  int first, last, part;  // from first up to, not including, last
  int start, stop;        // this thread's warp's

  __device__ __forceinline__ Columns(int from, int to) {
    first = from;
    last = to;
    part = (to - from + DRAW_THREADS - 1) / DRAW_THREADS * 32;
    start = begin_of(threadIdx.x / 32);
    stop = begin_of(threadIdx.x / 32 + 1);
  }
  __device__ __forceinline__ int begin_of(int warp) const { return min(first + warp * part, last); }
  __device__ __forceinline__ Columns of(int warp) const {
    return Columns(begin_of(warp), begin_of(warp + 1));
  }
};

// Softmax of a row at a temperature; the largest logits may be damped.
struct Softmax {
  const float* logits;
  double most, factor, scale;  // factor: 1 / temperature
  float damped_above;  // logits above it are damped, and equal ones up to this column
  int damped_to;

  __device__ __forceinline__ double operator()(int c) const {
    const float z = logits[c];
    const double below = (double)z - most;
    const double weight = below == 0 ? 1 : exp(below * factor);  // the factor may be infinite
    const bool is_damped = z > damped_above || (z == damped_above && c <= damped_to);
    return is_damped ? weight * scale : weight;
  }
};

// What replaces a rejected token: max(p - q, 0), where q is 1 for the token if it was certain.
struct Left {
  Softmax weight;
  double share;  // 1 / the sum of the weights
  const float* row;
  double q_share;  // 1 / the row's sum
  const int* places;  // of tokens in the row, -1: none; null: token t has entry t
  int certain;

  __device__ __forceinline__ double operator()(int c) const {
    if (c == certain) return 0;
    double left = weight(c) * share;
    if (row) {
      const int place = places ? places[c] : c;
      if (place >= 0) left -= (double)row[place] * q_share;
    }
    return left > 0 ? left : 0;
  }
};

struct Kept {  // a row of float32
  const float* row;
  __device__ __forceinline__ double operator()(int c) const { return row[c]; }
};

// Returns the sum of all weights; sums[w] is that of warp w's columns.
template <class Weight>
__device__ __forceinline__ double sum_all(const Weight& weight, const Columns& mine, double* sums) {
  double sum = 0;
  for (int c = mine.start + (int)threadIdx.x % 32; c < mine.stop; c += 32) sum += weight(c);
  sum = sum_of_lanes(sum);
  __syncthreads();  // sums may still be read
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  double total = 0;
  for (int w = 0; w < DRAW_WARPS; ++w) total += sums[w];
  return total;
}

// Returns the first part whose cumulative sum, behind `before`, is above `wanted`; where rounding leaves
// none, the last one with a weight. Adds the sums of the parts in front of it to `before`.
__device__ __forceinline__ int part_of(const double* sums, double wanted, double& before) {
  int found = 0;
  double sum = before;
  for (int w = 0; w < DRAW_WARPS; ++w) {
    if (sums[w] > 0) {
      found = w;
      before = sum;
    }
    sum += sums[w];
    if (sum > wanted) break;
  }
  return found;
}

// Returns, to all threads, the first token whose cumulative weight is above u times `total`; where
// rounding leaves none, the last one with a weight. sums: of sum_all over the columns. All warps sum
// the part that has the token again, a part of it each.
template <class Weight>
__device__ __forceinline__ int find(const Weight& weight, const Columns& columns, double* sums,
                                    double total, double u, int* token) {
  const double wanted = u * total;
  double before = 0;
  const Columns mine = columns.of(part_of(sums, wanted, before));
  sum_all(weight, mine, sums);
  if ((int)threadIdx.x / 32 == part_of(sums, wanted, before)) {
    const int lane = threadIdx.x % 32;
    int found = -1;
    for (int first = mine.start; first < mine.stop; first += 32) {
      const double own = first + lane < mine.stop ? weight(first + lane) : 0;
      double up_to = own;
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const double lower = __shfl_up_sync(0xFFFFFFFFu, up_to, lanes);
        if (lane >= lanes) up_to += lower;
      }
      const u32 some = __ballot_sync(0xFFFFFFFFu, own > 0);
      const u32 above = __ballot_sync(0xFFFFFFFFu, own > 0 && before + up_to > wanted);
      if (above) {
        found = first + __ffs(above) - 1;
        break;
      }
      for (int l = 0; l < 32; ++l)
        if (some >> l & 1) found = first + l;
      before += __shfl_sync(0xFFFFFFFFu, up_to, 31);
    }
    if (lane == 0) *token = found;
  }
  __syncthreads();
  return *token;
}

// Returns the largest logit; sets `finite` to whether all logits are finite.
__device__ __forceinline__ float largest(const float* logits, const Columns& mine, float* tops,
                                         bool& finite) {
  float top = __uint_as_float(0xFF800000u);
  bool good = true;
  for (int c = mine.start + (int)threadIdx.x % 32; c < mine.stop; c += 32) {
    const float z = logits[c];
    good = good && (__float_as_uint(z) & 0x7F800000u) != 0x7F800000u;
    top = z > top ? z : top;
  }
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, top, lanes);
    top = other > top ? other : top;
  }
  const bool all_good = __ballot_sync(0xFFFFFFFFu, !good) == 0;
  // A warp whose logits are not all finite brings NaN.
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = all_good ? top : __uint_as_float(0x7FC00000u);
  __syncthreads();
  finite = true;
  for (int w = 0; w < DRAW_WARPS; ++w) {
    finite = finite && tops[w] == tops[w];
    top = tops[w] > top ? tops[w] : top;
  }
  return top;
}

// Keeps the distribution as float32 multiples of 2^-51: sums of them are exact in any order, so that
// whoever receives the row finds the probabilities that it was drawn with, bit for bit.
__device__ __forceinline__ void keep_row(const Softmax& weight, double share, const Columns& mine,
                                         float* kept) {
  for (int c = mine.start + (int)threadIdx.x % 32; c < mine.stop; c += 32) {
    const float rounded = (float)(weight(c) * share);
    kept[c] = (float)(((double)rounded + 2.0) - 2.0);
  }
  __syncthreads();
}

struct Shared {
  double sums[DRAW_WARPS];
  float tops[DRAW_WARPS];
  Ask ask;
  int token;
};

__device__ __forceinline__ Tell propose(const Ask& ask, Softmax weight, double total,
                                        const Columns& mine, Shared* shared) {
  keep_row(weight, 1 / total, mine, ask.kept);
  const Kept kept = {ask.kept};
  const double sum = sum_all(kept, mine, shared->sums);
  const int token = find(kept, mine, shared->sums, sum, ask.u, &shared->token);
  return {(double)ask.kept[token], sum, token, ACCEPTED};
}

__device__ __forceinline__ Tell judge(const Ask& ask, Softmax weight, double total,
                                      const int* places, const Columns& mine, Shared* shared) {
  if (ask.q == 0) {
    const int token = find(weight, mine, shared->sums, total, ask.u, &shared->token);
    return {weight(token) / total, 1, token, ACCEPTED};
  }
  const double p = weight(ask.token) / total;
  if (ask.coin * ask.q < p) return {p, 1, ask.token, ACCEPTED};
  const bool is_certain = ask.q == 1;
  if (!is_certain && !ask.kept) return {p, 1, ask.token, UNKNOWN};
  const Left left = {weight, 1 / total, is_certain ? nullptr : ask.kept, 1 / ask.q_total,
                     places, is_certain ? ask.token : -1};
  const double sum = sum_all(left, mine, shared->sums);
  if (sum <= EMPTY) return {p, 1, ask.token, ACCEPTED};
  return {p, 1, find(left, mine, shared->sums, sum, ask.u, &shared->token), REPLACED};
}

// logits: float32 [rows, width]. tops: int32 [rows, most], the largest logits' columns, for rows that
// damp some. Where `proposes`, tokens are drawn and their rows kept; otherwise drafted ones are judged.
extern "C" __global__ void __launch_bounds__(DRAW_THREADS)
    draw(const float* logits, int width, const Ask* asks, Tell* tells, int proposes, double scale,
         const int* tops, int most, const int* places) {
  wait_for_last();
  Shared* shared = (Shared*)block_memory();
  if (threadIdx.x == 0) shared->ask = asks[blockIdx.x];  // one thread alone reads the host's memory
  __syncthreads();
  const Ask& ask = shared->ask;
  const Columns mine(0, width);
  const float* row = logits + (long long)ask.row * width;
  bool finite;
  const float top = largest(row, mine, shared->tops, finite);
  Softmax weight = {row, top, 1 / ask.temperature, 1, __uint_as_float(0x7F800000u), -1};
  if (ask.top > 0) {
    weight.damped_to = tops[(long long)ask.row * most + ask.top - 1];
    weight.damped_above = row[weight.damped_to];
    weight.scale = scale;
  }
  Tell tell = {0, 0, 0, NOT_FINITE};
  if (finite) {
    double total = sum_all(weight, mine, shared->sums);
    if (ask.top > 0 && total == 0) {  // everything was damped to nothing: then nothing is
      weight.scale = 1;
      total = sum_all(weight, mine, shared->sums);
    }
    tell = proposes ? propose(ask, weight, total, mine, shared)
                    : judge(ask, weight, total, places, mine, shared);
  }
  if (threadIdx.x == 0) tells[blockIdx.x] = tell;
}
