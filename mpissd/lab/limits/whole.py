"""Measures whole models on one GPU against the memory's limit, beside what others do there.

    python -m mpissd.lab.limits.whole OUT [MODEL…]      (8b, 1b, smollm2; all by default)

Forwards are captured, over random float16 weights, with keys and values that were computed; the
floor is weights, LM head and the keys and values that a forward reads, over the read rate of the
same job. Beside them, in the same job: PyTorch compiled with a static cache in a CUDA graph, and
Hugging Face generate, over the same weights. A row counts only where the same kernels say Hugging
Face's tokens in float32 (`parity`). Rows go to OUT/T1.jsonl; bars.py makes the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpissd.common.errors import GateError
from mpissd.common.records import is_stable
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.lab.limits.bar import OURS, RUNS
from mpissd.lab.limits.bars import add
from mpissd.lab.limits.model import (
    BIT_LANES,
    BIT_ROWS,
    WholeModel,
    different_rows,
    lane_rows,
    launch_costs,
    prompt_flops,
    ragged,
    run,
    timed,
)
from mpissd.lab.limits.table import line_of

_READ_BYTES = 4 * 10**9
_PROMPT, _ANSWER, _CHUNKED = 48, 32, 2048  # tokens of the parity's, and of the timed prompt
_STABLE = 0.02
_BIT_CONTEXTS = (5, 126, 200)  # fewer and more tokens than one split of the attention
_ROUNDING = 4e-3  # what float16 activations may move a logit by, against the largest


@dataclass(frozen=True)
class Case:
    """Forwards of one kind: rows of a sequence behind a context, of several sequences, or lanes.

    counts: rows of each sequence. lanes: of a growth of STEPS steps behind the context.
    """

    context: int
    counts: tuple[int, ...] = (1,)
    lanes: int = 0

    @property
    def rows(self) -> int:
        return self.lanes or sum(self.counts)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values a forward reads, those of lanes on average."""
        own = self.lanes * (STEPS + 1) / 2 if self.lanes else 0
        return int(len(self.counts) * self.context + own)

    def places(self) -> list[Places]:
        """Returns the places of the forwards that are timed, one after the other."""
        if self.lanes:
            return [lane_rows(self.context, self.lanes, step) for step in range(STEPS)]
        return [ragged(self.context, self.counts)]


STEPS = 7
CASES = {  # by model: what its bars need, and the sequences at once
    "8b": (
        Case(512), Case(4096), Case(512, (5,)), Case(512, (8,)),
        Case(1024, (1,) * 16), Case(1024, (4, 3, 4, 2, 4, 1, 3, 4)),
    ),
    "1b": (Case(128), Case(1024), Case(1024, lanes=24)),
    "smollm2": (Case(256), Case(256, (5,))),
}  # fmt: skip
WHERE = {"8b": "llama-3.1-8b", "1b": "llama-3.2-1b", "smollm2": "smollm2-135m-instruct"}


class Whole:
    """Measures the cases of some models on GPU 0."""

    def __init__(self, out: Path, backend: Any) -> None:
        self._out, self._backend = out, backend
        self._rate = float(backend.read_bandwidth(_READ_BYTES))
        self._tell("read", rate_tb_per_s=self._rate / 1e12)

    def measure(self, name: str) -> None:
        """Measures one model: parity first, then our forwards, then the others'."""
        cases = CASES[name]
        longest = max(max(case.context for case in cases) + 64, _CHUNKED + 64)
        model = WholeModel(
            self._backend, WHERE[name], capacity=longest,
            slots=max(2, *(len(case.counts) for case in cases)),
            lanes=max(BIT_LANES, *(case.lanes for case in cases)), steps=STEPS,
        )  # fmt: skip
        others = self._others(model)
        parity = self._parity(model, others)
        for case in sorted(cases, key=lambda case: case.context):
            model.fill(case.context, len(case.counts))
            for _ in range(RUNS):
                self._forward(model, case, OURS, self._taken(model, case), parity)
        self._launches(model)
        self._bits(model)
        if name == "8b":
            self._prompt(model)
        if others is not None:
            self._rivals(model, others, cases)

    def _others(self, model: WholeModel) -> Any:
        """Returns PyTorch over the same weights, or None where it is not installed."""
        try:
            from mpissd.lab.limits.torch_whole import others_of
        except ImportError as missing:
            self._tell("refused", why=f"PyTorch's columns: {missing}")
            return None
        return others_of(model)

    def _parity(self, model: WholeModel, others: Any) -> bool | None:
        """Returns whether Hugging Face says our tokens over the same weights; None: not known.

        A token may differ where Hugging Face's own margin is rounding. Raises GateError else.
        """
        if others is None:
            return None
        prompt = model.tokens(_PROMPT)
        answer = model.greedy(prompt, _ANSWER)
        rows = others.logits(np.concatenate([prompt, answer]))[_PROMPT - 1 : -1]
        chosen = rows[np.arange(_ANSWER), answer]
        margins = (rows.max(-1) - chosen) / np.abs(rows).max(-1)
        worst, equal = float(margins.max()), int((margins == 0).sum())
        is_equal = bool(worst <= _ROUNDING)
        self._tell("parity", model=model.name, tokens=_ANSWER, equal=equal, margin=worst,
                   parity=is_equal)  # fmt: skip
        if not is_equal:
            raise GateError(f"{model.name}: not Hugging Face's tokens, by a margin of {worst:.1e}")
        return is_equal

    def _taken(self, model: WholeModel, case: Case) -> list[float]:
        """Returns the device seconds of this case's forwards."""
        program, taken = model.program(case.rows), []
        tokens = model.tokens(case.rows, slot=99)
        for places in case.places():
            model.set(tokens, places)
            taken.append(timed(program))
        program.close()
        return [float(seconds) for seconds in np.mean(taken, axis=0)]

    def _forward(
        self, model: WholeModel, case: Case, way: str, taken: Sequence[float], parity: bool | None
    ) -> None:
        floor, seconds = model.floor_s(self._rate, case.kv_tokens), float(np.median(taken))
        self._tell(
            "whole", model=model.name, way=way, rows=case.rows, sequences=len(case.counts),
            lanes=case.lanes, context=case.context, seconds=seconds, floor_s=floor,
            floor_fraction=floor / seconds, p99_s=float(np.percentile(taken, 99)),
            num_rounds=len(taken), stable=is_stable(taken, _STABLE), parity=parity,
            kernel=model.kernel if way == OURS else None,
        )  # fmt: skip

    def _bits(self, model: WholeModel) -> None:
        """Counts rows whose logits differ between forwards of 2 to 32 rows and of one.

        mixed: whether rows of a second slot and of lanes stood beside them, too.
        """
        for context in _BIT_CONTEXTS:
            different = different_rows(model, context)
            self._tell("bits", model=model.name, context=context, rows=BIT_ROWS[-1],
                       different=different, mixed=True, kernel=model.kernel)  # fmt: skip

    def _launches(self, model: WholeModel) -> None:
        program = model.program(1)
        model.set(model.tokens(1), trunk_rows(0, 100, 101))
        for _ in range(RUNS):
            costs = {f"{name}_s": seconds for name, seconds in launch_costs(program).items()}
            self._tell("whole_launch", model=model.name, **costs)
        program.close()

    def _prompt(self, model: WholeModel) -> None:
        """Times a prompt in chunks of their own and by rows; compares what the next token gets."""
        tokens, rows = model.tokens(_CHUNKED + 1), model.stack.chunk_rows
        if not rows:
            self._tell("refused", why="chunks of a prompt: no products by cuBLAS here")
            return
        flops, peak = prompt_flops(model.shard, _CHUNKED), self._backend.peak_flops()
        model.fill(_CHUNKED)
        expected = self._next_logit(model, tokens)
        assert model.stack.chunks is not None
        program = self._backend.program(
            model.stack.chunks.body, model.shard.cost(1, 1, 2, model.options)
        )
        for _ in range(RUNS):
            taken = 0.0
            for start in range(0, _CHUNKED, rows):
                model.stack.place_chunk(0, start, tokens[start : start + rows])
                taken += run(program)
            self._tell(
                "prompt", model=model.name, tokens=_CHUNKED, chunk=rows, seconds=taken,
                peak_tflops=peak / 1e12, peak_fraction=flops / taken / peak,
                error=abs(self._next_logit(model, tokens) / expected - 1),
            )  # fmt: skip
        program.close()

    def _next_logit(self, model: WholeModel, tokens: Any) -> float:
        program = model.program(1)
        model.set(tokens[_CHUNKED:], trunk_rows(0, _CHUNKED, _CHUNKED + 1))
        run(program)
        program.close()
        return float(model.best(1)[1][0])

    def _rivals(self, model: WholeModel, others: Any, cases: Sequence[Case]) -> None:
        """Times one row behind the first context by PyTorch and by transformers."""
        case = cases[0]  # compiling takes PyTorch some 15 s a shape
        taken = others.compiled_seconds(case.rows, case.context)
        self._forward(model, case, "torch", taken, None)
        self._forward(model, case, "huggingface", others.generate_seconds(case.context), None)

    def _tell(self, what: str, **values: Any) -> None:
        row = {"what": what, "tp": 1, "device": self._backend.info.name, **values}
        add(self._out, [row])
        print(line_of(row), flush=True)


def main(arguments: Sequence[str]) -> int:
    """Measures the named models and returns the exit code."""
    from mpissd.engine.backend.cupy_backend import CupyBackend

    out, *names = arguments
    Path(out).mkdir(parents=True, exist_ok=True)
    backend = CupyBackend(0)
    measure: Callable[[str], None] = Whole(Path(out), backend).measure
    for name in names or list(CASES):
        measure(name)
    backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
