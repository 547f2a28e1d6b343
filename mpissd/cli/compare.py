"""`compare`: prints tables and comparisons of result rows, as --show selects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mpissd.cli.configs import CompareConfig
from mpissd.common.errors import ConfigError
from mpissd.common.output import json_line
from mpissd.common.row import Row
from mpissd.lab.predict.why import gaps
from mpissd.lab.tables import best, claims, milestone
from mpissd.lab.tables.load import (
    find_pair,
    find_rows,
    load_profiles,
    load_rounds,
    load_rows,
    of_one_group,
)
from mpissd.lab.tables.pair import Pair


def compare(config: CompareConfig) -> int:
    """Prints what --show names; without it, one result over another, or the best methods.

    Raises ConfigError for results that are missing or cannot be compared.
    """
    if config.show is not None:
        return SHOWN[config.show](config)
    if config.b is not None or (config.a is not None and "," not in config.a):
        pair = find_pair(config.a or config.out, config.b, config.out)
        if pair is not None:
            return show_pair(config)
    return show_best(config)


def show_pair(config: CompareConfig) -> int:
    """Prints the speedup of one result over another, with its confidence interval."""
    found = None if config.a is None else find_pair(config.a, config.b, config.out)
    if found is None:
        raise ConfigError(
            f"compare: a={config.a} b={config.b}: a pair needs two results, each a run id, a "
            "runs.jsonl or a folder, or one folder that holds two configurations"
        )
    a, b, paths = found
    pair = Pair.of(a, b, load_rounds(paths, [a, b]), *(load_rows([path]) for path in paths))
    print(pair)
    print(json_line(pair.to_dict()))
    return 0


def show_best(config: CompareConfig) -> int:
    """Prints which method is fastest, at equal K and each at its own best K, and SSD against the
    strongest other use of its GPUs."""
    rows = rows_of(config.a or config.out)
    comparisons = best.compare_methods(rows)
    if not comparisons:
        raise ConfigError(f"results {config.a or config.out!r}: no rows there")
    judged = {n: claims.judged(one.setting, rows) for n, one in enumerate(comparisons)}
    print(best.render(comparisons, judged))
    methods = [
        {**best.to_dict(one), "ssd_at_equal_gpus": [claim.to_dict() for claim in judged[n]]}
        for n, one in enumerate(comparisons)
    ]
    print(json_line(methods))
    return 0


def show_claims(config: CompareConfig) -> int:
    """Prints the tables of SSD against the strongest other use of its GPUs."""
    print(claims.render(claims.claims(rows_of(config.a or "results"))))
    return 0


def show_tables(config: CompareConfig) -> int:
    """Prints the milestone report's tables from all rows that it finds."""
    places = [Path(config.a)] if config.a else [Path("results"), Path("out")]
    paths = [p for place in places for p in _row_files(place)]
    if config.a and not paths:
        raise ConfigError(f"results {config.a!r}: no runs*.jsonl there")
    rows = of_one_group(load_rows(paths))
    used = [row for row in rows if milestone.is_usable(row)]
    print(milestone.render(rows, load_profiles(paths, used), load_rounds(paths, used)))
    return 0


def show_why(config: CompareConfig) -> int:
    """Prints the three largest gaps between a row and its floor."""
    row = find_rows(config.a, config.out)[0][-1]
    floor = "unknown" if row.floor_us is None else f"{row.floor_us:.1f} µs"
    largest = gaps(row)
    print(f"{row.run_id}: round {row.round_us['mean']:.1f} µs, floor {floor}")
    for gap in largest:
        print(f"{gap.us:10.1f} µs  {gap.share:6.1%}  {gap.name}\n{'':23}{gap.advice}")
    return 0


SHOWN: dict[str, Callable[[CompareConfig], int]] = {
    "pair": show_pair,
    "best": show_best,
    "claims": show_claims,
    "tables": show_tables,
    "why": show_why,
}


def rows_of(results: str) -> list[Row]:
    """Returns the rows of folders and files, separated by commas."""
    return of_one_group(load_rows([name for name in results.split(",") if name]))


def _row_files(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(place.glob("**/runs*.jsonl"))
