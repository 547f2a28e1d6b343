"""The data of a round: the drafted tokens (Speculation) and the decision (Outcome).

Everything covers b sequences, and row i of every array belongs to the same sequence. An Outcome and
a Speculation are one int32 matrix each, with views of its columns, so that a message is one copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Biases = tuple[tuple[int, float], ...]
MOST_GRAMMAR = 1 << 15  # bytes of a request's grammar
MOST_SAMPLING = 1 << 17  # bytes of a Sampling in JSON: a grammar in quotes, and 1,024 biases
MOST_FORCED = 32  # tokens that a grammar forces at once


class Source(IntEnum):
    """The origin of a sequence's draft tokens in a round."""

    NONE = 0  # nothing was drafted (AR)
    CACHE = 1  # drafted while the target verified the round before
    JIT = 2  # drafted just in time, after the outcome was known
    FAST = 3  # a backup that costs no draft step


class Event(IntEnum):
    """Meaning of an outcome's row for its sequence."""

    COMMIT = 0  # the round accepted num_accepted tokens and drew the bonus token
    ADMIT = 1  # a new sequence; `bonus` is its last prompt token, and nothing is drafted for it yet
    RELEASE = 2  # the sequence is finished and takes no speculation
    PREFILL = 3  # a new sequence whose prompt is stored in parts, during the rounds of the others
    START = 4  # a sequence whose prompt was stored in parts, and which joins now as if by ADMIT
    FORCED = 5  # `bonus` is a token that the grammar forces; it follows the sequence's bonus token


LIVE = (True, True, False, False, True, False)  # by Event: takes part in the next round
_FRESH = np.array([False, True, False, True, False, False])  # by Event: the sequence is new


class Logprob(NamedTuple):
    """ln of a token's probability, and (token, ln of its probability) of the likeliest ones."""

    value: float
    top: Sequence[tuple[int, float]] = ()


class Control(NamedTuple):
    """The lead's decisions on the next round, for all ranks. lookahead: the most tokens that are
    drafted for a sequence (None: K). width: the most bonus candidates after each number of accepted
    tokens for which the draft drafts ahead (None: its fan-out; 0: none). prefill_rows: rows of
    prompts in parts (Event.PREFILL) that are stored with the verification."""

    lookahead: int | None = None
    width: int | None = None
    prefill_rows: int = 0


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are drafted and chosen; the same on all ranks. temperature,
    top_p: of the target's distribution; at temperature 0 its likeliest token is taken. seed: of the
    draws, whatever the request's id (None: the job's). logprobs: how many of the target's likeliest
    tokens are returned beside each of its own (None: no log-probabilities). logit_bias: addends to
    the target's logits by token, before temperature and top_p. presence_penalty, frequency_penalty:
    subtracted once, and for each time, from the logit of a token that the answer has [OpenAI API
    reference]. grammar: which tokens may follow (text.grammar; "": any), of at most MOST_GRAMMAR
    bytes. lookahead: most tokens that are drafted in a round (None: K; 0: the draft skips the
    sequence). mode: of a server's rounds, "ar", "sd" or "ssd" (None: the server's choice)."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    logit_bias: Biases = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    grammar: str = ""
    lookahead: int | None = None
    mode: str | None = None

    @property
    def adjusts(self) -> bool:
        return bool(self.logit_bias or self.presence_penalty or self.frequency_penalty)

    @property
    def reads_logits(self) -> bool:
        """Whether the lead reads the target's logits, also if the request is greedy."""
        return self.logprobs is not None or self.adjusts or bool(self.grammar)

    def adjusted(
        self, logits: NDArray[np.floating[Any]], answer: Sequence[int]
    ) -> NDArray[np.float64]:
        """Returns the logits [V] of the row after these tokens of the answer."""
        adjusted = logits.astype(np.float64)
        bias = dict(self.logit_bias)
        adjusted[list(bias)] += list(bias.values())
        tokens, counts = np.unique(np.array(answer, np.int64), return_counts=True)
        adjusted[tokens] -= self.presence_penalty + self.frequency_penalty * counts
        return adjusted

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that differ from their defaults."""
        return {name: value for name, value in vars(self).items() if value != vars(GREEDY)[name]}

    @classmethod
    def from_dict(cls, values: Any) -> Sampling:
        """Returns the sampling of a JSON object of its fields; raises ValueError for another."""
        kinds = cls.__annotations__
        try:
            return cls(**{name: _read(kinds[name], value) for name, value in values.items()})
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{str(values)[:80]!r} is no Sampling") from error


def _read(kind: str, value: Any) -> Any:
    """Returns the value of a field from JSON's, by the field's type; raises for another type."""
    if kind == "Biases":
        return tuple((_read("int | None", token), _read("float", bias)) for token, bias in value)
    if kind.startswith("str"):
        value.encode()  # no other type of JSON has it; half of a surrogate pair has no code
        return value
    kinds, low = ((int, float), -_MOST) if kind == "float" else ((int,), 0)
    if type(value) not in kinds or not low <= value < _MOST:
        raise TypeError
    return value


_MOST = 1 << 64  # limit of a field's number
GREEDY = Sampling()


@dataclass(frozen=True)
class Request:
    """One sequence to decode. It is identified by (request_id, epoch), never by a batch slot.
    prompt: its tokens up to first_token if the workers read them, or empty. answered: how many of
    the prompt's last tokens belong to the answer already."""

    request_id: int
    first_token: int = 0
    epoch: int = 0
    prompt: tuple[int, ...] = ()
    sampling: Sampling = GREEDY
    answered: int = 0


_NO_DISTRIBUTIONS: Mapping[int, Sequence[Any]] = {}
Requests = Mapping[tuple[int, int], Request]  # by (id, epoch)
_NONE: Requests = {}
_FREE = Control()


class Outcome:
    """The result of round `round`: (k, t*) for each sequence, and which were admitted or released.
    rows: int32 [n, 5] = id, epoch, event, num_accepted (k, 0..num_draft; in a tree the node where
    the accepted path ends), bonus (t*). The speculation of round + 1 has the rows whose event is
    LIVE, in their order. prompts: the requests of those new sequences that have a prompt. control:
    of round + 1."""

    WIDTH = 5

    def __init__(
        self, round_: int, rows: Ints, prompts: Requests = _NONE, control: Control = _FREE
    ) -> None:
        self.round = round_
        self.rows = rows
        self.prompts = prompts
        self.control = control
        self.ids: Ints = rows[:, 0]
        self.events: Ints = rows[:, 2]
        self.num_accepted: Ints = rows[:, 3]
        self.bonus: Ints = rows[:, 4]

    @classmethod
    def admission(cls, round_: int, requests: Sequence[Request]) -> Outcome:
        """Returns an outcome that only admits these requests."""
        rows = [(r.request_id, r.epoch, Event.ADMIT, 0, r.first_token) for r in requests]
        prompts = {(r.request_id, r.epoch): r for r in requests if r.prompt}
        return cls(round_, np.array(rows, np.int32).reshape(-1, cls.WIDTH), prompts or _NONE)

    @property
    def fresh(self) -> Ints:
        """The rows of new sequences, [n, 5]: ADMIT, or PREFILL, whose prompts are stored first."""
        new: Ints = self.rows[_FRESH[self.events]]
        return new

    @property
    def num_live(self) -> int:
        """The number of sequences that take part in the next round."""
        events = self.events  # in a damaged message they may have any value
        return int(np.count_nonzero((events <= Event.ADMIT) | (events == Event.START)))


class Speculation:
    """The draft tokens of round `round`; row i has num_draft[i] <= K of them (in a tree: N). rows:
    int32 [b, 3 + K] = source, hit (1: the outcome was a key of the cache), num_draft, tokens. With
    sampled, 2K more columns hold q, float64 [b, K]: the probability with which each token was drawn
    (1: it was certain). In tokens and q, columns from num_draft[i] on are not read."""

    HEAD = 3

    def __init__(
        self,
        round_: int,
        rows: Ints,
        *,
        sampled: bool = False,
        version: int = 0,
        is_lost: bool = False,
        drawn_from: Mapping[int, Sequence[Any]] = _NO_DISTRIBUTIONS,
    ) -> None:
        """version: of the draft's weights; 0: as loaded. is_lost: whether the distributions of
        uncertain tokens (q < 1) are lost, so that these are not judged. drawn_from: on the rank
        that drafted, these distributions [V] by batch row."""
        self.round = round_
        self.rows = rows
        self.sampled = sampled
        self.version = version
        self.is_lost = is_lost
        self.drawn_from = drawn_from
        self.source: Ints = rows[:, 0]
        self.hit: Ints = rows[:, 1]
        self.num_draft: Ints = rows[:, 2]
        self.tokens: Ints = rows[:, 3:]
        if sampled:
            end = self.HEAD + (rows.shape[1] - self.HEAD) // 3
            self.tokens = rows[:, self.HEAD : end]
            self.q: NDArray[np.float64] = rows[:, end:].view(np.float64)

    @classmethod
    def empty(
        cls, round_: int, batch: int, lookahead: int, *, sampled: bool = False, version: int = 0
    ) -> Speculation:
        """Returns a speculation without draft tokens, as AR verifies in every round."""
        rows = np.zeros((batch, cls.width(lookahead, sampled)), np.int32)
        return cls(round_, rows, sampled=sampled, version=version)

    def lost(self) -> Speculation:
        """Returns this speculation without the distributions of its uncertain tokens."""
        return Speculation(
            self.round, self.rows, sampled=self.sampled, version=self.version, is_lost=True
        )

    @classmethod
    def width(cls, lookahead: int, sampled: bool) -> int:
        return cls.HEAD + lookahead * (3 if sampled else 1)

    @property
    def num_proposals(self) -> NDArray[np.int64]:
        """The number of each row's uncertain tokens (q < 1), whose distributions are sent, [b]."""
        if not self.sampled:
            return np.zeros(len(self.rows), np.int64)
        served = np.arange(self.tokens.shape[1]) < self.num_draft[:, None]
        return np.asarray((served & (self.q < 1)).sum(axis=1))

    @property
    def num_rows(self) -> int:
        """The number of rows of the target's forward that verifies it, Σ(num_draft + 1)."""
        return int(self.num_draft.sum()) + len(self.rows)


def verify_rows(last_tokens: Ints, speculation: Speculation) -> Ints:
    """Returns the tokens that the target's forward reads, int32 [Σ(num_draft + 1)]: for each
    sequence its last token (last_tokens [b]), and then its num_draft drafted tokens."""
    width = speculation.tokens.shape[1]
    table = np.empty((len(last_tokens), width + 1), np.int32)
    table[:, 0] = last_tokens
    table[:, 1:] = speculation.tokens
    if (speculation.num_draft == width).all():
        return table.reshape(-1)
    return table[np.arange(width + 1) <= speculation.num_draft[:, None]]
