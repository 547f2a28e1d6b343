"""A job's own profile as a file: its flags, T, and the durations measured in it.

`run` writes one for each row (OUT/profiles/RUN_ID.json). `plan --rows --host=` reads its host
costs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.engine.job import Job
from mpissd.lab.predict.costs import DeviceCosts, HostCosts

SCHEMA = 1
_FILE = "OUT/profiles/RUN_ID.json"


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


def load(name: str) -> tuple[DeviceCosts, HostCosts]:
    """Loads the durations of a run's profile.

    Raises ConfigError for another file, another schema or a missing field.
    """
    try:
        data = json.loads(Path(name).read_text())
        if data["kind"] == "job" and data["schema"] == SCHEMA:
            return DeviceCosts.from_dict(data["device"]), HostCosts.from_dict(data["host"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"host {name!r}: {error}: allowed: a run's {_FILE}") from error
    raise ConfigError(f"host {name!r}: allowed: a run's {_FILE} of schema {SCHEMA}")
