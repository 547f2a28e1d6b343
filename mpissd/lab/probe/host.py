"""Measures host work and link time for the configurations that the ranks of a probe allow.

Each configuration decodes some rounds, as a run's warm-up does, and its costs are read off their
ledgers (lab/measure/calibrate). Its forwards, timed in series, go into the profile as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.engine.comm.topology import Refused
from mpissd.engine.job import resolve
from mpissd.engine.session.rank import Rank
from mpissd.engine.session.session import Session
from mpissd.lab.measure.calibrate import WarmUp, calibrate, host_costs, warm_up
from mpissd.lab.probe.measure import NEAR, Entry

MORE_SEQUENCES = 8  # Factor from the first batch size to the second; host work grows with it.
_FEWEST, _MOST, _ROUNDS_S = 18, 60, 1.0


def host_entries(session: Session, source: str) -> tuple[list[Entry], list[str]]:
    """Measures every configuration; collective over the job's world.

    Returns ("host" entries, reasons why others are missing) on the lead.
    """
    entries: list[Entry] = []
    notes: list[str] = []
    probed = session.job
    for config in ways(probed.config, on_host=session.backend.info.kind == "cpu"):
        if config.pair is None and config.target is None:  # another pair would be its default
            draft = None if probed.draft is None else probed.draft.name
            config = replace(config, target=probed.target.name, draft=draft)
        try:
            job = resolve(config, probed.tp, backend=session.backend.name, memory_bytes=None)
            entry = _measured(replace(session, job=job, resources=ExitStack()), source)
        except (ConfigError, Refused) as error:  # All ranks raise the same error here.
            notes.append(f"host costs of {config.mode}, b={config.batch_size}: {error}")
            continue
        entries += [] if entry is None else [entry]
    return entries, notes


def ways(config: RunConfig, *, on_host: bool = False) -> Iterator[RunConfig]:
    """Yields the configurations for the probe's draft ranks: AR and inline SD without any, or SD
    and SSD.

    Each is measured at the probe's batch size and at eight times that size. on_host: forwards run
    on the host's cores; a transformer's then disturb the caches more the longer their contexts are,
    so that two are measured.
    """
    contexts = [config.context]
    if on_host and config.is_transformer and config.context > NEAR:
        contexts = [NEAR, config.context]
    modes = ("sd", "ssd") if config.drafts else ("ar", "sd")
    for mode in modes if config.mode != "ar" else ("ar",):
        way = replace(config, mode=mode, num_drafts=config.drafts if mode != "ar" else None)
        for batch in (config.batch_size, MORE_SEQUENCES * config.batch_size):
            for context in contexts:
                yield replace(way, batch_size=batch, context=context)


def _measured(session: Session, source: str) -> Entry | None:
    """Times one configuration's forwards and runs its rounds; returns its entry on the lead.

    Raises Refused on every rank if its models do not fit in memory.
    """
    job, world, count = session.job, session.topology.world, 0
    try:
        rank = Rank(session)
        profile = calibrate(rank)
        if profile is not None:
            # The forwards' times limit the rounds: a large model takes seconds a round on a CPU.
            round_s = float(profile.device.verify(job.verify_rows))
            if profile.device.draft is not None:
                step_s = float(profile.device.draft_s(job.config.batch_size))
                round_s += job.num_forwards(job.lookahead) * step_s
            count = int(min(max(_ROUNDS_S / max(round_s, 1e-6), _FEWEST), _MOST))
        count = world.bcast(count)
        drafter = rank.drafter(rank.draft) if rank.draft is not None else None
        lead = rank.run_pass(rank.target, drafter, partial(warm_up, rank=rank, count=count))
        own = None if drafter is None else WarmUp.of_draft(drafter, count)
        drafts = [draft for draft in world.gather(own) or () if draft is not None]
        if profile is not None and lead is not None and rank.chained is None:
            costs = host_costs(job, profile.device, lead, drafts[0] if drafts else None)
            profile = replace(profile, host=costs)
        rank.close()
    finally:
        session.resources.close()
    if profile is None:
        return None
    about: dict[str, Any] = {
        "mode": job.config.mode,
        "tp": job.tp,
        "num_drafts": job.config.drafts,
        "batch_size": job.config.batch_size,
        "lookahead": job.lookahead,
        "lanes": job.fan_outs.branches,
        "context": job.options.context if job.config.is_transformer else 0,
        "forward": "transformer" if job.config.is_transformer else "gemm",
    }
    forwards = profile.device.to_dict()
    return {**about, "from": source, "seconds": profile.host.to_dict(), "job_forwards": forwards}
