"""CUDA sources of the cupy backend, one operation a file, compiled at run time by NVRTC.

They include no header. All except the chain and the whole forward (9.0) and the transformer (8.0)
need only compute capability 7.0 and CUDA 12, so that a V100 and an H200 run the same source. To
check a file without a GPU, put types.cu and the other files that it needs before it, and compile
with nvcc -arch=sm_75 -cubin.
"""

from __future__ import annotations

from pathlib import Path

FILES = ("types", "fill", "gather", "top_k", "read", "copy_ints", "packed_product")
ENTRIES = (
    "fill",
    "fill_packed",
    "gather",
    "top_k",
    "top_k_merge",
    "top_k_float32",
    "top_k_merge_float32",
    "read_words",
    "copy_ints",
    "packed_product",
)
EXCHANGE = ("types", "system", "inbox", "exchange")  # The sources of the kernel `exchange`.
# The sources of the kernel `chain`, for compute capability 9.0 or more.
CHAIN = ("types", "system", "ampere", "hopper", "inbox", "plan", "columns", "units", "chain")


def source(files: tuple[str, ...] = FILES) -> str:
    """Returns the sources of some kernels as one translation unit; by default the backend's own."""
    folder = Path(__file__).parent
    return "\n".join((folder / f"{name}.cu").read_text() for name in files)
