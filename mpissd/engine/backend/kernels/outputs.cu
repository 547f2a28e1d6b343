// How two sums of a tile leave, of columns c and c + 8, each times its row's factor: as float32, as float16, or
// gate and up as one float16 silu(gate) up.
struct Float32 {
  static __device__ __forceinline__ void put(void* out, int tile, int c, int columns, const Both& v) {
    float* to = (float*)out + 16 * tile + c;
    if (16 * tile + c < columns) to[0] = v.a;
    if (16 * tile + c + 8 < columns) to[8] = v.b;
  }
  static constexpr int BYTES = 4;
};

struct Float16 {
  static __device__ __forceinline__ void put(void* out, int tile, int c, int columns, const Both& v) {
    u16* to = (u16*)out + 16 * tile + c;
    if (16 * tile + c < columns) to[0] = to_finite_half(v.a);
    if (16 * tile + c + 8 < columns) to[8] = to_finite_half(v.b);
  }
  static constexpr int BYTES = 2;
};

struct Gated {
  static __device__ __forceinline__ void put(void* out, int tile, int c, int columns, const Both& v) {
    if (8 * tile + c < columns) ((u16*)out)[8 * tile + c] = gated(v.a, v.b);
  }
  static constexpr int BYTES = 2;
};

// out: where its row begins, of out_step elements.
template <class Out>
__device__ __forceinline__ void put_sums(void* out, long long out_step, int row, int tile, int c, int columns,
                                         const float* factors, const Both& sum) {
  const float by = factors ? factors[row] : 1.0f;
  void* to = (unsigned char*)out + row * out_step * Out::BYTES;
  Out::put(to, tile, c, columns, {__fmul_rn(sum.a, by), __fmul_rn(sum.b, by)});
}
