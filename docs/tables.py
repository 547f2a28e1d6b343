#!/usr/bin/env python3
"""Rewrites the tables of the documentation that a command prints.

    docs/tables.py [FILE …]        (default: every .md file beside this one, and in results/)

A table is between two comments, of which the first holds its command, of mpissd or of a module
in docs/ or results/:

    <!-- python -m mpissd compare results/h200-tables -->
    <!-- end -->
    <!-- python -m results.drafts.tables shipped -->
    <!-- end -->

The command runs in the repository's root; a last line of JSON is left out.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGES = [
    ROOT / "README.md",
    *sorted(HERE.glob("*.md")),
    *sorted((ROOT / "results").rglob("README.md")),
]
_BLOCK = re.compile(r"<!-- python (-m .+?|results/.+?) -->\n(.*?)<!-- end -->", re.DOTALL)


def commands(text: str) -> list[str]:
    """Returns the commands that a page holds tables of."""
    return [match[1] for match in _BLOCK.finditer(text)]


def rewritten(text: str) -> str:
    """Returns a page with its tables as their commands print them now."""
    return _BLOCK.sub(lambda match: _block(match[1]), text)


def _block(command: str) -> str:
    words = [sys.executable, *shlex.split(command)]
    text = subprocess.check_output(
        words, cwd=ROOT, timeout=120, stdin=subprocess.DEVNULL, text=True
    )
    printed = text.splitlines()
    table = printed[:-1] if printed[-1].startswith(("{", "[")) else printed
    return "\n".join([f"<!-- python {command} -->", *table, "<!-- end -->"])


def main() -> int:
    """Rewrites the pages and prints the names of those that changed; returns 0."""
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else PAGES:
        before = path.read_text()
        after = rewritten(before)
        if after != before:
            path.write_text(after)
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
