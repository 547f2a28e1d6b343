"""What the host's work and the link take, by the ways to decode that the ranks of a probe allow.

Measured as a run calibrates itself: passes of the decoding loops over paused forwards
(lab/measure/calibrate). The same calibration times the job's own forwards; both go into the
profile, so that a reader can hold the probed forwards against them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.engine.comm.topology import Refused
from mpissd.engine.job import Job, resolve
from mpissd.engine.session.rank import Rank
from mpissd.engine.session.session import Session
from mpissd.lab.measure.calibrate import JobProfile, calibrate
from mpissd.lab.probe.sample import Entry

_MORE_SEQUENCES = 8  # host work grows with the batch


def host_costs(session: Session, source: str) -> tuple[list[Entry], list[str]]:
    """("host" entries, why others are missing), on the lead; collective over the job's world."""
    entries: list[Entry] = []
    notes: list[str] = []
    for config in ways(session.job.config):
        try:
            job = _resolved(session, config)
            found = _measured(replace(session, job=job, resources=ExitStack()))
        except (ConfigError, Refused) as error:  # the same on every rank
            notes.append(f"host costs of {config.mode}, b={config.batch_size}: {error}")
            continue
        if found is not None:
            entries.append(_entry(job, found, source))
    return entries, notes


def ways(config: RunConfig) -> Iterator[RunConfig]:
    """The configurations with as many draft ranks: AR and inline SD without one, else SD and SSD;
    at the probe's batch and at one of eight times as many sequences."""
    modes = ("sd", "ssd") if config.drafts else ("ar", "sd")
    for mode in modes if config.mode != "ar" else ("ar",):
        drafts = config.drafts if mode != "ar" else None
        for batch in (config.batch_size, _MORE_SEQUENCES * config.batch_size):
            yield replace(config, mode=mode, num_drafts=drafts, batch_size=batch)


def _resolved(session: Session, config: RunConfig) -> Job:
    """The pair is the probe's, whatever this one would fit."""
    probed = session.job
    if config.pair is None and config.target is None:
        draft = None if probed.draft is None else probed.draft.name
        config = replace(config, target=probed.full_target.name, draft=draft)
    return resolve(config, probed.tp, backend=session.backend.name, memory_bytes=None)


def _measured(session: Session) -> JobProfile | None:
    """This way's calibration, on the lead. Refused on every rank: no room for its models."""
    try:
        rank = Rank(session)
        found = calibrate(rank)
        rank.close()
    finally:
        session.resources.close()
    return found


def _entry(job: Job, found: JobProfile, source: str) -> Entry:
    told: dict[str, Any] = {
        "mode": job.config.mode,
        "tp": job.tp,
        "num_drafts": job.config.drafts,
        "batch_size": job.config.batch_size,
        "lookahead": job.lookahead,
        "lanes": job.fan_outs.branches,
    }
    forwards = found.device.to_dict()
    return {**told, "from": source, "seconds": found.host.to_dict(), "job_forwards": forwards}
