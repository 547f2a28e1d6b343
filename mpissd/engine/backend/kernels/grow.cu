// What happens between two growth steps that the device joins: see model/transformer/growing.py,
// whose NumPy twin says the same. One block. sheet: the stage's number, then rows of `most`: places
// [4], picks [3], tokens [K + 1].
extern "C" __global__ void grow(int rows, int most, int* sheet, const int* ids, const int* best,
                                int candidates, int* tokens, int* seats, int most_seats) {
  may_start_next();
  wait_for_last();
  const int step = sheet[0];
  int *places = sheet + 1, *picks = places + 4 * most, *decided = picks + (3 + step) * most;
  for (int i = threadIdx.x; i < rows; i += blockDim.x) {
    int left = picks[most + i];
    const int served = picks[2 * most + i], *found = best + candidates * picks[i];
    for (int at = 0; decided[i] < 0 && at < candidates; ++at) {
      const int token = ids ? ids[found[at]] : found[at];
      if (token != served && --left < 0) decided[i] = token;
    }
    tokens[i] = decided[i];
    for (int at = 0; at < 4; ++at) seats[at * most_seats + i] = places[at * most + i];
    ++places[most + i];
    picks[i] = i;
    picks[most + i] = 0;
    picks[2 * most + i] = -1;
  }
  __syncthreads();  // every thread has read the stage's number
  if (threadIdx.x == 0) sheet[0] = step + 1;
}
