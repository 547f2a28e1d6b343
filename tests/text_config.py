"""The configuration of a tiny pair that decodes prompts of token ids on the CPU, and its end."""

from collections.abc import Sequence

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
