"""Prints a run for a person at the terminal: settings, a progress bar, a table, the JSON line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from mpissd.common.config import RunConfig
from mpissd.common.output import json_line
from mpissd.common.row import Row
from mpissd.engine.backend.base import DeviceInfo
from mpissd.engine.comm.topology import Topology
from mpissd.engine.job import Job
from mpissd.engine.session.session import Session
from mpissd.lab.measure.row import answers_file
from mpissd.lab.predict.row import price_of, under_default_law


def print_card(session: Session) -> None:
    """Prints the job's settings, ranks and devices to stdout, before anything is measured."""
    job, config, topology = session.job, session.job.config, session.topology
    target_bytes, draft_bytes = job.rank_bytes(session.backend.itemsize)
    lines = [
        ("mode", _mode(session)),
        ("target", f"{job.target.name}, {_groups(job)}T={job.tp}, {_bytes(target_bytes)} a rank"),
    ]
    if job.draft is not None:
        where = "inline on the lead" if job.inline else f"{_bytes(draft_bytes)} on its own rank"
        lines.append(("draft", f"{job.draft.name}, {where}"))
    lines.append(("backend", f"{session.backend.name} ({session.backend.dtype_name})"))
    if session.backend.info.kind == "emulated":
        lines.append(("", "EMULATED: forwards last as long as a profile says; nothing is computed"))
    lines += rank_lines(topology, session.infos)
    if config.learners:
        learning = config.learning
        told = f"from {learning.positions}, rate {learning.rate:g}, batch {learning.batch}"
        text = f"learner  trains the draft {told}; a version every {learning.publish_s:g} s at most"
        lines.append((f"rank {job.world_size - 1}", text))
    if session.backend.info.kind == "emulated" and (rate := session.backend.read_bandwidth(0)):
        batch, itemsize = config.batch_size, session.backend.itemsize
        cost = job.target_shard.cost(job.verify_rows, batch, itemsize, job.options)
        read_s = (cost.weight_bytes + cost.kv_bytes) / rate
        lines.append(("floor", f"{read_s * 1e3:.3f} ms to read a target rank's bytes"))
    lines.append(("law", _law(session)))
    each = " in each group" if topology.groups > 1 else ""
    lines.append(("seed", f"{config.seed}, batch {config.batch_size}{each}"))
    print("\n".join(f"{name:>8}  {text}" for name, text in lines), flush=True)


def rank_lines(topology: Topology, infos: Sequence[DeviceInfo]) -> list[tuple[str, str]]:
    """Returns a line for each rank: its name, and its role, host and device."""
    lines = []
    for rank, (host, info) in enumerate(zip(topology.hosts, infos, strict=True)):
        is_draft, leads = rank >= topology.first_draft, rank % topology.tp == 0
        role = "draft" if is_draft else "lead" if leads else "target"
        lines.append((f"rank {rank}", f"{role:6} {host}  {info.name}"))
    return lines


def _groups(job: Job) -> str:
    groups = job.config.groups
    return f"{groups} groups of " if groups > 1 else ""


def _mode(session: Session) -> str:
    job = session.job
    if job.config.mode == "ar":
        return "AR (K=0)"
    if not job.fan_out:
        return f"SD, K={job.lookahead}"
    fan_out = ",".join(str(f) for f in job.fan_out)
    return f"SSD, K={job.lookahead}, fan-out {fan_out} ({sum(job.fan_out)} branches)"


def _law(session: Session) -> str:
    job = session.job
    if job.draft is None:
        return "none: every round emits one token a sequence"
    return session.workload.law + (_imposed(job) if job.fan_out else "")


def _imposed(job: Job) -> str:
    """Describes how many branches the default hit model would need for the imposed hit rate."""
    if not job.hit_law.p_hit:
        return ""
    honest = under_default_law(job)
    needed = "no number of branches" if honest is None else f"{sum(honest.fan_out)} branches"
    return f" (imposed on {sum(job.fan_out)} branches; the default law needs {needed})"


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


class _Lines:
    """A stream that prints each redraw of a bar as a line of its own.

    Open MPI 5 holds back a rank's output until the line ends, so a bar that redraws one line would
    not appear.
    """

    encoding = "utf-8"

    def write(self, text: str) -> int:
        if line := text.strip("\r\n "):
            sys.stderr.write(f"{line}\n")
        return len(text)

    def flush(self) -> None:
        sys.stderr.flush()


@contextmanager
def progress_bar(config: RunConfig, rounds: int | None) -> Iterator[Callable[[int], Any]]:
    """Shows a bar on stderr if a person is watching; yields advance(n), which adds n rounds."""
    shown = config.progress == "on" or (config.progress == "auto" and sys.stderr.isatty())
    if not shown:
        yield lambda count: None
        return
    bar = open_bar(rounds, "round", lines_s=2.0)
    try:
        yield bar.update
    finally:
        bar.close()


def open_bar(total: int | None, unit: str, *, lines_s: float, leave: bool = False) -> Any:
    """Opens a progress bar on stderr, redrawn twice a second.

    If stderr is a launcher's pipe or a file instead of a terminal, the bar prints a line every
    lines_s seconds.
    """
    direct = sys.stderr.isatty()
    return tqdm(
        total=total,
        unit=unit,
        mininterval=0.5 if direct else lines_s,
        leave=leave,
        ncols=None if direct else 80,
        file=sys.stderr if direct else _Lines(),
    )


def print_summary(row: Row, out: str = "") -> None:
    """Prints a short table, then the row as JSON on the last line of stdout.

    out: the folder that has the answers to several prompts, of which one is shown.
    """
    rounds = row.round_us
    lines = [
        ("tok/s", f"{row.tok_per_s:.1f}   per GPU {row.tok_per_s_per_gpu:.1f}"),
        ("round", "   ".join(f"{p} {_us(rounds[p])}" for p in ("p50", "p90", "p99"))),
        (
            "tokens",
            f"{row.num_tokens} in {row.num_rounds} rounds, "
            f"{row.acceptance_length:.2f} a round and sequence"
            + (" with those behind an answer's end" if row.num_prompts else ""),
        ),
        ("target", _target(row)),
    ]
    if row.t_draft_s is not None:
        ratio = "" if row.T_SD is None else f"   T_SD {row.T_SD:.3f}"
        lines.append(("draft", f"{_us(row.t_draft_s * 1e6)} for K={row.lookahead}{ratio}"))
    if row.learner is not None:
        lines.append(("learner", _learner(row, row.learner)))
    if row.per_group:
        rates = ", ".join(f"{group['tok_per_s']:.1f}" for group in row.per_group)
        lines.append(("groups", f"{rates} tok/s"))
    if row.pool is not None:
        lines.append(("pool", _pool(row)))
    if row.hit_rate is not None:
        price = price_of(row.imposed_hits, row.expected_tok_per_s or 0.0)
        hits = [f"{row.hit_rate:.3f} of the lookups", price]
        lines.append(("hits", ", ".join(filter(None, hits))))
    if (row.num_prompts or 0) > 1 and out:
        lines.append(("answers", f"{answers_file(out, row.run_id)}: of {row.num_prompts} prompts"))
    if row.stable is False:
        lines.append(("", "unstable: interleaved blocks of rounds differ in their median"))
    print("\n".join(f"{name:>8}  {text}" for name, text in lines))
    print(json_line(row.to_dict()), flush=True)


def _learner(row: Row, told: Mapping[str, Any]) -> str:
    seen, steps, published, refused = (
        told.get(name, 0) for name in ("sequences", "steps", "published", "refused")
    )
    text = f"{row.learner_state}: {seen} sequences, {steps} steps; versions: {published} published"
    text += f", {refused} refused, {row.draft_versions} taken over"
    if not_taken := told.get("refused_versions"):
        text += f"; the draft refused {len(not_taken)}, first {not_taken[0]}"
    shared = told.get("shares_gpu_of")
    return text if shared is None else f"{text}; on rank {shared}'s GPU, which counts once"


def _pool(row: Row) -> str:
    pool, wait = row.pool or {}, row.draft_wait_us or {}
    text = f"the draft is busy {pool['busy']:.0%}, {pool['seats']:.2f} groups a forward"
    return f"{text}; waits for it p50 {_us(wait['p50'])}, p90 {_us(wait['p90'])}"


def _target(row: Row) -> str:
    if row.t_target_s is None:
        return "no full round was measured"
    text = f"{_us(row.t_target_s * 1e6)} a forward"
    if row.floor_fraction is not None:
        text += f"; its floor is {_us(row.floor_us)}, {row.floor_fraction:.0%} of that"
    return text


def _us(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value / 1e3:.2f} ms" if value >= 1e3 else f"{value:.1f} µs"
