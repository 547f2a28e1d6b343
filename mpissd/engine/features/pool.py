"""A draft rank that serves several target groups, with a thread for the rounds of each group.

One thread runs at a time, until it has launched a forward or waits for a message. When no thread
can go on, the forwards that all threads have launched run as one. So an outcome waits for at most
the forward that is under way when it arrives, and for forwards over other groups' long prompts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import Semaphore, Thread
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.common.wait import Waiter
from mpissd.engine.comm.link import DraftEnd
from mpissd.engine.model.forwards import Forwards, Places, Results, joined
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.round.draft import Drafter, serve


class GroupWaiter(Waiter):
    """Lets the thread that drafts for one target group wait: the thread pauses, and the main loop
    (serve_groups) resumes it. awaited: returns whether the awaited message has arrived (None: the
    thread waits for its launched forward). is_over: whether the group's rounds have ended."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__(deadline_s, spin=False)
        self.awaited: Callable[[], bool] | None = bool
        self.is_over = False
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._may_run = Semaphore(0)
        self._has_paused = Semaphore(0)

    def until(self, test: Callable[[], bool], what: str) -> None:
        """Waits until test() is true, and lets the threads of other target groups run meanwhile."""
        if not test():
            self.pause(test)

    def pause(self, awaited: Callable[[], bool] | None) -> None:
        """Pauses the calling thread until awaited() is true; with awaited=None, until the forward
        that the thread has launched is over."""
        self.awaited = awaited
        self._has_paused.release()
        self._may_run.acquire()
        if self._is_abandoned:
            raise SystemExit

    @property
    def may_go_on(self) -> bool:
        """Whether the thread may go on: its message has arrived, or its forward is over."""
        return self.awaited is not None and self.awaited()

    def wake(self) -> None:
        """Lets the thread go on at its next turn, because its forward is over."""
        self.awaited = lambda: True

    def begin(self, rounds: Callable[[], None]) -> None:
        """Starts a thread, which calls `rounds` when it is resumed for the first time."""
        self.is_over = False
        Thread(target=self._run, args=(rounds,), daemon=True).start()
        self.wake()

    def _run(self, rounds: Callable[[], None]) -> None:
        self._may_run.acquire()
        try:
            rounds()
        except BaseException as error:  # noqa: BLE001  (the pool raises it)
            self._error = error
        self.is_over = True
        self._has_paused.release()

    def resume(self) -> None:
        """Lets the thread run until it pauses or ends; raises the exception that has ended it."""
        self._may_run.release()
        self._has_paused.acquire()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Ends the paused thread, whose rounds are not finished."""
        if not self.is_over:
            self._is_abandoned = True
            self._may_run.release()


def serve_groups(
    ends: Sequence[tuple[DraftEnd, Drafter]], forwards: SharedForwards, waiter: Waiter
) -> None:
    """Runs a draft's rounds for all target groups until each group's first rank ends its rounds.
    ends: for each group, (its message channel, its Drafter), which wait by the same GroupWaiter.
    forwards: runs the forwards of all groups. waiter: waits for a forward or a message."""
    groups = list[GroupWaiter]()
    for link, drafter in ends:
        assert isinstance(drafter.waiter, GroupWaiter), "a group that would hold up the others"
        groups.append(drafter.waiter)
        drafter.waiter.begin(partial(_serve, link, drafter, forwards))
    try:
        while groups:
            for group in groups[:]:
                if group.may_go_on:
                    group.resume()
                    if group.is_over:
                        groups.remove(group)
            if forwards.launched:
                launched = [group for group in groups if group.awaited is None]
                forwards.run(waiter)
                for group in launched:
                    group.wake()
            elif groups:
                waiter.until(lambda: any(group.may_go_on for group in groups), "target: outcome")
            if len(groups) > 1:
                groups.append(groups.pop(0))  # each group is first in turn
    finally:
        for group in groups:
            group.abandon()


def _serve(link: DraftEnd, drafter: Drafter, forwards: SharedForwards) -> None:
    forwards.stepper.backend.use_here()
    serve(link, drafter)


class SharedForwards:
    """A draft model that several target groups share. Forwards that several groups have launched
    run as one. groups: each group's view of the model. launched: views with a forward."""

    COLUMNS = ("begin_ns", "device_ns", "rows", "seats")

    def __init__(self, stepper: Stepper, groups: int, *, slots: int, lanes: int) -> None:
        """stepper: runs the model's forwards. groups: the number of target groups. slots, lanes:
        for how many sequences, and for how many branches, a group has KV cache memory."""
        self.stepper = stepper
        self.most_rows = stepper.most_rows // groups
        self.groups = [GroupForwards(self, n * slots, n * lanes) for n in range(groups)]
        self.launched: list[GroupForwards] = []
        self._log = array("q")  # the numbers of `log`, forward after forward

    def run(self, waiter: Waiter) -> None:
        """Runs all launched forwards as one forward, and waits until it is over."""
        together = self.launched
        self.launched = []
        tokens = list[Ints]()
        places = list[Places]()
        start = 0
        rows = 0
        for group in together:
            start, rows = group.join(start, rows, tokens, places)
        lists = any(group.lists for group in together)
        self.stepper.upload(
            rows, np.concatenate(tokens), joined(places) if places else None, lists=lists
        )
        begin = perf_counter_ns()
        self.stepper.launch()
        self.stepper.wait(waiter)
        seconds = self.stepper.elapsed_s()
        self._log.extend((begin, round(seconds * 1e9), rows, len(together)))

    def log(self) -> NDArray[np.int64]:
        """Returns a row for each of the n forwards so far, int64 [n, 4]: (begin by perf_counter in
        ns, device time in ns, rows, number of groups that took part)."""
        return np.array(self._log).reshape(-1, len(self.COLUMNS))


class GroupForwards(Forwards):
    """One target group's view of a draft model that several groups share. Its KV cache slots and
    scratch memory are numbered from 0. lists: whether the group reads several of each row's
    likeliest tokens, and not only the first."""

    def __init__(self, shared: SharedForwards, first_slot: int, first_lane: int) -> None:
        self.shared = shared
        self.lists = False
        self._first_slot = first_slot
        self._first_lane = first_lane
        self._part: tuple[int, Ints, Places | None] | None = None  # (rows, tokens, places) to run
        self._window = slice(0, 0)  # the rows of this group in the last forward

    @property
    def most_rows(self) -> int:
        return self.shared.most_rows

    def upload(
        self, rows: int, tokens: Ints, places: Places | None = None, *, lists: bool = False
    ) -> None:
        if places is not None:
            lanes = np.where(places.lanes < 0, places.lanes, places.lanes + self._first_lane)
            slots = places.slots + np.int32(self._first_slot)
            places = replace(places, slots=slots, lanes=lanes.astype(np.int32))
        self._part = rows, tokens, places
        self.lists = lists

    def launch(self) -> None:
        assert self not in self.shared.launched, "a second forward before the first one is over"
        self.shared.launched.append(self)

    def join(
        self, start: int, rows: int, tokens: list[Ints], places: list[Places]
    ) -> tuple[int, int]:
        """Appends the group's uploaded rows to the lists `tokens` and `places` of a shared forward,
        which has `start` tokens and (with padding) `rows` rows so far. Returns the new numbers."""
        assert self._part is not None, "launched without rows"
        own_rows, own_tokens, own_places = self._part
        self._part = None
        self._window = slice(start, start + len(own_tokens))
        tokens.append(own_tokens)
        if own_places is not None:
            places.append(own_places)
        return self._window.stop, rows + own_rows

    def move(self, lane: int, slot: int, start: int, stop: int) -> None:
        lane += self._first_lane
        self.shared.stepper.move(lane, self._first_slot + slot, start, stop)

    def wait(self, waiter: Waiter) -> None:
        if self in self.shared.launched:
            if isinstance(waiter, GroupWaiter):
                waiter.pause(None)
            else:  # outside a pool
                self.shared.run(waiter)

    def elapsed_s(self) -> float:
        return self.shared.stepper.elapsed_s()

    def results(self) -> Results:
        shared = self.shared.stepper.results()
        window = slice(None), self._window, slice(None if self.lists else 1)
        values = None if shared.values is None else shared.values[window]
        return Results(shared.ids[window], values)

    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        return self.shared.stepper.logits([self._window.start + row for row in rows])

    def release(self, slots: Sequence[int]) -> None:
        self.shared.stepper.release([self._first_slot + slot for slot in slots])
