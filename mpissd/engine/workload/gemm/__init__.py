"""The `gemm` workload: forwards multiply random matrices; imposed laws decide the tokens."""
