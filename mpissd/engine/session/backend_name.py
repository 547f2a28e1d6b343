"""Chooses a rank's backend if --backend=auto leaves it open."""

from __future__ import annotations

import sys

from mpissd.common.config import RunConfig
from mpissd.common.presets import resolve_model, target_of
from mpissd.engine.backend.registry import choose, visible_gpus
from mpissd.engine.comm.topology import Topology
from mpissd.engine.model.shard import ForwardOptions, Shard

_SMALL_BYTES = 2e9  # some 15 forwards a second on a core that reads 30 GB/s


def backend_name(config: RunConfig, topology: Topology) -> str:
    """Returns the backend of this rank, the same on all ranks of its host.

    `auto` is numpy if text of a small model has more ranks than its host has GPUs, as SSD on a
    laptop: on one GPU they would be refused. The lead reports it on stderr.
    """
    name = choose(config.backend)
    here = topology.hosts.count(topology.hosts[topology.world.rank])
    if config.backend != "auto" or name != "cupy" or not (config.is_text and _is_small(config)):
        return name
    if here <= (gpus := visible_gpus()):
        return name
    if topology.is_lead:
        told = f"mpissd: {here} ranks, {gpus} visible GPU(s): backend numpy, one core a rank"
        sys.stderr.write(f"{told} (on the GPU: --backend=cupy --mode=sd --num_drafts=0)\n")
        sys.stderr.flush()
    return "numpy"


def _is_small(config: RunConfig) -> bool:
    """Returns whether CPUs read the target's 16-bit weights often enough for text."""
    where = target_of(config.pair) if config.pair else config.target
    if where is None:
        return False
    options = ForwardOptions(lm_head=True)
    return Shard(resolve_model(where)).weight_bytes(options, 2) <= _SMALL_BYTES
