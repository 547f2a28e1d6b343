"""Row-major float16 products by cuBLAS, in a form that a stream can capture.

CuPy refuses cuBLAS while its stream is captured (cupy#6290); the bindings of nvmath-python take the
same pointers and streams and allow capture. This module does not use CuPy: it sees only addresses.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpissd.common.errors import ConfigError

WORKSPACE_BYTES = 64 << 20
# The values of CUDA_R_16F, CUDA_R_32F, CUBLAS_COMPUTE_32F and CUBLAS_GEMM_DEFAULT.
_HALF, _SINGLE, _COMPUTE_FLOAT, _DEFAULT_ALGORITHM = 2, 0, 68, -1
_NO_TRANSPOSE, _TRANSPOSE = 0, 1
# Without this, cuBLAS may add the parts of a split product in float16. It costs at most 1% (H200,
# 1B model, 24 rows: 0.733 ms a forward instead of 0.726).
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16


class Gemm:
    """A cuBLAS handle on one stream, with a workspace that its owner allocated."""

    def __init__(self, bindings: Any, stream: int, workspace: int) -> None:
        self._cublas = bindings
        self._one, self._zero = np.array(1, np.float32), np.array(0, np.float32)
        self._handle = bindings.create()
        bindings.set_stream(self._handle, stream)
        # set_stream resets the workspace, so it is set afterwards; without one, a captured product
        # would allocate memory.
        bindings.set_workspace(self._handle, workspace, WORKSPACE_BYTES)
        bindings.set_math_mode(self._handle, _DISALLOW_REDUCED_PRECISION_REDUCTION)

    def multiply(
        self, m: int, n: int, k: int, x: tuple[int, int], w: tuple[int, int], out: tuple[int, int]
    ) -> None:
        """Enqueues out[m, n] = x[m, k] @ w[k, n]; each operand is (address, elements from row to
        row).

        cuBLAS is column-major, so it computes outᵀ = wᵀ xᵀ with the operands swapped.
        """
        (x_at, x_step), (w_at, w_step), (out_at, out_step) = x, w, out
        self._cublas.gemm_ex(
            self._handle, _NO_TRANSPOSE, _NO_TRANSPOSE, n, m, k, self._one.ctypes.data,
            w_at, _HALF, w_step, x_at, _HALF, x_step, self._zero.ctypes.data,
            out_at, _HALF, out_step, _COMPUTE_FLOAT, _DEFAULT_ALGORITHM,
        )  # fmt: skip

    def multiply_rows(
        self,
        m: int,
        n: int,
        k: int,
        x: tuple[int, int],
        w: tuple[int, int],
        out: tuple[int, int],
        *,
        single: bool,
    ) -> None:
        """Enqueues out[m, n] = x[m, k] @ w[n, k]ᵀ; operands as in multiply.

        single: out is float32, not float16.
        """
        (x_at, x_step), (w_at, w_step), (out_at, out_step) = x, w, out
        self._cublas.gemm_ex(
            self._handle, _TRANSPOSE, _NO_TRANSPOSE, n, m, k, self._one.ctypes.data,
            w_at, _HALF, w_step, x_at, _HALF, x_step, self._zero.ctypes.data,
            out_at, _SINGLE if single else _HALF, out_step, _COMPUTE_FLOAT, _DEFAULT_ALGORITHM,
        )  # fmt: skip

    def close(self) -> None:
        """Destroys the handle; call it after the graphs that hold its products are destroyed."""
        if self._handle:
            self._cublas.destroy(self._handle)
            self._handle = 0


def open_gemm(stream: int, workspace: int) -> Gemm:
    """Opens a Gemm on `stream`; raises ConfigError without nvmath-python, or a cuBLAS that it can
    load."""
    try:
        from nvmath.bindings import cublas

        return Gemm(cublas, stream, workspace)
    # RuntimeError means a library that nvmath cannot load.
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"backend 'cupy': nvmath-python: {error}; pip install '.[cuda12]' (or cuda13)"
        ) from error
