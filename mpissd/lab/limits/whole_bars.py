"""The bars of whole models on one GPU, and which measured rows they read (see whole.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpissd.lab.limits.bar import FRACTION, MS, OURS, US, Bar, Unit

_COUNT = Unit(places=0)
_MODELS = {"8B": "llama-3.1-8b", "1B": "llama-3.2-1b", "SmolLM2": "smollm2-135m-instruct"}


def whole_bars() -> Iterator[Bar]:
    """Yields the bars by number; forwards count only where the same kernels passed parity."""
    for number, rows, context, least in (
        (1, 1, 512, 0.92), (1, 1, 4096, 0.90), (2, 5, 512, 0.88), (2, 8, 512, 0.88),
    ):  # fmt: skip
        what = f"8B M={rows}, context {context}, of the floor"
        yield _forward(number, what, "8B", least, rows=rows, context=context, sequences=1)
    for context, seconds in ((128, 0.70e-3), (1024, 0.72e-3)):
        at = {"rows": 1, "context": context, "lanes": 0}
        yield _forward(3, f"1B M=1, context {context}", "1B", seconds, **at)
    yield _forward(4, "1B, a step of 24 lanes, context 1k", "1B", 0.90e-3, lanes=24)
    for rows, seconds in ((1, 0.40e-3), (5, 0.42e-3)):
        yield _forward(5, f"SmolLM2 M={rows}, context 256", "SmolLM2", seconds, rows=rows)
    yield _forward(6, "8B, 16 sequences, context 1k", "8B", 0.85, sequences=16)
    yield _forward(6, "8B, 8 sequences of 1 to 4 rows, context 1k", "8B", 0.82, sequences=8)
    for model in _MODELS:
        where = {"what": "bits", "model": _MODELS[model]}
        what = f"rows of 2 to 32 with other bits than alone, {model}"
        yield Bar(7, what, "different", where, 0, unit=_COUNT, worst=True)
    yield from _rounds()


def _forward(number: int, what: str, model: str, limit: float, **at: Any) -> Bar:
    """Returns the bar of a forward: at least a share of the floor, or at most some seconds."""
    beside = {"what": "whole", "model": _MODELS[model], **at}
    where = {**beside, "way": OURS, "parity": True}
    if limit > 0.1:
        return Bar(number, what, "floor_fraction", where, limit, least=True, beside=beside)
    return Bar(number, what, "seconds", where, limit, unit=MS, beside=beside)


def _rounds() -> Iterator[Bar]:
    inline = {"what": "inline", "model": _MODELS["8B"], "chained": True}
    what = "device idle from outcome to verification, 8B/1B inline"
    yield Bar(8, f"{what}, p50", "idle_p50_s", inline, 50e-6, unit=US, least=False)
    for model in ("8B", "1B"):  # rows also say what a launch costs a core that polled or slept
        where = {"what": "whole_launch", "model": _MODELS[model]}
        name = f"host time of a launch, {model}, warm core"
        yield Bar(9, name, "warm_s", where, 10e-6, unit=US)
    what = "SD 8B/1B inline of a recording, of Σ floors"
    yield Bar(10, what, "of_floors", inline, 0.85, least=True)
    prompt = {"what": "prompt", "model": _MODELS["8B"]}
    yield Bar(
        11, "8B, a prompt of 2k tokens, of the matrix peak", "peak_fraction", prompt, 0.6,
        least=True, unit=FRACTION,
    )  # fmt: skip
