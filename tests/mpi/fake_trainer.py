"""Replaces a trainer's process: `python -m tests.mpi.fake_trainer KIND FOLDER`.

KIND: versions (one for every second example, from FOLDER's files), dying (ends at the second
example), huge (versions whose logits are not finite).
"""

import sys
from pathlib import Path

import numpy as np

from mpissd.engine.model.transformer.checkpoint import packed, unpacked
from mpissd.online.process import receive, send


def tell(version: int, data: bytes) -> None:
    send(sys.stdout.buffer, (version, data))
    send(sys.stdout.buffer, {"state": "learning"})


def main(kind: str, folder: Path) -> int:
    files = sorted(folder.glob("*.version"))
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
            if kind == "huge":
                arrays, norm = dict(unpacked(data)), "model.norm.weight"
                data = packed(arrays | {norm: np.full_like(arrays[norm], 3e38)})
            tell(version, data)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
