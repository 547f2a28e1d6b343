"""The target worker and the draft worker: they run a model's forwards for a batch.

The decoding loops in `decode` use a model only through these classes. A worker starts forwards and
reports when they are over; its oracle decides tokens. Workers never send messages, wait for a peer
or read a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from mpissd.common.rounds import Ints, Source, Speculation, verify_rows
from mpissd.common.wait import Waiter
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.model.forwards import Forwards, joined
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.cache import PageTable
from mpissd.engine.model.transformer.growing import ChainedGrowth
from mpissd.engine.round.oracle import (
    Branches,
    DraftOracle,
    Oracle,
    Proposals,
    Rollout,
    TargetOracle,
)
from mpissd.engine.round.sequence import (
    Batch,
    Change,
    Gap,
    Placement,
    places_of,
)

R = TypeVar("R")
AnyOracle = TypeVar("AnyOracle", bound=Oracle)
# Work that pauses at each of its forwards: it yields whenever it has launched one, and is resumed
# when that is over. Whoever drives it may run forwards of several groups as one (model.stepper).
Steps = Generator[None, None, R]


def finish(steps: Steps[R], wait: Callable[[], None]) -> R:
    """Runs all forwards of `steps`, each awaited by `wait`; returns their result."""
    while True:
        try:
            next(steps)
        except StopIteration as over:
            result: R = over.value
            return result
        wait()


class Worker(Generic[AnyOracle]):
    """Base class of both workers: fills the KV cache of a batch, and runs forwards.

    num_rows: rows of the trunk forward that was uploaded last. adopted: by request id, of the
    sequences that the last outcome placed, the tokens that other sequences have stored.
    """

    def __init__(
        self, stepper: Forwards, oracle: AnyOracle, placement: Placement | None = None
    ) -> None:
        """placement: None if the model keeps no KV cache; then nothing is ever filled."""
        self.stepper, self.oracle, self.placement = stepper, oracle, placement
        self.num_rows = 0
        self.adopted: Mapping[int, int] = {}

    def open_batch(self, capacity: int) -> Batch:
        """Returns an empty batch, for one pass of the loop."""
        prompt = self.oracle.prompt if self.oracle.reads_tokens else None
        batch = Batch(capacity, self.placement, prompt)
        batch.tree = self.oracle.tree
        batch.layout = self.oracle.layout
        return batch

    def wait(self, waiter: Waiter) -> None:
        """Waits until the launched forward is over."""
        self.stepper.wait(waiter)

    def elapsed_s(self) -> float:
        """Returns the device time of the last finished forward, in seconds."""
        return self.stepper.elapsed_s()

    def enter(self, batch: Batch, change: Change) -> None:
        """Begins a round: frees the caches of sequences that left, and places new ones."""
        if self.adopted:
            self.adopted = {}
        for lane, gap in change.moves:
            self.stepper.move(lane, *gap)
        if self.placement is not None and any(change):
            pages = self._kept_pages
            self._free(change.left)
            if pages is not None:
                for one in change.started:  # other sequences may use the prompt that it has stored
                    pages.keep(one.slot, batch.stored_of(one))
                self.adopted = {one.request.request_id: 0 for one in change.placed}
                for one in change.placed:
                    batch.filled[one.slot] = shared = pages.adopt(one.slot, one.tokens[:-1])
                    self.adopted[one.request.request_id] = shared
        self.oracle.begin_round(batch, change.started)

    def leave(self, batch: Batch) -> None:
        """Ends a pass: frees the cache of every sequence."""
        if self.placement is not None:
            left = [*batch.sequences, *batch.opened.values()]
            self._free([(one.slot, batch.stored_of(one)) for one in left])

    def _free(self, left: Sequence[tuple[int, list[int]]]) -> None:
        """Frees the caches of these slots, after later sequences may reuse the pages that store
        these tokens."""
        if not left:
            return
        if (pages := self._kept_pages) is not None:
            for slot, tokens in left:
                pages.keep(slot, tokens)
        self.stepper.release([slot for slot, _ in left])

    @property
    def _kept_pages(self) -> PageTable | None:
        keeps = self.placement is not None and self.placement.keeps
        return self.stepper.pages if keeps and isinstance(self.stepper, Stepper) else None

    def fill(self, batch: Batch, rows: Sequence[int], waiter: Waiter, spare: int = 0) -> bool:
        """Like `filling`, forward by forward."""
        return bool(finish(self.filling(batch, rows, spare), lambda: self.stepper.wait(waiter)))

    def filling(self, batch: Batch, rows: Sequence[int], spare: int = 0) -> Steps[int]:
        """Stores the committed tokens that the cache of batch rows `rows` lacks, prompts first.

        Rows that lack at most `spare` tokens are left out. Returns how many tokens were stored;
        collective over the target ranks, which all see the same batch.
        """
        if gaps := batch.gaps(rows, spare):
            batch.fill(gaps)
            yield from self._fill_rows(batch, gaps)
        return sum(gap.size for gap in gaps)

    def is_short(self, batch: Batch, rows: int) -> bool:
        """Whether the forced tokens that the cache lacks do not fit beside `rows` others."""
        if not batch.forced:
            return False
        lacking = sum(gap.size for gap in batch.gaps(range(len(batch))))
        return lacking > max(0, self.stepper.most_rows - rows)

    def _fill_rows(self, batch: Batch, gaps: Sequence[Gap]) -> Steps[None]:
        """Stores the tokens of these gaps by forwards of as many rows as the stepper has."""
        tokens = np.concatenate([batch.committed(gap) for gap in gaps])
        places, most = places_of(gaps), self.stepper.most_rows
        for start in range(0, len(tokens), most):
            part = slice(start, start + most)
            self.stepper.upload(len(tokens[part]), tokens[part], places.part(part))
            self.stepper.launch()
            yield

    def store_opened(self, batch: Batch, rows: int) -> Steps[int]:
        """Stores up to `rows` tokens of opened prompts in a forward of their own; returns how
        many."""
        gaps = batch.opened_gaps(min(rows, self.stepper.most_rows)) if rows else []
        if gaps:
            batch.fill(gaps)
            yield from self._fill_rows(batch, gaps)
        return sum(gap.size for gap in gaps)

    def _upload_trunk(
        self,
        batch: Batch,
        speculation: Speculation,
        rows: int | None = None,
        fill: int = 0,
        *,
        lists: bool = False,
    ) -> int:
        """Hands the last token of each sequence and its served tokens to the device; returns how
        many tokens these are.

        rows: of the forward, padding included (None: no padding). After them come the forced tokens
        that the cache lacks, and up to `fill` tokens of opened prompts. lists: whether each row's
        best candidates are read, or only the best one.
        """
        tokens = verify_rows(batch.last_tokens, speculation)
        count = len(tokens)
        self.num_rows = rows = count if rows is None else rows
        if self.placement is None:
            self.stepper.upload(rows, tokens, lists=lists)
            return count
        gaps = batch.gaps(range(len(batch))) if batch.forced else []
        parts = [batch.fill(gaps)] if gaps else []
        places = batch.trunk(speculation.num_draft)
        fill = min(fill, self.stepper.most_rows - rows - sum(gap.size for gap in gaps))
        if opened := batch.opened_gaps(fill) if fill > 0 else []:
            parts.append(batch.fill(opened))
        if parts:
            others = [batch.committed(gap) for gap in (*gaps, *opened)]
            tokens = np.concatenate([tokens, *others])
            places = joined([places, *parts], reads=len(batch) > 0)
            self.num_rows = rows = rows + sum(map(len, others))
        self.stepper.upload(rows, tokens, places, lists=lists)
        return count


class TargetWorker(Worker[TargetOracle]):
    """Runs one target rank's share of the target model, and applies the acceptance rule."""

    def upload(self, batch: Batch, speculation: Speculation, fill: int = 0) -> None:
        """Hands the tokens that the next launch verifies to the device.

        A sequence has num_draft + 1 rows: its last committed token and its drafted tokens. After
        them, up to `fill` tokens of opened prompts are stored.
        """
        batch.serve(speculation)
        self._verified = self._upload_trunk(batch, speculation, fill=fill)

    def launch(self) -> None:
        """Starts the forward over the uploaded rows (collective over the target ranks)."""
        self.stepper.launch()

    def wait(self, waiter: Waiter) -> None:
        """Waits until the forward is over, and what judging needs has arrived."""
        self.stepper.wait(waiter)
        self.oracle.gather(self._verified, waiter)

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Applies the acceptance rule (TargetOracle.judge)."""
        return self.oracle.judge(batch, speculation, proposals)


class DraftWorker(Worker[DraftOracle]):
    """Runs the whole draft model on a draft rank, or on the lead if the draft is inline.

    growth: the programs of growth whose steps the device joins (None: the host does).
    """

    growth: ChainedGrowth | None = None

    def launch_glue(self, batch: Batch, speculation: Speculation) -> None:
        """Starts the forward that scores the served trunk, N+1 rows a sequence."""
        rows = len(batch) * (self.oracle.tree.ends[self.oracle.lookahead] + 1)
        self._upload_trunk(batch, speculation, rows, lists=True)
        self.stepper.launch()

    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Rollout:
        """Returns new lanes that continue batch rows `rows`, with their places in the cache."""
        rollout = self.oracle.restart(batch, rows, source)
        rollout.tree = self.oracle.tree
        if self.placement is not None:
            rollout.places = batch.restart(np.asarray(rows, np.int64))
        return rollout

    def place_branches(self, batch: Batch, branches: Branches) -> None:
        """Gives new branches their shape, and their places in the cache."""
        lanes, rollout = branches
        rollout.tree = self.oracle.tree
        if self.placement is not None:
            rollout.places = batch.lanes(lanes.rows, lanes.k, lanes.place)

    def grow_ahead(
        self, batch: Batch, speculation: Speculation, fan_outs: FanOuts, steps: int
    ) -> Branches | None:
        """Launches the first of `steps` steps behind the glue; returns the branches, whose first
        tokens are known after the next wait. None: they are to be grown step by step."""
        if self.growth is None or batch.forced:
            return None
        branches, picks = self.oracle.ahead(batch, speculation, fan_outs)
        self.place_branches(batch, branches)
        assert branches.rollout.places is not None, "a lane without a place"
        places = batch.step(branches.rollout.places, 0)
        is_begun = self.growth.begin(branches.rollout, places, picks, steps)
        return branches if is_begun else None

    def launch_step(self, batch: Batch, rollouts: Sequence[Rollout]) -> None:
        """Starts one forward that grows every lane of every rollout by one level of its tree.

        Committed tokens that the cache lacks come first in it. Of growth that the device joins,
        it starts the step after the one that runs.
        """
        if self.growth is not None and self.growth.left:
            self.growth.launch()
            return
        tokens = [rollout.inputs for rollout in rollouts]
        self._first_row, places = 0, None
        if self.placement is not None:
            parts, gaps = [], list[Gap]()
            for rollout in rollouts:
                assert rollout.places is not None, "a lane without a place"
                gaps += batch.missing(rollout.places, rollout.steps)
                parts.append(batch.step(rollout.places, rollout.steps))
            if gaps:
                tokens = [*map(batch.committed, gaps), *tokens]
                parts = [places_of(gaps), *parts]
                self._first_row = sum(gap.size for gap in gaps)
            places = joined(parts)
        every = tokens[0] if len(tokens) == 1 else np.concatenate(tokens)
        self.stepper.upload(len(every), every, places, lists=self.oracle.tree.width > 1)
        self.stepper.launch()

    def collect_step(self, rollouts: Sequence[Rollout]) -> None:
        """Stores the tokens of the finished step in the rollouts (DraftOracle.collect)."""
        if self.growth is not None and self.growth.left:
            self.growth.collect()
        else:
            self.oracle.collect(rollouts, self._first_row)

    def forget(self, batch: Batch) -> None:
        """Forgets the stored tokens of every sequence: the model's weights have changed.

        Committed tokens are stored again before the next forward that reads them.
        """
        batch.filled[:] = 0
        self.oracle.forget()
