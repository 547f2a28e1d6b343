"""A chat template's token ids before, between and after the messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mpissd.common.errors import ConfigError


class Chat(Protocol):
    """The methods that a tokenizer must have."""

    @property
    def stop_ids(self) -> Any:
        """The ids that end an answer."""

    def encode(self, text: str) -> list[int]:
        """Returns a text's ids, without any special token added."""

    def chat(self, messages: Sequence[Any]) -> list[int]:
        """Returns the ids of a conversation, the opening of the next answer included."""


@dataclass(frozen=True)
class TemplateParts:
    """The token ids that a chat template puts around messages, when a model writes the messages.

    before: ids in front of the first user's message. between: ids after `end` of a user's message,
    in front of the answer. again: ids after `end` of an answer, in front of the next user's
    message. end: the token that ends every message.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    again: tuple[int, ...]
    end: int


def template_parts(tokenizer: Chat) -> TemplateParts:
    """Derives a chat template's fixed parts from rendered conversations of one-letter messages.

    Raises ConfigError for a template that does not end every message with one stop token.
    """
    one, other = (tokenizer.chat([_user(text)]) for text in ("x", "y"))
    first = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    before, after = one[:first], one[first + 1 :]
    if not after or after[0] not in tokenizer.stop_ids:
        raise ConfigError("the chat template does not end a message with a stop token")
    turns = [_user("x"), {"role": "assistant", "content": "y"}, _user("x")]
    both = tokenizer.chat(turns)[len(one) : -len(after)]
    if both[0] != other[first] or both[1] != after[0] or both[-1] != one[first]:
        raise ConfigError("the chat template changes earlier turns of a conversation")
    return TemplateParts(tuple(before), tuple(after[1:]), tuple(both[2:-1]), after[0])


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
