"""The same arrivals at a server that is simulated in this process, on an emulated device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpissd.engine.backend.profile import load_profile
from mpissd.engine.job import resolve_unopened
from mpissd.lab.load.arrivals import Load
from mpissd.lab.load.config import AUTO, LoadConfig
from mpissd.lab.load.served import ANSWERED, Served
from mpissd.lab.load.virtual.server import Arrival, simulate
from mpissd.lab.load.virtual.server import Served as Answered

_TOLD = ("drafted", "accepted", "hits", "rounds")


def about(config: LoadConfig) -> Mapping[str, Any]:
    """Returns a row's description of the simulated server; raises ConfigError for bad flags."""
    run = config.simulated
    job = resolve_unopened(run, config.tp)
    told = job.workload.row_fields()
    return {
        "mode": AUTO if config.auto else run.mode,
        "backend": run.backend,
        "device_name": f"{load_profile(run.device).device_name} (emulated)",
        "model": job.target.name,
        "draft": job.draft.name if job.draft else None,
        "tp": config.tp,
        "num_drafts": run.drafts,
        "world_size": (config.tp + run.drafts) * config.replicas,
        "replicas": config.replicas,
        "acceptance": told.acceptance,
        "hit_law": told.hit_law,
        "lookahead": 0 if run.mode == "ar" else run.lookahead,
        "max_running": config.max_running,
    }


def send_all(config: LoadConfig, load: Load) -> list[Served]:
    """Returns the results of a load's requests, dealt to the replicas in turn."""
    found = [each.prompt_tokens for each in load.arrivals]
    arrivals = [
        Arrival(each.at_s, tokens, each.max_tokens)
        for each, tokens in zip(load.arrivals, found, strict=True)
    ]
    served: list[Served | None] = [None] * len(arrivals)
    for first in range(config.replicas):
        served[first :: config.replicas] = _one(config, arrivals[first :: config.replicas])
    return [each for each in served if each is not None]


def _one(config: LoadConfig, arrivals: Sequence[Arrival]) -> list[Served]:
    """Returns the results of the requests of one replica."""
    if not arrivals:
        return []
    run = config.simulated
    done = simulate(run, config.tp, arrivals, auto=config.auto, kv_tokens=config.kv_tokens)
    return [_served(each) for each in done.requests]


def _served(found: Answered) -> Served:
    times = found.token_s
    return Served(
        at_s=found.at_s,
        status=ANSWERED,
        ttft_s=times[0] - found.at_s,
        latency_s=times[-1] - found.at_s,
        num_tokens=len(times),
        prompt_tokens=found.prompt_tokens,
        speculation={name: getattr(found, name) for name in _TOLD},
    )
