"""A whole model on one GPU with real keys and values, and the floor of its forwards."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpissd.common.presets import resolve_model
from mpissd.common.rounds import Ints
from mpissd.common.wait import Waiter
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.transformer import families
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.random_weights import RandomCheckpoint
from mpissd.engine.model.transformer.shard import TransformerShard
from mpissd.engine.model.transformer.stack import TransformerStack
from mpissd.engine.model.transformer.weights import load_weights
from mpissd.engine.workload.placement import joined

PROMPT_ROWS = 128  # of the forwards that fill a cache
WARM_UP, LAUNCHES = 5, 40
BIT_ROWS, BIT_LANES = (2, 5, 8, 9, 16, 17, 24, 31, 32), 3
WAITER = Waiter(60.0, spin=True)


class WholeModel:
    """One model of random weights, `slots` sequences at once, and lanes for a draft's growth."""

    def __init__(
        self,
        backend: Any,
        where: str,
        *,
        capacity: int,
        slots: int = 1,
        lanes: int = 0,
        steps: int = 0,
    ) -> None:
        """Loads the model; a name whose weights are installed has random ones, too."""
        self.backend = backend
        checkpoint = RandomCheckpoint(families.of_preset(resolve_model(where)), 1)
        self.shard = TransformerShard(checkpoint.config)
        self.options = ForwardOptions(
            lm_head=True, top_k=1, values=True, capacity=capacity, lanes=lanes, steps=steps
        )
        weights = load_weights(backend, checkpoint, self.shard, max_rows=PROMPT_ROWS)
        self.stack = TransformerStack(
            backend, SoloGroup(), self.shard, self.options, weights,
            max_rows=PROMPT_ROWS, max_sequences=slots,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The shape's name."""
        return self.shard.shape.name

    @property
    def kernel(self) -> str:
        """Name of the kernels that read the weights."""
        return self.stack.weights.kernel

    def tokens(self, count: int, slot: int = 0) -> Ints:
        """Returns the first tokens of a slot's sequence, the same in every process."""
        drawn = np.random.default_rng((7, slot)).integers(0, self.shard.shape.vocab_size, count)
        return drawn.astype(np.int32)

    def program(self, rows: int) -> Any:
        """Compiles a forward of `rows` rows."""
        return self.backend.program(self.stack.body(rows), self.shard.cost(1, 1, 2, self.options))

    def fill(self, context: int, slots: int = 1) -> None:
        """Stores the first `context` tokens of these slots, by rows as in decoding."""
        program = self.program(PROMPT_ROWS)
        for slot in range(slots):
            tokens = self.tokens(context, slot)
            for start in range(0, context, PROMPT_ROWS):
                part = tokens[start : start + PROMPT_ROWS]
                self.set(part, trunk_rows(slot, start, start + len(part)))
                run(program)
        program.close()

    def set(self, tokens: Ints, places: Places) -> None:
        """Sets the next forward's rows."""
        self.stack.buffers.tokens[: len(tokens)] = tokens
        self.stack.place(places)

    def best(self, rows: int) -> tuple[Any, Any]:
        """Returns the best token of each row of the last forward, and its logit."""
        ids, values = self.stack.read(rows)
        return ids[0, 0, :rows, 0], values[0, 0, :rows, 0]

    def greedy(self, prompt: Ints, count: int) -> Ints:
        """Returns the `count` tokens that the model says behind a prompt, one row at a time."""
        program, tokens = self.program(1), prompt.tolist()
        for position in range(len(prompt) + count - 1):
            self.set(np.array(tokens[position : position + 1], np.int32),
                     trunk_rows(0, position, position + 1))  # fmt: skip
            run(program)
            if position >= len(prompt) - 1:
                tokens.append(int(self.best(1)[0][0]))
        program.close()
        return np.array(tokens[len(prompt) :], np.int32)

    def floor_s(self, read_rate: float, kv_tokens: int) -> float:
        """Returns the seconds in which weights, LM head and these keys and values are read."""
        params = self.shard.num_params(self.options)
        return (2 * params + self.shard.kv_bytes(kv_tokens, 1)) / read_rate


def different_rows(model: WholeModel, context: int) -> int:
    """Returns how many rows behind a context have other bits in forwards of several rows.

    Forwards of each of BIT_ROWS rows are compared with those of one: of rows of slot 0, and of
    these mixed with two rows of slot 1 and BIT_LANES lanes of slot 0.
    """
    model.fill(context, 2)
    programs = {count: model.program(count) for count in (1, *BIT_ROWS)}

    def logits(rows: Sequence[_Row]) -> Any:
        model.set(np.array([token for token, _ in rows], np.int32), joined([at for _, at in rows]))
        run(programs[len(rows)])
        return model.stack.logits(range(len(rows)))

    different = 0
    for rows in _bit_rows(model, context):
        alone = np.concatenate([logits([row]) for row in rows])
        for count in BIT_ROWS:
            different += int((logits(rows[:count]) != alone[:count]).any(axis=1).sum())
    for program in programs.values():
        program.close()
    return different


_Row = tuple[int, Places]  # a token, and its place


def _bit_rows(model: WholeModel, context: int) -> tuple[list[_Row], list[_Row]]:
    """Returns rows of slot 0 behind a context, and as many of it, slot 1 and lanes in turn."""

    def trunk(slot: int, count: int) -> list[_Row]:
        tokens = model.tokens(count, slot=50 + slot).tolist()
        places = [trunk_rows(slot, context + n, context + n + 1) for n in range(count)]
        return list(zip(tokens, places, strict=True))

    at = lane_rows(context, BIT_LANES, 0)
    lanes = [
        (token, Places(at.slots[[n]], at.positions[[n]], at.lanes[[n]], at.trunks[[n]]))
        for n, token in enumerate(model.tokens(BIT_LANES, slot=52).tolist())
    ]
    own, second = trunk(0, BIT_ROWS[-1]), trunk(1, 2)
    mixed = [own[0], lanes[0], second[0], own[1], lanes[1], second[1], *lanes[2:], *own[2:]]
    return own, mixed[: len(own)]


def run(program: Any) -> float:
    """Runs a program; returns its device time in seconds."""
    program.launch()
    program.wait(WAITER)
    return float(program.elapsed_s())


def timed(program: Any, launches: int = LAUNCHES) -> list[float]:
    """Returns the device seconds of launches behind a warm-up."""
    return [run(program) for _ in range(WARM_UP + launches)][WARM_UP:]


def ragged(contexts: int, counts: Sequence[int]) -> Places:
    """Returns the places of counts[n] rows of slot n, behind `contexts` − counts[n] tokens."""
    return joined([trunk_rows(n, contexts - rows, contexts) for n, rows in enumerate(counts)])


def lane_rows(trunk: int, lanes: int, step: int) -> Places:
    """Returns the places of one growth step of `lanes` lanes behind the same trunk of slot 0."""
    numbers = np.arange(lanes, dtype=np.int32)
    return Places(
        np.zeros(lanes, np.int32), np.full(lanes, trunk + step, np.int32), numbers,
        np.full(lanes, trunk, np.int32),
    )  # fmt: skip


def launch_costs(program: Any, launches: int = LAUNCHES) -> dict[str, float]:
    """Returns the median host seconds of a launch, by what the core did before.

    warm: it launched the same program just before. polled: it polled an event for the time of a
    forward. slept: it slept for 5 ms.
    """
    found: dict[str, list[float]] = {"warm": [], "polled": [], "slept": []}
    for _ in range(launches):
        found["polled"].append(_launch_s(program))
        found["warm"].append(_launch_s(program))
        program.wait(WAITER)
        time.sleep(5e-3)
        found["slept"].append(_launch_s(program))
        program.wait(WAITER)
    return {name: float(np.median(seconds)) for name, seconds in found.items()}


def _launch_s(program: Any) -> float:
    start = time.perf_counter()
    program.launch()
    return time.perf_counter() - start


def prompt_flops(shard: TransformerShard, tokens: int) -> float:
    """Returns the floating-point operations of a prompt without its LM head.

    The last layer's attention and all behind it are left out, as nobody reads them.
    """
    shape = shard.shape
    weights = (shape.num_layers - 1) * shard.layer_params()
    weights += shape.hidden * (shard.q_width + 2 * shard.kv_width)
    scores = math.comb(tokens + 1, 2) * shard.q_width * (shape.num_layers - 1)
    return 2.0 * tokens * weights + 4.0 * scores
