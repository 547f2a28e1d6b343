// q, k and v of a forward, as products over weights in the order of whole.cu leave them, [rows][heads +
// 2 kv_heads][HEAD], float32: adds the biases and rotates; q goes to `queries` in float16, scaled, k and v to
// the cache. One warp a row and head.
extern "C" __global__ void late_rotate(const float* qkv, const float* bias, const float2* turns,
                                       const int* seats, int most_rows, CACHE, int heads, float scale,
                                       u16* queries) {
  const Rows rows(seats, most_rows);
  const Cache cache = THE_CACHE;
  may_start_next();
  wait_for_last();
  const int every = heads + 2 * cache.kv_heads;
  const int head = blockIdx.y * blockDim.y + threadIdx.y, row = blockIdx.x;
  const int slot = rows.slots[row];
  if (head >= every || slot < 0) return;
  const int position = rows.positions[row], kv = (head - heads) % cache.kv_heads, own = rows.lanes[row];
  const bool is_q = head < heads, is_k = !is_q && head < heads + cache.kv_heads;
  u16* pages = is_k ? cache.keys : cache.values;
  u16* lanes = is_k ? cache.lane_keys : cache.lane_values;
  u16* to = is_q      ? queries + ((long long)row * heads + head) * HEAD
            : own < 0 ? pages + cache.in_page(slot, kv, position)
                      : lanes + cache.in_lane(own, kv, position - rows.trunks[row]);
  const float* from = qkv + ((long long)row * every + head) * HEAD;
  for (int i = threadIdx.x; i < HEAD / 2; i += 32) {
    Both both = {from[2 * i - i % 8], from[2 * i - i % 8 + 8]};
    if (bias)
      both = {__fadd_rn(both.a, bias[head * HEAD + i]), __fadd_rn(both.b, bias[head * HEAD + i + HEAD / 2])};
    if (is_q || is_k) both = turned(both, turns[(long long)position * (HEAD / 2) + i]);
    const float by = is_q ? scale : 1.0f;
    to[i] = to_finite_half(__fmul_rn(both.a, by));
    to[i + HEAD / 2] = to_finite_half(__fmul_rn(both.b, by));
  }
}
