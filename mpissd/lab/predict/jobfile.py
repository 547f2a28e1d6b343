"""A job's own profile as a file: its flags, T, and what it measured of itself.

`run` writes one beside each row (OUT/profiles/RUN_ID.json); `predict --profile=` reads it and, with
no other flag, predicts the very number that the row carries.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.engine.job import Job
from mpissd.lab.predict.costs import DeviceCosts, HostCosts

SCHEMA = 1


def to_dict(
    job: Job,
    backend: str,
    num_rounds: int,
    device: DeviceCosts,
    host: HostCosts,
    rates: Mapping[str, float | None],
) -> dict[str, Any]:
    """What the file holds. rates: of the lead's device, by their keys in a row."""
    config = dataclasses.asdict(job.config)
    if config["pair"] is None and config["target"] is None:  # what the machine chose
        config["target"] = job.full_target.name
        config["draft"] = None if job.draft is None else job.draft.name
    return {
        "schema": SCHEMA,
        "kind": "job",
        "backend": backend,
        "tp": job.tp,
        "num_rounds": num_rounds,
        "config": config,
        **rates,
        "device": device.to_dict(),
        "host": host.to_dict(),
    }


@dataclasses.dataclass(frozen=True)
class JobFile:
    """What was read."""

    config: dict[str, Any]
    backend: str
    tp: int
    num_rounds: int
    device: DeviceCosts
    host: HostCosts


def load(name: str) -> JobFile | None:
    """A job's profile; None where `name` is not one (a device profile's name or file).

    Raises ConfigError: unreadable, another schema, a missing field.
    """
    if not name.endswith(".json"):
        return None
    try:
        data = json.loads(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"profile {name!r}: {error}") from error
    if not isinstance(data, dict) or data.get("kind") != "job":
        return None
    if data.get("schema") != SCHEMA:
        raise ConfigError(
            f"profile {name!r}: schema {data.get('schema')!r}, this version reads {SCHEMA}"
        )
    try:
        return JobFile(
            config=_flags(data["config"]),
            backend=str(data["backend"]),
            tp=_count(data["tp"]),
            num_rounds=_count(data["num_rounds"]),
            device=DeviceCosts.from_dict(data["device"]),
            host=HostCosts.from_dict(data["host"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"profile {name!r}: missing or malformed {error}") from error


def _flags(given: dict[str, Any]) -> dict[str, Any]:
    """The flags that were said or have a default, typed and bounded as on the command line."""
    fields = {field.name: field for field in dataclasses.fields(RunConfig)}
    said = {k: v for k, v in given.items() if k in fields and v is not None}
    return {name: fields[name].metadata["parse"](name, str(value)) for name, value in said.items()}


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r}: allowed: a whole number >= 1")
    return value
