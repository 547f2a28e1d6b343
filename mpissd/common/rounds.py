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
MOST_GRAMMAR = 1 << 15  # bytes of a request's grammar
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
    ADMIT = 1  # a new sequence; `bonus` is its last prompt token, and its first round is a miss
    RELEASE = 2  # the sequence is finished and takes no speculation
    PREFILL = 3  # a new sequence whose prompt is stored in parts, during the rounds of the others
    START = 4  # an opened sequence whose prompt is stored: from here on as if it were admitted
    FORCED = 5  # `bonus` is a token that the grammar forces; it follows the sequence's bonus token


LIVE = (True, True, False, False, True, False)  # by Event: takes part in the next round
_FRESH = np.array([False, True, False, True, False, False])  # by Event: its request is new


class Logprob(NamedTuple):
    """ln of a token's probability, and (token, ln of its probability) of the likeliest ones."""

    value: float
    top: Sequence[tuple[int, float]] = ()


class Control(NamedTuple):
    """The lead's decisions on the next round, for all ranks.

    lookahead: most tokens that are drafted for a sequence (None: K). width: most bonus candidates
    that the draft keeps for a row, while the target verifies (None: its fan-out; 0: no growth).
    prefill_rows: rows of opened prompts that are stored with the verification.
    """

    lookahead: int | None = None
    width: int | None = None
    prefill_rows: int = 0


@dataclass(frozen=True, eq=False)
class Adjustment:
    """What a request adds to the target's logits, before temperature and top_p.

    start: tokens of its prompt; the answer follows them. bias: addends by token. presence,
    frequency: subtracted once, and for each time, from a token that the answer has [OpenAI API
    reference, presence_penalty and frequency_penalty].
    """

    start: int
    bias: Mapping[int, float]
    presence: float = 0.0
    frequency: float = 0.0

    def apply(self, logits: NDArray[np.float32], answer: Sequence[int]) -> NDArray[np.float64]:
        """Returns the logits [V] of the row after these tokens of the answer."""
        adjusted = logits.astype(np.float64)
        adjusted[list(self.bias)] += list(self.bias.values())
        tokens, counts = np.unique(np.array(answer, np.int64), return_counts=True)
        adjusted[tokens] -= self.presence + self.frequency * counts
        return adjusted


@dataclass(frozen=True)
class Request:
    """One sequence to decode. It is identified by (request_id, epoch), never by a batch slot.

    prompt: its tokens up to first_token if the workers read them, or empty. temperature, top_p: of
    its sampling. seed: of its draws, whatever its id (None: the job's). logprobs: how many of the
    target's likeliest tokens are returned beside each of its own (None: no log-probabilities).
    lookahead: most tokens that are drafted for it in a round (None: K; 0: the draft skips it).
    Ranks other than the lead know neither `logprobs` nor `adjustment`, but only `reads_logits`.
    grammar: which tokens may follow (text.grammar; "": any), of at most MOST_GRAMMAR bytes.
    answered: how many of the prompt's last tokens belong to the answer already.
    """

    request_id: int
    first_token: int = 0
    epoch: int = 0
    prompt: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    lookahead: int | None = None
    adjustment: Adjustment | None = None
    grammar: str = ""
    answered: int = 0

    @property
    def reads_logits(self) -> bool:
        """Whether the lead reads the target's logits, also if it is greedy and has no grammar."""
        return self.logprobs is not None or self.adjustment is not None


_NO_DISTRIBUTIONS: Mapping[int, Sequence[Any]] = {}
Requests = Mapping[tuple[int, int], Request]  # by (id, epoch)
_NONE: Requests = {}
_FREE = Control()


class Outcome:
    """The result of round `round`: (k, t*) for each sequence, and which were admitted or released.

    rows: int32 [n, 5] = id, epoch, event, num_accepted (k, 0..num_draft; in a tree the node), bonus
    (t*). The speculation of round + 1 answers the rows that are not releases, in their order.
    prompts: the requests of those new sequences that have a prompt. control: on round + 1.
    """

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
        """The rows of the sequences that are new, admitted or opened, [n, 5]."""
        new: Ints = self.rows[_FRESH[self.events]]
        return new

    @property
    def num_live(self) -> int:
        """The number of sequences that take part in the next round."""
        events = self.events  # in a damaged message they may have any value
        return int(np.count_nonzero((events <= Event.ADMIT) | (events == Event.START)))


class Speculation:
    """The draft tokens of round `round`; row i holds num_draft[i] <= K of them (of a tree: N).

    rows: int32 [b, 3 + K] = source, hit (1: the outcome was a key of the cache), num_draft, tokens.
    With sampled, 2K more columns hold q, float64 [b, K]: the probability with which each token was
    drawn (1: it was certain). In tokens and q, columns from num_draft[i] on are not read.
    """

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
        """version: of the draft's weights; 0: as loaded. is_lost: whether the distributions of its
        uncertain tokens are lost, so that these are not judged. drawn_from: on the rank that
        drafted, these distributions [V] by batch row."""
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
        sampled = self.sampled
        return Speculation(
            self.round, self.rows, sampled=sampled, version=self.version, is_lost=True
        )

    @classmethod
    def width(cls, lookahead: int, sampled: bool) -> int:
        """Returns the number of columns of `rows`."""
        return cls.HEAD + lookahead * (3 if sampled else 1)

    @property
    def num_proposals(self) -> NDArray[np.int64]:
        """Counts each row's tokens that were not certain, [b]; PROPOSALS brings a distribution for
        each."""
        if not self.sampled:
            return np.zeros(len(self.rows), np.int64)
        served = np.arange(self.tokens.shape[1]) < self.num_draft[:, None]
        return np.asarray((served & (self.q < 1)).sum(axis=1))

    @property
    def num_rows(self) -> int:
        """The rows of the target forward that verifies it: Σ(num_draft + 1)."""
        return int(self.num_draft.sum()) + len(self.rows)


def verify_rows(last_tokens: Ints, speculation: Speculation) -> Ints:
    """Returns the tokens that the target verifies, flat [Σ(num_draft+1)].

    Each sequence has its last token t* and then its draft tokens x_1 … x_num_draft.
    last_tokens: int32 [b].
    """
    width = speculation.tokens.shape[1]
    table = np.empty((len(last_tokens), width + 1), np.int32)
    table[:, 0] = last_tokens
    table[:, 1:] = speculation.tokens
    if (speculation.num_draft == width).all():
        return table.reshape(-1)
    return table[np.arange(width + 1) <= speculation.num_draft[:, None]]
