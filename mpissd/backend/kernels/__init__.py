"""CUDA sources of the cupy backend, one operation a file, compiled at run time by NVRTC.

They include no header and use nothing newer than compute capability 7.0 and CUDA 12, so that a
V100 and an H200 run the same text. To check one without a GPU: nvcc -arch=sm_75 -cubin read.cu
"""

from __future__ import annotations

from pathlib import Path

FILES = ("types", "fill", "gather", "top_k", "read", "copy_ints")
ENTRIES = ("fill", "gather", "top_k", "top_k_merge", "read_words", "copy_ints")


def source() -> str:
    """The sources of all kernels, one translation unit."""
    folder = Path(__file__).parent
    return "\n".join((folder / f"{name}.cu").read_text() for name in FILES)
