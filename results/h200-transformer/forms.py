"""Times forms of the whole forward in one kernel beside the separate kernels, at the bars' shapes.

    python results/h200-transformer/forms.py OUT [MODEL…] [--forms=A;B;…] [--seconds=N]
    python results/h200-transformer/forms.py OUT --compile    all kernels first, on all cores
    python results/h200-transformer/forms.py OUT --table      what OUT/forms.jsonl holds

MODEL: of CASES in mpissd.lab.limits.whole (8b, 1b, smollm2; all by default). A form is what
whole_plan.Form.parse reads. A row is one form and shape: device time of a captured forward (the
median of 40; of lanes the mean of their steps), the share of its floor at the read rate of the same
job, and `bits`: whether all logits are those of the first form. Nothing new begins after N seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from mpissd.common.errors import FaultError
from mpissd.engine.model.transformer.cupy_ops.whole import Whole
from mpissd.engine.model.transformer.cupy_ops.whole_ops import WholeOps
from mpissd.engine.model.transformer.cupy_ops.whole_plan import Form
from mpissd.lab.limits.model import WholeModel, run, timed
from mpissd.lab.limits.whole import CASES, STEPS, WHERE, Case

SEPARATE = "separate"
FORMS = (  # what each is for, and what it should take: PLAN.md
    "",
    "holds=0",
    "holds=2",
    "piece=8,flying=4",
    "piece=8,flying=5",
    "teams=1,ahead=2",
    "arrive=1",
    "arrive=1,holds=2",
    "arrive=1,piece=8,flying=4,holds=2",
    "arrive=1,piece=8,flying=5,holds=2",
    "arrive=1,teams=1,ahead=3,holds=2",
    "arrive=1,piece=8,flying=5,teams=1,ahead=4,holds=2",
    "arrive=2,holds=2",
    "arrive=2,piece=8,flying=5,holds=2",
    "arrive=2,piece=8,flying=5,teams=1,ahead=4,holds=2",
    "arrive=2,tiles=2,holds=2",
)
_READ_BYTES = 4 * 10**9
_STUCK_S, _GIVEN_UP_S = 0.25, 9.0
_SPREAD = 1e-2  # of one kernel's logits from those of the separate ones, against the largest


class Bench:
    """Measures the forms of one model over one set of weights."""

    def __init__(self, backend: Any, name: str, rate: float, out: Path, stop: float) -> None:
        self._backend, self._name, self._rate = backend, name, rate
        self._out, self._stop = out, stop
        self._seen: dict[Case, Any] = {}

    def run(self, forms: Sequence[str]) -> None:
        """Measures the separate kernels, then each form, case by case."""
        self._pass([SEPARATE], is_whole=False)
        self._pass(forms, is_whole=True)

    def _pass(self, forms: Sequence[str], *, is_whole: bool) -> None:
        cases, WholeOps.is_on = CASES[self._name], is_whole
        Whole.least_hidden = 0  # SmolLM2's shapes are measured, too
        model = WholeModel(
            self._backend,
            WHERE[self._name],
            capacity=max(case.context for case in cases) + 64,
            slots=max(len(case.counts) for case in cases),
            lanes=max(case.lanes for case in cases),
            steps=STEPS,
        )
        for case in sorted(cases, key=lambda case: case.context):
            model.fill(case.context, len(case.counts))
            first = None
            for form in forms:
                if time.monotonic() > self._stop:
                    return
                first = self._measured(model, case, form, first)

    def _measured(self, model: Any, case: Case, form: str, first: Any) -> Any:
        """Writes one row; returns the logits that the next forms are held against."""
        Whole.form = Form.parse("" if form == SEPARATE else form)
        seconds, logits = taken(model, case)
        if form == SEPARATE:
            self._seen[case] = logits
        apart = float(np.abs(logits - self._seen[case]).max() / np.abs(logits).max())
        floor = model.floor_s(self._rate, case.kv_tokens)
        row = {
            "model": self._name,
            "form": form if form == SEPARATE else str(Whole.form),
            "rows": case.rows,
            "sequences": len(case.counts),
            "lanes": case.lanes,
            "context": case.context,
            "ms": 1e3 * seconds,
            "floor_ms": 1e3 * floor,
            "share": floor / seconds,
            "bits": seconds < _STUCK_S and (first is None or bool(np.array_equal(first, logits))),
            "apart": apart,
            "right": apart < _SPREAD,
            "device": self._backend.info.name,
        }
        with open(self._out / "forms.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        print(line_of(row), flush=True)
        return logits if first is None else first


def taken(model: Any, case: Case) -> tuple[float, Any]:
    """Returns the median seconds of a case's forwards, and the logits of the last one.

    A form whose blocks wait for ever gives up, and has _GIVEN_UP_S.
    """
    model.backend.stop[...] = 0  # of a form before this one that gave up
    try:
        program = model.program(case.rows)
        seconds = float(
            np.mean([_median(model, program, places, case) for places in case.places()])
        )
        program.close()
    except FaultError:
        model.backend.stop[...] = 0
        seconds = _GIVEN_UP_S
    return seconds, model.stack.logits(range(case.rows))


def _median(model: Any, program: Any, places: Any, case: Case) -> float:
    model.set(model.tokens(case.rows, slot=99), places)
    first = run(program)
    return first if first > _STUCK_S else float(np.median(timed(program)))


def line_of(row: dict[str, Any]) -> str:
    """Returns a row as text."""
    what = f"{row['model']:8}{row['rows']:3} rows, {row['sequences']:2} sequences, "
    what += f"context {row['context']:5}"
    wrong = "" if row["bits"] and row["right"] else f"  WRONG (apart {row['apart']:.1e})"
    return f"{what}  {row['form']:52}{row['ms']:8.3f} ms  {row['share']:.3f}{wrong}"


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of a table: milliseconds (share) by form and shape, the fastest marked."""
    keys = ("model", "rows", "sequences", "lanes", "context")
    shapes = list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))
    heads = [f"{m} {r}{'L' if lanes else ''}x{c}" for m, r, _, lanes, c in shapes]
    yield "| form | " + " | ".join(heads) + " |"
    yield "|---" * (len(shapes) + 1) + "|"
    found = {(row["form"], tuple(row[key] for key in keys)): row for row in rows}
    valid = [row for row in rows if row["bits"] and row["right"]]
    best = {
        shape: min((r["ms"] for r in valid if tuple(r[key] for key in keys) == shape), default=0)
        for shape in shapes
    }
    for form in dict.fromkeys(row["form"] for row in rows):
        cells = [_cell(found.get((form, shape)), best[shape]) for shape in shapes]
        yield f"| {form} | " + " | ".join(cells) + " |"


def _cell(row: dict[str, Any] | None, best: float) -> str:
    if row is None:
        return "–"
    text = f"{row['ms']:.3f} ({row['share']:.3f})"
    if not (row["bits"] and row["right"]):
        return f"{text} WRONG"
    return f"**{text}**" if row["ms"] == best else text


def read(out: Path) -> list[dict[str, Any]]:
    """Returns the rows of OUT/forms.jsonl."""
    path = out / "forms.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kernels(names: Sequence[str], forms: Sequence[str]) -> list[tuple[str, int, int]]:
    """Returns (form, rows, head_dim) of every kernel that these models need, each once."""
    heads = {"8b": 128, "1b": 64, "smollm2": 64}
    every = {(form, -(-case.rows // 8), heads[name]) for name in names for case in CASES[name]
             for form in forms}  # fmt: skip
    return sorted((form, 8 * tiles, head) for form, tiles, head in every)


def compiled(kernel: tuple[str, int, int]) -> None:
    """Compiles one kernel into the user's cache (a process of its own)."""
    from mpissd.engine.backend.cupy_backend import CupyBackend
    from mpissd.engine.model.transformer.cupy_ops import whole, whole_plan

    form, rows, head = kernel
    launcher = CupyBackend(0).launcher(early=True)
    geometry = whole_plan.geometry(rows, head, 256, launcher.shared_bytes, Form.parse(form))
    if geometry.fits:
        launcher.function("whole", whole.SOURCES, geometry.macros, geometry.shared_bytes)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="*", choices=[*CASES, []])
    parser.add_argument("--forms", default=";".join(FORMS))
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--table", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measures, compiles or prints, and returns the exit code."""
    given = options(arguments)
    names, forms = given.models or list(CASES), given.forms.split(";")
    stop = time.monotonic() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    if given.table:
        print("\n".join(table(read(given.out))))
        return 0
    if given.compile:
        with get_context("spawn").Pool(12) as pool:
            pool.map(compiled, kernels(names, forms), chunksize=1)
        return 0
    from mpissd.engine.backend.cupy_backend import CupyBackend

    backend = CupyBackend(0)
    rate = float(backend.read_bandwidth(_READ_BYTES))
    print(f"{backend.info.name}, {rate / 1e12:.2f} TB/s", flush=True)
    for name in names:
        Bench(backend, name, rate, given.out, stop).run(forms)
    backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
