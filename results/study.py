#!/usr/bin/env python3
"""Runs a study and prints its table. A study is a folder with steps, grids and expected figures.

    results/study.py run STUDY OUT [STEP …]      # STUDY: results/two-gpus; default: every step
    results/study.py table STUDY [OUT]           # of OUT's rows; default: the study's own rows

STUDY/study.ini has a section for each step, in order of importance, and one section `study`:

    [study]
    gpus = 2                    steps that need more are left out; `detect`: those of this machine
    budget_s = 530              no step begins with less than 15 s of it left
    flags = --backend=cupy      flags of every step
    columns = use, tok_per_s    keys of a row; see COMPUTED for the others
    expected = tok_per_s        the key of STUDY/expected.jsonl that is compared
    turns = 3                   how often sweeps are measured while the budget lasts (default: 1)

    [real-T1D1]                 the sweep of STUDY/real-T1D1.grid with T = 1 and D = 1
    limit_s = 100

A step that is not such a sweep has `ranks`, `command` (run, sweep, probe) and `flags`, or `shell`,
a command line. `env` sets environment variables; `needs` (of a step, or of the study) names those
without which a step is left out; `show = yes` prints what a step printed. Each step writes OUT/STEP
and OUT/STEP.log, rows as they are measured. A step that fails does not stop the others; the exit
code is then 1.

BACKEND and BUDGET_S replace what the file has, FLAGS are added: BACKEND=emulated
FLAGS=--device=null rehearses a study without GPUs. DRY=1 only plans each step. PYTHON, MPIRUN: see
launch/env.sh.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from configparser import ConfigParser, SectionProxy
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mpissd.common.output import read_rows  # noqa: E402
from mpissd.common.row import Row  # noqa: E402
from mpissd.engine.comm.topology import usable_cores  # noqa: E402
from mpissd.lab.measure.load import counters, reasons  # noqa: E402
from mpissd.lab.measure.verdict import (  # noqa: E402
    FEWEST_TURNS,
    PAID,
    Answer,
    TimedUse,
    UseComparison,
)
from mpissd.lab.tables.load import LeftOut, load_rows, of_one_group  # noqa: E402
from mpissd.lab.tables.uses import Family, mode_of, unit  # noqa: E402
from results import pages  # noqa: E402

BUSY = "busy.jsonl"  # file in OUT with each step's number of rows and what disturbed the step
FEWEST_S = 15  # A step is not begun if fewer seconds of the budget are left.
SHOW_S = 2.0
HEADS = {"tok_per_s": "tok/s"}  # column heads that differ from the row's key


def use(row: Row) -> str:
    """Returns how a result row uses its GPUs, such as "SSD T=1 D=1 K=3 F=8"."""
    mode = "lookup" if row["mode"] == "sd" and row.get("backup") == "fast" else row["mode"]
    words = [str(Family(row.get("schedule") or mode, row["tp"], row.get("num_drafts") or 0))]
    words += [f"K={row['lookahead']}"] if row.get("lookahead") else []
    words += [f"tree={row['tree_nodes']}"] if row.get("tree_nodes") else []
    words += [f"F={row['branch_budget']} {row['backup']}"] if row.get("branch_budget") else []
    return " ".join(words)


def setting(row: Row) -> str:
    """Returns what a result row decodes, as text: models, acceptance or recording, kind of forward,
    context and batch size."""
    words = [str(row["target"]).rpartition("-")[2] if row.get("workload") != "text" else "text"]
    recording = (row.get("recording") or "").partition(" ")[0].removesuffix(".npz")
    law = recording.rpartition("-")[2] or row.get("acceptance")
    words += [str(law)] if law and row["mode"] != "ar" else []
    words += ["whole"] if row.get("forward") == "transformer" else []
    words += ["LM head"] if row.get("lm_head") and "whole" not in words else []
    words += [f"context {row['context']}"] if row.get("context") else []
    words += [f"T={row['temperature']:g}"] if row.get("temperature") else []
    words += [f"b={row['batch_size']}"] if row.get("batch_size", 1) > 1 else []
    return ", ".join(words)


COMPUTED: dict[str, Callable[[Row], Any]] = {
    "use": use,
    "setting": setting,
    "rows": lambda row: row["batch_size"] * (row["lookahead"] + 1),
    "ms": lambda row: row["t_target_s"] and 1e3 * row["t_target_s"],
    "p99_over_p50": lambda row: row["round_us"]["p99"] / row["round_us"]["p50"],
}


def value_of(row: Row, key: str) -> Any:
    """Returns a result row's value of `key`; some keys are computed from others (COMPUTED)."""
    return COMPUTED[key](row) if key in COMPUTED else row.get(key)


def cell(tp: int, flags: Mapping[str, Any]) -> str:
    """Returns a text that identifies a configuration: T and a grid's flags, without the seed."""
    return json.dumps([tp, sorted((k, v) for k, v in flags.items() if k != "seed")])


def disturbed(out: Path, count: int) -> list[str]:
    """Returns texts on what disturbed the machine most in any step of a study, and on how many of
    its `count` rows this is unknown."""
    steps = []
    lines = (out / BUSY).read_bytes().splitlines() if (out / BUSY).exists() else []
    for line in lines:
        with suppress(ValueError, TypeError, LookupError, AttributeError):  # The line is cut off.
            step = json.loads(line)
            largest = max(map(float, step["busy"].values()), default=0.0)
            steps.append((largest, str(step["step"]), int(step["rows"]), [*step["busy"]]))
    _, name, _, texts = max(steps, default=(0.0, "", 0, []))
    busy = [f"{text} (step {name})" for text in texts]
    left = count - sum(rows for _, _, rows, _ in steps)
    unknown = f"what disturbed {left} of {count} rows is unknown (their step was killed)"
    return busy + [unknown] * (left > 0)


def cells_in(out: Path) -> dict[str, list[Row]]:
    """Returns {configuration, as `cell` names it: its rows} of a folder; ends without any row."""
    files = [p for name in ("runs", "measured") for p in sorted(out.rglob(f"{name}*.jsonl"))]
    cells: dict[str, list[Row]] = {}
    with LeftOut() as left_out:
        for row in load_rows(files, left_out):
            flags = (row.sweep or {}).get("flags", {"run": row.get("config_digest")})
            pool = {"groups": row.groups} if not of_one_group([row]) else {}
            cells.setdefault(cell(row["tp"], {**flags, **pool}), []).append(row)
    if not cells:
        raise SystemExit(f"{out}: no rows there yet: allowed: the OUT of results/study.py run")
    return cells


def chosen(uses: list[TimedUse]) -> TimedUse:
    """Returns the fastest configuration with cross-validated speeds: the speed in a turn is that of
    the configuration which is fastest in the other turns. If the same turns chose and judged it, it
    would seem too fast (M. Stone, Cross-validatory choice and assessment of statistical
    predictions, 1974)."""

    def without(turn: int, use: TimedUse) -> tuple[float, float]:
        others = [*use.speeds[:turn], *use.speeds[turn + 1 :]]
        return replace(use, speeds=others).mean, use.mean

    turns = range(len(uses[0].speeds))
    speeds = [max(uses, key=partial(without, turn)).speeds[turn] for turn in turns]
    return replace(max(uses, key=lambda use: use.mean), speeds=speeds)


def verdicts(
    cells: Mapping[str, list[Row]], busy: list[str], failed: Sequence[str] = ()
) -> Iterator[str]:
    """Yields sentences on whether a GPU for the draft pays, for each kind of device and setting
    (model pair, acceptance, …) with SSD rows of one target. cells: {configuration: its rows}. busy:
    what disturbed the machine. failed: steps that did not end; then nothing is said to pay."""
    single = {name: of_one_group(rows) for name, rows in cells.items()}
    for device in sorted({row["device_name"] for rows in single.values() for row in rows}):
        own = {name: [row for row in rows if row["device_name"] == device]
               for name, rows in single.items()}  # fmt: skip
        yield from _verdicts({name: rows for name, rows in own.items() if rows}, busy, failed)


def _verdicts(
    cells: Mapping[str, list[Row]], busy: list[str], failed: Sequence[str]
) -> Iterator[str]:
    """Yields the sentences on one kind of device. The fastest SSD on G ranks is compared with the
    fastest alternative without a draft rank on at most G ranks. Parameters: as of `verdicts`."""
    turns = [
        {((row.sweep or {}).get("repeat", 0), row.seed): row["tok_per_s"] for row in rows}
        for rows in cells.values()
    ]
    order = sorted({turn for speeds in turns for turn in speeds}, key=str)
    first = [rows[0] for rows in cells.values()]
    # `names` maps a setting of SSD to the setting of AR, which has no acceptance.
    with_ssd = [row for row in first if row["mode"] == "ssd"]
    names = {setting(row): setting(Row.from_dict({**row, "mode": "ar"})) for row in with_ssd}
    for name in sorted(names):
        uses = list[TimedUse]()
        rounds = list[int]()
        for rows, speeds in zip(cells.values(), turns, strict=True):
            row = rows[0]
            if setting(row) == (names[name] if row["mode"] == "ar" else name):
                family = Family(mode_of(row), row["tp"], row["num_drafts"])
                speed = [*map(speeds.get, order)]
                uses.append(TimedUse(family, unit(row), row["lookahead"], speed))
                rounds += [row["num_rounds"] for row in rows]
        for family in sorted({use.family for use in uses if use.family.mode == "ssd"}):
            plain = [use for use in uses if not use.family.num_drafts]
            rivals = [use for use in plain if use.family.gpus <= family.gpus]
            if not any(use.family.tp == family.gpus for use in rivals):
                continue  # Nothing was measured with all these GPUs for the target.
            ssd = chosen([use for use in uses if use.family == family])
            comparison = UseComparison([ssd, chosen(rivals)], busy, num_rounds=min(rounds))
            place = f"{name}: " if len(names) > 1 else ""
            for answer in comparison.answers():
                if "for the draft" in answer.what:
                    yield place + _lacking(comparison.sentence(answer), answer, failed)
    counts = sorted({len(speeds) for speeds in turns})
    runs = " to ".join(map(str, (counts[0], counts[-1])[: len(counts)]))
    state = "nothing disturbed the machine while these rows were measured"
    if busy:
        state = f"{' and '.join(busy)}, so only an interval beyond 5% is a verdict"
    rests = f"{runs} turn{'s' * (runs != '1')} of {len(cells)} uses on {first[0]['device_name']}"
    how = "intervals of 95%, each turn compares the uses that are fastest in the other turns"
    yield f"Trust: {rests}; {how}; {state}."
    if counts[0] < FEWEST_TURNS:
        yield f"A verdict needs {FEWEST_TURNS} turns: the same command again adds what is missing."


def _lacking(sentence: str, answer: Answer, failed: Sequence[str]) -> str:
    """Returns the sentence of an answer, or that nothing can be told if SSD pays by the rows, but
    the steps `failed` did not end and might have measured a faster alternative."""
    if answer.verdict != PAID or not failed:
        return sentence
    asked = f"Cannot tell whether {answer.what[0].lower()}{answer.what[1:]} pays"
    why = f"step {', '.join(failed)} did not end, and a use of it may be faster"
    return f"{asked}: {why}: {sentence.partition(': ')[2]}"


def table(folder: Path, out: Path) -> Iterator[str]:
    """Yields a Markdown table with a line for each configuration: medians of the rows in `out`, and
    the figures that the study in `folder` expects."""
    config = settings(folder)["study"]
    columns = [name.strip() for name in config["columns"].split(",")]
    key = config.get("expected")
    cells = cells_in(out)
    lines = read_rows(folder / "expected.jsonl") if key else []
    expected = {cell(line["tp"], line["flags"]): line[key] for line in lines if key in line}
    heads = [*(HEADS.get(column, column) for column in columns), "runs"]
    heads += [f"{HEADS.get(key, key)} in expected.jsonl", "measured / that"] if expected else []
    yield from pages.head(*heads)
    order = list(expected)
    for name in sorted(cells, key=lambda name: order.index(name) if name in order else len(order)):
        rows = cells[name]
        shown = [text_of([value_of(row, column) for row in rows]) for column in columns]
        shown.append(str(len(rows)))
        if expected:
            figure = expected.get(name)
            measured = [float(v) for row in rows if (v := value_of(row, str(key))) is not None]
            ratio = f"{median(measured) / figure:.2f}" if figure and measured else ""
            shown += [text_of([figure]), ratio]
        yield pages.line(shown)


def text_of(values: list[Any]) -> str:
    """Returns the text of a table's cell: the median of numbers, or the distinct texts."""
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if numbers:
        middle = median(numbers)
        places = 0 if middle >= 100 or all(isinstance(v, int) for v in numbers) else 3
        return f"{middle:.{places}f}"
    return ", ".join(dict.fromkeys(str(v) for v in values if v is not None))


def settings(folder: Path) -> ConfigParser:
    """Reads the file study.ini of a study's folder."""
    config = ConfigParser(interpolation=None)
    if not config.read(folder / "study.ini", "utf-8") or "study" not in config:
        raise SystemExit(f"{folder}: no study.ini with a section [study] there")
    return config


def gpus_of(text: str, backend: str) -> int:
    """Returns the number of GPUs that a study may use. text: a number, or "detect" for those of
    this machine. Ends the program with exit code 2 if a GPU is needed but none is found."""
    if text != "detect" or backend != "cupy" or os.environ.get("GPUS"):
        return int(os.environ.get("GPUS") or (8 if text == "detect" else text))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
        count = listed.stdout.count("GPU ")
    except (OSError, subprocess.TimeoutExpired):
        count = 0
    if not count:
        print("nothing to measure: nvidia-smi lists no GPU here", file=sys.stderr)
        raise SystemExit(2)
    return count


class Runner:
    """Runs the steps of one study, each within its limit and all within the budget."""

    def __init__(self, folder: Path, out: Path) -> None:
        self._folder = folder
        self._out = out
        self._begun = time.monotonic()
        self._config = settings(folder)
        study = self._config["study"]
        backend = os.environ.get("BACKEND", "cupy")
        self._gpus = gpus_of(study.get("gpus", "1"), backend)
        self._budget_s = float(os.environ.get("BUDGET_S") or study.get("budget_s", "530"))
        flags = study.get("flags", "") + f" {os.environ.get('FLAGS', '')}"
        self._flags = [f"--backend={backend}", *shlex.split(os.path.expandvars(flags))]
        self._is_dry = bool(os.environ.get("DRY"))
        self._turns = int(study.get("turns", "1"))
        self._turn = 1
        self.lacking: list[str] = []  # steps that did not succeed in the first turn

    def run(self, names: list[str]) -> int:
        """Runs the named steps of the study (none named: all); returns how many failed."""
        steps = {name: self._config[name] for name in self._config.sections() if name != "study"}
        if unknown := set(names) - set(steps):
            raise SystemExit(f"no step {', '.join(unknown)}: allowed: {', '.join(steps)}")
        self._out.mkdir(parents=True, exist_ok=True)
        failed = list[str]()
        while self._turn <= self._turns and not failed:
            begun = time.monotonic()
            failed = [name for name in names or steps if not self._step(name, steps[name])]
            self.lacking += failed * (self._turn == 1)
            self._turn += 1
            now = time.monotonic()
            if self._is_dry or 2 * now - begun > self._begun + self._budget_s:
                break
        return len(failed)

    def _step(self, name: str, step: SectionProxy) -> bool:
        needed = f"{self._config['study'].get('needs', '')} {step.get('needs', '')}".split()
        if missing := [variable for variable in needed if not os.environ.get(variable)]:
            print(f"{name}: left out, {' and '.join(missing)} not set")
            return True
        command, environment = self._command(name, step)
        if command is None:
            return True
        left = self._budget_s - (time.monotonic() - self._begun)
        if left < FEWEST_S:
            print(f"{name}: SKIPPED, {max(left, 0):.0f} s are left")
            return self._turn > 1
        limit = min(left, float(step.get("limit_s", "600")))
        begun = time.monotonic()
        log = self._out / f"{name}.log"
        with (
            self._watched(name),
            log.open("w") as file,
            subprocess.Popen(
                ["timeout", "-k", "15", f"{limit:.0f}", *command],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            code = self._wait(process, name, limit)
        taken = time.monotonic() - begun
        what = "planned" if self._is_dry else f"{self._rows(name)} rows"
        print(f"{name}: {what}, exit code {code}, {taken:.0f} s", flush=True)
        lines = log.read_text(errors="replace").splitlines()
        is_shown = step.getboolean("show", False)
        if code or is_shown:
            print("\n".join(lines if is_shown else lines[-3:]))
        return code == 0

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        """Measures within a `with` block what disturbs the machine during the step `name`, and
        appends that to OUT/busy.jsonl."""
        count = self._rows(name)
        before = counters() | {"own": sum(os.times()[:4])}
        try:
            yield
        finally:
            now = counters() | {"own": sum(os.times()[:4])}  # its ranks are children
            spent = {name: now[name] - value for name, value in before.items()}
            spent.pop("delayed", None)  # This process only waits, so its delays mean nothing.
            cores = len(usable_cores())
            measured = self._rows(name) - count
            busy = reasons([spent, *[{"own": 0.0}] * (cores - 1)], cores)
            if measured:
                line = {"step": name, "rows": measured, "busy": busy}
                with (self._out / BUSY).open("a") as file:
                    file.write(json.dumps(line) + "\n")

    def _wait(self, process: subprocess.Popen[bytes], name: str, limit: float) -> int:
        """Waits for a step's process and returns its exit code; on a terminal, shows how many rows
        the step has measured. limit: the step's time limit in s."""
        begun = time.monotonic()
        is_watched = sys.stderr.isatty()
        while True:
            try:
                code = process.wait(SHOW_S)
                break
            except subprocess.TimeoutExpired:
                taken = f"{time.monotonic() - begun:.0f} s of at most {limit:.0f}"
                line = f"\x1b[2K{name}: {self._rows(name)} rows, {taken}\r"
                sys.stderr.write(line if is_watched else "")
                sys.stderr.flush()
        sys.stderr.write("\x1b[2K" if is_watched else "")
        return code

    def _rows(self, name: str) -> int:
        files = (self._out / name).rglob("runs*.jsonl")
        return sum(len(path.read_text().splitlines()) for path in files)

    def _command(self, name: str, step: SectionProxy) -> tuple[list[str] | None, dict[str, str]]:
        """Returns a step's command line and environment variables. The command line is None if the
        step is not to run, because this machine has too few GPUs."""
        out = str((self._out / name).resolve())
        environment = os.environ | {"OUT": out, "PYTHONFAULTHANDLER": "1"}
        environment |= dict(word.split("=", 1) for word in shlex.split(step.get("env", "")))
        if shell := step.get("shell"):
            return (None if self._is_dry else ["bash", "-c", shell]), environment
        command = step.get("command", "sweep")
        grid = self._folder / f"{name}.grid"
        flags = [*self._flags, *shlex.split(os.path.expandvars(step.get("flags", "")))]
        if named := re.search(r"-T(\d+)D(\d+)$", name):
            tp, drafts = map(int, named.groups())
            ranks = tp + drafts
            flags.append(f"--num_drafts={drafts}")
        else:
            ranks = int(step["ranks"])
        if command == "sweep":
            flags += [f"--grid={grid.resolve()}"] if grid.exists() else []
            flags += [f"--repeats={self._turn}", "--progress=off"]
        if ranks > self._gpus:
            return None, environment
        flags.append(f"--out={out}")
        if self._is_dry:
            python = os.environ.get("PYTHON", sys.executable)
            dry = [python, "-m", "mpissd", command, f"--dry_run={ranks}"]
            return [*dry, *flags], environment
        environment["COMMAND"] = command
        return [str(ROOT / "launch" / "local.sh"), str(ranks), *flags], environment


def main(words: list[str]) -> int:
    """Runs the command line `words`; returns the exit code: 0, 1 if a step failed, or 2 for a wrong
    command line, after printing the usage."""
    if words[:1] == ["run"] and len(words) > 2:
        folder = Path(words[1]).resolve()
        out = Path(words[2])
        runner = Runner(folder, out)
        failed = runner.run(words[3:])
        if not os.environ.get("DRY"):
            print("\n".join(table(folder, out)))
            cells = cells_in(out)
            busy = disturbed(out, sum(map(len, cells.values())))
            for sentence in verdicts(cells, busy, runner.lacking):
                print(textwrap.fill(sentence, 100, subsequent_indent="  "))
        return int(failed > 0)
    if words[:1] == ["table"] and len(words) in (2, 3):
        folder = Path(words[1]).resolve()
        print("\n".join(table(folder, Path(words[2]) if len(words) > 2 else folder)))
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
