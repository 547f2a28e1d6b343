"""CUDA sources of the cupy backend, one operation a file, compiled at run time by NVRTC.

They include no header. All but the chain use nothing newer than compute capability 7.0 and CUDA 12,
so that a V100 and an H200 run the same text. To check one without a GPU: put types.cu and what else
it builds on before it, and nvcc -arch=sm_75 -cubin.
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
    "read_words",
    "copy_ints",
    "packed_product",
)
EXCHANGE = ("types", "system", "inbox", "exchange")  # entry: exchange
# entry: chain; from 9.0 on
CHAIN = ("types", "system", "hopper", "inbox", "plan", "columns", "chain")


def source(files: tuple[str, ...] = FILES) -> str:
    """The sources of some kernels, one translation unit; of the backend's own unless told."""
    folder = Path(__file__).parent
    return "\n".join((folder / f"{name}.cu").read_text() for name in files)
