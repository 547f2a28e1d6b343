#!/usr/bin/env python3
"""Prints the grid of what `plan` advised for SSD, and of PEARL and AMUSD beside it.

results/h200-plan/grid.py PLAN.txt …     # what `mpissd plan` printed, one file for each alpha
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

HEAD = """# SSD as `plan` advised it by a probe of the same visit, and PEARL and AMUSD.

[DEFAULT]
pair = 8b/1b
fuse = true
lm_head = true
rounds = 400
seed = 0..4
mode = ssd
hit_law = "power:A=0.75,r=1.0"
"""
FLAGS = ("lookahead", "fan_out", "backup", "backup_lookahead")


def block(path: Path) -> str:
    """The block of one plan's SSD choice, without which there is none."""
    text = path.read_text()
    found = re.search(r"alpha:([\d.]+)", text)
    assert found is not None, f"{path}: no alpha"
    plan = json.loads(text.splitlines()[-1])
    choice = next(way for way in plan["by_method"] if way["mode"] == "ssd")
    flags = [f"{name} = {choice[name]}" for name in FLAGS]
    return "\n".join([f"[ssd-{found[1]}]", f"alpha = {found[1]}", *flags])


def main() -> int:
    """Prints the grid."""
    print(HEAD)
    print("\n\n".join(block(Path(name)) for name in sys.argv[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
