"""The commit of this checkout."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path


@cache
def commit() -> str | None:
    """Returns the checkout's commit, with "+" if files have changed; elsewhere MPISSD_COMMIT, or
    None. The git of another project's checkout around this file does not track it."""
    file = Path(__file__).resolve()
    git = ["git", "-C", str(file.parent)]
    describe = [*git, "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        for words in ([*git, "ls-files", "--error-unmatch", file.name], describe):
            done = subprocess.run(words, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("MPISSD_COMMIT")
    return done.stdout.strip() or None
