"""The performance bars of the GPU path, and the table that compares measurements with them.

    python -m mpissd.lab.limits.bars OUT

A bar is judged by the median over at least three stable runs, each of which has its own median; one
on bits by the worst run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median

from mpissd.common.output import json_line
from mpissd.lab.limits.bar import MS, US, Bar, Row, matching
from mpissd.lab.limits.whole_bars import whole_bars

_MODELS = {"8B": "llama-3.1-8b", "70B": "llama-3.1-70b", "1B": "llama-3.2-1b"}


def bars() -> Iterator[Bar]:
    """Yields the ten bars by number."""
    yield from _forwards()
    for tp, seconds in ((2, 3.8e-6), (4, 4.8e-6)):
        for size, limit in ((16, seconds), (128, None)):
            where = {"what": "all_reduce", "tp": tp, "bytes": size << 10, "own": True}
            what = f"all-reduce in a graph, {size} KB, T={tp}" + " (NCCL's)" * (limit is None)
            yield Bar(5, what, "seconds", where, limit, unit=US)
    for rows, limit in ((1, 0.56e-3), (24, 0.60e-3)):
        at = {"model": _MODELS["1B"], "tp": 1, "rows": rows}
        where = {"what": "forward", "way": "fast", **at}
        yield Bar(6, f"1B step, M={rows}", "seconds", where, limit, unit=MS, beside=at)
    for name, tp in (("8B", 1), ("1B", 1), ("70B", 2), ("70B", 4)):
        where = {"what": "launch", "way": "fast", "model": _MODELS[name], "tp": tp}
        yield Bar(7, f"host time of a launch, {name} T={tp}", "seconds", where, 10e-6, unit=US)
    yield from _rounds()


def _forwards() -> Iterator[Bar]:
    """Yields bars 1 to 4 on the share of the memory floor: 1 row in AR rounds, 16 in replays."""
    places = (("8B", 1), ("70B", 2), ("70B", 4))
    for number, ((name, tp), least) in enumerate(zip(places, (0.92, 0.87, 0.80), strict=True)):
        at = {"model": _MODELS[name], "tp": tp}
        what, where = f"{name} T={tp} M=1, of the floor", {"what": "rounds", "mode": "ar", **at}
        at["rows"] = 1
        yield Bar(number + 1, what, "floor_fraction", where, least, least=True, beside=at)
    for (name, tp), least in zip(places, (0.88, 0.83, 0.76), strict=True):
        at = {"model": _MODELS[name], "tp": tp, "rows": 16}
        what, where = f"{name} T={tp} M=16, of the floor", {"what": "forward", "way": "fast", **at}
        yield Bar(4, what, "floor_fraction", where, least, least=True, beside=at)


def _rounds() -> Iterator[Bar]:
    """Yields bars 8 to 10: the hit path, SSD against bare forwards, and the slowest rounds."""
    for tp in (1, 2):
        for start, begin in (("outcome", "outcome known"), ("over", "forward over")):
            for rank, limit in (("p50", 30e-6), ("p99", 100e-6)):
                where = {"what": "hit_path", "start": start, "tp": tp}
                what = f"hit path T={tp}, {begin} → launched, {rank}"
                yield Bar(8, what, f"{rank}_s", where, limit, unit=US)
    places = (("8B", 1), ("70B", 2))
    for name, tp in places:
        where = {"what": "rounds", "mode": "ssd", "model": _MODELS[name], "tp": tp}
        for key, of in (("of_replays", "replays"), ("of_own", "its own forwards")):
            what = f"SSD p_hit=1 {name}/1B T={tp}, of {of}"
            yield Bar(9, what, key, where, 0.97, least=True)
    for mode, (name, tp) in [
        *((mode, place) for place in places for mode in ("ar", "ssd")), ("ar", ("70B", 4))
    ]:  # fmt: skip
        where = {"what": "rounds", "mode": mode, "model": _MODELS[name], "tp": tp}
        yield Bar(
            10, f"p99/p50 of a round, {mode.upper()} {name} T={tp}", "p99_over_p50", where, 1.05
        )


def with_replays(rows: Sequence[Row]) -> list[Row]:
    """Adds to SSD's rounds their tok/s relative to bare forwards.

    of_replays: relative to replays back to back in the same job. of_own: relative to the forwards
    of these very rounds, without any time between them.
    """
    merged = []
    for row in rows:
        if row["what"] == "rounds" and row["mode"] == "ssd":
            at = {"model": row["model"], "tp": row["tp"], "rows": row["lookahead"] + 1}
            replays = matching(rows, {"what": "forward", "way": "fast", **at})
            if not replays:
                continue
            rate = row["tok_per_s"] / row["acceptance_length"]
            of_replays = rate * median(replay["seconds"] for replay in replays)
            row = row | {"of_replays": of_replays, "of_own": rate * row["t_target_s"]}
        merged.append(row)
    return merged


def table(rows: Sequence[Row]) -> list[str]:
    """Returns the table's lines, one for each bar and place."""
    merged = with_replays(rows)
    return [bar.line(merged) for bar in (*bars(), *whole_bars())]


def read(out: Path) -> list[Row]:
    """Reads the rows of OUT/T1.jsonl, OUT/T2.jsonl, …"""
    paths = sorted(out.glob("T[0-9]*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def add(out: Path, rows: Iterable[Row]) -> None:
    """Appends each row to the file of its T."""
    for row in rows:
        with open(out / f"T{row['tp']}.jsonl", "a") as file:
            file.write(json_line(row) + "\n")


def main(arguments: Iterable[str]) -> int:
    """Prints the table and returns the exit code."""
    rows = read(Path(next(iter(arguments), "out")))
    devices = sorted({row["device"] for row in rows if row.get("device")})
    print(f"{', '.join(devices) or 'nothing measured'}; medians of runs")
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
