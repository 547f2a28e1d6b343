"""The interfaces of a workload's target and draft workers.

The decoding loops in `decode` use a model only through these classes. Workers start forwards and
report when they are over; they never send messages, wait for a peer or read a clock. Every rank's
worker sees the same batch, because every rank applies the same outcomes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Batch, Ints, Request, Source, Speculation, verify_rows
from mpissd.common.wait import Waiter
from mpissd.engine.comm.learner_messages import Lesson, Sent
from mpissd.engine.model.forwards import Forwards, Places
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.cache import PageTable
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.placement import (
    LEAST_CHUNK,
    Gap,
    Placement,
    chunk,
    cut,
    joined,
)
from mpissd.engine.workload.rollout import Branches, Rollout
from mpissd.engine.workload.steps import Steps, finish

_ALL = 1 << 30
Admissions = Sequence[tuple[int, Request]]

W = TypeVar("W", bound="Worker")
# (batch row, i) → float32 [V]: the distribution from which drafted token i was drawn.
_NO_LOGPROBS: Mapping[int, list[float]] = {}
Proposals = Callable[[int, int], NDArray[np.float32]]


class LogitsGather(Protocol):
    """Gathers the T target ranks' shares of the logits on the lead."""

    def start(self, local: NDArray[np.float32]) -> None:
        """Starts to gather `local` [rows, V/T] (collective)."""

    def done(self) -> bool:
        """Returns whether the gather is over (never blocks)."""

    def result(self) -> NDArray[np.float32]:
        """Returns the gathered logits on the lead: float32 [T, rows, V/T]."""


OpenGather = Callable[[], LogitsGather]


class Worker(ABC):
    """Base class of target and draft workers: follows the batch, tracks the places of its rows in
    the model's KV cache, fills that cache, and runs forwards.

    Without a placement (a model of products) rows have no place, and nothing is ever filled.
    """

    stepper: Forwards
    placement: Placement | None = None
    num_rows = 0  # of the trunk forward that was uploaded last
    _opened: Mapping[int, Request] = {}  # by slot, those whose prompts are being stored
    # By request id, of the sequences placed in this round: tokens that others have stored.
    adopted: Mapping[int, int] = {}
    # Whether the device may decide whole greedy rounds by itself (decode.chained).
    chains: bool = False
    reads_forwards: ClassVar[bool] = False  # whether the forwards decide its tokens

    def prepare(self, requests: Iterable[Request]) -> None:  # noqa: B027
        """Draws the first tokens of these sequences ahead of the rounds that admit them.

        Called while no sequence is live. The default does nothing.
        """

    def done(self) -> bool:
        """Returns whether the launched forward is over; never blocks."""
        return self.stepper.done()

    def wait(self, waiter: Waiter) -> None:
        """Waits until the launched forward is over."""
        self.stepper.wait(waiter)

    def elapsed_s(self) -> float:
        """Returns the device time of the last finished forward, in seconds."""
        return self.stepper.elapsed_s()

    def close(self) -> None:
        """Frees the forwards; must be called before the group's communicator is freed."""
        self.stepper.close()

    @abstractmethod
    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        """Admits new sequences to their slots and prepares the tokens that this round needs.

        Called after an outcome was applied to `batch`. A slot that is used again forgets its
        previous sequence.
        """

    def enter(self, batch: Batch, admissions: Admissions) -> None:
        """Begins a round: places new sequences in the KV cache, rolls the others back."""
        placement, adopted = self.placement, dict[int, int]()
        if placement is not None:
            self._vacate(placement, batch.occupied)
            for slot, request in (*admissions, *batch.opened.items()):
                if self._opened.get(slot) is not request:
                    adopted[request.request_id] = self._place(placement, slot, request)
                elif slot not in batch.opened:  # it joins
                    self._keep(slot, request.prompt[: int(placement.filled[slot])])
            placement.roll_back(batch)
        self._opened, self.adopted = dict(batch.opened), adopted
        self.begin_round(batch, admissions)

    def _place(self, placement: Placement, slot: int, request: Request) -> int:
        """Gives a new sequence its slot; returns how many of its tokens are stored already."""
        shared = self.reusable(slot, request)
        if not shared:
            self._keep(slot, self.known(slot)[: int(placement.filled[slot])])  # of the last one
            self.stepper.release([slot])
            if placement.keeps and request.prompt and (pages := self._pages):
                shared = pages.adopt(slot, request.prompt[:-1])
        placement.admit(slot, request, shared)
        return shared

    def leave(self) -> None:
        """Ends a pass: gives back the pages of every sequence if sequences share pages."""
        if self.placement is not None:
            self._vacate(self.placement, np.zeros(0, np.int64))

    def forget(self) -> None:
        """Forgets the stored tokens of every sequence: the model's weights have changed.

        Committed tokens are stored again before the next forward that reads them.
        """
        if self.placement is not None:
            self.placement.filled[:] = 0

    def _vacate(self, placement: Placement, slots: NDArray[np.int64]) -> None:
        if left := placement.vacate(slots):
            for slot, filled in left:
                self._keep(slot, self.known(slot)[:filled])
            self.stepper.release([slot for slot, _ in left])

    @property
    def _pages(self) -> PageTable | None:
        return self.stepper.pages if isinstance(self.stepper, Stepper) else None

    def _keep(self, slot: int, tokens: Sequence[int]) -> None:
        """Lets later sequences take over the pages of a slot that store these tokens."""
        if self.placement is not None and self.placement.keeps and (pages := self._pages):
            pages.keep(slot, tokens)

    def known(self, slot: int) -> Sequence[int]:
        """Returns the tokens of a slot's sequence, as far as they were committed; none if
        forwards decide nothing."""
        return ()

    def reusable(self, slot: int, request: Request) -> int:
        """Returns how many tokens of a new prompt need no forward, since the slot's cache holds
        them.

        Returns 0 if sequences share the pages: pages left by a longer sequence belong to others,
        and the tokens of a sequence that never joined are unknown.
        """
        if self.placement is None or self.placement.pooled:
            return 0
        held = int(self.placement.filled[slot])
        return min(self.shared(slot, request), held)

    def shared(self, slot: int, request: Request) -> int:
        """Returns how many tokens of a new prompt begin the slot's last sequence."""
        return 0

    def committed(self, slot: int, start: int, stop: int) -> Ints:
        """Returns tokens start … stop − 1 of a slot's sequence, int32 [stop − start].

        If forwards decide nothing, any tokens may be returned.
        """
        return np.zeros(stop - start, np.int32)

    def fill(self, batch: Batch, rows: Sequence[int], waiter: Waiter, spare: int = 0) -> bool:
        """Like `filling`, forward by forward."""
        return bool(finish(self.filling(batch, rows, spare), lambda: self.stepper.wait(waiter)))

    def filling(
        self, batch: Batch, rows: Sequence[int], spare: int = 0, most: int | None = None
    ) -> Steps[int]:
        """Stores the committed tokens that the cache of batch rows `rows` lacks, prompts first.

        Rows that lack at most `spare` tokens are left out; of the others, `most` tokens are stored
        (None: all of them). Returns how many were; collective over the target ranks, which all see
        the same batch.
        """
        gaps = _first(self._gaps(batch, rows, spare), most)
        if self.placement is None or not gaps:
            return 0
        self.placement.fill(gaps)
        rows_apart: list[Gap] = []
        stepper = self.stepper
        is_long = any(gap.stop - gap.start >= LEAST_CHUNK for gap in gaps)
        for gap, is_chunk in cut(gaps, _chunk_rows(stepper) if is_long else 0):
            if not is_chunk:
                rows_apart.append(gap)
                continue
            yield from self._fill_rows(rows_apart)
            rows_apart = []
            stepper.upload_chunk(gap.slot, gap.start, self.committed(*gap))
            stepper.launch()
            yield
        yield from self._fill_rows(rows_apart)
        return sum(gap.stop - gap.start for gap in gaps)

    def _gaps(self, batch: Batch, rows: Sequence[int], spare: int) -> list[Gap]:
        if self.placement is None or not len(rows):
            return []
        return self.placement.gaps(batch, np.asarray(rows, np.int64), spare)

    def lacking(self, batch: Batch) -> int:
        """Returns how many committed tokens the cache lacks, but for those that a forward over the
        last ones stores."""
        return sum(gap.stop - gap.start for gap in self._gaps(batch, range(len(batch)), 1))

    def ready(self, batch: Batch, rows: list[int], spare: int) -> list[int]:
        """Returns the batch rows among `rows` that lack at most `spare` tokens."""
        short = {gap.slot for gap in self._gaps(batch, rows, spare)}
        return [row for row in rows if int(batch.slots[row]) not in short] if short else rows

    def _fill_rows(self, gaps: Sequence[Gap]) -> Steps[None]:
        """Stores the tokens of these gaps by forwards of as many rows as the stepper has."""
        if not gaps:
            return
        tokens = np.concatenate([self.committed(*gap) for gap in gaps])
        places, most = Placement.places_of(gaps), self.stepper.most_rows
        for start in range(0, len(tokens), most):
            part = slice(start, start + most)
            self.stepper.upload(len(tokens[part]), tokens[part], chunk(places, part))
            self.stepper.launch()
            yield

    def unstored(self, opened: Mapping[int, Request]) -> int:
        """Returns how many tokens of opened prompts, by slot, are still to be stored."""
        gaps = [] if self.placement is None else self.placement.opened_gaps(opened, _ALL)
        return sum(gap.stop - gap.start for gap in gaps)

    def is_stored(self, slot: int) -> bool:
        """Returns whether the whole prompt of an opened sequence is stored."""
        placement, request = self.placement, self._opened[slot]
        return placement is None or not placement.opened_gaps({slot: request}, 1)

    def store_opened(self, batch: Batch, rows: int) -> Steps[int]:
        """Stores up to `rows` tokens of opened prompts in a forward of their own; returns how
        many."""
        if self.placement is None or not rows:
            return 0
        gaps = self.placement.opened_gaps(batch.opened, min(rows, self.stepper.most_rows))
        if not gaps:
            return 0
        tokens, places = self._take(self.placement, gaps)
        self.stepper.upload(len(tokens), tokens, chunk(places, slice(None)))
        self.stepper.launch()
        yield
        return len(tokens)

    def _take(self, placement: Placement, gaps: Sequence[Gap]) -> tuple[Ints, Places]:
        """Returns the tokens and places of parts of opened prompts, which are stored from then
        on."""
        parts = [np.array(self._opened[g.slot].prompt[g.start : g.stop], np.int32) for g in gaps]
        return np.concatenate(parts), placement.fill(gaps)

    def _upload_trunk(
        self,
        rows: int,
        tokens: Ints,
        batch: Batch,
        speculation: Speculation,
        fill: int = 0,
        *,
        lists: bool = False,
    ) -> None:
        """Hands the last token of each sequence and its served tokens to the device.

        After them come up to `fill` tokens of opened prompts. lists: whether each row's best
        candidates are read, or only the best one.
        """
        self.num_rows = rows
        if self.placement is None:
            self.stepper.upload(rows, tokens, lists=lists)
            return
        places = self.placement.trunk(batch, speculation.num_draft)
        fill = min(fill, self.stepper.most_rows - rows)
        if gaps := self.placement.opened_gaps(batch.opened, fill) if fill > 0 else ():
            more, behind = self._take(self.placement, gaps)
            tokens, rows = np.concatenate([tokens, more]), rows + len(more)
            places = joined([places, behind])
            if not len(batch):
                places = chunk(places, slice(None))
        self.num_rows = rows
        self.stepper.upload(rows, tokens, places, lists=lists)

    def _upload_lanes(
        self, placement: Placement, rollouts: Sequence[Rollout], inputs: Sequence[Ints]
    ) -> int:
        """Hands the lanes' tokens to the device, after committed tokens that the cache lacks.

        Returns the row of the first lane; lanes follow one another.
        """
        tokens, parts = [*inputs], []
        gaps: list[Gap] = []
        for rollout in rollouts:
            assert rollout.places is not None, "a lane without a place"
            gaps += placement.missing(rollout.places, rollout.steps)
            parts.append(placement.step(rollout.places, rollout.steps))
        if gaps:
            tokens = [*(self.committed(*gap) for gap in gaps), *tokens]
            parts = [placement.places_of(gaps), *parts]
        every = np.concatenate(tokens)
        self.stepper.upload(len(every), every, joined(parts))
        return sum(gap.stop - gap.start for gap in gaps)


class TargetWorker(Worker):
    """Runs one target rank's share of the target model, and applies the acceptance rule."""

    def upload(self, batch: Batch, speculation: Speculation, fill: int = 0) -> None:
        """Hands the tokens that the next launch verifies to the device.

        A sequence has num_draft + 1 rows: its last committed token and its drafted tokens. After
        them, up to `fill` tokens of opened prompts are stored.
        """
        tokens = verify_rows(batch.last_tokens, speculation)
        self._upload_trunk(len(tokens), tokens, batch, speculation, fill)

    def launch(self) -> None:
        """Starts the forward over the uploaded rows (collective over the target ranks)."""
        self.stepper.launch()

    def served(self, batch: Batch, speculation: Speculation) -> None:
        """Records the speculation that is verified. The default does nothing."""

    def truth(self) -> Ints | None:
        """Returns the target's tokens of this round, int32 [b, K+1]; None: its forwards decide."""
        return None

    @abstractmethod
    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Applies the acceptance rule to the finished forward.

        Returns (num_accepted, bonus), both int32 [b]. `proposals` is called only if the rule
        rejects a token that was drawn with q < 1.
        """

    def logprobs(
        self, batch: Batch, speculation: Speculation, accepted: Ints, bonus: Ints
    ) -> Mapping[int, list[float]]:
        """Returns, by batch row, the log-probabilities of the tokens that a judged round emitted.

        Of the sequences that asked for them (Request.logprobs); by default of none.
        """
        return _NO_LOGPROBS

    def lessons(
        self, batch: Batch, accepted: Ints, bonus: Ints, sent: Sent, *, everywhere: bool
    ) -> list[Lesson]:
        """Returns a judged round's lessons for a learner, by sequence.

        sent: how many tokens of a sequence the learner has. everywhere: of all rows up to the
        bonus, or only of rows that rejected a drafted token.
        """
        raise NotImplementedError("lessons of a workload without logits")

    def logits_of(self, row: int) -> NDArray[np.float32]:
        """Returns the target's logits [V] of a row of the finished forward."""
        raise NotImplementedError("logits of a workload without them")


class DraftWorker(Worker):
    """Runs the whole draft model on a draft rank, or on the lead if the draft is inline."""

    lookahead: int
    first_row: int = 0  # the row of the first lane in the last step's forward

    def launch_glue(self, batch: Batch, speculation: Speculation) -> None:
        """Starts the forward that scores the served trunk, K+1 rows a sequence."""
        tokens = verify_rows(batch.last_tokens, speculation)
        rows = len(batch) * (self.lookahead + 1)
        self._upload_trunk(rows, tokens, batch, speculation, lists=True)
        self.stepper.launch()

    def served(self, batch: Batch, speculation: Speculation) -> None:
        """Records the speculation that was served.

        Called before the glue forward, and also in rounds that have none. The default does nothing.
        """

    @abstractmethod
    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Returns a lane (branch slot) for each bonus candidate t*, after the glue forward.

        The candidates are the rollout's `first`. A sequence whose speculation was a hit keeps
        fan_outs.after_hit[k] candidates at each k, and after_miss[k] after a miss. The token that
        was served after k accepted tokens is never one of them.
        """

    @abstractmethod
    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Rollout:
        """Returns new lanes that continue batch rows `rows` from their last committed token.

        source: which backup drafts them (JIT or FAST).
        """

    def settle(self, batch: Batch, rollout: Rollout, rows: NDArray[np.int64], k: Ints) -> None:
        """Gives new branches, after k accepted tokens of batch rows `rows`, their places."""
        if self.placement is not None:
            rollout.places = self.placement.lanes(batch, rows, k)

    def resume(self, batch: Batch, rows: Sequence[int], source: Source) -> Rollout:
        """Returns the lanes of `restart`, with their places in the KV cache."""
        rollout = self.restart(batch, rows, source)
        if self.placement is not None:
            rollout.places = self.placement.restart(batch, np.asarray(rows, np.int64))
        return rollout

    def launch_step(self, rollouts: Sequence[Rollout]) -> None:
        """Starts one forward that grows every lane of every rollout by one token."""
        inputs = [rollout.inputs for rollout in rollouts]
        if self.placement is not None:
            self.first_row = self._upload_lanes(self.placement, rollouts, inputs)
        else:
            tokens = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
            self.stepper.upload(len(tokens), tokens)
        self.stepper.launch()

    @abstractmethod
    def collect_step(self, rollouts: Sequence[Rollout]) -> None:
        """Stores the tokens of the finished step in the rollouts.

        Raises DivergedError, and leaves `steps` of unfinished rollouts as they are, if a token is
        sampled from logits that are not finite.
        """

    def is_sound(self) -> bool:
        """Returns whether the last step's logits were finite, if watched, as replaced weights
        are."""
        return True


def _first(gaps: list[Gap], most: int | None) -> list[Gap]:
    """Returns `most` tokens of these gaps, short gaps first (None: all)."""
    if most is None:
        return gaps
    found = []
    for gap in sorted(gaps, key=lambda gap: gap.stop - gap.start):
        if not most:
            break
        found.append(gap._replace(stop=min(gap.stop, gap.start + most)))
        most -= found[-1].stop - gap.start
    return found


def _chunk_rows(stepper: Forwards) -> int:
    """Returns the rows of the chunks in which these forwards compute long prompts; 0: none."""
    return getattr(stepper, "chunk_rows", 0)
