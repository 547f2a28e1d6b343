"""Finds the git commit of the checkout that this package is in."""

import os
import subprocess
from functools import cache
from pathlib import Path


@cache
def commit() -> str | None:
    """Returns the git commit of mpissd's checkout, with "+" if files have changed. Without git or
    such a checkout, returns the value of MPISSD_COMMIT, or None. A checkout of another project
    around this file does not track it, and does not count."""
    file = Path(__file__).resolve()
    git = ["git", "-C", str(file.parent)]
    describe = [*git, "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        for words in ([*git, "ls-files", "--error-unmatch", file.name], describe):
            done = subprocess.run(words, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("MPISSD_COMMIT")
    return done.stdout.strip() or None
