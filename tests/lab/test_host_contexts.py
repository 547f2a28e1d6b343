"""Host costs of a transformer on a CPU, between two contexts: longer ones disturb caches more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpissd.engine.backend.profile import HostEntry, Profile, load_profile
from mpissd.lab.predict.costs import HostCosts
from mpissd.lab.predict.hosts import costs_at, host_of
from tests.lab.test_transformer_profile import job


def entry(batch: int, context: int, assemble: float) -> HostEntry:
    seconds = HostCosts(draft_assemble=assemble).to_dict()
    about = {"mode": "sd", "tp": 1, "num_drafts": 0, "batch_size": batch, "lookahead": 4}
    return HostEntry.parse({**about, "context": context, "seconds": seconds, "from": "measured"})


def profile(*entries: HostEntry) -> Profile:
    return replace(load_profile("h200"), hosts=entries, other_kernels=())


def assemble(known: Profile, batch: int, context: int) -> float:
    return costs_at(known, known.hosts[0], batch, context).draft_assemble


def test_costs_lie_on_a_line_between_contexts_and_batches() -> None:
    known = profile(
        entry(1, 0 + 100, 1e-4), entry(8, 100, 8e-4), entry(1, 2100, 5e-4), entry(8, 2100, 12e-4)
    )
    assert assemble(known, 1, 100) == pytest.approx(1e-4)
    assert assemble(known, 1, 1100) == pytest.approx(3e-4)
    assert assemble(known, 8, 2100) == pytest.approx(12e-4)
    assert assemble(known, 1, 20) == pytest.approx(1e-4)  # before the first as at it


def test_a_job_takes_the_costs_of_its_mean_context() -> None:
    known = profile(entry(1, 10, 1e-4), entry(1, 10_000, 1e-2))
    near, far = (job(num_drafts=0, context=n) for n in (0, 4000))
    assert host_of(known, near).draft_assemble < host_of(known, far).draft_assemble < 1e-2
