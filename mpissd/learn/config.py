"""The flags of `distill`."""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.errors import ConfigError
from mpissd.common.flags import Checked, choice, flag, integer, number, words


def _layers(name: str, text: str) -> str:
    """Takes rising layer numbers, a comma between."""
    parts = text.split(",")
    numbers = [int(part) for part in parts if part.strip().isdecimal()]
    if len(numbers) < len(parts) or numbers != sorted(set(numbers)):
        raise ConfigError(f"{name}={text}: allowed: rising layer numbers, as in 0,1,28,29")
    return text


@dataclass(frozen=True)
class DistillConfig(Checked):
    """Flags of `distill`: the target, the draft's shape, and how long each part may take."""

    target: str = flag("", words, "the target: a Hugging Face folder or a .gguf file")
    out: str = flag("out/draft", words, "folder that the draft is written to")
    layers: str = flag("0,1,28,29", _layers, "the target's layers that the draft starts from")
    vocab: int = flag(12288, integer(32), "rows of the draft's LM head: the most frequent tokens")
    sequences: int = flag(7168, integer(1), "conversations that are sampled at a time")
    length: int = flag(512, integer(48), "tokens of a conversation")
    batch: int = flag(76, integer(1), "conversations in a training step")
    batches: int = flag(1000, integer(1), "batches of samples at most")
    steps: int = flag(10**6, integer(1), "training steps at most")
    learning_rate: float = flag(1.5e-3, number(0, 1), "the highest of the schedule")
    seconds_sampling: float = flag(120.0, number(0), "time for samples; the last batch is finished")
    seconds_training: float = flag(240.0, number(0), "time for training")
    seconds_evaluating: float = flag(60.0, number(0), "time for evaluation, answers included")
    seconds: float = flag(
        86400.0, number(0), "time for everything: training ends early enough for the evaluation"
    )
    prompts: str | None = flag(
        None, words, "files .jsonl of people's prompts to evaluate on, a comma between"
    )
    held_out: int = flag(512, integer(1), "conversations of the target's own to evaluate on")
    answer: int = flag(128, integer(1), "tokens of an answer in the evaluation, at most")
    seed: int = flag(0, integer(0), "of the samples and of the training's order")
    license: str = flag(
        "target", choice("target", "apache-2.0"), "apache-2.0: that of the target; adds its text"
    )
    device: str = flag("auto", choice("auto", "cuda", "cpu"), "where PyTorch computes")

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The target's layers that the draft starts from."""
        return tuple(int(part) for part in self.layers.split(","))

    def check_target(self) -> None:
        """Refuses a command without a target."""
        if not self.target:
            raise ConfigError("target: needed: a Hugging Face folder or a .gguf file")
