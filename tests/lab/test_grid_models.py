"""Models are made once, shared by all jobs with the same weights, and dropped for lack of room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpissd.common.config import RunConfig
from mpissd.engine.backend.emulated_backend import EmulatedBackend
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.comm.topology import Refused
from mpissd.engine.job import Job, resolve
from mpissd.engine.session import models

WORLD = SimpleNamespace(rank=0, size=1, allgather=lambda value: [value])
LEAD = SimpleNamespace(world=WORLD, group=WORLD, is_draft=False, is_lead=True)
DRAFT = SimpleNamespace(world=WORLD, group=WORLD, is_draft=True, is_lead=False)
FOLLOWER = SimpleNamespace(world=WORLD, group=WORLD, is_draft=False, is_lead=False)
WEIGHTS = 13_958_643_712  # bytes of 8b's layers in float16


class Counted(EmulatedBackend):
    """Counts tables and programs; few_rows as on a GPU whose layout depends on the rows."""

    def __init__(self, most_rows: int = 1 << 20) -> None:
        super().__init__(load_profile("h200"))
        self.few_rows = 32
        self.tables = self.programs = 0
        self.most_rows = most_rows

    def table(self, entries: int, width: int, key: int) -> Any:
        self.tables += 1
        return None

    def activation(self, rows: int, width: int) -> Any:
        if rows > self.most_rows:
            raise MemoryError(f"{rows} rows")
        return None

    def program(self, *args: Any, **kwargs: Any) -> Any:
        self.programs += 1
        return super().program(*args, **kwargs)


def job(mode: str = "ssd", tp: int = 1, **flags: Any) -> Job:
    config = RunConfig(mode=mode, pair="8b/1b", **flags)
    return resolve(config, tp, backend="emulated", memory_bytes=None)


def opened(jobs: list[Job], backend: Counted, room: int | None = None) -> Any:
    held = models.Models(backend, SoloGroup(), 0)
    held.room = room
    held.expect(jobs)
    return held


def test_weights_and_programs_are_made_once() -> None:
    backend = Counted()
    jobs = [job(lookahead=k, alpha=a) for k in (2, 4, 6) for a in (0.6, 0.9)]
    held = opened(jobs, backend)
    for found in jobs * 2:
        target, draft = held.open(found, LEAD)
        assert target is not None and draft is None
        assert target.buckets == found.target_buckets()  # its own, of all that were opened
    union = {rows for found in jobs for rows in found.target_buckets()}
    assert (backend.tables, backend.programs) == (1, len(union))
    assert held.open(jobs[0], LEAD)[0].bucket(3) == 3
    assert held.open(jobs[1], LEAD)[0].stack is held.open(jobs[0], LEAD)[0].stack


def test_a_draft_rank_has_the_draft_and_an_inline_lead_both() -> None:
    far, near = job(), job("sd", num_drafts=0)
    held = opened([far, near], Counted())
    target, draft = held.open(far, DRAFT)
    assert target is None and draft.shard.shape.name == "llama-3.2-1b"
    target, draft = opened([near], Counted()).open(near, LEAD)
    assert (target.shard.shape.name, draft.shard.shape.name) == ("llama-3.1-8b", "llama-3.2-1b")
    target, draft = opened([near], Counted()).open(near, FOLLOWER)
    assert target is not None and draft is None  # the lead's: it counts, and is not made


def test_what_reads_other_weights_has_weights_of_its_own() -> None:
    backend = Counted()
    few, many = job("ar", batch_size=32), job("ar", batch_size=33)
    head, long = job("ar", lm_head=True), job("ar", context=1024)
    held = opened([few, many, head, long], backend)
    stacks = [held.open(found, LEAD)[0].stack for found in (few, many, head, long)]
    assert len(set(map(id, stacks))) == 4
    assert backend.tables == 3  # a context has buffers of its own, on the weights of `few`
    assert stacks[3].weights is stacks[0].weights


def test_what_was_used_longest_ago_makes_room() -> None:
    backend = Counted()
    few, many, head = job("ar"), job("ar", batch_size=64), job("ar", lm_head=True)
    held = opened([few, many, head], backend, room=2 * WEIGHTS + (4 << 30))
    first = held.open(few, LEAD)[0].stack
    held.open(many, LEAD)
    assert held.open(few, LEAD)[0].stack is first  # both have room
    held.open(head, LEAD)  # `many` goes: `few` was used since
    assert held.open(few, LEAD)[0].stack is first and backend.tables == 3
    held.open(many, LEAD)
    assert backend.tables == 4


def test_one_that_has_no_room_leaves_the_others_theirs() -> None:
    backend = Counted(most_rows=24)
    small, large = job("ar", batch_size=4), job("ar", batch_size=32)
    held = opened([small, large], backend)
    for _ in range(2):
        assert held.open(small, LEAD)[0].buckets == small.target_buckets()
        with pytest.raises(Refused, match="rank 0: 32 rows"):
            held.open(large, LEAD)
    held.close()
