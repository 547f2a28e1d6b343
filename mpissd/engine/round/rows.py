"""The workers of the target and the draft, which choose the rows (tokens) of a model's forwards.

A forward computes either the trunk (each sequence's last committed token and the drafted tokens
that the target verifies), or one step of a draft's branches. It may also compute committed tokens
only to store their K and V: prompts or parts of them, and other tokens that the KV cache lacks. The
loops of the rounds use a model only through a worker, which sends no messages. The worker's oracle
decides tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from mpissd.common.rounds import Ints, Speculation, verify_rows
from mpissd.common.wait import Waiter
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.model.forwards import Forwards, joined
from mpissd.engine.model.transformer.cache import PageTable
from mpissd.engine.round.branches import Branches
from mpissd.engine.round.oracle import DraftOracle, Oracle, Proposals, TargetOracle
from mpissd.engine.round.sequence import Batch, Change, Gap, Part, Placement, places_of

AnyOracle = TypeVar("AnyOracle", bound=Oracle)


class Worker(Generic[AnyOracle]):
    """Base class of TargetWorker and DraftWorker: runs a model's forwards and fills the KV cache.

    num_rows: the rows of the last forward that verified or scored drafted tokens. adopted: by
    request id, for the sequences that joined in this round, how many of their tokens are stored in
    KV pages of other sequences, which they share. prompt_parts: the parts of prompts in the
    last forward whose log-probabilities are asked for. Such prompts share no pages, since pages
    hold no logits.
    """

    def __init__(
        self, stepper: Forwards, oracle: AnyOracle, placement: Placement | None = None
    ) -> None:
        """stepper: runs the model's forwards. oracle: decides tokens. placement: how sequences use
        the model's KV cache (None: there is no cache)."""
        self.stepper = stepper
        self.oracle = oracle
        self.placement = placement
        self.num_rows = 0
        self.adopted: Mapping[int, int] = {}
        self.prompt_parts: list[Part] = []

    def open_batch(self, capacity: int) -> Batch:
        """Returns an empty batch, the list of live sequences, of at most `capacity` sequences."""
        prompt = self.oracle.prompt if self.oracle.reads_tokens else None
        placement = self.placement
        make = None if placement is None else placement.batches
        return (make or Batch)(capacity, placement, prompt, self.oracle.shape)

    def launch(self) -> None:
        """Starts the forward over the uploaded rows. All ranks that share the model call it."""
        self.stepper.launch()

    def wait(self, waiter: Waiter) -> None:
        """Waits until the launched forward is over."""
        self.stepper.wait(waiter)

    def elapsed_s(self) -> float:
        """Returns the device time of the last finished forward, in seconds."""
        return self.stepper.elapsed_s()

    def enter(self, batch: Batch, change: Change) -> None:
        """Begins a round: frees the KV caches of sequences that left, and lets new sequences share
        pages in which other sequences have stored the same tokens. change: made by the outcome."""
        if self.adopted:
            self.adopted = {}
        for lane, gap in change.moves:
            self.stepper.move(lane, *gap)
        if self.placement is not None and any(change):
            pages = self._kept_pages
            self._free(change.left)
            if pages is not None:
                for sequence in change.started:  # later ones can share its prompt's K, V
                    pages.keep(sequence.slot, batch.stored_of(sequence))
                self.adopted = {
                    sequence.request.request_id: pages.adopt(
                        sequence.slot, () if sequence.is_scored else sequence.tokens[:-1]
                    )
                    for sequence in change.placed
                }
                for sequence in change.placed:
                    batch.filled[sequence.slot] = self.adopted[sequence.request.request_id]
        self.oracle.begin_round(batch, change.started)

    def leave(self, batch: Batch) -> None:
        """Frees the KV cache of every sequence when the loop ends."""
        if self.placement is not None:
            left = [*batch.sequences, *batch.opened.values()]
            self._free([(sequence.slot, batch.stored_of(sequence)) for sequence in left])

    def _free(self, left: Sequence[tuple[int, list[int]]]) -> None:
        """Frees KV cache slots, but keeps their pages for later sequences that begin with the same
        tokens. left: a (slot, tokens stored in it) for each slot."""
        if not left:
            return
        if (pages := self._kept_pages) is not None:
            for slot, tokens in left:
                pages.keep(slot, tokens)
        self.stepper.release([slot for slot, _ in left])

    @property
    def _kept_pages(self) -> PageTable | None:
        keeps = self.placement is not None and self.placement.keeps
        return getattr(self.stepper, "pages", None) if keeps else None

    def catch_up(self, batch: Batch, rows: Sequence[int], waiter: Waiter, spare: int = 0) -> int:
        """Stores K and V of the committed tokens that the KV cache lacks, for each batch row of
        `rows` that lacks more than `spare`. Returns their number. Collective."""
        lag = 0 if self.placement is None else self.placement.lag
        return self._store(batch, batch.gaps(rows, max(spare, lag)), waiter)

    def store_opened(self, batch: Batch, rows: int, waiter: Waiter) -> int:
        """Stores K and V of up to `rows` tokens of prompts that are stored in parts (chunked
        prefill), by a forward only for them. Returns how many tokens were stored."""
        gaps = batch.opened_gaps(min(rows, self.stepper.most_rows)) if rows else []
        return self._store(batch, gaps, waiter)

    def _store(self, batch: Batch, gaps: Sequence[Gap], waiter: Waiter) -> int:
        """Runs forwards that only store K and V of the tokens in `gaps`, ranges of positions that
        the KV cache lacks. Returns the number of tokens."""
        if not gaps:
            return 0
        tokens = np.concatenate([batch.committed(gap) for gap in gaps])
        places = batch.store(gaps)
        most = self.stepper.most_rows
        for start in range(0, len(tokens), most):
            part = slice(start, start + most)
            self.stepper.upload(len(tokens[part]), tokens[part], places.part(part))
            self.stepper.launch()
            self.stepper.wait(waiter)
        return len(tokens)

    def is_short(self, batch: Batch, rows: int) -> bool:
        """Returns whether the next forward, which needs `rows` rows itself, has no room to also
        store the tokens that grammars forced and that the KV cache lacks."""
        if not batch.forced:
            return False
        lacking = sum(gap.size for gap in batch.gaps(range(len(batch))))
        return lacking > max(0, self.stepper.most_rows - rows)

    def _upload_trunk(
        self,
        batch: Batch,
        speculation: Speculation,
        rows: int | None = None,
        fill: int = 0,
        *,
        lists: bool = False,
    ) -> int:
        """Uploads the last committed token and the drafted tokens of each sequence as the rows of
        the next forward. Returns their number.

        rows: the number to which these rows are padded (None: no padding). Rows that are only
        stored in the KV cache follow: tokens that grammars forced, and up to `fill` tokens of
        prompts that are stored in parts. lists: whether the caller will read several of each row's
        likeliest tokens, or only the first one.
        """
        tokens = verify_rows(batch.last_tokens, speculation)
        count = len(tokens)
        rows = count if rows is None else rows
        self.num_rows = rows
        self.prompt_parts = []
        if self.placement is None:
            self.stepper.upload(rows, tokens, lists=lists)
            return count
        gaps = batch.gaps(range(len(batch))) if batch.forced else []
        stored = [batch.store(gaps)] if gaps else []
        places = batch.trunk(speculation.num_draft)
        fill = min(fill, self.stepper.most_rows - rows - sum(gap.size for gap in gaps))
        if opened := batch.opened_gaps(fill) if fill > 0 else []:
            stored.append(batch.store(opened))
            first = count + sum(gap.size for gap in gaps)
            for gap in opened:
                if batch.opened[gap.slot].is_scored:
                    self.prompt_parts.append(Part(batch.opened[gap.slot], gap, first))
                first += gap.size
        if stored:
            others = [batch.committed(gap) for gap in (*gaps, *opened)]
            tokens = np.concatenate([tokens, *others])
            places = joined([places, *stored], reads=len(batch) > 0 or bool(self.prompt_parts))
            rows += sum(map(len, others))
            self.num_rows = rows
        self.stepper.upload(rows, tokens, places, lists=lists)
        return count


class TargetWorker(Worker[TargetOracle]):
    """Runs one target rank's share of the target model, and applies the acceptance rule."""

    knows_trees = False  # whether the host knows trees that change shape each round
    _verified = 0  # the number of rows (tokens) that the last forward verified

    def upload(self, batch: Batch, speculation: Speculation, fill: int = 0) -> None:
        """Uploads the tokens that the next forward verifies: the last committed token and the
        drafted tokens of each sequence. The same forward also stores up to `fill` tokens of prompts
        that are stored in parts (chunked prefill)."""
        batch.serve(speculation)
        self._verified = self._upload_trunk(batch, speculation, fill=fill)
        self.oracle.scores = bool(self.prompt_parts)
        if self.prompt_parts:
            self._verified = self.num_rows

    def wait(self, waiter: Waiter) -> None:
        """Waits until the forward is over. Then collects what judging needs from other ranks."""
        self.stepper.wait(waiter)
        self.oracle.gather(self._verified, waiter)

    def verified(self, speculation: Speculation) -> Speculation:
        """Returns the drafted tokens that the finished forward verified: `speculation` as it was
        uploaded, except in a subclass whose GPU drafts the tokens itself."""
        return speculation

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Decides which drafted tokens of `speculation` are accepted. Returns (number of accepted
        tokens, bonus token), int32 [b]. proposals: returns a drafted token's distribution."""
        return self.oracle.judge(batch, speculation, proposals)


class DraftWorker(Worker[DraftOracle]):
    """Runs the whole draft model, on a draft rank or (inline SD) on the target's rank 0.

    masks: the mask tokens that a parallel draft reads after the last token of a branch; else ().
    """

    _first_row = 0  # the row of the last forward at which the branches' rows begin

    def __init__(
        self,
        stepper: Forwards,
        oracle: DraftOracle,
        placement: Placement | None = None,
        masks: Sequence[int] = (),
    ) -> None:
        """masks: those of a model without a KV cache; with one, `placement` has them."""
        super().__init__(stepper, oracle, placement)
        self.masks = masks if placement is None else placement.masks

    def launch_scoring(
        self, batch: Batch, speculation: Speculation, fan_outs: FanOuts, levels: int
    ) -> None:
        """Starts the draft's forward over the last committed token and the drafted tokens of each
        sequence, which the target verifies now. Its logits give candidates for the bonus token.
        fan_outs, levels: how many branches will grow and to how many levels, for subclasses that
        launch their growth together with this forward."""
        rows = len(batch) * (self.oracle.shape.ends[self.oracle.lookahead] + 1)
        self._upload_trunk(batch, speculation, rows, lists=True)
        self.stepper.launch()

    def scored(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Returns a new branch for each bonus candidate in the results of the scoring forward."""
        return self.oracle.branches(batch, speculation, fan_outs)

    def launch_step(self, batch: Batch, growing: Sequence[Branches]) -> None:
        """Starts one forward that grows branches by one level; it also stores tokens that the KV
        cache lacks before branches in their sequences' slots."""
        tokens = [self._inputs(branches) for branches in growing]
        self._first_row = 0
        places = None
        if self.placement is not None:
            parts = []
            gaps = list[Gap]()
            for branches in growing:
                assert branches.places is not None, "a branch without a place"
                if not branches.steps and branches.places.are_trunk:
                    gaps += batch.gaps(branches.rows)
                parts.append(batch.step(branches.places, branches.steps))
            if gaps:
                tokens = [*map(batch.committed, gaps), *tokens]
                parts = [places_of(gaps), *parts]
                self._first_row = sum(gap.size for gap in gaps)
            places = joined(parts)
        inputs = tokens[0] if len(tokens) == 1 else np.concatenate(tokens)
        self.stepper.upload(len(inputs), inputs, places, lists=self.oracle.shape.width > 1)
        self.stepper.launch()

    def _inputs(self, branches: Branches) -> Ints:
        """Returns the tokens that the next forward of these branches reads, int32 [rows]. To draft
        all levels at once, a parallel draft reads its mask tokens after each branch's token."""
        if not self.masks:
            return branches.inputs
        masks = np.array(self.masks, np.int32)
        return np.column_stack([branches.inputs, np.tile(masks, (len(branches), 1))]).reshape(-1)

    def collect_step(self, growing: Sequence[Branches]) -> None:
        """Appends the tokens that the finished forward drafted to the branches."""
        self.oracle.collect(growing, self._first_row)

    def settle(self, waiter: Waiter) -> bool:
        """Waits for draft forwards that a subclass has launched ahead, and returns whether there
        were any. Called before any other forward. The default returns False."""
        return False

    def forget(self, batch: Batch) -> None:
        """Marks the K and V of all tokens as invalid, because the weights have changed. Committed
        tokens are computed again before the next forward that attends to them."""
        batch.filled[:] = 0
        self.oracle.forget()
