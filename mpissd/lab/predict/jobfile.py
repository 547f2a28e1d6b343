"""A job's own profile as a file: its flags, T, and the durations measured in it.

`run` writes one for each row (OUT/profiles/RUN_ID.json). `predict --profile=` reads it and, without
other flags, predicts exactly the number that the row has.
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
    """Returns the content of the file; rates: of the lead's device, by their keys in a row."""
    config = dataclasses.asdict(job.config)
    # The default pair depends on the machine, so the file names the pair.
    if config["pair"] is None and config["target"] is None:
        config["target"] = job.target.name
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
    """The content of a job's profile."""

    config: dict[str, Any]
    backend: str
    tp: int
    num_rounds: int
    device: DeviceCosts
    host: HostCosts


def load(name: str) -> JobFile | None:
    """Loads a job's profile; returns None if `name` is a device profile's name or file.

    Raises ConfigError for an unreadable file, another schema or a missing field.
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
    """Returns the flags that are not null, typed and bounded as on the command line."""
    fields = {field.name: field for field in dataclasses.fields(RunConfig)}
    if (late := given.get("on_late", "finish")) != "finish":
        raise ConfigError(f"a job with on_late={late}, which is retired: allowed: finish")
    said = {k: v for k, v in given.items() if k in fields and v is not None}
    return {name: fields[name].metadata["parse"](name, str(value)) for name, value in said.items()}


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r}: allowed: a whole number >= 1")
    return value
