"""Prompts that the target writes: passages of its answers, and messages about them."""

from __future__ import annotations

from typing import Any

import pytest

from mpissd.common.errors import ConfigError
from tests.needs import module

torch = module("torch", "PyTorch")

from mpissd.learn.mould import Mould  # noqa: E402
from mpissd.learn.sample import ANSWER, USER, Samples  # noqa: E402
from mpissd.online import own  # noqa: E402
from mpissd.online.own import OwnPrompts, passage_of_code, passage_of_text  # noqa: E402

END = 0
MOULD = Mould((1, 2), (3,), (4,), END)
TEXT = "Rivers carry water to the sea, and rain brings it back to the hills. " * 3
CODE = 'Here:\n```python\ndef f(x):\n    """Doubles it."""\n    return x + x\n```\nIt doubles.'


def test_a_passage_of_text_ends_with_a_sentence() -> None:
    assert passage_of_text(" One. Two is cut o") == "One."
    assert passage_of_text("no stop at all") == ""


def test_a_passage_of_code_is_a_block_that_defines_a_function() -> None:
    assert passage_of_code(CODE) == 'def f(x):\n    """Doubles it."""\n    return x + x'
    assert passage_of_code("```\ndef g():\n    pa") == "def g():\n    pa"  # cut by the limit
    assert passage_of_code("```python\nx = 1\n```") == passage_of_code("def f(): ...") == ""


class Letters:
    """A tokenizer of characters, above the template's ids."""

    vocab_size = 128 + 10

    def encode(self, text: str) -> list[int]:
        return [ord(letter) + 10 for letter in text]

    def decode(self, ids: Any) -> str:
        return "".join(chr(each - 10) for each in ids if each > 10)


class Writer:
    """A sampler that writes "?" for a user, and always the same answer."""

    def __init__(self, answer: str) -> None:
        self.answer, self.cos = answer, torch.zeros(1)
        self.asked: list[tuple[int, list[float]]] = []

    def write(self, given: Any, mould: Mould, first: int, warmth: Any) -> Samples:
        self.asked.append((first, [float(part[0]) for part in warmth]))
        tokens, answered = given.clamp(min=0).int(), given > 10**6
        for row, each in enumerate(given):
            start = int((each >= 0).sum())
            written = [*Letters().encode("?"), END, *mould.between] if first == USER else []
            answer = [*Letters().encode(self.answer), END][: len(each) - start - len(written)]
            whole = torch.tensor([*written, *answer])
            tokens[row, start : start + len(whole)] = whole
            answered[row, start + len(written) : start + len(whole)] = True
        return Samples(tokens, answered)


@pytest.mark.parametrize(("kind", "answer"), [("working", TEXT), ("editing", CODE)])
def test_a_message_asks_for_work_on_what_the_target_wrote(
    kind: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "SHORTEST", 20)
    monkeypatch.setattr(own, "PASSAGE_TOKENS", 120)
    writer: Any = Writer(answer)
    prompts = OwnPrompts(writer, Letters(), MOULD, 0)
    samples = prompts.answered(kind, 6, 16, 1024)
    assert writer.asked == [(USER, [pytest.approx(0.7)] * 2), (ANSWER, [0.0, 0.0])]
    assert len(samples.tokens) == 6 and (samples.answered.sum(-1) == 16).all()
    passage = (passage_of_text if kind == "working" else passage_of_code)(answer[:120])
    openings = set()
    for message in prompts.about_passages(kind, 20):
        assert message[:2] == [1, 2] and message[-2:] == [END, 3]
        text = Letters().decode(message[2:-2])
        assert text.endswith(passage) and not text.removesuffix(passage).endswith("def")
        openings.add(text.removesuffix(passage))
    assert len(openings) > 3 and all(opening.endswith("\n\n") for opening in openings)


def test_the_other_kinds_are_answered_as_they_are_written() -> None:
    writer: Any = Writer("Yes.")
    samples = OwnPrompts(writer, Letters(), MOULD, 0).answered("coding", 5, 8, 1024)
    assert writer.asked == [(USER, [pytest.approx(0.7), 0.0])]
    assert samples.answered.sum(-1).tolist() == [5] * 5  # with its stop token
    with pytest.raises(ConfigError, match="own:singing: allowed: own:asking, own:coding"):
        OwnPrompts(writer, Letters(), MOULD, 0).answered("singing", 5, 8, 1024)
