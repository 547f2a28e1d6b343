// Drafts by a prompt lookup: copies the tokens that followed the latest earlier occurrence of a sequence's
// last n <= longest tokens, for the largest n that has one, to the target's forward. See
// law/lookup.py, whose latest_match finds the same. A block of a power of two threads a sequence. Needs
// chained.cu, which also tells what the arrays are. filler: stands in missing places; -1: the last token.
extern "C" __global__ void copy(int nodes, int longest, int filler, int most_tokens,
                                const int* state, const int* history, const int* forced,
                                int* tokens) {
  may_start_next();
  wait_for_last();
  const int s = blockIdx.x, count = state[4 * s + 1] + 1;
  const int* known = history + s * most_tokens;
  int* best = (int*)block_memory();  // by thread: how many tokens match, and where, as one number
  int most = 0;
  for (int end = 1 + threadIdx.x; end < count; end += blockDim.x) {
    int n = 0;
    while (n < longest && n < end && known[end - 1 - n] == known[count - 1 - n]) ++n;
    if (n) most = max(most, n * most_tokens + end);
  }
  best[threadIdx.x] = most;
  for (int half = blockDim.x / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) best[threadIdx.x] = max(best[threadIdx.x], best[threadIdx.x + half]);
  }
  __syncthreads();
  const int start = best[0] ? best[0] % most_tokens : count;
  for (int j = threadIdx.x; j < nodes; j += blockDim.x) {
    const int rest = filler < 0 ? known[count - 1] : filler;
    const int found = start + j < count ? known[start + j] : rest;
    tokens[s * (nodes + 1) + 1 + j] = token_of(forced[s * (2 * nodes + 1) + j], nullptr, found);
  }
}
