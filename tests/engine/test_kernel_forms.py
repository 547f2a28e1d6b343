"""The script that times forms of the whole kernel: its table, and a pass on emulated kernels."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from mpissd.engine.model.transformer.cupy_ops.whole import Whole
from mpissd.engine.model.transformer.cupy_ops.whole_ops import WholeOps
from mpissd.engine.model.transformer.cupy_ops.whole_plan import Form, geometry
from mpissd.lab.limits import model
from mpissd.lab.limits.whole import Case
from tests.emulator.launcher import EmulatedGpu
from tests.gpu.transformer_rig import tiny

FOLDER = Path(__file__).parents[2] / "results/h200-transformer"
ROOM = 227 << 10


@pytest.fixture(scope="module")
def forms() -> Any:
    spec = spec_from_file_location("forms", FOLDER / "forms.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_form_can_be_built_for_every_shape(forms: Any) -> None:
    """A multiprocessor has room for the copies that are under way."""
    assert len(set(forms.FORMS)) == len(forms.FORMS)
    for form, rows, head in forms.kernels(list(forms.CASES), forms.FORMS):
        found = geometry(rows, head, 256, ROOM, Form.parse(form))
        assert found.fits and found.shared_bytes <= ROOM, form


def test_a_form_is_read_and_written() -> None:
    for text in ("arrive=1,piece=8,flying=5", "holds=0"):
        assert str(Form.parse(text)) == text
    assert str(Form.parse("")) == "default"
    with pytest.raises(ValueError, match="depth: unknown"):
        Form.parse("depth=3")


def row(form: str, ms: float, **more: Any) -> dict[str, Any]:
    shape = {"model": "8b", "rows": 1, "sequences": 1, "lanes": 0, "context": 512}
    told = {"form": form, "ms": ms, "share": 3.0 / ms, "bits": True, "right": True, "apart": 0}
    return shape | told | more


def test_the_table_marks_the_fastest_that_is_right(forms: Any) -> None:
    rows = [row("separate", 4.0), row("a", 3.5), row("b", 3.2, bits=False), row("a", 1.0, rows=5)]
    lines = list(forms.table(rows))
    assert lines[0] == "| form | 8b 1x512 | 8b 5x512 |"
    assert lines[2:] == [
        "| separate | 4.000 (0.750) | – |",
        "| a | **3.500 (0.857)** | **1.000 (3.000)** |",
        "| b | 3.200 (0.938) WRONG | – |",
    ]
    assert "WRONG" in forms.line_of(rows[2]) and "WRONG" not in forms.line_of(rows[1])


def test_the_command_line(forms: Any, tmp_path: Path, capsys: Any) -> None:
    given = forms.options([str(tmp_path), "8b", "--forms=;arrive=1", "--seconds=60"])
    assert given.models == ["8b"] and given.forms.split(";") == ["", "arrive=1"]
    (tmp_path / "forms.jsonl").write_text(json.dumps(row("separate", 4.0)) + "\n")
    assert forms.main([str(tmp_path), "--table"]) == 0
    assert "| separate | **4.000 (0.750)** |" in capsys.readouterr().out


@pytest.mark.slow
def test_a_pass_over_emulated_kernels(
    forms: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where, name in ((Whole, "least_hidden"), (Whole, "form"), (WholeOps, "is_on")):
        monkeypatch.setattr(where, name, getattr(where, name))
    monkeypatch.setattr(Whole, "least_hidden", 0)
    monkeypatch.setattr(model, "resolve_model", lambda where: where)
    monkeypatch.setattr(model.families, "of_preset", lambda where: tiny("smollm2", layers=1))
    monkeypatch.setattr(model, "PROMPT_ROWS", 8)
    monkeypatch.setattr(model, "WARM_UP", 0)
    monkeypatch.setattr(forms, "timed", lambda program: [model.run(program)])
    monkeypatch.setattr(forms, "_STUCK_S", 1e9)
    monkeypatch.setitem(forms.CASES, "1b", (Case(6), Case(5, (2, 1))))
    gpu = EmulatedGpu(tmp_path)
    forms.Bench(gpu, "1b", 1e12, tmp_path, 1e18).run(["", "arrive=1"])
    rows = forms.read(tmp_path)
    assert [r["form"] for r in rows] == ["separate"] * 2 + ["default", "arrive=1"] * 2
    assert all(r["bits"] and r["right"] for r in rows)
    assert "whole" in gpu.launcher(early=False).launches
