"""Replaces a trainer's process: `python -m tests.mpi.fake_trainer KIND FOLDER`.

KIND: versions (one for every second example, from FOLDER's files), deaf (does not even read), dying
(ends at the second example), huge (versions whose logits are not finite).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from mpissd.engine.model.transformer.checkpoint import packed, unpacked
from mpissd.online.process import receive, send


def tell(version: int, data: bytes) -> None:
    send(sys.stdout.buffer, (version, data))
    send(sys.stdout.buffer, {"state": "learning"})


def overflowing(data: bytes) -> bytes:
    """A version whose last norm is too large."""
    arrays = dict(unpacked(data))
    arrays["model.norm.weight"] = np.full_like(arrays["model.norm.weight"], 3e38)
    return packed(arrays)


def main(kind: str, folder: Path) -> int:
    files = sorted(folder.glob("*.version"))
    if kind == "deaf":
        time.sleep(600)
    count = version = 0
    while (example := receive(sys.stdin.buffer)) is not None:
        # Without a rejection a sequence has no rejected position.
        assert not len(example.at) or example.at[-1] < len(example.tokens)
        count += 1
        if kind == "dying" and count == 2:
            return 9
        if kind != "dying" and count % 2 == 0:
            data = files[version % len(files)].read_bytes()
            version += 1
            tell(version, overflowing(data) if kind == "huge" else data)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
