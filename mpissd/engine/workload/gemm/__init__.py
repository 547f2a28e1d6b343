"""The `gemm` workload: the forwards are products of random numbers, tokens follow imposed laws."""
