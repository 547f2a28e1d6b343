"""The interface of what draws tokens from a model's logits where these are, on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mpissd.common.rounds import Ints
from mpissd.engine.spec.sampling import Row


@dataclass(frozen=True)
class Drafting:
    """Asks for a draft's next token from a row of logits, with u in [0, 1).

    top: the largest logits whose weights Saguaro's sampling damps; 0: none.
    """

    row: int
    temperature: float
    u: float
    top: int = 0


@dataclass(frozen=True)
class Proposed:
    """A drafted token, its probability q, and the row that both were drawn from.

    kept: the row on the device; numpy.asarray copies it to the host, float32 [columns].
    """

    token: int
    q: float
    kept: Any


@dataclass(frozen=True)
class Judging:
    """Asks whether a drafted token is accepted, and for what replaces it, drawn with u in [0, 1).

    q: the probability with which the token was drafted; 1 if it was certain; 0: none was drafted,
    and the row's own token is drawn. coin: uniform in [0, 1). kept: the row that the token was
    drafted from, which is read only where one of q < 1 is rejected.
    """

    row: int
    temperature: float
    u: float
    token: int = -1
    q: float = 0.0
    coin: float = 0.0
    kept: Any = None


@dataclass(frozen=True)
class Verdict:
    """What a row decides: `token` is drawn where nothing was drafted, or the draft is rejected.

    needs_row: the drafted token is rejected, and `kept` was missing.
    """

    token: int
    is_replaced: bool = False
    needs_row: bool = False


class Draws(Protocol):
    """Draws from the logits of a model's last finished forward, which the next one overwrites.

    Both methods raise DivergedError for a row with a logit that is not finite.
    """

    most_damped: int  # the largest `top`

    def propose(self, asked: Sequence[Drafting], scale: float) -> list[Proposed]:
        """Draws drafted tokens; scale: what damped weights are multiplied by, 0 … 1."""

    def judge(self, asked: Sequence[Judging], ids: Ints | None = None) -> list[Verdict]:
        """Judges drafted tokens; ids: the token of each entry of kept rows (None: entry t is t)."""

    def keep(self, row: Row, total: float) -> Any:
        """Returns a row of the host, whose entries' sum is `total`, as `Judging.kept` takes it."""
