"""Checks a run's result row against its raw rounds, and both against the hardware's limits.

    lines = violations(row, rounds)     one line per fault: "RULE: the fault, with both numbers"

`row` is one line of runs.jsonl, and `rounds` holds the arrays of OUT/rounds/RUN_ID.npz. CHECKS
lists the rules; each compares two independent measurements, or a measurement with what is possible.
A rule is skipped if a number that it needs is null or missing. These keys of a row are read only
here (b: batch size, K: drafted tokens a round):

    floor_bytes    bytes (weights and KV) that a target rank reads to verify b(K+1) rows
    floor_flops    operations of that verification on a target rank (missing in old rows)
    cache_bytes    size of the last-level cache of rank 0's device (null: unknown, or emulated)
    token_limit    value of --num_tokens (null: no limit)
    rank_digests   for each MPI rank, a digest of the acceptance results it received (null: unknown)
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Source
from mpissd.common.row import Row

Rounds = Mapping[str, NDArray[Any]]
Floats = NDArray[np.float64]
Faults = Iterator[str]

_ENDING = ("replay", "text")  # names of workloads whose sequences may end before the token limit
_READ_NOISE = {"numpy": 0.1}  # {backend: relative error of its measured memory bandwidth}
_PEAK_NOISE = {"numpy": 0.5}  # {backend: relative error of its measured peak flop/s}
_CLOSES = 0.99  # Timed phases must cover at least this share of a round's wall time.
_AT_MOST = 1.01
_REALISTIC_US = 1000.0  # Shorter rounds (in µs) are not checked: gaps may exceed 1% of them.
_FEWEST = 100  # from so many rounds on, 99% of rounds must pass _CLOSES; else only the median must
_EVENTS_S = 2e-6  # allowed error (s) of a forward's device time against the host's
_CLOCKS_S = 20e-6  # allowed difference (s) between two timers of the same rounds


class _UnknownError(Exception):
    """Raised if a rule needs a number or an array that is unknown; that rule is then skipped."""


@dataclass(frozen=True)
class Facts:
    """A result row and its raw rounds, as the rules read them. If a rule reads a value that is
    unknown, _UnknownError is raised, and the rule is skipped."""

    row: Row
    rounds: Rounds

    def get(self, path: str) -> float | None:
        """Returns the row's number at a dotted path such as "round_us.p50"; None: unknown."""
        value: Any = self.row
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if is_number else None

    def __getitem__(self, path: str) -> float:
        if (value := self.get(path)) is None:
            raise _UnknownError(path)
        return value

    def array(self, name: str) -> NDArray[Any]:
        if name not in self.rounds:
            raise _UnknownError(name)
        return self.rounds[name]

    def draft(self, name: str) -> NDArray[Any]:
        """Returns the column `name` of the table that the draft rank recorded, [rounds]."""
        rows = self.array("draft_rounds")
        return rows[:, self.rounds["draft_columns"].tolist().index(name)]


def _finite(facts: Facts) -> Faults:
    """Yields a fault for each NaN or infinity, except NaN ("not measured") in `draft_rounds`."""
    yield from _not_finite("", facts.row)
    for name, values in facts.rounds.items():
        if values.dtype.kind == "f":
            wrong = np.isinf(values) if name == "draft_rounds" else ~np.isfinite(values)
            if wrong.any():
                yield f"{name} holds {values[wrong][0]}, {int(wrong.sum())} of {values.size}"


def _not_finite(path: str, value: Any) -> Faults:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _not_finite(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for n, inner in enumerate(value):
            yield from _not_finite(f"{path}[{n}]", inner)
    elif isinstance(value, (float, np.floating)) and not math.isfinite(value):
        yield f"{path} is {value}"


def _clock(facts: Facts) -> Faults:
    """Yields a fault if a round's duration is not positive, if rounds are out of order, or if the
    time of a phase or a forward is negative."""
    rounds = facts.rounds
    for path in ("wall_s", "round_us.mean", "round_us.p50"):
        if (value := facts.get(path)) is not None and value <= 0:
            yield f"{path} is {value:g}: allowed: above 0"
    tables = ("round_s", "lead_ledger_ns", "draft_ledger_ns")
    for name in (name for name in tables if name in rounds):
        table = rounds[name]
        unit = "s" if name == "round_s" else "ns"
        walls = table if table.ndim == 1 else table[:, 1]
        for n in np.flatnonzero(walls <= 0)[:1]:
            yield f"{name}: round {n} took {walls[n]:g} {unit}, a clock stood or went backwards"
        if table.ndim > 1:
            for n, phase in np.argwhere(table[:, 2:] < 0)[:1]:
                yield f"{name}: phase {phase} of round {n} took {table[n, 2 + phase]} ns"
            for n in np.flatnonzero(np.diff(table[:, 0]) != 1)[:1]:
                yield f"{name}: round {table[n + 1, 0]} follows round {table[n, 0]}"
    times = {"t_target_s": rounds.get("t_target_s", np.zeros(0))}
    if "draft_rounds" in rounds:
        times |= {name: facts.draft(name) for name in ("t_draft_s", "t_growth_s")}
    for name, seconds in times.items():
        if (seconds < 0).any():
            yield f"{name}: a forward of {np.nanmin(seconds):g} s, a clock went backwards"


def _ranks(facts: Facts) -> Faults:
    """Yields a fault if the number of ranks is wrong, or if digests show that the ranks of one
    target group received different acceptance results. A draft rank has a digest for each group."""
    row = facts.row
    size = int(row.world_size)
    groups = row.groups or 1
    learners = row.learners or 0
    if (count := groups * row.tp + row.num_drafts + learners) != size:
        names = "groups · " * (groups > 1), " + learners" * (learners > 0)
        yield f"world_size is {size}, {names[0]}tp + num_drafts{names[1]} is {count}"
    digests = row.rank_digests
    if digests is None:
        digests = facts.array("rank_digests").tolist()
    if len(digests) != groups * (row.tp + row.num_drafts):
        yield f"world_size is {size}, rank_digests has {len(digests)}"
    draft = groups * row.tp
    for group in range(groups):
        places = [*range(group * row.tp, (group + 1) * row.tp), draft + group]
        received = [(min(n, draft), digests[n]) for n in places if n < len(digests)]
        received = [(rank, digest) for rank, digest in received if digest is not None]
        for rank, digest in received[1:]:
            if digest != received[0][1]:
                yield f"rank {received[0][0]} heard {received[0][1]}, rank {rank} heard {digest}"


def _floor(facts: Facts) -> Faults:
    """Yields a fault if the target's forward took less time than the hardware needs to read the
    bytes that its last-level cache cannot hold, or to compute the matrix products."""
    took = facts["t_target_s"]
    backend = str(facts.row.backend)
    names = ("floor_bytes", "cache_bytes", "read_bytes_per_s", "floor_flops", "peak_flops_per_s")
    read, cached, rate, flops, peak = (facts.get(name) for name in names)
    bounds = []
    if read is not None and cached is not None and rate:
        of_cache = f"{read / 1e6:.1f} MB less {cached / 1e6:.1f} MB of cache"
        least = max(0.0, read - cached) / rate * (1 - _READ_NOISE.get(backend, 0.0))
        bounds.append((least, f"{of_cache} at {rate / 1e9:.1f} GB/s"))
    if flops is not None and peak:
        least = flops / peak * (1 - _PEAK_NOISE.get(backend, 0.0))
        bounds.append((least, f"{flops / 1e9:.1f} Gflop at {peak / 1e9:.1f} Gflop/s"))
    for least, what in bounds:
        if took < least:
            yield f"t_target_s is {took * 1e6:.3f} µs, {what} take {least * 1e6:.3f} µs"


def host_s(row: Row, rounds: Rounds) -> Floats:
    """Returns the seconds from the launch of each round's target forward to its end, as rank 0
    timed them, [rounds]. If forwards may be launched one round ahead, the wall time of the round
    before is added, because the launch may lie anywhere in that round."""
    names = rounds["lead_phases"].tolist()
    columns = [2 + names.index(name) for name in ("launch", "device_wait")]
    seconds: Floats = rounds["lead_ledger_ns"][:, columns].sum(axis=1) * 1e-9
    is_captured = row.graph and row.all_reduce in ("solo", "oneshot", "nccl")
    is_greedy = not row.num_drafts and not row.temperature
    is_chained = is_captured and is_greedy and row.forward == "transformer"
    if is_chained and row.lookup in (None, "prompt"):
        # The host may launch forward n during round n − 1, so that round's time is added.
        seconds[1:] += rounds["lead_ledger_ns"][:-1, 1] * 1e-9
    return seconds


def _device(facts: Facts) -> Faults:
    """Yields a fault for a target forward that took longer by the device's clock than the host
    waited for it, and for a negative device time."""
    for name in ("forward", "all_reduce", "idle"):
        us = facts.get(f"device_us.{name}")
        if us is not None and us < -_EVENTS_S * 1e6:
            yield f"device_us.{name} is {us:g}: allowed: 0 or more"
    took = facts.array("t_target_s")
    ledger = facts.array("lead_ledger_ns")
    host = host_s(facts.row, facts.rounds)
    for n in np.flatnonzero(took > host * _AT_MOST + _EVENTS_S)[:1]:
        yield (
            f"round {n}: a forward of {took[n] * 1e6:.1f} µs within a launch and wait of "
            f"{host[n] * 1e6:.1f} µs"
        )
    t_target = facts["t_target_s"]
    rows = facts.array("sequences")
    verified = np.bincount(rows[:, 0], weights=rows[:, 7] + 1, minlength=len(took))
    is_full = verified == facts["batch_size"] * (facts["lookahead"] + 1)
    walls = ledger[is_full, 1] * 1e-9
    if len(walls) and t_target > (p50 := float(np.median(walls))) * _AT_MOST + _EVENTS_S:
        yield f"t_target_s is {t_target * 1e6:.1f} µs, p50 of its rounds {p50 * 1e6:.1f} µs"


def _counts(facts: Facts) -> Faults:
    """Yields a fault for each array or key whose number of rounds is not num_rounds, and for a
    fan_out without K + 1 elements (with a draft tree: one more than its nodes)."""
    row = facts.row
    rounds = facts.rounds
    names = "round_s t_target_s lead_ledger_ns draft_ledger_ns draft_rounds".split()
    counts = {name: len(rounds[name]) for name in names if name in rounds}
    if "sequences" in rounds:
        counts["sequences"] = len(np.unique(rounds["sequences"][:, 0]))
    for name, count in {**counts, "round_us.n": facts.get("round_us.n")}.items():
        if count is not None and count != row.num_rounds:
            yield f"num_rounds is {row.num_rounds}, {name} has {count:g}"
    nodes = row.lookahead if row.tree_nodes is None else row.tree_nodes
    if row.fan_out is not None and len(row.fan_out) != nodes + 1:
        yield f"lookahead is {row.lookahead}, fan_out has {len(row.fan_out)}, of {nodes} tokens"


def _tokens(facts: Facts) -> Faults:
    """Yields a fault for an impossible accept_histogram, and for a num_tokens that contradicts it.
    Up to K tokens that a sequence emits beyond its end do not count in num_tokens."""
    row = facts.row
    rows = facts.rounds.get("sequences")
    histogram = np.asarray(row.accept_histogram, np.int64)
    # In a round, a sequence emits its accepted tokens and the token that the target adds.
    emitted = int(histogram @ np.arange(1, len(histogram) + 1))
    outcomes = int(histogram.sum())
    if len(histogram) != row.lookahead + 1 or (histogram < 0).any():
        yield f"accept_histogram is {histogram.tolist()}, lookahead is {row.lookahead}"
    if not row.num_rounds <= outcomes <= row.num_rounds * row.batch_size:
        of = f"{row.num_rounds} rounds of {row.batch_size} sequences"
        yield f"accept_histogram counts {outcomes}, {of}"
    num_sequences = (row.groups or 1) * row.batch_size
    if rows is not None:
        distinct, ids = np.unique(rows[:, 1], return_inverse=True)
        num_sequences = len(distinct)
    fewest = emitted - num_sequences * row.lookahead
    if "token_limit" in row and row.stop_token is None and row.workload not in _ENDING:
        if row.token_limit is None:
            fewest = emitted
        elif rows is not None:
            counts = np.bincount(ids, weights=rows[:, 3] + 1)
            fewest = emitted = int(np.minimum(counts, row.token_limit).sum())
    if not fewest <= row.num_tokens <= emitted:
        bounds = f"{emitted}" if fewest == emitted else f"{fewest} to {emitted}"
        yield f"num_tokens is {row.num_tokens}, accept_histogram gives {bounds}"


def _decisions(facts: Facts) -> Faults:
    """Yields a fault if a round's numbers break 0 ≤ k accepted tokens ≤ drafted tokens ≤ K, if a
    cache hit contradicts the recorded source of its tokens, or if the number of drafted tokens or
    of sequences contradicts the row's settings."""
    row = facts.row
    rows = facts.array("sequences")
    lookahead = int(row.lookahead)
    round_, _, _, accepted, _, source, hit, drafted = rows.T
    lost = facts.get("draft_lost_round")
    asked = np.full(len(round_), True) if lost is None else round_ < lost
    wanted = facts.get("backup_lookahead")
    is_backup = asked & (source != Source.CACHE)
    is_outside = (accepted < 0) | (accepted > drafted) | (drafted > lookahead)
    is_unasked = ~asked & ((source != Source.NONE) | (drafted > 0))
    is_other = is_backup & (drafted != (drafted if wanted is None else wanted))
    of_lost = "of source {source}, draft_lost_round is {row.draft_lost_round}"
    for places, message in (
        (is_outside, "accepted {k} of {n} drafted tokens, lookahead is {row.lookahead}"),
        (hit != (source == Source.CACHE), "has hit {hit} and source {source}"),
        (is_unasked, f"has {{n}} drafted tokens {of_lost}"),
        (is_other, "has {n} such tokens, backup_lookahead is {row.backup_lookahead}"),
    ):
        for n in np.flatnonzero(places)[:1]:
            values = {"k": accepted[n], "n": drafted[n], "hit": hit[n], "source": source[n]}
            yield f"round {round_[n]} {message.format(row=row, **values)}"
    prompts = (row.num_prompts or 0) // (row.groups or 1)
    if (begun := int((round_ == 0).sum())) != min(row.batch_size, prompts or row.batch_size):
        yield f"batch_size is {row.batch_size}, round 0 has {begun} sequences"


def _ledger(facts: Facts) -> Faults:
    """Yields a fault if rank 0's timed phases do not add up to the wall time of the rounds, within
    1%. If the OS preempts the rank between reading the two timers, time moves to a neighbouring
    round; so a round also passes if its sum with a neighbour does."""
    spent = facts.array("lead_ledger_ns")[:, 2:].sum(axis=1) * 1e-9
    took = facts.array("round_s")
    if spent.sum() > took.sum() * _AT_MOST + _CLOCKS_S:
        yield f"lead_ledger_ns adds up to {spent.sum():.6g} s, round_s to {took.sum():.6g} s"
    if (facts.get("round_us.p50") or 0.0) > _REALISTIC_US:
        shares = spent / took
        if len(took) > 1:
            pairs = (spent[1:] + spent[:-1]) / (took[1:] + took[:-1])
            closes = np.minimum(pairs, 2 - pairs)
            shares = np.maximum(np.append(closes, 0.0), np.append(0.0, closes))
        closed = np.percentile(shares, 1) if len(took) >= _FEWEST else np.median(shares)
        counts = len(took) >= _FEWEST or abs(took.sum() - spent.sum()) > _CLOCKS_S
        if closed < _CLOSES and counts:
            yield f"the phases close to {closed:.5f} of a round's wall, allowed: {_CLOSES}"


CHECKS = (_finite, _clock, _ranks, _floor, _device, _counts, _tokens, _decisions, _ledger)


def violations(row: Row, rounds: Rounds) -> list[str]:
    """Returns one line for each fault in a row and its rounds; an empty list if there is none."""
    facts = Facts(row, rounds)
    messages = list[str]()
    for check in CHECKS:
        gate = check.__name__[1:]
        try:
            messages += [f"{gate}: {message}" for message in check(facts)]
        except _UnknownError:
            continue
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Such errors come from a row or an array of the wrong shape.
            messages.append(f"{gate}: cannot be judged: {error!r}")
    return messages
