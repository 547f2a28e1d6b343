"""CUDA sources of the cupy backend, one operation a file, compiled at run time by NVRTC.

They include no header. All except the chain and the whole forward (9.0) and the transformer (8.0)
need only compute capability 7.0 and CUDA 12, so that a V100 and an H200 run the same source. To
check a file without a GPU, put types.cu and the other files that it needs before it, and compile
with nvcc -arch=sm_75 -cubin.
"""

from __future__ import annotations

from pathlib import Path

BACKEND = ("types", "fill", "pack", "gather", "top_k", "read", "copy_ints")
EXCHANGE = ("types", "system", "inbox", "exchange")  # The sources of the kernel `exchange`.
# The sources of the kernel `chain`, for compute capability 9.0 or more.
CHAIN = ("types", "system", "ampere", "hopper", "inbox", "plan", "columns", "units", "chain")
# The sources of a transformer's kernels, for 8.0 or more.
PACK = ("types", "fill", "pack")
ROWS = ("types", "ampere", "rows")
SKINNY = ("types", "ampere", "arithmetic", "skinny")
LATE = ("types", "ampere", "arithmetic", "late")
ATTENTION = ("types", "ampere", "arithmetic", "cache", "splits", "attend", "attention")
CHAINED = ("types", "ampere", "chained", "dynamic")
GROW = ("types", "ampere", "grow")
DRAW = ("types", "ampere", "draw")
WHOLE = (  # for 9.0 or more
    "types", "system", "ampere", "hopper", "inbox", "arithmetic", "cache", "splits", "attend",
    "plan", "columns", "units", "whole",
)  # fmt: skip


def ceil_div(value: int, by: int) -> int:
    """Returns value / by, rounded up."""
    return -(-value // by)


def source(files: tuple[str, ...]) -> str:
    """Returns the sources of some kernels as one translation unit."""
    folder = Path(__file__).parent
    return "\n".join((folder / f"{name}.cu").read_text() for name in files)
