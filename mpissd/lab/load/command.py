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
from mpissd.lab.load.requests import Load, Served, loads, row_of

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
        if config.is_simulated:
            from mpissd.lab.load import simulated

            about = simulated.about(config)
            print(_HEAD, flush=True)
            rows = [
                _kept(config, each, simulated.send_all(config, each), about) for each in planned
            ]
        else:
            rows = asyncio.run(_send_all(config, planned))
    except FaultError as fault:
        print(f"mpissd: {fault}", file=sys.stderr)
        return fault.exit_code
    print(json_line(rows[-1].to_dict()))
    return 0


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
    """Makes a load's row and prints its line; keeps it in OUT/loads.jsonl, and its requests'
    numbers in OUT/loads."""
    named = {
        "load_id": f"load-{about.get('mode') or 'server'}-{secrets.token_hex(6)}",
        "server": about.get("server", "in-process"),
        "model": about["model"],
        "provenance": {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "host": platform.node(),
            "python": platform.python_version(),
            "command": without(sys.argv[1:], "api_key"),
        },
    }
    row, folder = row_of(config, load, served, about, named), Path(config.out, "loads")
    kinds = dict.fromkeys(("at_s", "ttft_s", "latency_s"), "f4")
    kinds |= dict.fromkeys(("num_tokens", "prompt_tokens", "status"), "i4")
    numbers: dict[str, Any] = {
        n: np.array([getattr(e, n) for e in served], kind) for n, kind in kinds.items()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / f"{row.load_id}.npz", **numbers)
        append_row(Path(config.out, "loads.jsonl"), row.to_dict())
    except OSError as error:
        raise ConfigError(f"out={config.out!r}: cannot be written: {error.strerror}") from error
    texts = []
    for times in (row.ttft_s, row.tpot_s):
        cells = ["–"] * 3
        if times is not None:
            ms = [1e3 * times[name] for name in ("p50", "p90", "p99")]
            cells = [f"{time:.0f}" if time >= 100 else f"{time:.1f}" for time in ms]
        texts.append(f"{cells[0]:>8}{cells[1]:>6}{cells[2]:>6}")
    rate, share = "at once" if row.rate is None else f"{row.rate:.3g}", row.good_share
    print(
        f"{rate:>7} {f'{row.num_answered}/{row.num_requests}':>9} {row.num_refused:7d} "
        f"{row.tok_per_s:8.1f}   {texts[0]}      {texts[1]}      {row.goodput_per_s:6.2f} "
        f"({share:.0%})",
        flush=True,
    )
    return row
