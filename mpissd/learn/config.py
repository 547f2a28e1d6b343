"""The flags of `distill`."""

from dataclasses import dataclass

from mpissd.common.errors import ConfigError
from mpissd.common.flags import Checked, choice, flag, integer, number, words
from mpissd.common.shapes import MOST_MASKS, STATE_KINDS

Form = tuple[int, int, int, int]  # layers, heads, KV heads and FFN width of a draft


def form_of(text: str) -> Form:
    """Parses LAYERSxHEADSxKV_HEADSxFFN, as in "4x9x3x1536"; raises ConfigError for another text."""
    parts = text.split("x")
    numbers = [int(part) for part in parts if part.isdecimal()]
    is_shape = len(parts) == len(numbers) == 4 and min(numbers) > 0
    if not is_shape or numbers[1] % numbers[2] or numbers[3] % 32:
        allowed = "allowed: LAYERSxHEADSxKV_HEADSxFFN, heads a multiple of KV heads, FFN of 32"
        raise ConfigError(f"shapes={text}: {allowed}")
    return numbers[0], numbers[1], numbers[2], numbers[3]


def _layers(name: str, text: str) -> str:
    parts = text.split(",")
    numbers = [int(part) for part in parts if part.strip().isdecimal()]
    if len(numbers) < len(parts) or numbers != sorted(set(numbers)):
        raise ConfigError(f"{name}={text}: allowed: rising layer numbers, as in 0,1,28,29")
    return text


def _shapes(name: str, text: str) -> str:
    for part in text.split(","):
        form_of(part)
    return text


def _kinds(name: str, text: str) -> str:
    parts = text.split(",") if text else []
    if not set(parts) <= set(STATE_KINDS) or len(set(parts)) < len(parts):
        raise ConfigError(f"{name}={text}: allowed: {', '.join(STATE_KINDS)}, a comma between")
    return text


@dataclass(frozen=True)
class DistillConfig(Checked):
    """Flags of `distill`: the target, the draft's shape, and how long each part may take."""

    target: str = flag("", words, "the target: a Hugging Face folder or a .gguf file")
    out: str = flag("out/draft", words, "folder that the draft is written to")
    layers: str = flag("0,1,28,29", _layers, "the target's layers that the draft starts from")
    shapes: str = flag(
        "",
        _shapes,
        "fresh layers instead: LAYERSxHEADSxKV_HEADSxFFN; of several, a comma between, each is "
        "trained on the same samples and written to OUT/SHAPE",
    )
    kinds: str = flag(
        "",
        _kinds,
        "drafts that read the target's hidden state instead: medusa, mlp, eagle; of several, each "
        "is trained on the same samples and written to OUT/KIND",
    )
    heads: int = flag(4, integer(1), "Medusa's heads, and steps ahead that `kinds` are trained for")
    vocab: int = flag(12288, integer(32), "rows of the draft's LM head: the most frequent tokens")
    on: str | None = flag(
        None,
        words,
        "people's prompts (.jsonl), a comma between, whose answers at temperature 0 are trained on "
        "instead of sampled conversations",
    )
    parallel: int = flag(
        0,
        integer(0, MOST_MASKS),
        "mask tokens of a parallel draft: one forward drafts so many tokens and one more; 0: none",
    )
    anchors: int = flag(48, integer(1), "positions of a conversation that masks follow in a step")
    from_draft: str | None = flag(
        None,
        words,
        "a folder that distill made, whose draft is trained further instead: its layers, and the "
        "tokens and kind of its LM head, are kept",
    )
    head: str = flag(
        "own", choice("own", "target"), "own: trained and stored; target: rows of the target's"
    )
    processes: int = flag(1, integer(1), "processes that sample and train together, one a GPU")
    sequences: int = flag(8192, integer(1), "conversations that are sampled at a time")
    length: int = flag(384, integer(48), "tokens of a conversation")
    batch: int = flag(96, integer(1), "conversations in a process's step")
    batches: int = flag(1000, integer(1), "batches of samples at most, of each process")
    steps: int = flag(10**6, integer(1), "training steps at most")
    optimizer: str = flag("adamw", choice("adamw", "muon"), "muon: for the layers' matrices")
    learning_rate: float = flag(1.5e-3, number(0, 1), "the highest of the schedule")
    variation_from: float = flag(
        0.5, number(0, 1), "share of the training after which total variation is added"
    )
    seconds_sampling: float = flag(
        120.0, number(0), "time for samples; the last batch is finished, within `seconds`"
    )
    seconds_training: float = flag(240.0, number(0), "time for training, of each draft")
    seconds_evaluating: float = flag(60.0, number(0), "time for evaluation, answers included")
    seconds: float = flag(
        86400.0, number(0), "time for everything: samples take .4 of it at most, the evaluation .2"
    )
    save_every: float = flag(300.0, number(1), "seconds of training between copies of the draft")
    prompts: str | None = flag(
        None, words, "people's prompts (.jsonl) to evaluate on, a comma between"
    )
    held_out: int = flag(512, integer(0), "conversations of the target's own to evaluate on")
    answer: int = flag(128, integer(1), "tokens of an answer in the evaluation, at most")
    seed: int = flag(0, integer(0), "of the samples and of the training's order")
    device: str = flag("auto", choice("auto", "cuda", "cpu"), "where PyTorch computes")

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.layers.split(","))

    @property
    def forms(self) -> dict[str, Form]:
        """{name: Form} of drafts with randomly initialized layers; empty if layers are copied."""
        return {part: form_of(part) for part in self.shapes.split(",") if part}

    @property
    def kind_names(self) -> list[str]:
        """Kinds of drafts that read the target's hidden states; empty for independent models."""
        return [part for part in self.kinds.split(",") if part]

    def check(self) -> None:
        super().check()
        if not self.target:
            raise ConfigError("target: needed: a Hugging Face folder or a .gguf file")
        rivals = "shapes kinds, kinds on, parallel kinds, from_draft kinds, from_draft shapes"
        for one, other in (pair.split() for pair in rivals.split(", ")):
            if getattr(self, one) and getattr(self, other):
                raise ConfigError(f"{one} and {other}: allowed: one of them")
        both = set((self.on or "").split(",")) & set((self.prompts or "").split(",")) - {""}
        if both:
            raise ConfigError(f"on and prompts: {min(both)} in both: allowed: other prompts")
