"""The command `load`: a table with a line a rate, a row each in OUT/loads.jsonl."""

from __future__ import annotations

import asyncio
import json
import platform
import secrets
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.load_row import LoadRow
from mpissd.common.output import append_row, check_output
from mpissd.lab.load.arrivals import Load, digest, loads
from mpissd.lab.load.client import Client
from mpissd.lab.load.config import LoadConfig
from mpissd.lab.load.served import arrays, row_of

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
        last = asyncio.run(_send_all(config, planned))
    except FaultError as fault:
        print(f"mpissd: {fault}", file=sys.stderr)
        return fault.exit_code
    print(json.dumps(last.to_dict()))
    return 0


async def _send_all(config: LoadConfig, planned: list[Load]) -> LoadRow:
    row = LoadRow()
    async with Client(config) as client:
        about = await client.about()
        print(_HEAD, flush=True)
        for each in planned:
            served = await client.send_all(each)
            load_id = f"load-{about.get('mode') or 'server'}-{secrets.token_hex(6)}"
            named = {**_named(config, client.model), "load_id": load_id}
            row = row_of(each, served, (config.ttft, config.tpot), about, named)
            keep(config.out, row, arrays(served))
            print(line(row), flush=True)
            if row.num_failed and not row.num_answered:
                raise FaultError(f"url={config.url}: none of {row.num_requests} was answered")
    return row


def _named(config: LoadConfig, model: str) -> dict[str, Any]:
    assert config.prompts is not None, "checked"
    return {
        "server": config.url,
        "model": model,
        "prompts": digest(config.prompts),
        "seed": config.seed,
        "provenance": provenance(),
    }


def provenance() -> dict[str, Any]:
    """Returns where, when and by which command a load was measured; a key is left out."""
    words = [word for word in sys.argv[1:] if not word.lstrip("-").startswith("api_key")]
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {
        "time": now,
        "host": platform.node(),
        "python": platform.python_version(),
        "command": words,
    }


def keep(out: str, row: LoadRow, numbers: Mapping[str, Any]) -> None:
    """Appends the row to OUT/loads.jsonl, and writes the requests' numbers beside it."""
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
    return (
        f"{row.rate:7.3g} {share:>9} {row.num_refused:7d} {row.tok_per_s:8.1f}   {first}      "
        f"{each}      {row.goodput_per_s:6.2f} ({row.good_share:.0%})"
    )


def _milliseconds(found: Mapping[str, float] | None) -> str:
    if found is None:
        return f"{'–':>8}{'–':>6}{'–':>6}"
    return f"{1e3 * found['p50']:8.0f}{1e3 * found['p90']:6.0f}{1e3 * found['p99']:6.0f}"
