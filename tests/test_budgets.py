"""Each part of the project stays within its budget of lines or words (tests/budgets.txt)."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = [
    line
    for line in (ROOT / "tests/budgets.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def size_of(unit: str, patterns: list[str]) -> int:
    files = {path for pattern in patterns for path in ROOT.glob(pattern)}
    assert files, f"no file matches {patterns}"
    texts = [path.read_text(encoding="utf-8") for path in files]
    return sum(len(text.split()) if unit == "words" else text.count("\n") for text in texts)


@pytest.mark.parametrize("line", PARTS, ids=lambda line: line.split("  ")[0])
def test_a_part_stays_within_its_budget(line: str) -> None:
    part, numbers = line.split("  ", 1)
    most, _goal, unit, *patterns = numbers.split()
    size = size_of(unit, patterns)
    assert size <= int(most), f"{part} has {size} {unit}, {most} are allowed: remove some elsewhere"
