// When each block of the kernel `whole` got how far, in cycles of its multiprocessor; off unless TRACE,
// a number of operations, is defined.
#ifdef TRACE
__device__ long long whole_trace[TRACE * 256 * 12];
#define MARK(number, what) \
  if (threadIdx.x == 0) whole_trace[((number) * gridDim.x + blockIdx.x) * 12 + (what)] = cycles()
#else
#define MARK(number, what)
#endif
