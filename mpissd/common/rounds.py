"""The data of one decoding round: the drafted tokens (Speculation) and what the target's
verification decided (Outcome).

All arrays cover the b sequences of a batch; row i of each belongs to the same sequence. An Outcome
or a Speculation holds one int32 matrix and views of its columns, so that a message is one copy.
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
Ids = tuple[int, ...]
MOST_GRAMMAR = 1 << 15  # most bytes of a request's grammar
MOST_SAMPLING = 1 << 17  # most bytes of a Sampling as JSON, with a grammar and 1,024 biases
MOST_FORCED = 32  # most tokens that a grammar forces in one round


class Source(IntEnum):
    """Where a sequence's draft tokens of one round come from."""

    NONE = 0  # nothing was drafted (AR)
    CACHE = 1  # drafted ahead, while the target verified the previous round
    JIT = 2  # drafted by the draft model once the previous round's accepted tokens were known
    FAST = 3  # drafted by a cheap backup without the draft model, such as prompt lookup


class Event(IntEnum):
    """What a row of an Outcome says about its sequence."""

    COMMIT = 0  # the round accepted num_accepted tokens and drew the bonus token
    ADMIT = 1  # a new sequence; `bonus` is its last prompt token, and it has no draft tokens yet
    RELEASE = 2  # the sequence is finished, and gets no more draft tokens
    PREFILL = 3  # a new sequence whose prompt is stored in parts, during rounds of other sequences
    START = 4  # a sequence that was added by PREFILL joins, since its whole prompt is stored
    FORCED = 5  # the grammar allows only the token `bonus` after the sequence's bonus token


# LIVE[event]: whether the sequence of a row with this event takes part in the next round
LIVE = (True, True, False, False, True, False)
_FRESH = np.array([False, True, False, True, False, False])  # by Event: does a new sequence begin?


class Logprob(NamedTuple):
    """A token's natural log-probability. top: the likeliest tokens as (token, log-probability)."""

    value: float
    top: Sequence[tuple[int, float]] = ()


class Scored(NamedTuple):
    """Log-probabilities of some tokens of a prompt, those at positions start, start + 1, …"""

    request_id: int
    start: int
    logprobs: Sequence[Logprob]


class Control(NamedTuple):
    """What the target's rank 0 decided about the next round, for all ranks. lookahead: the most
    draft tokens of a sequence (None: as the flags say). width: for each possible number of accepted
    tokens, the most candidates for the token that the target adds, from which the draft drafts
    ahead (None: as the flags say; 0: none). prefill_rows: the number of prompt tokens that the
    verification's forward also stores in the KV cache."""

    lookahead: int | None = None
    width: int | None = None
    prefill_rows: int = 0


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are drafted and chosen. All ranks have the same values.
    temperature, top_p: applied to the target's distribution; at temperature 0 the likeliest token
    is taken. seed: of this request's random draws (None: the job's seed and the request's id decide
    them). logprobs: how many of the likeliest tokens are returned with each token (None: no
    log-probabilities). logit_bias: pairs (token, number added to its logit), applied before
    temperature and top_p. presence_penalty: subtracted from the logit of each token that is in the
    answer; frequency_penalty: subtracted once for each occurrence of a token in the answer [OpenAI
    API reference]. grammar: the grammar that the answer must match, as text ("": none). lookahead:
    the most draft tokens in a round (None: K; 0: none are drafted). mode: "ar", "sd" or "ssd", if
    the request asks a server for a decoding mode. top_k: how many of the likeliest tokens are kept
    (0: all). min_p: tokens less likely than min_p times the likeliest one are dropped.
    repetition_penalty: divides the positive logits, and multiplies the negative ones, of all tokens
    of prompt and answer, before the other penalties [Keskar 2019, section 4.1]. stop_ids: the
    tokens that end the answer (None: the model's). min_tokens: none of them is among the first
    min_tokens tokens. prompt_logprobs: as logprobs, of the prompt's tokens."""

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
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: Ids | None = None
    min_tokens: int = 0
    prompt_logprobs: int | None = None

    @property
    def adjusts(self) -> bool:
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(self.logit_bias or penalties or (self.min_tokens and self.stop_ids))

    @property
    def cuts(self) -> bool:
        """Whether unlikely tokens are dropped."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def is_plain(self) -> bool:
        """Whether no bias, penalty or grammar changes the logits."""
        return not (self.adjusts or self.grammar)

    @property
    def reads_logits(self) -> bool:
        """Whether the target's rank 0 needs the logits even if the request is greedy, since more
        than the likeliest token is asked for."""
        return self.logprobs is not None or not self.is_plain

    def adjusted(
        self, logits: NDArray[np.floating[Any]], answer: Sequence[int], prompt: Sequence[int]
    ) -> NDArray[np.float64]:
        """Returns a copy of a row of logits [V] with the biases and penalties applied, in vLLM's
        order. answer: the answer's tokens before this row. prompt: the tokens before them."""
        adjusted = logits.astype(np.float64)
        bias = dict(self.logit_bias)
        adjusted[list(bias)] += list(bias.values())
        if (factor := self.repetition_penalty) != 1:
            seen = np.unique(np.array([*prompt, *answer], np.int64))
            found = adjusted[seen]
            adjusted[seen] = np.where(found > 0, found / factor, found * factor)
        tokens, counts = np.unique(np.array(answer, np.int64), return_counts=True)
        adjusted[tokens] -= self.presence_penalty + self.frequency_penalty * counts
        if len(answer) < self.min_tokens:
            adjusted[list(self.stop_ids or ())] = -np.inf
        return adjusted

    def to_dict(self) -> dict[str, Any]:
        """Returns {name: value} of the fields that differ from their defaults."""
        return {name: value for name, value in vars(self).items() if value != vars(GREEDY)[name]}

    @classmethod
    def from_dict(cls, values: Any) -> Sampling:
        """Makes a Sampling from a mapping that `to_dict` returned; raises ValueError otherwise."""
        kinds = cls.__annotations__
        try:
            return cls(**{name: _read(kinds[name], value) for name, value in values.items()})
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{str(values)[:80]!r} is no Sampling") from error


def _read(kind: str, value: Any) -> Any:
    """Returns a JSON value as a Python value of a field's type annotation `kind`; raises an error
    if the value has another type."""
    if kind == "Biases":
        return tuple((_read("int | None", token), _read("float", bias)) for token, bias in value)
    if kind.startswith("Ids"):
        return tuple(_read("int", token) for token in value)
    if kind.startswith("str"):
        value.encode()  # raises for other types than str, and for half of a surrogate pair
        return value
    kinds, low = ((int, float), -_MOST) if kind == "float" else ((int,), 0)
    if type(value) not in kinds or not low <= value < _MOST:
        raise TypeError
    return value


_MOST = 1 << 64  # every number in a Sampling is smaller
GREEDY = Sampling()


@dataclass(frozen=True)
class Request:
    """One sequence to decode, identified by (request_id, epoch), never by its place in the batch.
    first_token: the last prompt token. epoch: how often decoding was started again after a
    preemption. prompt: all prompt tokens; empty if no worker reads prompts. answered: how many of
    the prompt's last tokens belong to the answer, because they were decoded before a preemption."""

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
    """What one round decided: for each sequence the number k of accepted tokens and the bonus token
    t* that the target emits after them, and which sequences join or leave. rows: int32 [n, 5] with
    the columns id, epoch, event, num_accepted (k; with a draft tree, the node at which the accepted
    path ends) and bonus (t*). The Speculation of the next round has a row for each of these rows
    whose event keeps its sequence in the batch (LIVE), in the same order. prompts: the requests of
    new sequences with a prompt. control: the decisions about the next round. taken: the version of
    the draft's weights that drafted the branches which rank 0 took from its own cache for all
    sequences (None: it asks the draft)."""

    WIDTH = 5

    def __init__(
        self,
        round_: int,
        rows: Ints,
        prompts: Requests = _NONE,
        control: Control = _FREE,
        taken: int | None = None,
    ) -> None:
        self.round = round_
        self.rows = rows
        self.prompts = prompts
        self.control = control
        self.taken = taken
        self.ids: Ints = rows[:, 0]
        self.events: Ints = rows[:, 2]
        self.num_accepted: Ints = rows[:, 3]
        self.bonus: Ints = rows[:, 4]

    @classmethod
    def admission(cls, round_: int, requests: Sequence[Request]) -> Outcome:
        """Returns an Outcome that accepts no tokens but lets new sequences join, one for each
        request. round_: the number of the round."""
        rows = [(r.request_id, r.epoch, Event.ADMIT, 0, r.first_token) for r in requests]
        prompts = {(r.request_id, r.epoch): r for r in requests if r.prompt}
        return cls(round_, np.array(rows, np.int32).reshape(-1, cls.WIDTH), prompts or _NONE)

    @property
    def fresh(self) -> Ints:
        """Those rows of `rows` that add a sequence (event ADMIT or PREFILL), [n, 5]."""
        new: Ints = self.rows[_FRESH[self.events]]
        return new

    @property
    def num_live(self) -> int:
        """The number of sequences that take part in the next round."""
        events = self.events  # in a damaged message an event may be any number
        return int(np.count_nonzero((events <= Event.ADMIT) | (events == Event.START)))


class Speculation:
    """The draft tokens of one round. rows: int32 [b, 3 + K] with the columns source (Source), hit
    (1: these tokens were found in the speculation cache), num_draft and K tokens, of which
    row i uses the first num_draft[i]. A tree of N nodes has N token columns. If `sampled`, 2K more
    columns hold q, float64 [b, K]: the probability with which each token was drawn."""

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
        """Takes one round's draft tokens. version: the version of the draft's weights, 0 for those
        that were loaded. is_lost: whether the distributions from which tokens with q < 1 were drawn
        are lost, so that these tokens cannot be verified. drawn_from: {row of the batch: its
        tokens' distributions over the vocabulary} on the rank that drafted."""
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
        """Returns a Speculation without draft tokens for `batch` sequences, which AR verifies in
        every round. lookahead: K, for which its rows have columns."""
        rows = np.zeros((batch, cls.width(lookahead, sampled)), np.int32)
        return cls(round_, rows, sampled=sampled, version=version)

    def lost(self) -> Speculation:
        """Returns a copy that is marked as having lost the distributions of its sampled tokens."""
        return Speculation(
            self.round, self.rows, sampled=self.sampled, version=self.version, is_lost=True
        )

    @classmethod
    def width(cls, lookahead: int, sampled: bool) -> int:
        return cls.HEAD + lookahead * (3 if sampled else 1)

    @property
    def num_proposals(self) -> NDArray[np.int64]:
        """For each of the b sequences, the number of draft tokens that were sampled (q < 1), [b].
        Their distributions are sent to the target, which needs them to verify the tokens."""
        if not self.sampled:
            return np.zeros(len(self.rows), np.int64)
        served = np.arange(self.tokens.shape[1]) < self.num_draft[:, None]
        return np.asarray((served & (self.q < 1)).sum(axis=1))

    @property
    def num_rows(self) -> int:
        """The number of rows of the target's forward that verifies these tokens, Σ(num_draft+1)."""
        return int(self.num_draft.sum()) + len(self.rows)


class ReadyBranches:
    """Whole branches that a draft sends to the target's rank 0, which then needs no answer if the
    outcome of round `round` is among theirs. version: of the draft's weights. levels: the limit of
    their levels (Control.lookahead of the round). rows: int32 [n, 4 + 3 + K]: the request id,
    epoch, number of accepted tokens (in a tree: node) and bonus token for which the branch was
    grown, then a row of the Speculation that serves it."""

    KEY = 4

    def __init__(
        self, round_: int, rows: Ints, version: int = 0, levels: int | None = None
    ) -> None:
        self.round = round_
        self.rows = rows
        self.version = version
        self.levels = levels
        keys = map(tuple, rows[:, : self.KEY].tolist())
        self._numbers = {key: number for number, key in enumerate(keys)}

    def served(self, outcome: Outcome, *, sampled: bool) -> Speculation | None:
        """Returns the drafted tokens of the round after `outcome` if every sequence that goes on
        has a branch for its outcome, and no sequence joins or has tokens forced by a grammar, or
        None. sampled: whether rows hold probabilities q."""
        if outcome.control.lookahead != self.levels:
            return None
        found = list[int]()
        for request_id, epoch, event, k, token in outcome.rows.tolist():
            if event == Event.COMMIT:
                number = self._numbers.get((request_id, epoch, k, token))
                if number is None:
                    return None
                found.append(number)
            elif event not in (Event.RELEASE, Event.PREFILL):
                return None
        if not found:
            return None
        rows = self.rows[found, self.KEY :]
        return Speculation(outcome.round + 1, rows, sampled=sampled, version=self.version)


def verify_rows(last_tokens: Ints, speculation: Speculation) -> Ints:
    """Returns the input tokens of the target's verification, int32 [Σ(num_draft + 1)]: for each
    sequence its last token (last_tokens [b]), then its num_draft draft tokens."""
    width = speculation.tokens.shape[1]
    table = np.empty((len(last_tokens), width + 1), np.int32)
    table[:, 0] = last_tokens
    table[:, 1:] = speculation.tokens
    if (speculation.num_draft == width).all():
        return table.reshape(-1)
    return table[np.arange(width + 1) <= speculation.num_draft[:, None]]
