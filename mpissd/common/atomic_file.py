"""Files that appear complete or not at all, even if the process is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for writing that gets the name `path` once the block ends without an error.

    Until then it has no name if the file system allows that (most on Linux do). On NFS, which does
    not, it is named PATH.part.
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
        # With src_dir_fd Python lets the kernel follow the link to the open file.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=0, follow_symlinks=True)
