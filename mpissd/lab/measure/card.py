"""Prints a run on the terminal: its settings, its progress, and a short table of results."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic
from typing import TextIO

from mpissd.common.config import RunConfig
from mpissd.common.row import Row
from mpissd.engine.backend.base import DeviceInfo
from mpissd.engine.comm.topology import Topology
from mpissd.engine.session.session import Session
from mpissd.lab.measure.row import answers_file
from mpissd.lab.show import columns_of

# What a sum of 16 KB by NCCL takes longer, for T = 2 and more, on H200s (docs/performance.md).
_NCCL_LONGER_US = 3.1, 6.2


def print_card(session: Session) -> None:
    """Prints the job's settings, ranks and devices to stdout, before anything is measured."""
    job = session.job
    topology = session.topology
    backend = session.backend
    config = job.config
    sizes = [
        f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
        for count in job.rank_bytes(backend.itemsize)
    ]
    mode = "AR (K=0)" if config.mode == "ar" else f"SD, K={job.lookahead}"
    if config.tree and job.lookahead:
        mode += f", a {'dynamic ' * (job.dynamic is not None)}tree of {job.verified} tokens"
    if job.masks:
        mode += ", all from one forward of the draft"
    if job.fan_out:
        fan_out = ",".join(str(f) for f in job.fan_out)
        mode = f"S{mode}, fan-out {fan_out} ({sum(job.fan_out)} branches)"
    groups = f"{config.groups} groups of " if config.groups > 1 else ""
    target = f"{job.target.name}, {groups}T={job.tp}, {sizes[0]} a rank"
    lines = [("mode", mode), ("target", target)]
    if job.draft is not None:
        where = "inline on the lead" if job.inline else f"{sizes[1]} on its own rank"
        where += f" ({config.draft_backend})" if config.draft_backend else ""
        lines.append(("draft", f"{job.draft.name}, {where}"))
    lines.append(("backend", f"{backend.name} ({backend.dtype_name})"))
    if backend.info.kind == "emulated":
        lines.append(("", "EMULATED: forwards last as long as a profile says; nothing is computed"))
    if session.group.name != "solo":
        lines.append(("sums", all_reduce_text(session)))
    lines += rank_lines(topology, session.infos)
    if config.learners:
        learning = config.learning
        how = f"rate {learning.rate:g}, batch {learning.batch}"
        text = f"learner  trains the draft {how}; a version every {learning.publish_s:g} s at most"
        lines.append((f"rank {job.world_size - 1}", text))
    no_law = "none: every round emits one token a sequence"
    lines.append(("law", no_law if job.draft is None else session.workload.law))
    where = " in each group" if topology.groups > 1 else ""
    lines.append(("seed", f"{config.seed}, batch {config.batch_size}{where}"))
    print("\n".join(f"{name:>8}  {text}" for name, text in lines), flush=True)


def all_reduce_text(session: Session) -> str:
    """Returns the name of the all-reduce and, if the one-shot kernels were tried in vain, the
    reason and what that costs."""
    group = session.group
    if not group.not_oneshot:
        return group.name
    cost = "through host memory, and forwards are no CUDA graphs"
    if group.name == "nccl":
        sums = 2 * session.job.target.num_layers
        cost_us = sums * _NCCL_LONGER_US[session.job.tp > 2]
        cost = f"on an H200 {sums} of them make a forward {cost_us / 1e3:.2f} ms longer"
    return f"{group.name} ({cost}): {group.not_oneshot}"


def rank_lines(topology: Topology, infos: Sequence[DeviceInfo]) -> list[tuple[str, str]]:
    """Returns ("rank N", text) for each MPI rank N; the text says whether the rank runs target or
    draft, and names its host and device. infos: each rank's device."""
    lines = []
    for rank, (host, info) in enumerate(zip(topology.hosts, infos, strict=True)):
        role = "target" if rank % topology.tp else "lead"
        role = "draft" if rank >= topology.first_draft else role
        bound = f"  ({info.binding})" if info.binding else ""
        lines.append((f"rank {rank}", f"{role:6} {host}  {info.name}{bound}"))
    return lines


@contextmanager
def progress_line(
    config: RunConfig, terminal: TextIO | None = None, every_s: float = 0.5
) -> Iterator[Callable[[Callable[[float], str]], None]]:
    """Yields a function show(text), which may be called often and now and then writes a progress
    line. Its argument is a function that returns the line, given the seconds since the beginning.
    On a terminal (None: stderr, if that is one) one line is redrawn, at most every every_s seconds.
    In a launcher's pipe new lines are written, because Open MPI 5 holds back incomplete lines."""
    screen = terminal or (sys.stderr if sys.stderr.isatty() else None)
    begun = monotonic()
    if config.progress == "off" or (config.progress == "auto" and screen is None):
        yield lambda text: None
        return
    output = screen or sys.stderr
    every_s = every_s if screen else 2.0
    due = begun + every_s

    def write(text: str) -> None:
        line = f"{text}\n" if screen is None else f"\r\x1b[2K{text[: columns_of(screen) - 1]}"
        output.write(line)
        output.flush()

    def show(text: Callable[[float], str]) -> None:
        nonlocal due
        if (now := monotonic()) >= due:
            due = now + every_s
            write(text(now - begun))

    try:
        yield show
    finally:
        if screen is not None:
            write("")


@contextmanager
def progress_bar(config: RunConfig, rounds: int | None) -> Iterator[Callable[[int], None]]:
    """Yields a function advance(n), which adds n to the number of rounds in a progress line on
    stderr. rounds: the expected total (None: unknown)."""
    done = 0
    total = f" of {rounds}" if rounds else ""

    def advance(count: int) -> None:
        nonlocal done
        done += count
        show(lambda seconds: f"{done}{total} rounds, {done / seconds:.1f} a second")

    with progress_line(config) as show:
        yield advance


@contextmanager
def status_line(config: RunConfig, terminal: TextIO | None) -> Iterator[Callable[[str], None]]:
    """Yields a function say(text), which changes the text of a progress line; every 4 s the line
    also shows the seconds so far. terminal: where (None: stderr, if that is a terminal)."""
    shown = ""
    is_over = Event()

    def count() -> None:
        while not is_over.wait(4.0):
            if shown:  # The text is empty except on rank 0.
                show(lambda seconds: f"{shown} ({seconds:.0f} s)")

    def say(text: str) -> None:
        nonlocal shown
        shown = text
        show(lambda _: text)

    with progress_line(config, terminal, every_s=0.0) as show:
        clock = Thread(target=count, daemon=True)
        clock.start()
        try:
            yield say
        finally:
            is_over.set()
            clock.join()


def print_summary(row: Row, out: str = "", busy: Iterable[str] = ()) -> None:
    """Prints a short table of a result row. out: folder of the answers, which the table names if
    there are several answers. busy: texts on what disturbed the machine."""

    def us(value: float | None) -> str:
        if value is None:
            return "unknown"
        return f"{value / 1e3:.2f} ms" if value >= 1e3 else f"{value:.1f} µs"

    past_end = " with those behind an answer's end" if row.num_prompts else ""
    length = f"{row.acceptance_length:.2f} a round and sequence{past_end}"
    target = "no full round was measured"
    if row.t_target_s is not None:
        target = f"{us(row.t_target_s * 1e6)} a forward"
    if row.t_target_s is not None and row.floor_fraction is not None:
        target += f"; its floor is {us(row.floor_us)}, {row.floor_fraction:.0%} of that"
    unit = "rank" if row.backend == "numpy" else "GPU"
    lines = [
        ("tok/s", f"{row.tok_per_s:.1f}   per {unit} {row.tok_per_s_per_gpu:.1f}"),
        ("round", "   ".join(f"{p} {us(row.round_us[p])}" for p in ("p50", "p90", "p99"))),
        ("tokens", f"{row.num_tokens} in {row.num_rounds} rounds, {length}"),
        ("target", target),
    ]
    if row.t_draft_s is not None:
        ratio = "" if row.T_SD is None else f"   T_SD {row.T_SD:.3f}"
        forwards = " in one forward" if row.parallel_drafting else ""
        text = f"{us(row.t_draft_s * 1e6)} for K={row.lookahead}{forwards}{ratio}"
        lines.append(("draft", text))
    if (learner := row.learner) is not None:
        text = f"{row.learner_state}: {learner.get('steps', 0)} steps, {row.draft_versions} "
        text += "versions taken over"
        lines.append(("learner", text))
    if row.per_group:
        rates = ", ".join(f"{group['tok_per_s']:.1f}" for group in row.per_group)
        lines.append(("groups", f"{rates} tok/s"))
    if row.hit_rate is not None:
        lines.append(("hits", f"{row.hit_rate:.3f} of the lookups"))
    if (row.num_prompts or 0) > 1 and out:
        lines.append(("answers", f"{answers_file(out, row.run_id)}: of {row.num_prompts} prompts"))
    lines += [("busy", text) for text in busy]
    print("\n".join(f"{name:>8}  {text}" for name, text in lines), flush=True)
