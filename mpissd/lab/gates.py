"""Consistency gates: check a result row against its raw rounds, and both against physics.

    lines = violations(row, rounds)     one line each, "gate: the fault, with both numbers"

row is a row of `run`, rounds the arrays of OUT/rounds/RUN_ID.npz. What is null or missing is
unknown, and rules that need it do not apply, except for the few numbers that every row has. Two
tables hold the rules on single numbers (SAME, WITHIN); the other rules are functions (CHECKS). Keys
of a row that only gates need:

    floor_bytes    bytes that a verification of b(K+1) rows reads on a target rank: weights and KV
    floor_flops    its operations there (missing in old rows: their floor is only of bytes)
    cache_bytes    the lead's last-level cache (null: unknown, or emulated)
    token_limit    --num_tokens (null: none)
    rank_digests   by world rank, the digest of the outcomes it received (null: unknown)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.records import is_first_round, median, outcome_digest, percentiles_us
from mpissd.common.rounds import Source
from mpissd.common.row import READABLE, Row

Rounds = Mapping[str, NDArray[Any]]
Floats = NDArray[np.float64]
Faults = Iterator[str]

_ROUNDING = 2e-3  # allowed relative error: rows hold rounded numbers
_ALWAYS = """tp num_drafts world_size batch_size lookahead num_rounds num_tokens wall_s tok_per_s
tok_per_s_per_gpu acceptance_length ledger_closure round_us.mean round_us.p50 round_us.n""".split()
_A_ROW_A_ROUND = "round_s t_target_s lead_ledger_ns draft_ledger_ns draft_rounds".split()
_ENDING = ("replay", "text")  # workloads whose sequences end by themselves
_READ_NOISE = {"numpy": 0.1}  # relative noise of the read rate, by backend
_PEAK_NOISE = {"numpy": 0.5}  # a process on the same core (SMT) may halve the measured peak
_CLOSES = 0.99  # least share of a round's wall that phases explain, at the first percentile
_AT_MOST = 1.01
_REALISTIC_US = 1000.0  # in shorter rounds, the gaps between stamps may exceed 1% of the round
_FEWEST = 100  # fewest rounds for which a first percentile means anything
_EVENTS_S = 2e-6  # error of a device's events against the host's clock
_CLOCKS_S = 20e-6  # round_s and the ledger read their clocks at different instants


class _UnknownError(Exception):
    """A rule needs a number or an array that is not known, and does not apply."""


class Facts:
    """A row and its rounds. Reading what is unknown ends a rule without a fault."""

    def __init__(self, row: Row, rounds: Rounds) -> None:
        self.row, self.rounds = row, rounds

    def get(self, path: str) -> float | None:
        """Returns the number at a dotted path such as "round_us.p50"; None if there is none."""
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
        """Returns an array of the rounds."""
        if name not in self.rounds:
            raise _UnknownError(name)
        return self.rounds[name]

    def draft(self, name: str) -> NDArray[Any]:
        """Returns a column of draft_rounds."""
        rows = self.array("draft_rounds")
        column: NDArray[Any] = rows[:, self.rounds["draft_columns"].tolist().index(name)]
        return column

    @property
    def has_draft(self) -> NDArray[np.bool_]:
        """Whether there was a draft to ask, for each row of `sequences`, [n]."""
        round_, lost = self.array("sequences")[:, 0], self.get("draft_lost_round")
        return np.full(len(round_), True) if lost is None else round_ < lost

    @property
    def is_full(self) -> NDArray[np.bool_]:
        """Whether each round verified the full b(K+1) rows, [rounds]."""
        rows, count = self.array("sequences"), len(self.array("t_target_s"))
        verified = np.bincount(rows[:, 0], weights=rows[:, 7] + 1, minlength=count)
        full: NDArray[np.bool_] = verified == self["batch_size"] * (self["lookahead"] + 1)
        return full

    @property
    def emitted(self) -> int:
        """Tokens of all outcomes that accept_histogram counts."""
        counts = np.asarray(self.row.accept_histogram, np.int64)
        return int(counts @ np.arange(1, len(counts) + 1))

    @property
    def num_gpus(self) -> float:
        """Devices of the job; one that a learner shares counts once."""
        is_shared = (self.row.learner or {}).get("shares_gpu_of") is not None
        return self["world_size"] - is_shared

    @property
    def longest_s(self) -> float:
        """Sum of the rounds of the target group that took longest."""
        round_s, groups = self.array("round_s"), self.row.per_group or ()
        ends = np.cumsum([int(group["num_rounds"]) for group in groups])[:-1]
        return max(float(part.sum()) for part in np.split(round_s, ends))

    @property
    def explained(self) -> tuple[Floats, Floats]:
        """Seconds that the lead's phases explain, and seconds of the wall, [rounds]."""
        ledger, round_s = self.array("lead_ledger_ns"), self.array("round_s")
        return ledger[:, 2:].sum(axis=1) * 1e-9, round_s

    @property
    def closure(self) -> float:
        """First percentile of the share of a round that its phases explain."""
        spent, took = self.explained
        return float(np.percentile(np.minimum(spent / took, 2 - spent / took), 1))

    def percentile_us(self, name: str) -> float | None:
        """Returns a percentile or the mean of the rounds' walls, as a row has it."""
        return percentiles_us(self.array("lead_ledger_ns")[:, 1] * 1e-9)[name]

    def draft_median(self, name: str, fewest: int) -> float | None:
        """Returns the median of a column of draft_rounds; None with fewer values than `fewest`."""
        values = self.draft(name)
        return median(values) if np.isfinite(values).sum() >= fewest else None

    @property
    def hit_rate(self) -> float | None:
        """Share of the lookups that hit; None without lookups."""
        rows = self.array("sequences")
        looked = self.has_draft & ~is_first_round(rows)
        return float(rows[looked, 6].mean()) if looked.any() else None


Value = Callable[[Facts], float | None]
# fmt: off
# Numbers of a row that follow from others: (gate, key, the source that a message names, the value
# or None, an absolute difference that counts as rounding).
SAME: tuple[tuple[str, str, str, Value, float], ...] = (
    ("counts", "branch_budget", "Σ fan_out", lambda f: sum(f.row.fan_out or ()) or None, 0),
    ("tokens", "acceptance_length", "accept_histogram",
     lambda f: f.emitted / max(1, sum(f.row.accept_histogram)), 1e-5),
    ("decisions", "hit_rate", "sequences", lambda f: f.hit_rate, 1e-5),
    ("speed", "tok_per_s", "num_tokens / wall_s", lambda f: f["num_tokens"] / f["wall_s"], 1e-3),
    ("speed", "tok_per_s_per_gpu", "tok_per_s / world_size",
     lambda f: f["tok_per_s"] / f.num_gpus, 1e-3),
    ("speed", "wall_s", "Σ round_s", lambda f: f.longest_s, 1e-6),
    ("walls", "round_us.mean", "lead_ledger_ns", lambda f: f.percentile_us("mean"), 2e-3),
    ("walls", "round_us.p50", "lead_ledger_ns", lambda f: f.percentile_us("p50"), 2e-3),
    ("walls", "round_us.p90", "lead_ledger_ns", lambda f: f.percentile_us("p90"), 2e-3),
    ("walls", "round_us.p99", "lead_ledger_ns", lambda f: f.percentile_us("p99"), 2e-3),
    ("ledger", "ledger_closure", "lead_ledger_ns / round_s", lambda f: f.closure, 1e-4),
    ("device", "round_us.mean", "Σ device_us",
     lambda f: f["device_us.forward"] + f["device_us.all_reduce"] + f["device_us.idle"], 1e-2),
    ("forwards", "t_target_s", "median of t_target_s",
     lambda f: median(f.array("t_target_s")[f.is_full]), 1e-9),
    # With fewer than 10 misses, t_draft_s is computed from the calibrated forward.
    ("forwards", "t_draft_s", "median of draft_rounds",
     lambda f: f.draft_median("t_draft_s", 10), 1e-9),
    ("forwards", "t_growth_s", "median of draft_rounds",
     lambda f: f.draft_median("t_growth_s", 1), 1e-9),
)
# Bounds of single numbers: (gate, key, least, most, bounds as a message names them).
WITHIN: tuple[tuple[str, str, float, float, str], ...] = (
    ("clock", "wall_s", 1e-12, math.inf, "above 0"),
    ("clock", "round_us.mean", 1e-6, math.inf, "above 0"),
    ("clock", "round_us.p50", 1e-6, math.inf, "above 0"),
    ("device", "device_us.forward", -_EVENTS_S * 1e6, math.inf, "0 or more"),
    ("device", "device_us.all_reduce", -_EVENTS_S * 1e6, math.inf, "0 or more"),
    ("device", "device_us.idle", -_EVENTS_S * 1e6, math.inf, "0 or more"),
    ("tokens", "hit_rate", 0, 1, "0 to 1"),
)
# fmt: on


def _differs(number: float, other: float, quantum: float) -> bool:
    return not abs(number - other) <= _ROUNDING * abs(other) + quantum  # NaN counts as different


def _missing(facts: Facts) -> Faults:
    """Yields keys that every row must have but this one lacks, and an unknown schema."""
    if facts.row.schema not in READABLE:
        yield f"schema is {facts.row.schema}, this version judges {READABLE}"
    for path in _ALWAYS:
        if facts.get(path) is None:
            yield f"{path} is not a number"


def _finite(facts: Facts) -> Faults:
    """Yields NaN and infinity; only in draft_rounds NaN is allowed; it means "not measured"."""
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
    """Yields rounds without a positive duration, and phases or forwards with a negative one."""
    rounds = facts.rounds
    for name in ("round_s", "lead_ledger_ns", "draft_ledger_ns"):
        if name not in rounds:
            continue
        table = rounds[name]
        walls, unit = (table, "s") if table.ndim == 1 else (table[:, 1], "ns")
        for n in np.flatnonzero(walls <= 0)[:1]:
            yield f"{name}: round {n} took {walls[n]:g} {unit}, a clock stood or went backwards"
        if table.ndim > 1:
            for n, phase in np.argwhere(table[:, 2:] < 0)[:1]:
                yield f"{name}: phase {phase} of round {n} took {table[n, 2 + phase]} ns"
            for n in np.flatnonzero(np.diff(table[:, 0]) != 1)[:1]:
                yield f"{name}: round {table[n + 1, 0]} follows round {table[n, 0]}"
    times = {
        name: facts.draft(name) for name in ("t_draft_s", "t_growth_s") if "draft_rounds" in rounds
    }
    if "t_target_s" in rounds:
        times["t_target_s"] = rounds["t_target_s"]
    for name, seconds in times.items():
        if (seconds < 0).any():
            yield f"{name}: a forward of {np.nanmin(seconds):g} s, a clock went backwards"


def _ranks(facts: Facts) -> Faults:
    """Yields a wrong number of ranks, and ranks whose digests of received outcomes differ.

    Only ranks of one target group receive the same ones; a draft has a digest for each group.
    """
    row = facts.row
    size, groups, learners = int(row.world_size), row.groups or 1, row.learners or 0
    if (known := groups * row.tp + row.num_drafts + learners) != size:
        names = "groups · " * (groups > 1), " + learners" * (learners > 0)
        yield f"world_size is {size}, {names[0]}tp + num_drafts{names[1]} is {known}"
    digests = row.rank_digests
    if digests is None:
        digests = facts.array("rank_digests").tolist()
    if len(digests) != groups * (row.tp + row.num_drafts):
        yield f"world_size is {size}, rank_digests has {len(digests)}"
    for group in range(groups):
        places = [*range(group * row.tp, (group + 1) * row.tp), groups * row.tp + group]
        heard = [(min(n, groups * row.tp), digests[n]) for n in places if n < len(digests)]
        heard = [(rank, digest) for rank, digest in heard if digest is not None]
        for rank, digest in heard[1:]:
            if digest != heard[0][1]:
                yield f"rank {heard[0][0]} heard {heard[0][1]}, rank {rank} heard {digest}"


def _floor(facts: Facts) -> Faults:
    """Yields forwards that are faster than reading their weights or computing their products.

    Weights that the last-level cache may hold need not be read.
    """
    took, backend = facts["t_target_s"], str(facts.row.backend)
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
    """Returns the seconds [rounds] within which the host launched a forward and waited for it."""
    names = rounds["lead_phases"].tolist()
    columns = [2 + names.index(name) for name in ("launch", "device_wait")]
    seconds: Floats = rounds["lead_ledger_ns"][:, columns].sum(axis=1) * 1e-9
    is_alone = row.graph and row.tp == 1 and not row.num_drafts and not row.temperature
    if is_alone and row.forward == "transformer" and row.backup in (None, "jit"):
        # Rounds may be chained: launched in the round before (decode.chained).
        seconds[1:] += rounds["lead_ledger_ns"][:-1, 1] * 1e-9
    return seconds


def _device(facts: Facts) -> Faults:
    """Yields forwards that took longer on the device's clock than the host waited for them."""
    took, ledger = facts.array("t_target_s"), facts.array("lead_ledger_ns")
    host = host_s(facts.row, facts.rounds)
    for n in np.flatnonzero(took > host * _AT_MOST + _EVENTS_S)[:1]:
        yield (
            f"round {n}: a forward of {took[n] * 1e6:.1f} µs within a launch and wait of "
            f"{host[n] * 1e6:.1f} µs"
        )
    if (parts := [facts.get(f"device_us.{name}") for name in ("forward", "all_reduce")])[0]:
        busy, mean = sum(part or 0.0 for part in parts), float(np.mean(took)) * 1e6
        if abs(busy - mean) > 1e-3 * mean + 1e-2:
            yield f"device_us: forward and all_reduce are {busy:.3f}, mean t_target_s {mean:.3f}"
    t_target = facts["t_target_s"]
    walls = ledger[facts.is_full, 1] * 1e-9
    if len(walls) and t_target > (p50 := float(np.median(walls))) * _AT_MOST + _EVENTS_S:
        yield f"t_target_s is {t_target * 1e6:.1f} µs, p50 of its rounds {p50 * 1e6:.1f} µs"


def _counts(facts: Facts) -> Faults:
    """Yields arrays and keys that disagree on the number of rounds, and lists of another K."""
    row, rounds = facts.row, facts.rounds
    counts = {name: len(rounds[name]) for name in _A_ROW_A_ROUND if name in rounds}
    if "sequences" in rounds:
        counts["sequences"] = len(np.unique(rounds["sequences"][:, 0]))
    for name, count in {**counts, "round_us.n": facts.get("round_us.n")}.items():
        if count is not None and count != row.num_rounds:
            yield f"num_rounds is {row.num_rounds}, {name} has {count:g}"
    if row.fan_out is not None and len(row.fan_out) != row.lookahead + 1:
        yield f"lookahead is {row.lookahead}, fan_out has {len(row.fan_out)}"


def _tokens(facts: Facts) -> Faults:
    """Yields an impossible accept_histogram, and a num_tokens that does not follow from it."""
    row, histogram = facts.row, np.asarray(facts.row.accept_histogram, np.int64)
    lookahead, batch, num_rounds = (int(row[k]) for k in ("lookahead", "batch_size", "num_rounds"))
    outcomes = int(histogram.sum())
    if len(histogram) != lookahead + 1 or (histogram < 0).any():
        yield f"accept_histogram is {histogram.tolist()}, lookahead is {lookahead}"
    if not num_rounds <= outcomes <= num_rounds * batch:
        yield f"accept_histogram counts {outcomes}, {num_rounds} rounds of {batch} sequences"
    least, most = _counted(facts, facts.emitted)
    if not least <= row.num_tokens <= most:
        bounds = f"{most}" if least == most else f"{least} to {most}"
        yield f"num_tokens is {row.num_tokens}, accept_histogram gives {bounds}"


def _counted(facts: Facts, emitted: int) -> tuple[int, int]:
    """Returns the fewest and the most tokens, of those emitted, that can count.

    Tokens beyond a sequence's end or limit do not count: at most K of them, in its last round.
    """
    row, rows = facts.row, facts.rounds.get("sequences")
    ids = None if rows is None else np.unique(rows[:, 1], return_inverse=True)[1]
    num_sequences = (row.groups or 1) * row.batch_size if ids is None else len(np.unique(ids))
    least = emitted - num_sequences * row.lookahead
    if "token_limit" not in row or row.stop_token is not None or row.workload in _ENDING:
        return least, emitted
    if row.token_limit is None:
        return emitted, emitted
    if rows is None or ids is None:
        return least, emitted
    exact = int(np.minimum(np.bincount(ids, weights=rows[:, 3] + 1), row.token_limit).sum())
    return exact, exact


def _decisions(facts: Facts) -> Faults:
    """Yields outcomes that break 0 ≤ k ≤ num_draft ≤ K, impossible hits, and wrong counts."""
    row, rows, lookahead = facts.row, facts.array("sequences"), int(facts.row.lookahead)
    round_, _, _, accepted, _, source, hit, drafted = rows.T
    wanted, asked = facts.get("backup_lookahead"), facts.has_draft

    def first(wrong: Any) -> Any:
        return np.flatnonzero(wrong)[:1]

    for n in first((accepted < 0) | (accepted > drafted) | (drafted > lookahead)):
        yield (
            f"round {round_[n]} accepted {accepted[n]} of {drafted[n]} drafted tokens, "
            f"lookahead is {lookahead}"
        )
    for n in first(hit != (source == Source.CACHE)):
        yield f"round {round_[n]} has hit {hit[n]} and source {source[n]}"
    for n in first(~asked & ((source != Source.NONE) | (drafted > 0))):
        yield (
            f"draft_lost_round is {row.draft_lost_round}, round {round_[n]} has {drafted[n]} "
            f"drafted tokens of source {source[n]}"
        )
    if wanted is not None:
        for n in first(asked & (source != Source.CACHE) & (drafted != wanted)):
            yield f"backup_lookahead is {wanted:g}, round {round_[n]} has {drafted[n]} such tokens"
    prompts = (row.num_prompts or 0) // (row.groups or 1)  # of the first group
    if (begun := int((round_ == 0).sum())) != min(row.batch_size, prompts or row.batch_size):
        yield f"batch_size is {row.batch_size}, round 0 has {begun} sequences"
    seen = np.bincount(accepted.clip(0), minlength=lookahead + 1).tolist()
    if seen != row.accept_histogram:
        yield f"accept_histogram is {row.accept_histogram}, sequences give {seen}"
    if (digest := outcome_digest(rows)) != row.get("outcome_digest", digest):
        yield f"outcome_digest is {row.outcome_digest}, sequences give {digest}"


def _walls(facts: Facts) -> Faults:
    """Yields percentiles that do not increase."""
    known = [value for p in ("p50", "p90", "p99") if (value := facts.get(f"round_us.{p}"))]
    if known != sorted(known):
        yield f"round_us: p50, p90, p99 are {known}"


def _ledger(facts: Facts) -> Faults:
    """Yields phases that do not add up to the rounds, or rounds that do not add up to the wall.

    The wall is measured by a separate clock.
    """
    for role in ("lead", "draft"):
        if f"{role}_ledger_ns" in facts.rounds:
            yield from _phases(facts, role)
    spent, took = facts.explained
    if spent.sum() > took.sum() * _AT_MOST + _CLOCKS_S:
        yield f"lead_ledger_ns adds up to {spent.sum():.6g} s, round_s to {took.sum():.6g} s"
    if (facts.get("round_us.p50") or 0.0) > _REALISTIC_US:
        by_round = _with_a_neighbour(spent, took)
        closed = np.percentile(by_round, 1) if len(took) >= _FEWEST else np.median(by_round)
        counts = len(took) >= _FEWEST or abs(took.sum() - spent.sum()) > _CLOCKS_S
        if closed < _CLOSES and counts:
            yield f"the phases close to {closed:.5f} of a round's wall, allowed: {_CLOSES}"


def _with_a_neighbour(spent: Floats, took: Floats) -> Floats:
    """Returns the share of time that phases explain [rounds], each round with a neighbour.

    The neighbour is the one that gives the better share. A rank that loses its core between the two
    clocks only moves time from one round to the next, and a pair restores it. Time that no phase
    counts stays missing with either neighbour.
    """
    if len(took) < 2:
        return spent / took
    pairs = (spent[1:] + spent[:-1]) / (took[1:] + took[:-1])
    closes = np.minimum(pairs, 2 - pairs)
    best: Floats = np.maximum(np.append(closes, 0.0), np.append(0.0, closes))
    return best


def _phases(facts: Facts, role: str) -> Faults:
    table, names = facts.array(f"{role}_ledger_ns"), facts.array(f"{role}_phases").tolist()
    for n in np.flatnonzero(table[:, 1] != table[:, 2:].sum(axis=1))[:1]:
        yield (
            f"{role}_ledger_ns: round {n} took {table[n, 1]} ns, its phases {table[n, 2:].sum()} ns"
        )
    total = 0.0
    for name, mean in zip(names, table[:, 2:].mean(axis=0) * 1e-3, strict=True):
        path = f"phases_us.{role}.{name}"
        if (us := facts.get(path)) is not None:
            total += us
            if _differs(us, mean, 2e-3):
                yield f"{path} is {us:.7g}, {role}_ledger_ns: {mean:.7g}"
    mean = float(table[:, 1].mean()) * 1e-3
    if abs(total - mean) > 1e-3 * mean + 1e-3 * len(names):
        yield f"phases_us.{role} adds up to {total:.3f} µs, the mean round is {mean:.3f} µs"


CHECKS: Mapping[str, Callable[[Facts], Faults]] = {
    "missing": _missing,
    "finite": _finite,
    "clock": _clock,
    "ranks": _ranks,
    "floor": _floor,
    "device": _device,
    "counts": _counts,
    "tokens": _tokens,
    "decisions": _decisions,
    "walls": _walls,
    "ledger": _ledger,
}


def violations(row: Row, rounds: Rounds) -> list[str]:
    """Returns every contradiction in a row, one line each; empty if the row is sound."""
    facts, messages = Facts(row, rounds), list[str]()

    def same(path: str, source: str, value: Value, quantum: float) -> Faults:
        number, other = facts[path], value(facts)
        if other is not None and _differs(number, other, quantum):
            yield f"{path} is {number:.7g}, {source}: {other:.7g}"

    def within(path: str, least: float, most: float, allowed: str) -> Faults:
        if not least <= facts[path] <= most:
            yield f"{path} is {facts[path]:g}: allowed: {allowed}"

    rules = [(gate, check(facts)) for gate, check in CHECKS.items()]
    rules += [(gate, within(*rule)) for gate, *rule in WITHIN]  # type: ignore[arg-type]
    rules += [(gate, same(*rule)) for gate, *rule in SAME]  # type: ignore[arg-type]
    for gate, faults in rules:
        try:
            messages += [f"{gate}: {message}" for message in faults]
        except _UnknownError:
            continue
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # A row or array of the wrong shape is reported as a violation, too.
            messages.append(f"{gate}: cannot be judged: {error!r}")
    return messages
