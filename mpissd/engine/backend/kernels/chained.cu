// A stage between two forwards of a greedy round that the device decides: see
// model/transformer/device_rounds.py, whose RoundStage does the same in NumPy. One block.
//
// state [sequences][3 + back]: slot (-1: none), position of the last committed token, that token, and
// `back` tokens before it (-1: its keys and values are stored). moves [2][sequences][4]: see Sheet.
// told [sequences][N + 2]: the accepted node (-2: a logit is not finite), bonus token, drafted tokens; of
// a dynamic tree [K + 2]: the number of accepted tokens, bonus token, accepted tokens.
// forced [sequences][N + K + 1]: N drafted tokens (of a dynamic tree, then N parents), and K + 1 of the
// target by level, that replace the forwards' own; -1: none. history [sequences][most_tokens]: for a
// lookup (copy.cu), the committed tokens by position; null without one. A forward's rows stand in seats [4][most rows]: slot, position, lane, trunk.
enum { PARENT, LEVEL, RANK, LINE, ROW, LANE, SPANS, FORK, KEPT_LANE, KEPT };  // see table_of

struct Shape {
  const int* table;  // of one sequence
  int nodes, lanes;
  __device__ __forceinline__ int of(int what, int node) const {
    return table[what * (nodes + 1) + node];
  }
};

struct Side {
  int *tokens, *seats;
  int most_rows;

  // position: of node 0.
  __device__ __forceinline__ void put(const Shape& tree, int row, int node, int token, int slot,
                                      int position) const {
    const int level = tree.of(LEVEL, node), fork = tree.of(FORK, node);
    const int lane = tree.of(LANE, node), spans = tree.of(SPANS, node);
    tokens[row] = token;
    seats[row] = slot;
    seats[most_rows + row] = position + level;
    seats[2 * most_rows + row] = lane < 0 ? -1 : slot * tree.lanes + lane + spans;
    seats[3 * most_rows + row] = position + fork;
  }
};

__device__ __forceinline__ int token_of(int forced, const int* ids, int found) {
  return forced >= 0 ? forced : ids ? ids[found] : found;
}

// first, width: the stage's nodes of a sequence; reads, puts: its rows in the draft's forwards before
// and after the stage. The first of them reads 2 * back rows: `back` tokens before the last one, that
// one, and back - 1 mask tokens from `mask` on. stride: of the sequences' tables; 0: they have one tree.
extern "C" __global__ void chained(int stage, int sequences, int nodes, int depth, int lanes,
                                   int draft_lanes, int back, int mask, int first, int width,
                                   int reads, int puts, const int* tables, int stride, int* state,
                                   int* moves, const int* forced, int* told, int* history,
                                   int most_tokens, const int* ids,
                                   const int* draft_best, const float* draft_tops, int draft_k,
                                   const int* draft_firsts, int draft_ranks, int* draft_tokens,
                                   int* draft_seats, int draft_most, const int* target_best,
                                   const float* target_tops, const int* firsts, int ranks,
                                   int* target_tokens, int* target_seats, int target_most) {
  may_start_next();
  wait_for_last();
  const Side draft = {draft_tokens, draft_seats, draft_most};
  const Side target = {target_tokens, target_seats, target_most};
  const int rows = nodes + 1, drafts = stride ? depth : nodes;
  const int drafted = stride ? 2 * nodes : nodes;  // forced numbers of the draft
  for (int i = threadIdx.x; i < sequences * width; i += blockDim.x) {
    const int s = i / width, own = first + i % width;
    const Shape tree = {tables + s * stride, nodes, lanes};
    int* at = state + (3 + back) * s;
    const int* force = forced + s * (drafted + 1 + depth);
    int* tell = told + s * (drafts + 2);
    const int slot = at[0], position = at[1], last = at[2];
    if (stage == 0) {
      for (int n = own; draft_k && n < 2 * back; n += width) {
        const int token = n < back ? at[3 + n] : n == back ? last : mask + n - back - 1;
        draft.put(tree, 2 * back * s + n, 0, token, token < 0 ? -1 : slot, position - back + n);
      }
      target.put(tree, i, own, own ? 0 : last, slot, position);
    } else if (stage <= depth) {
      const int row = s * reads + tree.of(LINE, own), next = tree.of(ROW, own);
      int found = row;  // of all ranks that share the draft; of equal logits the lowest rank's
      for (int n = 1; n < draft_ranks; ++n) {
        const int at = row + n * sequences * reads;
        if (draft_tops[at * draft_k] > draft_tops[found * draft_k]) found = at;
      }
      const int start = draft_firsts ? draft_firsts[found / (sequences * reads)] : 0;
      const int column = start + draft_best[found * draft_k + tree.of(RANK, own)];
      const int token = token_of(force[own - 1], ids, column);
      if (next >= 0) draft.put(tree, s * puts + next, own, token, slot, position);
      target.tokens[s * rows + own] = token;
    } else {
      bool finite = true;
      const auto best = [&](int row) {  // of all ranks; of equal logits the lowest rank's
        const int all = sequences * rows;
        int found = row;
        for (int at = row; at < ranks * all; at += all) {
          finite &= isfinite(target_tops[at]) != 0;
          if (target_tops[at] > target_tops[found]) found = at;
        }
        return firsts[found / all] + target_best[found];
      };
      const auto keep = [&](int level, int token) {
        if (history) history[s * most_tokens + position + level] = token;
      };
      int node = 0, bonus = token_of(force[drafted], nullptr, best(s * rows));
      for (int k = 0; stride && k < depth; ++k) tell[2 + k] = 0;
      for (int child = 1; child <= nodes; ++child) {  // a node's children are behind it
        const int token = target.tokens[s * rows + child], next = best(s * rows + child);
        if (!stride) tell[1 + child] = token;
        if (tree.of(PARENT, child) != node || token != bonus) continue;
        node = child;
        keep(tree.of(LEVEL, node), token);
        if (stride) tell[1 + tree.of(LEVEL, node)] = token;
        bonus = token_of(force[drafted + tree.of(LEVEL, node)], nullptr, next);
      }
      const int level = tree.of(LEVEL, node), lane = tree.of(LANE, node), fork = tree.of(FORK, node);
      keep(level + 1, bonus);
      tell[0] = finite || slot < 0 ? (stride ? level : node) : -2;
      tell[1] = bonus;
      for (int n = back - 1, up = node; n >= 0; --n) {  // the accepted tokens, and `last` before them
        at[3 + n] = up > 0 ? target.tokens[s * rows + up] : up ? -1 : last;
        if (up >= 0) up = tree.of(PARENT, up);
      }
      at[2] = bonus;
      at[1] = position + level + 1;
      if (!lanes) continue;
      const auto move = [&](int* to, int lane, int of, int count) {
        to[0] = lane < 0 ? -1 : slot * of + lane;
        to[1] = slot;
        to[2] = position + fork;
        to[3] = count;
      };
      move(moves + 4 * s, tree.of(KEPT_LANE, node), draft_lanes, tree.of(KEPT, node));
      move(moves + 4 * (sequences + s), lane, lanes, level - fork + 1);
    }
  }
}
