"""Tiles of products on the CPU: their sums stay in registers on each instruction set.

Machine code is made for processors that need not be here, and read.
"""

from __future__ import annotations

import re

import pytest
from llvmlite import binding, ir

from mpissd.engine.model.transformer.numba_ops import kernels, tiles

# By instruction set: triple, processor, and how many vectors of columns a tile of 1 to 6 rows sums
# at once, of bfloat16 and of int8 weights.
TARGETS = {
    "avx512": ("x86_64-linux-gnu", "skylake-avx512", [4, 4, 4, 4, 4, 4], [4, 4, 4, 4, 4, 4]),
    "avx2": ("x86_64-linux-gnu", "haswell", [2, 2, 2, 2, 2, 2], [4, 4, 2, 2, 2, 2]),
    "neon": ("aarch64-linux-gnu", "neoverse-n1", [4, 4, 4, 4, 4, 4], [8, 8, 4, 4, 4, 4]),
}
ADD = re.compile(r"\s(vfmadd\w+|fmla)\s")
STACK = re.compile(r"[xyz]mm\d+.*%rsp|%rsp.*[xyz]mm\d+|[qvd]\d+.*\[sp")


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An instruction set, for which the module's functions emit code."""
    name: str = request.param
    lanes, registers, width, int8_width = tiles.TILES[name]
    monkeypatch.setattr(tiles, "LANES", lanes)
    monkeypatch.setattr(tiles, "VECTOR", ir.VectorType(tiles.F32, lanes))
    monkeypatch.setattr(tiles, "REGISTERS", registers)
    assert kernels.BLOCK % width == kernels.BLOCK % int8_width == 0
    return name


def code(target: str, kind: str, rows: int, count: int) -> str:
    """Returns the machine code of one tile's kernel."""
    triple, processor, *_ = TARGETS[target]
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        machine = binding.Target.from_triple(triple).create_target_machine(cpu=processor, opt=3)
    except RuntimeError:
        pytest.skip(f"this llvmlite has no {triple}")
    module = ir.Module()
    module.triple = triple
    tiles.kernel(module, kind, rows, count).linkage = "external"
    parsed = binding.parse_assembly(str(module))
    tuning = binding.create_pipeline_tuning_options(speed_level=3)
    passes = binding.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(parsed, passes)
    text: str = machine.emit_assembly(parsed)
    return text


def loop_of(text: str) -> list[str]:
    """Returns the lines of the innermost loop that adds products."""
    label, lines = "", []
    for line in text.splitlines():
        if begins := re.match(r"(\S+):", line):
            label, lines = begins[1], []
        lines.append(line)
        if label and line.endswith(label) and any(map(ADD.search, lines)):
            return lines
    raise AssertionError(f"no loop in\n{text}")


def spilled(text: str) -> float:
    """Returns how often a loop moves vectors to or from the stack, as a share of its sums."""
    lines = loop_of(text)
    return sum(map(bool, map(STACK.search, lines))) / sum(map(bool, map(ADD.search, lines)))


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_a_tile_keeps_its_sums_in_registers(target: str, kind: str) -> None:
    sizes = tiles.TILES[target]
    width = sizes.int8_width if kind == "int8" else sizes.width
    rows = range(1, tiles.MOST_ROWS + 1)
    counts = [tiles.columns(m, width) for m in rows]
    assert counts == TARGETS[target][3 if kind == "int8" else 2]
    for m, count in zip(rows, counts, strict=True):
        assert spilled(code(target, kind, m, count)) <= (0 if m < 6 else 0.1), (m, count)


def test_a_tile_that_is_too_large_is_seen(target: str) -> None:
    lanes = tiles.TILES[target].lanes
    assert spilled(code(target, "int8", 8, 64 // lanes)) > 0.1
