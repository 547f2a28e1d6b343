"""Computes the fastest K for each batch size, as vLLM's speculative_config takes it.

vLLM's dynamic speculative decoding reads {"num_speculative_tokens": the largest K,
"num_speculative_tokens_per_batch_size": {"1-3": 5, "4-15": 3, …}}. The ranges are inclusive, K = 0
turns speculation off, and a batch size in a gap inherits the K before it (its pull request 32374).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.row import Row

# The keys in which all rows must agree. (vLLM drafts on the target's GPUs, in synchronous rounds.)
_SAME = (
    *("target", "draft", "tp", "device_name", "backend", "acceptance", "lm_head", "context"),
    *("num_layers", "dtype", "fuse", "graph"),
)
_COUNTS = ("num_drafts", "batch_size", "lookahead")


def schedule(rows: Iterable[Row]) -> dict[str, Any]:
    """Returns the schedule that follows from AR and SD rows of one pair and machine.

    Rows of SSD, of other schedules and of prompt lookup are left out, because vLLM has no such
    rounds. Each cell is the median tok_per_s of its repeats. If some SD rows draft inline on the
    lead (num_drafts = 0), as vLLM does, only these count. K = 0 needs an AR row of that batch size.
    Raises ConfigError without an SD row, or with rows of several pairs, machines or laws, naming
    the key that differs.
    """
    usable = [row for row in rows if row.mode in ("ar", "sd") and not row.schedule]
    usable = [row for row in usable if all(type(row.get(name)) is int for name in _COUNTS)]
    usable = [row for row in usable if isinstance(row.tok_per_s, (int, float))]
    drafted = [row for row in usable if row.mode == "sd"]
    inline = [row for row in drafted if row.num_drafts == 0]
    drafted = inline or drafted
    if not drafted:
        raise ConfigError("a schedule needs rows of mode sd at two or more K: none are there")
    _check_alike(drafted)
    best = _best(drafted + [row for row in usable if row.mode == "ar" and _fits(row, drafted)])
    sizes = sorted(best)
    ends = [*(size - 1 for size in sizes[1:]), sizes[-1]]
    starts = [1, *sizes[1:]]
    ranges = {
        f"{first}-{last}": best[size] for size, first, last in zip(sizes, starts, ends, strict=True)
    }
    return {
        "num_speculative_tokens": max(best.values()),
        "num_speculative_tokens_per_batch_size": ranges,
    }


def _best(rows: Iterable[Row]) -> dict[int, int]:
    """Returns {batch size: the K with the largest median tok_per_s; the smaller K at a tie}."""
    rates: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        rates[row.batch_size][row.lookahead].append(row.tok_per_s)
    return {
        size: max(sorted(by_k), key=lambda k, by_k=by_k: median(by_k[k]))  # type: ignore[misc]
        for size, by_k in rates.items()
        if set(by_k) != {0}
    }


def _fits(row: Row, drafted: list[Row]) -> bool:
    return all(row.get(key) == drafted[0].get(key) for key in _SAME if key not in _OF_DRAFTS)


_OF_DRAFTS = ("draft", "acceptance")  # AR rows have none of these.


def _check_alike(rows: list[Row]) -> None:
    compared = {key: [row.get(key) for row in rows] for key in _SAME}
    compared["draft_device_name"] = [row.draft_device for row in rows]
    for key, values in compared.items():
        distinct = sorted(set(map(str, values)))
        if len(distinct) > 1:
            raise ConfigError(
                f"rows of {key} {distinct[0]!r} and {distinct[1]!r}: allowed: one pair, machine "
                f"and law: --where='{key}={distinct[0]}'"
            )
