#!/usr/bin/env python3
"""Writes prompts whose answers repeat the prompt: code to edit, and text to summarise.

    results/recordings/repeating_prompts.py FOLDER [--count=40]

edit.jsonl: HumanEval's prompts, whose function is to be renamed. summarise.jsonl: paragraphs of the
documentation, to be summarised.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EDIT = "Rename the function {old} to {new} in this code. Answer with the whole code.\n\n{code}"
SUMMARISE = "Summarise this text in a few sentences:\n\n{text}"


def edits() -> Iterator[str]:
    """Yields requests to rename the last function of each HumanEval prompt."""
    for line in (ROOT / "tests/data/prompts/humaneval.jsonl").read_text().splitlines():
        code = json.loads(line)["prompt"].strip()
        old = re.findall(r"^def (\w+)", code, re.MULTILINE)[-1]
        yield EDIT.format(old=old, new=f"{old}_checked", code=code)


def summaries() -> Iterator[str]:
    """Yields requests to summarise paragraphs of prose, two at a time."""
    prose = []
    for path in sorted((ROOT / "docs").glob("*.md")):
        for paragraph in path.read_text().split("\n\n"):
            is_prose = paragraph[:1].isalpha() and "|" not in paragraph
            if is_prose and 50 <= len(paragraph.split()) <= 110:
                prose.append(" ".join(paragraph.split()))
    for first, second in zip(prose[::2], prose[1::2], strict=False):
        yield SUMMARISE.format(text=f"{first}\n\n{second}")


def main() -> int:
    """Writes both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=40)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, prompts in (("edit", edits()), ("summarise", summaries())):
        lines = [json.dumps({"prompt": prompt}) for prompt in islice(prompts, given.count)]
        (given.folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
