"""Reads files that the user names. Pipes and devices are refused: reading one may never end."""

import errno
import os
import stat
from pathlib import Path


def check_regular(path: Path) -> os.stat_result:
    """Returns os.stat of the regular file at a path, or that the symbolic link there names. Raises
    OSError for a folder, pipe, device or socket."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is a pipe or a device: allowed: a regular file", str(path))
    return status


def read_file(path: Path) -> bytes:
    """Returns the content of a regular file; raises OSError."""
    check_regular(path)
    return path.read_bytes()
