"""The flags of `online`: acceptance over tokens seen, replayed on stored answers of the target."""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.errors import ConfigError
from mpissd.common.flags import Checked, choice, flag, integer, number, switch, words


@dataclass(frozen=True)
class OnlineConfig(Checked):
    """Flags of `online`: the pair, the stream of prompts, and how the draft learns from it."""

    target: str = flag("", words, "the target: a Hugging Face folder or a .gguf file")
    draft: str = flag("smollm2-draft", words, "the draft that learns")
    stream: str = flag(
        "",
        words,
        "stages of the stream, a comma between: NAME=FILE.npz (a recording), NAME=FILE.jsonl "
        "(prompts), NAME=own:KIND (the target writes the prompts: asking, coding; or working, "
        "editing: on a text or on code that it wrote before)",
    )
    out: str = flag("out/online", words, "folder for curves.jsonl")
    answers: str = flag(
        "", words, "folder for the target's answers and distributions, NAME.npz (default: out)"
    )
    own: int = flag(2000, integer(8), "prompts of a stage that the target writes")
    prompts: int = flag(10**6, integer(8), "prompts of a stage at most")
    answer: int = flag(128, integer(8), "tokens of an answer at most")
    learn_from: str = flag(
        "all",
        choice("rejected", "all"),
        "positions that are learned from: where a draft was rejected, or all that were verified",
    )
    rate: float = flag(3e-5, number(0, 1), "learning rate")
    optimizer: str = flag("adamw", choice("adamw", "muon"), "muon: for the layers' matrices")
    batch: int = flag(4, integer(1), "sequences of a step: new ones, and some of earlier")
    steps: float = flag(
        1.0, number(0.01), "steps for each new sequence; it is seen batch · steps times"
    )
    exact: bool = flag(
        False, switch, "measure drafts that compute with float16 (CuPy), also where files are int8"
    )
    epochs: int = flag(4, integer(0), "passes over a stage of the draft that is distilled offline")
    every: int = flag(25, integer(1), "prompts between two points of a curve")
    lookahead: int = flag(4, integer(1), "K of the rounds in which drafts are rejected")
    schedules: str = flag("static,online,offline", words, "what is replayed, a comma between")
    seed: int = flag(0, integer(0), "of the order of prompts and of batches")
    device: str = flag("auto", choice("auto", "cuda", "cpu"), "where PyTorch computes")

    @property
    def stages(self) -> dict[str, str]:
        """{name: source} of the stream's stages."""
        parts = [part.partition("=") for part in self.stream.split(",") if part]
        return {name: source for name, _, source in parts}

    def check(self) -> None:
        """Refuses a stream without stages, and a stage without a source."""
        super().check()
        if not self.target:
            raise ConfigError("target: needed: a Hugging Face folder or a .gguf file")
        if not self.stages or not all(self.stages.values()):
            raise ConfigError(f"stream={self.stream}: allowed: NAME=SOURCE, a comma between")
