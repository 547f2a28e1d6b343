"""Drafts greedy branches on the GPU without waiting for the host (`DeviceGrowth`).

In SSD a draft prepares a branch for each likely outcome of a verification. A *scoring forward*
gives the branches' first tokens, candidates for the bonus token, and each later forward, a *step*,
adds one token to all branches. Between two forwards a small kernel, a *stage* (grow.cu, and
`GrowthSheet.run` on a host), copies the chosen tokens into the next input and advances each row's
position. So a step is launched before the host has read the previous forward's tokens.
"""

from collections.abc import Collection
from typing import Any

import numpy as np

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import HostArray, Program
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.cache import PADDING
from mpissd.engine.model.transformer.device_rounds import Ends
from mpissd.engine.model.transformer.trees import NOBODY

_IN_FLIGHT = 2  # the most programs that are launched before the host reads the first one's tokens


class GrowthSheet:
    """Host arrays through which the kernels between forwards (stages) grow up to R branches by K
    tokens. They are views of `ints`, int32 [1 + R · (8 + K)]. step: [1], the number of the next
    stage. places: [4, R], where the next step's rows lie in the KV cache: slot, position, lane and
    trunk (see forwards.Places). picks: [3, R], for each branch the row of the last forward that
    gives its next token, the token's rank among that row's candidates, and a candidate that is
    skipped, because the draft has proposed it there already (NOBODY: none). tokens: [K + 1, R], the
    branches' first tokens, then those of each step; NOBODY: the stage decides."""

    def __init__(self, ints: HostArray, rows: int) -> None:
        self.ints = ints
        self.step = ints[:1]
        self.places, self.picks, self.tokens = np.split(ints[1:].reshape(-1, rows), (4, 7))
        self.places[...] = PADDING

    def run(self, rows: int, draft: Ends, ids: Ints | None) -> None:
        """Runs on the host the stage before a step of `rows` rows, as grow.cu does on a GPU: picks
        each branch's next token and writes the step's input. draft: the draft's buffers. ids: the
        token of each column of its logits (None: column n is token n)."""
        part = slice(rows)
        branches = np.arange(rows)
        lines, ranks, served = self.picks[:, part]
        candidates = draft.best.ids[lines]
        if ids is not None:
            candidates = ids[candidates]
        order = np.argsort(candidates == served[:, None], axis=1, kind="stable")
        tokens = self.tokens[self.step[0], part]
        chosen = candidates[branches, order[branches, ranks]]
        tokens[...] = np.where(tokens < 0, chosen, tokens)
        draft.tokens[part] = tokens
        draft.row_places.rows[:, part] = self.places[:, part]
        self.places[1, part] += 1
        lines[...] = branches
        ranks[...] = 0
        served[...] = NOBODY
        self.step[0] += 1


class DeviceGrowth:
    """Compiled programs that grow a draft's greedy branches: the first stage (a kernel that makes
    the inputs of a forward), then steps, forwards with a stage after each. Two programs may be
    under way, and `stepper.wait` waits for the older one. left: the number of programs that are
    launched and not yet read; while it is above 0, the stepper must not be used otherwise."""

    def __init__(self, stepper: Stepper, lanes: Collection[int], steps: int) -> None:
        """Compiles the programs for the transformer of `stepper`. lanes: the branch counts to
        compile for. steps: K, the most tokens that a branch grows by."""
        self._stepper = stepper
        self.left = 0
        stack: Any = stepper.stack
        rows = {stepper.bucket(count) for count in lanes}
        ops = stack.weights.ops
        ids = None if stack.weights.head_ids is None else ops.ids(stack.weights.head_ids)
        ints = stepper.backend.host_ints(1 + max(rows) * (8 + steps))
        self.sheet = GrowthSheet(ints, max(rows))
        stack.place(None)

        def program(rows: int, k: int) -> Program:
            forward = stack.body(rows, 1)
            ends = Ends.of(stack, k)

            def body() -> None:
                if k == 1:
                    stack.steer()
                    forward()
                ops.grow(self.sheet, rows, ends, ids)

            self.sheet.step[0] = 0
            return stepper.backend.program(body, stepper.cost(rows))

        self._first = program(max(rows), stepper.options.top_k)
        self._steps = {size: [program(size, 1) for _ in range(_IN_FLIGHT)] for size in rows}

    def begin(self, lanes: Any, places: Places, picks: Any, steps: int) -> bool:
        """Launches the first of `steps` steps after the scoring forward, which was launched last.
        lanes: the branches, whose `first` and `tokens` are their prescribed tokens (NOBODY: the
        draft decides). places: where the first step's rows lie in the KV cache. picks: int32 [3,
        n], for each branch the row of the scoring forward that gives its first token, the token's
        rank there, and a candidate to skip (see GrowthSheet). Returns False, with nothing done, if
        no programs were compiled for so many branches."""
        sheet = self.sheet
        part = slice(len(lanes))
        if not len(lanes) or (turns := self._steps.get(self._stepper.bucket(len(lanes)))) is None:
            return False
        sheet.places[...] = PADDING
        sheet.step[0] = 0
        sheet.places[:, part] = places.columns
        sheet.tokens[0, part] = lanes.first
        sheet.tokens[1:, part] = lanes.tokens.T
        sheet.picks[:, part] = picks
        self._programs = [self._first, *(turns[n % _IN_FLIGHT] for n in range(steps))]
        self._lanes = lanes
        self._collected = 0
        self.launch()
        return True

    def launch(self) -> None:
        """Launches further steps (compiled forwards) until two are under way or all launched."""
        first = self._collected
        for program in self._programs[first + self.left : first + _IN_FLIGHT]:
            program.launch()
            self.left += 1
        self._stepper.current = self._programs[first]

    def collect(self) -> None:
        """Appends a token to each branch, as drafted by the older of the launched programs
        (forwards), which must have finished."""
        number = self._collected
        lanes = self._lanes
        tokens = self.sheet.tokens[number, : len(lanes)]
        if number:
            lanes.append(tokens)
        else:
            lanes.first = tokens.copy()
        self._collected += 1
        self.left -= 1
        if self.left:
            self._stepper.current = self._programs[self._collected]
