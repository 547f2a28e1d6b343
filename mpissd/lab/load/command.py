"""The command `load`: a table with a line a rate, a row each in OUT/loads.jsonl."""

from __future__ import annotations

import asyncio
import platform
import secrets
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.flags import without
from mpissd.common.load_row import LoadRow
from mpissd.common.output import append_row, check_output, json_line
from mpissd.lab.load.client import Client
from mpissd.lab.load.config import LoadConfig
from mpissd.lab.load.requests import Load, Served, arrays, digest, loads, row_of

_HEAD = (
    "   rate  answered refused    tok/s   TTFT p50   p90   p99 ms   TPOT p50   p90   p99 ms   "
    "goodput/s"
)


def load(config: LoadConfig) -> int:
    """Runs the command; the last line of stdout is the last row. Returns the exit code: 5 where a
    server answers nothing. Raises ConfigError."""
    check_output(config.out)
    planned = list(loads(config))
    try:
        rows = _simulate(config, planned) if config.is_simulated else _ask(config, planned)
    except FaultError as fault:
        print(f"mpissd: {fault}", file=sys.stderr)
        return fault.exit_code
    print(json_line(rows[-1].to_dict()))
    return 0


def _simulate(config: LoadConfig, planned: Sequence[Load]) -> list[LoadRow]:
    from mpissd.lab.load import simulated

    about = simulated.about(config)
    print(_HEAD, flush=True)
    return [_kept(config, each, simulated.send_all(config, each), about) for each in planned]


def _ask(config: LoadConfig, planned: Sequence[Load]) -> list[LoadRow]:
    return asyncio.run(_send_all(config, planned))


async def _send_all(config: LoadConfig, planned: Sequence[Load]) -> list[LoadRow]:
    rows = []
    async with Client(config) as client:
        about = {**await client.about(), "model": client.model, "server": client.url}
        print(_HEAD, flush=True)
        for each in planned:
            rows.append(_kept(config, each, await client.send_all(each), about))
            if rows[-1].num_failed and not rows[-1].num_answered:
                raise FaultError(f"url={client.url}: none of {len(each.arrivals)} was answered")
    return rows


def _kept(
    config: LoadConfig, load: Load, served: Sequence[Served], about: Mapping[str, Any]
) -> LoadRow:
    """Makes a load's row, keeps it and prints its line."""
    assert config.prompts is not None, "checked"
    named = {
        "load_id": f"load-{about.get('mode') or 'server'}-{secrets.token_hex(6)}",
        "server": about.get("server", "in-process"),
        "model": about["model"],
        "prompts": digest(config.prompts),
        "seed": config.seed,
        "provenance": provenance(),
    }
    row = row_of(load, served, (config.ttft, config.tpot), about, named)
    keep(config.out, row, arrays(served))
    print(line(row), flush=True)
    return row


def provenance() -> dict[str, Any]:
    """Returns the place, time and command of a load's measurement; a key is left out."""
    words = without(sys.argv[1:], "api_key")
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {
        "time": now,
        "host": platform.node(),
        "python": platform.python_version(),
        "command": words,
    }


def keep(out: str, row: LoadRow, numbers: Mapping[str, Any]) -> None:
    """Appends the row to OUT/loads.jsonl, and writes the requests' numbers next to it."""
    folder = Path(out, "loads")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / f"{row.load_id}.npz", **numbers)
        append_row(Path(out, "loads.jsonl"), row.to_dict())
    except OSError as error:
        raise ConfigError(f"out={out!r}: cannot be written: {error.strerror}") from error


def line(row: LoadRow) -> str:
    """Returns a line of the table."""
    first, each = (_milliseconds(found) for found in (row.ttft_s, row.tpot_s))
    share = f"{row.num_answered}/{row.num_requests}"
    rate = "at once" if row.rate is None else f"{row.rate:.3g}"
    return (
        f"{rate:>7} {share:>9} {row.num_refused:7d} {row.tok_per_s:8.1f}   {first}      "
        f"{each}      {row.goodput_per_s:6.2f} ({row.good_share:.0%})"
    )


def _milliseconds(found: Mapping[str, float] | None) -> str:
    if found is None:
        return f"{'–':>8}{'–':>6}{'–':>6}"
    times = [1e3 * found[name] for name in ("p50", "p90", "p99")]
    texts = [f"{time:.0f}" if time >= 100 else f"{time:.1f}" for time in times]
    return f"{texts[0]:>8}{texts[1]:>6}{texts[2]:>6}"
