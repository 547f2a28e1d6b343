"""CUDA sources of the cupy backend, one operation a file, compiled at run time by NVRTC.

They include no header, and need CUDA 12 and compute capability 7.0 (V100); the transformer needs
8.0. `chain` and `whole` (the megakernel), two persistent kernels, and `wide` (CUDA 12.1) need 9.0.
To check a file without a GPU, join the files of a tuple below that contains it, as `source` does,
and compile them with nvcc -arch=sm_75 -cubin.
"""

from pathlib import Path

BACKEND = ("types", "fill", "pack", "gather", "top_k", "read", "copy_ints")
EXCHANGE = ("types", "system", "inbox", "exchange")  # sources of the one-shot all-reduce
CHAIN = ("types", "system", "ampere", "hopper", "inbox", "plan", "columns", "units", "chain")
# The tuples below are the sources of a transformer's kernels.
PACK = ("types", "fill", "pack")
ROWS = ("types", "ampere", "rows")
SKINNY = ("types", "ampere", "arithmetic", "outputs", "skinny")
WIDE = ("types", "system", "ampere", "hopper", "arithmetic", "outputs", "wide")
LATE = ("types", "ampere", "arithmetic", "late")
ATTENTION = ("types", "ampere", "arithmetic", "cache", "splits", "attend", "attention")
STAGES = ("types", "ampere", "chained", "dynamic", "copy")
GROW = ("types", "ampere", "grow")
DRAW = ("types", "ampere", "draw")
WHOLE = (
    "types", "system", "ampere", "hopper", "inbox", "arithmetic", "cache", "splits", "attend",
    "plan", "columns", "units", "layers", "whole",
)  # fmt: skip


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def source(files: tuple[str, ...]) -> str:
    """Returns the text of these CUDA files, without the ending .cu, as one translation unit."""
    folder = Path(__file__).parent
    return "\n".join((folder / f"{name}.cu").read_text() for name in files)
