"""Files that are there as a whole or not at all, and of which a kill leaves no half."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, named `path` when the block is over without an error.

    Until then it has no name, where the file system can do that (most on Linux; NFS can't: there
    it is PATH.part).
    """
    try:
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o666)
    except (AttributeError, OSError):
        half = path.with_name(f"{path.name}.part")
        with half.open("wb") as file:
            yield file
        half.rename(path)
        return
    with os.fdopen(fd, "wb") as file:
        yield file
        file.flush()
        # src_dir_fd: only so does Python let the kernel follow the link to the open file.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=0, follow_symlinks=True)
