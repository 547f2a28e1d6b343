"""Measures what an answer's method has to beat on the same machine, and gives one verdict.

The rivals are AR and SD inline on the run's target ranks, and the faster of the two on all its
ranks. Their rows are kept in OUT/beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mpissd.common.config import RunConfig
from mpissd.common.flags import flags_of
from mpissd.common.rivals import Family
from mpissd.common.row import Row
from mpissd.engine.comm.topology import Refused, agreed
from mpissd.engine.session.session import Machine, Session, opened_machine, rest

Measure = Callable[[Session, dict[str, Any]], Row | None]
_AR_TOKENS = 64  # the speed of AR hardly depends on the text
_CLEAR = 1.1  # the least ratio of two single runs that counts as a difference
_FEWEST_ROUNDS = 8  # for a verdict: the first rounds of a run are its slowest
_OWN = "lookahead fan_out backup backup_lookahead lookup laws saguaro_c tree tree_shape".split()


def measured_beside(
    run: RunConfig, own: Row | None, tp: int, num_drafts: int, measure: Measure
) -> list[Row]:
    """Measures the rivals of a run whose machine is closed; returns their rows on rank 0, else [].

    own: the run's row on rank 0. tp, num_drafts: of the run. measure: measures a session.
    Collective. A rival that is refused is left out, as if memory does not hold both models.
    """
    measured = partial(_measured, run=run, own=own, measure=measure)
    is_drafted = run.beside != "ar" and bool(run.pair or run.draft)
    uses = [Family(mode, tp, 0) for mode in ("ar", "sd")[: 1 + is_drafted]]
    uses = [use for use in uses if use != Family(run.mode, tp, num_drafts)]
    rows: list[Row] = []
    with suppress(Refused):  # raised on all ranks
        with opened_machine(rival(run, "ar"), num_drafts) as machine:
            machine.divide([0])
            rows += [row for use in uses if (row := measured(machine, use)) is not None]
            faster = machine.topology.world.bcast(max(rows, key=speed).mode if rows else "sd")
        if num_drafts and is_drafted:
            with opened_machine(rival(run, faster), 0) as machine:
                wide = measured(machine, Family(faster, tp + num_drafts, 0))
                rows += [] if wide is None else [wide]
    return rows


def _measured(
    machine: Machine, use: Family, run: RunConfig, own: Row | None, measure: Measure
) -> Row | None:
    """Returns a rival's row on rank 0; None elsewhere."""
    config, world = rival(run, use.mode), machine.topology.world
    if own is not None:
        print(f"{use} answers the same prompt, for comparison (--beside=off: not) …", flush=True)
    row = session = None
    with suppress(Refused):
        with agreed(world):
            job = machine.resolve(config)
        machine.models.expect([job])
        session = machine.session(job)
        row = None if session is None else measure(session, {"beside": str(use)})
    if session is not None:
        session.resources.close()
    rest(machine.topology)
    return row


def rival(run: RunConfig, mode: str) -> RunConfig:
    """Returns the configuration of `mode` that answers a run's prompts without a draft rank, with
    defaults of the flags of the run's method, so that K is the rival's own."""
    fields = flags_of(RunConfig)
    reset = [n for n, f in fields.items() if n in _OWN or mode not in f.metadata["modes"]]
    limit = run.token_limit or _AR_TOKENS
    values: dict[str, Any] = {name: fields[name].default for name in reset}
    values |= {"mode": mode, "num_drafts": 0, "out": str(Path(run.out, "beside"))}
    values |= {"num_tokens": min(limit, _AR_TOKENS) if mode == "ar" else limit}
    values |= {"on_draft_loss": "abort", "progress": "off", "show": False, "trace": None}
    return replace(run, **values)


def speed(row: Row) -> float:
    """Returns the tokens a second after the first round, without the prefill of later prompts."""
    prompts = row.num_prompts or 1
    first = min(row.batch_size or 1, prompts)
    later_s = row.wall_s - (row.time_to_first_token_s or 0.0)
    later_s -= (1 - first / prompts) * (row.t_prefill_s or 0.0)
    tokens = row.num_tokens - first * row.acceptance_length
    return tokens / later_s if later_s > 0 else row.tok_per_s


def verdict(own: Row, rivals: Sequence[Row]) -> str:
    """Returns the speeds of a run and its rivals, and a line on each thing that may pay here."""
    unit = {"cupy": "GPU", "numpy": "core"}.get(own.backend, "emulated GPU")

    def name(row: Row) -> str:
        count = row.tp + row.num_drafts
        return f"{Family.of(row).name} on {count} {unit}{'s' * (count > 1)}"

    def judged(what: str, row: Row, other: Row) -> str:
        ratio = speed(row) / speed(other)
        pays = "makes no clear difference"
        if not 1 / _CLEAR < ratio < _CLEAR:
            pays = "pays" if ratio > 1 else "does not pay"
        return f"{what} {pays}: {name(row)} is {ratio:.2f} times {name(other)}"

    runs = [own, *rivals]
    speeds = "; ".join(f"{name(row)} {speed(row):.1f}" for row in runs)
    if min(row.num_tokens / row.acceptance_length for row in runs) < _FEWEST_ROUNDS:
        return f"tok/s: {speeds}\n→ no verdict: an answer of fewer than {_FEWEST_ROUNDS} rounds"
    narrow = [row for row in runs if row.tp == own.tp and not row.num_drafts]
    ar, sd = (next((r for r in narrow if r.mode == mode), None) for mode in ("ar", "sd"))
    parts = []
    if ar is not None and (drafted := sd or own) is not ar:
        parts.append(judged("speculation", drafted, ar))
    if own.num_drafts and any(row.tp > own.tp for row in rivals):
        best = max(rivals, key=speed)
        parts.append(judged(f"a {unit} for the draft", own, best))
    return "\n→ ".join([f"tok/s: {speeds}", *parts])
