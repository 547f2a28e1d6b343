"""Gates on time: clocks run forward, phases add up, and nothing is faster than physics allows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mpissd.common.records import median, percentiles_us
from mpissd.common.row import Row
from mpissd.lab.gates.read import Rounds, differs, draft_column, number

_NOISE = {"numpy": 0.1}  # relative noise of the read rate, by backend
_PEAK_NOISE = {"numpy": 0.5}  # a process on the same core (SMT) may halve the measured peak
_CLOSES = 0.99  # least share of a round's wall that phases explain, at the first percentile
_AT_MOST = 1.01
# In rounds shorter than this (µs), the gaps between stamps may exceed 1% of the round.
_REALISTIC_US = 1000.0
_FEWEST = 100  # fewest rounds for which a first percentile means anything
_EVENTS_S = 2e-6  # error of a device's events against the host's clock
_CLOCKS_S = 20e-6  # round_s and the ledger read their clocks at different instants


def clock(row: Row, rounds: Rounds) -> Iterator[str]:
    """Reports rounds without a positive duration, and phases or forwards with a negative one."""
    for path in ("wall_s", "round_us.mean", "round_us.p50"):
        if (value := number(row, path)) is not None and value <= 0:
            yield f"{path} is {value:g}, a clock stood or went backwards"
    if "round_s" in rounds:
        yield from _backwards("round_s", rounds["round_s"], "s")
    for name in ("lead_ledger_ns", "draft_ledger_ns"):
        if name in rounds:
            table = rounds[name]
            yield from _backwards(name, table[:, 1], "ns")
            for n, phase in np.argwhere(table[:, 2:] < 0)[:1]:
                yield f"{name}: phase {phase} of round {n} took {table[n, 2 + phase]} ns"
            for n in np.flatnonzero(np.diff(table[:, 0]) != 1)[:1]:
                yield f"{name}: round {table[n + 1, 0]} follows round {table[n, 0]}"
    for name in ("t_draft_s", "t_growth_s"):
        times = draft_column(rounds, name)
        if times is not None and (times < 0).any():
            yield f"draft_rounds: {name} of {np.nanmin(times):g} s, a clock went backwards"
    if (rounds.get("t_target_s", np.zeros(1)) < 0).any():
        yield f"t_target_s: a forward of {rounds['t_target_s'].min():g} s"


def _backwards(name: str, walls: NDArray[np.float64], unit: str) -> Iterator[str]:
    for n in np.flatnonzero(walls <= 0)[:1]:
        yield f"{name}: round {n} took {walls[n]:g} {unit}, a clock stood or went backwards"


def floor(row: Row, rounds: Rounds) -> Iterator[str]:
    """Reports forwards that are faster than reading their weights or computing their products.

    Weights that the last-level cache may hold need not be read. A bound that is unknown is skipped.
    """
    took = number(row, "t_target_s")
    for least, what in _least_s(row):
        if took is not None and took < least:
            yield f"t_target_s is {took * 1e6:.3f} µs, {what} take {least * 1e6:.3f} µs"


def _least_s(row: Row) -> Iterator[tuple[float, str]]:
    """Yields (seconds minus noise, description) for each known lower bound of a forward."""
    backend = str(row.backend)
    names = ("floor_bytes", "cache_bytes", "read_bytes_per_s", "floor_flops", "peak_flops_per_s")
    read, cached, rate, flops, peak = (number(row, name) for name in names)
    if read is not None and cached is not None and rate:
        of_cache = f"{read / 1e6:.1f} MB less {cached / 1e6:.1f} MB of cache"
        least = max(0.0, read - cached) / rate * (1 - _NOISE.get(backend, 0.0))
        yield least, f"{of_cache} at {rate / 1e9:.1f} GB/s"
    if flops is not None and peak:
        least = flops / peak * (1 - _PEAK_NOISE.get(backend, 0.0))
        yield least, f"{flops / 1e9:.1f} Gflop at {peak / 1e9:.1f} Gflop/s"


def _may_be_chained(row: Row) -> bool:
    """Whether a round's forwards may have been launched in the round before (decode.chained)."""
    is_alone = row.graph and row.tp == 1 and not row.num_drafts and not row.temperature
    return is_alone and row.forward == "transformer" and row.backup in (None, "jit")


def host_s(row: Row, rounds: Rounds) -> NDArray[np.float64]:
    """Returns the seconds [rounds] within which the host launched a forward and waited for it."""
    names = rounds["lead_phases"].tolist()
    columns = [2 + names.index(name) for name in ("launch", "device_wait")]
    seconds: NDArray[np.float64] = rounds["lead_ledger_ns"][:, columns].sum(axis=1) * 1e-9
    if _may_be_chained(row):  # launched in the round before
        seconds[1:] += rounds["lead_ledger_ns"][:-1, 1] * 1e-9
    return seconds


def device(row: Row, rounds: Rounds) -> Iterator[str]:
    """Reports forwards that took longer on the device's clock than the host waited for them."""
    if "t_target_s" not in rounds or "lead_ledger_ns" not in rounds:
        return
    host = host_s(row, rounds)
    took = rounds["t_target_s"]
    for n in np.flatnonzero(took > host * _AT_MOST + _EVENTS_S)[:1]:
        yield (
            f"round {n}: a forward of {took[n] * 1e6:.1f} µs within a launch and wait of "
            f"{host[n] * 1e6:.1f} µs"
        )
    t_target, walls = number(row, "t_target_s"), _full_walls(row, rounds)
    if t_target is not None and len(walls):
        p50 = float(np.median(walls))
        if t_target > p50 * _AT_MOST + _EVENTS_S:
            yield f"t_target_s is {t_target * 1e6:.1f} µs, p50 of its rounds {p50 * 1e6:.1f} µs"


def sub_phases(row: Row, rounds: Rounds) -> Iterator[str]:
    """Reports device shares that are negative or do not add up to the mean round."""
    names = ("forward", "all_reduce", "idle")
    parts = [number(row, f"device_us.{name}") for name in names]
    for name, part in zip(names, parts, strict=True):
        if part is not None and part < -_EVENTS_S * 1e6:
            yield f"device_us.{name} is {part:g}, a clock went backwards"
    forward, all_reduce, idle = parts
    if forward is None or all_reduce is None or idle is None:
        return
    yield from differs(row, "round_us.mean", forward + all_reduce + idle, "Σ device_us", 1e-2)
    if "t_target_s" in rounds:
        busy, mean = forward + all_reduce, float(np.mean(rounds["t_target_s"])) * 1e6
        if abs(busy - mean) > 1e-3 * mean + 1e-2:
            yield f"device_us: forward and all_reduce are {busy:.3f}, mean t_target_s {mean:.3f}"


def _is_full(row: Row, rounds: Rounds) -> NDArray[np.bool_]:
    """Returns [rounds] whether each round verified the full b(K+1) rows."""
    rows = rounds["sequences"]
    verified = np.bincount(rows[:, 0], weights=rows[:, 7] + 1, minlength=len(rounds["t_target_s"]))
    full: NDArray[np.bool_] = verified == row.batch_size * (row.lookahead + 1)
    return full


def _full_walls(row: Row, rounds: Rounds) -> NDArray[np.float64]:
    """Returns the seconds of the rounds that verified the full b(K+1) rows."""
    if "sequences" not in rounds:
        return np.zeros(0)
    walls: NDArray[np.float64] = rounds["lead_ledger_ns"][_is_full(row, rounds), 1] * 1e-9
    return walls


def speed(row: Row, rounds: Rounds) -> Iterator[str]:
    """Reports rates that are not tokens over time, in total and per device."""
    rate, wall = number(row, "tok_per_s"), number(row, "wall_s")
    if wall:
        yield from differs(row, "tok_per_s", row.num_tokens / wall, "num_tokens / wall_s", 1e-3)
    if rate is not None:
        is_shared = (row.learner or {}).get("shares_gpu_of") is not None
        each = rate / (row.world_size - is_shared)
        yield from differs(row, "tok_per_s_per_gpu", each, "tok_per_s / world_size", 1e-3)
    if "round_s" in rounds:
        yield from differs(row, "wall_s", _longest_s(row, rounds), "Σ round_s", 1e-6)


def _longest_s(row: Row, rounds: Rounds) -> float:
    """Returns the sum of the rounds of the target group that took longest."""
    counts = [int(group["num_rounds"]) for group in row.per_group or ()]
    parts = np.split(rounds["round_s"], np.cumsum(counts)[:-1]) if counts else [rounds["round_s"]]
    return max(float(part.sum()) for part in parts)


def walls(row: Row, rounds: Rounds) -> Iterator[str]:
    """Reports percentiles that do not increase, or that differ from the raw rounds' percentiles."""
    for key in ("round_us", "predicted_round_us"):
        rising = [number(row, f"{key}.{p}") for p in ("p50", "p90", "p99")]
        known = [value for value in rising if value is not None]
        if known != sorted(known):
            yield f"{key}: p50, p90, p99 are {known}"
    if "lead_ledger_ns" in rounds:
        computed = percentiles_us((rounds["lead_ledger_ns"][:, 1] * 1e-9).tolist())
        for name in ("mean", "p50", "p90", "p99"):
            yield from differs(row, f"round_us.{name}", computed[name], "lead_ledger_ns", 2e-3)


def ledger(row: Row, rounds: Rounds) -> Iterator[str]:
    """Reports phases that do not add up to the rounds, or rounds that do not add up to the wall.

    The wall is measured by a separate clock.
    """
    for role in ("lead", "draft"):
        if f"{role}_ledger_ns" in rounds:
            yield from _phases(row, rounds, role)
    if "lead_ledger_ns" not in rounds or "round_s" not in rounds:
        return
    spent, took = rounds["lead_ledger_ns"][:, 2:].sum(axis=1) * 1e-9, rounds["round_s"]
    if spent.sum() > took.sum() * _AT_MOST + _CLOCKS_S:
        yield f"lead_ledger_ns adds up to {spent.sum():.6g} s, round_s to {took.sum():.6g} s"
    closure = spent / took
    p1 = float(np.percentile(np.minimum(closure, 2 - closure), 1))
    yield from differs(row, "ledger_closure", p1, "lead_ledger_ns / round_s", 1e-4)
    if (number(row, "round_us.p50") or 0.0) > _REALISTIC_US:
        by_round = _with_a_neighbour(spent, took)
        closed = np.percentile(by_round, 1) if len(took) >= _FEWEST else np.median(by_round)
        counts = len(took) >= _FEWEST or abs(took.sum() - spent.sum()) > _CLOCKS_S
        if closed < _CLOSES and counts:
            yield f"the phases close to {closed:.5f} of a round's wall, allowed: {_CLOSES}"


def _with_a_neighbour(spent: NDArray[np.float64], took: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the share of time that phases explain [rounds], each round with a neighbour.

    The neighbour is the one that gives the better share. A rank that loses its core between the two
    clocks only moves time from one round to the next, and a pair restores it. Time that no phase
    counts stays missing with either neighbour.
    """
    if len(took) < 2:
        return spent / took
    pairs = (spent[1:] + spent[:-1]) / (took[1:] + took[:-1])
    closes = np.minimum(pairs, 2 - pairs)
    best: NDArray[np.float64] = np.maximum(np.append(closes, 0.0), np.append(0.0, closes))
    return best


def _phases(row: Row, rounds: Rounds, role: str) -> Iterator[str]:
    table = rounds[f"{role}_ledger_ns"]
    for n in np.flatnonzero(table[:, 1] != table[:, 2:].sum(axis=1))[:1]:
        yield (
            f"{role}_ledger_ns: round {n} took {table[n, 1]} ns, its phases {table[n, 2:].sum()} ns"
        )
    names = rounds[f"{role}_phases"].tolist()
    for name, mean in zip(names, table[:, 2:].mean(axis=0) * 1e-3, strict=True):
        yield from differs(row, f"phases_us.{role}.{name}", mean, f"{role}_ledger_ns", 2e-3)
    phases = [number(row, f"phases_us.{role}.{name}") for name in names]
    total, mean = sum(value or 0.0 for value in phases), float(table[:, 1].mean()) * 1e-3
    if abs(total - mean) > 1e-3 * mean + 1e-3 * len(names):
        yield f"phases_us.{role} adds up to {total:.3f} µs, the mean round is {mean:.3f} µs"


def forwards(row: Row, rounds: Rounds) -> Iterator[str]:
    """Reports t_target_s, t_draft_s and t_growth_s that are not the medians of the raw rounds.

    Ratios and floors that are computed from them are checked, too.
    """
    if "t_target_s" in rounds and "sequences" in rounds:
        times = rounds["t_target_s"][_is_full(row, rounds)]
        yield from differs(row, "t_target_s", median(times), "median of t_target_s", 1e-9)
    for name, fewest in (("t_draft_s", 10), ("t_growth_s", 1)):  # with fewer: calibrated
        column = draft_column(rounds, name)
        if column is not None and np.isfinite(column).sum() >= fewest:
            yield from differs(row, name, median(column), "median of draft_rounds", 1e-9)
    t_target, t_draft = number(row, "t_target_s"), number(row, "t_draft_s")
    if t_target and t_draft is not None:
        yield from differs(row, "T_SD", t_draft / t_target, "t_draft_s / t_target_s")
    yield from _floor_us(row)
    floor_us = number(row, "floor_us")
    if t_target and floor_us is not None:
        share = floor_us * 1e-6 / t_target
        yield from differs(row, "floor_fraction", share, "floor_us / t_target_s", 1e-4)
    yield from _depth(row, t_target)


def _floor_us(row: Row) -> Iterator[str]:
    """Reports a floor_us that is not the longer of the times to read and to compute.

    Rows older than the key floor_flops know the time to read only.
    """
    names = ("floor_bytes", "read_bytes_per_s", "floor_flops", "peak_flops_per_s")
    read, rate, flops, peak = (number(row, name) for name in names)
    sides, source = [(read, rate)], "floor_bytes / read_bytes_per_s"
    if "floor_flops" in row:
        sides.append((flops, peak))
        source += " or floor_flops / peak_flops_per_s"
    times = [work / speed for work, speed in sides if work is not None and speed]
    if len(times) == len(sides):
        yield from differs(row, "floor_us", max(times) * 1e6, source, 1e-3)


def _depth(row: Row, t_target: float | None) -> Iterator[str]:
    layers, full = number(row, "num_layers"), number(row, "full_num_layers")
    if t_target is None or not layers or full is None:
        return
    if layers != full and number(row, "t_target_full_depth_s") is None:
        yield f"num_layers is {layers:g} of {full:g}, t_target_full_depth_s is null"
    whole = t_target * full / layers
    yield from differs(row, "t_target_full_depth_s", whole, "t_target_s at full depth")


def prediction(row: Row, rounds: Rounds) -> Iterator[str]:
    """Reports prediction and sampling errors that do not follow from the row's rates."""
    rate, predicted = number(row, "tok_per_s"), number(row, "predicted_tok_per_s")
    if rate is not None and predicted:
        error = rate / predicted - 1
        quantum = 2e-5 + 1e-3 / predicted
        yield from differs(row, "prediction_error", error, "tok_per_s / prediction - 1", quantum)
    mean, count = number(row, "predicted_round_us.mean"), number(row, "predicted_round_us.n")
    same_draws = row.on_late != "serve" and row.get("token_limit", 0) is None
    if predicted is not None and mean and count and same_draws:  # replay emits equal tokens
        total = predicted * mean * count * 1e-6
        yield from differs(row, "num_tokens", total, "predicted rate times time")
    expected = number(row, "expected_tok_per_s")
    if predicted is not None and expected:
        draws = predicted / expected - 1
        yield from differs(row, "sampling_error", draws, "prediction / expected - 1", 1e-9)
