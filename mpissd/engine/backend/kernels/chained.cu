// What happens between two forwards of a greedy round that the device decides by itself: see
// model/transformer/chained.py, whose NumPy twin says the same. One block.
//
// state [sequences][4]: slot (-1: none), position of the last committed token, that token, and the
// token before it (-1: its keys and values are stored). told [sequences][K + 2]: accepted tokens (-2:
// a logit is not finite), bonus token, drafted tokens. forced [sequences][2 K + 1]: K drafted and
// K + 1 target tokens that replace the forwards' own; -1: none.
// A forward's rows stand in seats [4][most rows]: slot, position, lane, trunk.
struct Side {
  int *tokens, *seats;
  int most_rows;

  __device__ __forceinline__ void put(int row, int token, int slot, int position) const {
    tokens[row] = token;
    seats[row] = slot;
    seats[most_rows + row] = position;
    seats[2 * most_rows + row] = -1;
    seats[3 * most_rows + row] = position;
  }
};

__device__ __forceinline__ int token_of(int forced, const int* ids, int found) {
  return forced >= 0 ? forced : ids ? ids[found] : found;
}

extern "C" __global__ void chained(int stage, int sequences, int ahead, int* state, const int* forced,
                                   int* told, const int* ids, const int* draft_best, int draft_k,
                                   int* draft_tokens, int* draft_seats, int draft_most,
                                   const int* target_best, const float* target_tops, int target_k,
                                   int* target_tokens, int* target_seats, int target_most) {
  may_start_next();
  wait_for_last();
  const Side draft = {draft_tokens, draft_seats, draft_most};
  const Side target = {target_tokens, target_seats, target_most};
  const int rows = ahead + 1;
  for (int s = threadIdx.x; s < sequences; s += blockDim.x) {
    int* at = state + 4 * s;
    const int* force = forced + s * (2 * ahead + 1);
    int* tell = told + s * (ahead + 2);
    const int slot = at[0], position = at[1], last = at[2];
    if (stage == 0) {
      const int before = at[3];
      if (ahead) {
        draft.put(2 * s, before, before < 0 ? -1 : slot, position - 1);
        draft.put(2 * s + 1, last, slot, position);
      }
      for (int j = 0; j < rows; ++j) target.put(s * rows + j, j ? 0 : last, slot, position + j);
    } else if (stage <= ahead) {
      const int row = stage == 1 ? 2 * s + 1 : s;
      const int token = token_of(force[stage - 1], ids, draft_best[row * draft_k]);
      tell[1 + stage] = token;
      target.tokens[s * rows + stage] = token;
      if (stage < ahead) draft.put(s, token, slot, position + stage);
    } else {
      int accepted = 0, bonus = 0;
      bool finite = true;
      for (int j = 0; j < rows; ++j) finite = finite && isfinite(target_tops[(s * rows + j) * target_k]);
      for (;; ++accepted) {
        bonus = token_of(force[ahead + accepted], nullptr, target_best[(s * rows + accepted) * target_k]);
        if (accepted == ahead || tell[2 + accepted] != bonus) break;
      }
      tell[0] = finite || slot < 0 ? accepted : -2;
      tell[1] = bonus;
      at[3] = accepted ? tell[1 + accepted] : last;
      at[2] = bonus;
      at[1] = position + accepted + 1;
    }
  }
}
