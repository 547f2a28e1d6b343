"""`mpissd` with all its ranks on one GPU, which `mpissd run` refuses: for output, not for times.

    mpirun -np 2 python -m mpi4py tests/gpu/share_gpu.py run --backend=cupy …

Ranks of one GPU take turns on it, so times mean nothing. Target ranks need --all_reduce=staged.
"""

from __future__ import annotations

import sys
from typing import Any

from mpissd.__main__ import main
from mpissd.engine.session import session

_open = session.open_backend


def open_first(name: str, *, local_rank: int, **options: Any) -> Any:
    """Opens GPU 0, whatever the rank."""
    return _open(name, local_rank=0, **options)


session.open_backend = open_first  # type: ignore[attr-defined]

if __name__ == "__main__":
    sys.exit(main())
