"""The flags of `record`: a pair with weights, prompts, and how much of its choices is kept."""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.errors import ConfigError
from mpissd.common.flags import Checked, choice, flag, integer, switch, words


@dataclass(frozen=True)
class RecordConfig(Checked):
    """Flags of `record`; those with the name of a flag of `run` mean the same."""

    pair: str | None = flag(None, words, "smollm2, or TARGET/DRAFT with weights")
    target: str | None = flag(None, words, "Hugging Face folder, .gguf, or hub name")
    draft: str | None = flag(None, words, "likewise")
    backend: str = flag("auto", choice("auto", "numpy", "cupy"), "what computes")
    prompts: str | None = flag(
        None, words, 'file of prompts, lines of {"prompt": "…"} or {"messages": […]}'
    )
    prompt_ids: str | None = flag(None, words, "prompts as token ids: 1,2,3;4,5 are two prompts")
    chat_template: bool = flag(True, switch, "put a prompt into the model's chat template")
    stop_token: int | None = flag(None, integer(0), "token that ends an answer, beside the model's")
    num_tokens: int = flag(128, integer(1), "tokens of an answer, at most")
    count: int | None = flag(None, integer(1), "prompts to record, at most (default: all)")
    lookahead: int = flag(8, integer(1, 256), "longest K that a replay may ask for")
    fan_out: int = flag(16, integer(1, 63), "most candidates a row that a replay may ask for")
    batch_size: int = flag(8, integer(1, 256), "prompts that the target answers together")
    seed: int = flag(0, integer(0, 2**63 - 1), "of random weights")
    licence: str = flag("", words, "of the prompts, with their source")
    to: str | None = flag(None, words, "file to write: a new .npz")

    def check(self) -> None:
        """Refuses contradictory flags; raises ConfigError."""
        super().check()
        named = self.target is not None and self.draft is not None
        if named == (self.pair is not None) or (self.target is None) != (self.draft is None):
            raise ConfigError("record needs one pair: allowed: pair=NAME, or target and draft")
        if (self.prompts is None) == (self.prompt_ids is None):
            raise ConfigError("record needs prompts: allowed: prompts=FILE.jsonl, or prompt_ids")
