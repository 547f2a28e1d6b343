"""The configuration of a tiny pair that decodes prompts of token ids on the CPU, its answers in
this process, and what its rounds were like."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpissd.common.config import RunConfig, parse_flags
from mpissd.engine import Decoder
from tests.tiny_pair import TinyPair


def text_config(pair: TinyPair, *, prompt: Sequence[int] = (1,), **flags: object) -> RunConfig:
    told = {
        "target": pair.target, "draft": pair.draft, "workload": "text", "backend": "numpy",
        "prompt_ids": ",".join(map(str, prompt)), "context": 256, **flags,
    }  # fmt: skip
    return parse_flags({name: str(value) for name, value in told.items()})


def finished(config: RunConfig, most: int | None = None) -> Decoder:
    """Decodes to the end, or for at most so many rounds."""
    with Decoder(config) as decoder:
        while not decoder.is_over and (most is None or len(decoder.records) < most):
            decoder.step()
    return decoder


V, TOKENS = 97, 80
LENGTHS = (3, 17, 60, 33, 1)  # with the answers they cross pages of 64 positions
PROMPTS = ";".join(
    ",".join(str((7 * n + j * j) % V) for j in range(length)) for n, length in enumerate(LENGTHS)
)


class Decoded(NamedTuple):
    tokens: dict[int, list[int]]
    accepted: float  # mean of a round
    hit_rate: float


def config(pair: Any, mode: str, **flags: Any) -> RunConfig:
    """pair: has a target and a draft, which AR lacks."""
    models = {"target": str(pair.target), "draft": None if mode == "ar" else str(pair.draft)}
    told = {"prompt_ids": PROMPTS, "num_tokens": TOKENS, "backend": "numpy", "deadline_s": 60.0}
    return RunConfig(mode=mode, workload="text", **{**told, **models, **flags})


def decode(pair: Any, mode: str, **flags: Any) -> Decoded:
    told = config(pair, mode, **flags)
    decoder = finished(told)
    rows = decoder.records.sequences()
    tokens = {n: found[: told.num_tokens] for n, found in decoder.tokens.items()}
    return Decoded(tokens, rows[:, 3].mean(), rows[:, 6].mean())
