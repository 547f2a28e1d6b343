"""The table of the ten bars: medians of stable runs, honest where there are too few."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.lab.limits import model
from mpissd.lab.limits.bars import add, bars, main, read, table
from mpissd.lab.limits.table import line_of
from mpissd.lab.limits.whole import Case, Whole
from mpissd.lab.limits.whole_bars import whole_bars
from tests.emulator.launcher import EmulatedGpu
from tests.gpu.transformer_rig import tiny, use_megakernel
from tests.scripts import ROOT

Row = dict[str, Any]


def forward(seconds: float, **more: Any) -> Row:
    row = {"what": "forward", "way": "fast", "model": "llama-3.2-1b", "tp": 1, "rows": 24}
    return row | {"seconds": seconds, "floor_fraction": 0.5, "stable": True} | more


def line(rows: list[Row], start: str) -> str:
    """The one line of the table that begins so, behind its number."""
    found = [text for text in table(rows) if text[4:].startswith(start)]
    assert len(found) == 1, found
    return found[0]


def test_the_median_of_three_runs_decides_and_never_the_best() -> None:
    rows = [forward(s) for s in (0.59e-3, 0.61e-3, 0.62e-3)]
    assert "0.610 ms MISSED  (0.590 … 0.620, 3 of 3 runs stable)" in line(rows, "1B step, M=24")
    rows = [forward(s) for s in (0.58e-3, 0.60e-3, 0.62e-3)]
    assert "0.600 ms met " in line(rows, "1B step, M=24")


def test_unstable_runs_do_not_count_and_two_are_too_few() -> None:
    rows = [forward(0.5e-3), forward(0.5e-3), forward(0.9e-3, stable=False)]
    text = line(rows, "1B step, M=24")
    assert "too few (0.500 … 0.500, 2 of 3 runs stable)" in text and "met" not in text


def test_what_was_not_measured_says_so() -> None:
    assert all("not measured here" in text for text in table([]))
    assert [bar.number for bar in bars()] == sorted(bar.number for bar in bars())
    assert {bar.number for bar in bars()} == set(range(1, 11))


def test_cublas_and_pytorch_stand_beside_a_forward() -> None:
    rows = [forward(0.5e-3), forward(0.7e-3, way="cublas"), forward(0.72e-3, way="torch")]
    assert line(rows, "1B step, M=24").endswith("  cuBLAS 0.700  PyTorch 0.720")


def all_reduce(seconds: float, **more: Any) -> Row:
    row = {"what": "all_reduce", "tp": 2, "bytes": 128 << 10, "seconds": seconds}
    return row | {"group": "oneshot", "own": True} | more


@pytest.mark.parametrize("seconds, verdict", [(4e-6, "met"), (8e-6, "MISSED")])
def test_a_large_all_reduce_is_held_against_nccls(seconds: float, verdict: str) -> None:
    rows = [all_reduce(seconds)] * 3 + [all_reduce(7e-6, group="nccl", own=False)]
    text = line(rows, "all-reduce in a graph, 128 KB, T=2")
    assert "<= 7.00" in text and f" {verdict} " in text


def rounds(**more: Any) -> Row:
    row = {"what": "rounds", "mode": "ssd", "model": "llama-3.1-8b", "tp": 1, "lookahead": 4}
    row |= {"tok_per_s": 970.0, "acceptance_length": 4.0, "t_target_s": 3.9e-3, "stable": True}
    return row | {"p99_over_p50": 1.02, "floor_fraction": 0.9} | more


def test_ssd_is_held_against_replays_of_as_many_rows() -> None:
    replay = {"model": "llama-3.1-8b", "rows": 5}
    rows = [rounds()] * 3 + [forward(4e-3, **replay), forward(9e-3, **replay | {"rows": 1})]
    assert "0.970    met" in line(rows, "SSD p_hit=1 8B/1B T=1, of replays")
    assert "0.946    MISSED" in line(rows, "SSD p_hit=1 8B/1B T=1, of its own forwards")
    assert "1.020    met" in line(rows, "p99/p50 of a round, SSD 8B T=1")
    assert "not measured" in line([rounds()] * 3, "SSD p_hit=1 8B/1B T=1, of replays")


def test_rows_go_to_the_file_of_their_t(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [forward(0.5e-3, device="GPU"), all_reduce(4e-6)]
    add(tmp_path, rows)
    assert read(tmp_path) == rows
    assert (tmp_path / "T2.jsonl").read_text().count("\n") == 1
    assert main([str(tmp_path)]) == 0 and capsys.readouterr().out.startswith("GPU; medians")


def whole(fraction: float, **more: Any) -> Row:
    row = {"what": "whole", "way": "ours", "model": "llama-3.1-8b", "rows": 5, "context": 512}
    row |= {"sequences": 1, "lanes": 0, "floor_fraction": fraction, "seconds": 3.3e-3 / fraction}
    return row | {"stable": True, "parity": True} | more


@pytest.mark.parametrize("parity, verdict", [(True, " met "), (False, "not measured here")])
def test_a_whole_model_counts_only_with_parity(parity: bool, verdict: str) -> None:
    rows = [whole(0.9, parity=parity)] * 3 + [whole(0.6, way="torch")]
    text = line(rows, "8B M=5, context 512, of the floor")
    assert verdict in text and text.endswith("  PyTorch 0.600")


def test_the_bars_of_whole_models_read_rows_of_their_own() -> None:
    rows = [whole(0.8)] * 3
    assert "MISSED" in line(rows, "8B M=5, context 512, of the floor")
    assert "not measured here" in line(rows, "8B M=8, context 512, of the floor")
    assert [bar.number for bar in whole_bars()] == sorted(bar.number for bar in whole_bars())


def bits(different: int) -> Row:
    row = {"what": "bits", "model": "llama-3.1-8b", "context": 126, "rows": 32}
    return row | {"different": different}


def test_one_row_with_other_bits_misses_bar_7() -> None:
    start = "rows of 2 to 32 with other bits than alone, 8B"
    assert " met " in line([bits(0)] * 3, start)
    for rows in ([bits(0), bits(1), bits(1)], [bits(0), bits(7), bits(0)]):  # one context of three
        assert "MISSED" in line(rows, start)
    assert line_of(bits(2)).endswith("behind 126 tokens: 2 with other bits than alone")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes whole models tiny, and their prompts short."""
    monkeypatch.setattr(model, "resolve_model", lambda where: where)
    monkeypatch.setattr(model.families, "of_preset", lambda where: tiny("llama"))
    monkeypatch.setattr(model, "PROMPT_ROWS", 32)


def whole_model(backend: Any) -> model.WholeModel:
    return model.WholeModel(backend, "tiny", capacity=64, slots=2, lanes=3, steps=1)


@pytest.mark.usefixtures("small")
def test_rows_with_other_bits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one slot, and mixed with another's and with lanes: each row once a forward."""
    tested = whole_model(NumpyBackend())
    assert model.different_rows(tested, 5) == 0
    of_row = tested.stack.logits
    monkeypatch.setattr(tested.stack, "logits", lambda rows: of_row(rows) + (len(rows) == 17))
    assert model.different_rows(tested, 5) == 2 * 17


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("which, wrong", [("lanes", 3), ("slots", 2)])
def test_rows_of_lanes_and_of_a_second_slot_stand_beside_them(
    monkeypatch: pytest.MonkeyPatch, which: str, wrong: int
) -> None:
    """A model whose lanes, or second slot, are wrong beside other rows."""
    tested = whole_model(NumpyBackend())
    placed, of_row, place = list[Any](), tested.stack.logits, tested.stack.place
    monkeypatch.setattr(tested.stack, "place", lambda at: (placed.append(at), place(at))[1])

    def spoiled(rows: range) -> Any:
        at = placed[-1]
        found = at.lanes >= 0 if which == "lanes" else at.slots == 1
        return of_row(rows) + (found & (len(rows) == 32))[:, None]

    monkeypatch.setattr(tested.stack, "logits", spoiled)
    assert model.different_rows(tested, 5) == wrong


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_one_kernel_has_a_row_s_bits_in_any_mix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_megakernel(monkeypatch, is_on=True)
    monkeypatch.setattr(model, "BIT_ROWS", (5, 9))
    gpu: Any = EmulatedGpu(tmp_path)
    tested = whole_model(gpu)
    assert tested.kernel == "whole" and model.different_rows(tested, 5) == 0
    fills, forwards = 2, 9 + 2  # of each slot; of rows alone and of BIT_ROWS, of each kind
    assert gpu.launcher(early=False).launches.count("whole") == fills + 2 * forwards


@pytest.mark.usefixtures("small")
def test_a_row_says_which_kernel_computed_it(tmp_path: Path) -> None:
    device: Any = SimpleNamespace(
        info=SimpleNamespace(name="GPU"), read_bandwidth=lambda size: 1e12
    )
    bench, tested = Whole(tmp_path, device), whole_model(NumpyBackend())
    for way in ("ours", "torch"):
        bench._forward(tested, Case(5), way, [1e-3], parity=True)
    assert [row["kernel"] for row in read(tmp_path)[1:]] == ["numba", None]


def numbers(cell: str) -> list[str]:
    """What a cell says was got, without what stands in brackets."""
    return re.findall(r"[\d.]+", re.sub(r"\(.*?\)", "", cell))


def test_the_page_s_bars_are_what_the_committed_rows_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each to the places that the page gives, in the order of the bars."""
    page = (ROOT / "docs/performance.md").read_text()
    lines = page.partition("| bar | asked | got | by separate kernels")[2].split("\n\n")[0]
    said = [text for line in lines.splitlines()[2:] for text in numbers(line.split("|")[3])]
    assert main([str(ROOT / "results/h200-whole")]) == 0
    told = [re.search(r"[<>]= [\d.]+ +([\d.]+) .* runs stable", line)
            for line in capsys.readouterr().out.splitlines()]  # fmt: skip
    found = [float(match[1]) for match in told if match]
    assert len(found) == len(said) == 18
    for got, text in zip(found, said, strict=True):
        assert abs(got - float(text)) <= 0.5001 * 10.0 ** -len(text.partition(".")[2]), (got, text)
