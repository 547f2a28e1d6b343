"""Checks a file of the user's before it is opened."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mpissd.common.errors import ConfigError


def regular_status(path: Path) -> os.stat_result:
    """Returns the status of a regular file, or of the one that a link leads to.

    Raises ConfigError for anything else: a pipe would block its reader, and a device like
    /dev/zero has no end.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"cannot read {str(path)!r}: allowed: a regular file")
    return status
