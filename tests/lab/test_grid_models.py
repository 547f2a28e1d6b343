"""Models are made once, shared by all jobs with the same weights, and dropped for lack of room."""

from types import SimpleNamespace
from typing import Any

from mpissd.common.config import RunConfig
from mpissd.engine.backend.profile import EmulatedBackend, load_profile
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.job import Job, resolve
from mpissd.engine.session.session import Models

WORLD = SimpleNamespace(rank=0, size=1, allgather=lambda value: [value])
LEAD = SimpleNamespace(world=WORLD, group=WORLD, is_draft=False, is_lead=True)
WEIGHTS = 13_958_643_712  # bytes of 8b's layers in float16


class Counted(EmulatedBackend):
    """Counts tables and programs; few_rows as on a GPU whose layout depends on the rows."""

    def __init__(self) -> None:
        super().__init__(load_profile("h200"))
        self.few_rows = 32
        self.tables = self.programs = 0

    def table(self, entries: int, width: int, key: int) -> Any:
        self.tables += 1
        return None

    def program(self, *args: Any, **kwargs: Any) -> Any:
        self.programs += 1
        return super().program(*args, **kwargs)


def job(mode: str = "ssd", tp: int = 1, **flags: Any) -> Job:
    config = RunConfig(mode=mode, pair="8b/1b", **flags)
    return resolve(config, tp, backend="emulated", memory_bytes=None)


def opened(jobs: list[Job], backend: Counted, room: int | None = None) -> Any:
    held = Models(backend, SoloGroup(), 0)
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
