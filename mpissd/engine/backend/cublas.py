"""Row-major float16 products by cuBLAS, in a form that a stream can capture.

CuPy refuses cuBLAS while its stream is captured (cupy#6290); the bindings of nvmath-python take the
same pointers and streams and capture well. Nothing here knows of CuPy: it sees addresses.
"""

from __future__ import annotations

from typing import Any

import numpy as np

WORKSPACE_BYTES = 64 << 20
_HALF, _COMPUTE_FLOAT, _DEFAULT_ALGORITHM = 2, 68, -1  # CUDA_R_16F, CUBLAS_COMPUTE_32F, …
_NO_TRANSPOSE = 0
# Without this cuBLAS may add the parts of a split product in float16. It costs at most 1% (H200, 1B
# model, 24 rows: 0.733 ms a forward against 0.726).
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16


class Gemm:
    """A cuBLAS handle on one stream, with a workspace that its owner allocated (address, bytes)."""

    def __init__(self, bindings: Any, stream: int, workspace: int) -> None:
        self._cublas = bindings
        self._one, self._zero = np.array(1, np.float32), np.array(0, np.float32)
        self._handle = bindings.create()
        bindings.set_stream(self._handle, stream)
        # After set_stream, which resets it; without one of its own a captured product allocates.
        bindings.set_workspace(self._handle, workspace, WORKSPACE_BYTES)
        bindings.set_math_mode(self._handle, _DISALLOW_REDUCED_PRECISION_REDUCTION)

    def multiply(
        self, m: int, n: int, k: int, x: tuple[int, int], w: tuple[int, int], out: tuple[int, int]
    ) -> None:
        """out[m, n] = x[m, k] @ w[k, n]; each operand is (address, elements from row to row).

        cuBLAS counts by columns: it is told outᵀ = wᵀ xᵀ, so the operands swap places.
        """
        (x_at, x_step), (w_at, w_step), (out_at, out_step) = x, w, out
        self._cublas.gemm_ex(
            self._handle, _NO_TRANSPOSE, _NO_TRANSPOSE, n, m, k, self._one.ctypes.data,
            w_at, _HALF, w_step, x_at, _HALF, x_step, self._zero.ctypes.data,
            out_at, _HALF, out_step, _COMPUTE_FLOAT, _DEFAULT_ALGORITHM,
        )  # fmt: skip

    def close(self) -> None:
        """Destroys the handle; after the graphs that hold its products."""
        if self._handle:
            self._cublas.destroy(self._handle)
            self._handle = 0


def open_gemm(stream: int, workspace: int) -> tuple[Gemm | None, str | None]:
    """A Gemm on `stream`, or (None, why there is none): no nvmath-python, or no cuBLAS for it."""
    try:
        from nvmath.bindings import cublas

        return Gemm(cublas, stream, workspace), None
    except (ImportError, RuntimeError) as error:  # RuntimeError: a library it cannot load
        return None, f"nvmath-python: {error}"
