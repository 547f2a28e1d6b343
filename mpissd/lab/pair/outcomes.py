"""The rounds of a real pair as arrays: from a recording exactly, from a row as it happened.

A recording at temperature 0 determines every round of K tokens (docs/recordings.md), so one file
has the outcomes of each K. A row of text has the outcomes of its own K and temperature; the ranks
of its bonus tokens are counted in its key `learned`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Source
from mpissd.common.row import Row
from mpissd.engine.workload.replay.recording import Ids, Recorded, Recording
from mpissd.engine.workload.replay.workload import copied

Array = NDArray[np.int64]
BEYOND, OUTSIDE, NO_LOOKUP = 0, -1, -2  # instead of a rank


@dataclass(frozen=True)
class Outcomes:
    """The rounds of one source at one K; all arrays have one entry a sequence and round, [n].

    sequence: from 0, in the order of the rounds within each. accepted: k. rank: of the bonus token
    among the `limit` candidates, from 1, or BEYOND, OUTSIDE, NO_LOOKUP; None if a source lacks it.
    knows_vocabulary: whether OUTSIDE is counted separately from BEYOND.
    """

    source: str
    lookahead: int
    temperature: float
    sequence: Array
    accepted: Array
    rank: Array | None
    limit: int
    knows_vocabulary: bool
    # [m, 3] (limit, rank, count) after a rejection and after K accepted, if `rank` is None
    counted: tuple[Array, Array] | None = None


def of_recording(recording: Recording, lookahead: int) -> Outcomes:
    """Returns the rounds of SD and SSD with K tokens after hits and jit backups."""
    rounds = [
        (n, *line)
        for n, part in enumerate(recording.sequences)
        for line in _rounds(part, part.rollout, lookahead, recording.widest, recording.known)
    ]
    table = np.array(rounds, np.int64).reshape(-1, 3)
    return Outcomes(
        source=recording.name,
        lookahead=lookahead,
        temperature=0.0,
        sequence=table[:, 0],
        accepted=table[:, 1],
        rank=table[:, 2],
        limit=recording.widest,
        knows_vocabulary=recording.known is not None,
    )


def _rounds(
    part: Recorded, drafts: Ids, lookahead: int, widest: int, known: Ids | None
) -> Iterator[tuple[int, int]]:
    """Yields (k, rank) of each round of one sequence."""
    runs = accepted_runs(part, drafts[:, :lookahead])
    c = 0
    while c < part.end:
        k = int(runs[c])
        served = drafts[c, k] if k < lookahead else None
        yield k, _rank(part, c + k, served, widest, known)
        c += k + 1


def accepted_runs(part: Recorded, drafts: Ids) -> Array:
    """Returns k after each of the answer's tokens [end], for these drafts [≥ end, K]."""
    end, lookahead = part.end, drafts.shape[1]
    ahead = np.arange(end)[:, None] + np.arange(lookahead)
    same = drafts[:end] == part.tokens[ahead]
    return np.asarray(np.cumprod(same, axis=1).sum(axis=1), np.int64)


def _rank(part: Recorded, at: int, served: int | None, widest: int, known: Ids | None) -> int:
    """Returns the rank of the token after `at` generated ones; NO_LOOKUP if it ends the last
    round."""
    if at + 1 >= part.end:
        return NO_LOOKUP
    token, kept = part.tokens[at], part.top[at]
    if served is not None:
        kept = kept[kept != served]
    found = np.flatnonzero(kept[:widest] == token)
    if len(found):
        return int(found[0]) + 1
    is_outside = known is not None and known[np.searchsorted(known, token) % len(known)] != token
    return OUTSIDE if is_outside else BEYOND


def looked_up_counts(recording: Recording, lookahead: int, kind: str) -> Array:
    """Counts the rounds with k = 0 … K tokens accepted if only a lookup drafts, [K + 1]."""
    counts = np.zeros(lookahead + 1, np.int64)
    for n, part in enumerate(recording.sequences):
        runs = accepted_runs(part, copied(recording, n, lookahead, kind))
        c = 0
        while c < part.end:
            counts[runs[c]] += 1
            c += int(runs[c]) + 1
    return counts


def of_row(row: Row, rounds: Path) -> Outcomes:
    """Returns the measured rounds of a row of text; raises ConfigError if they are not kept."""
    if row.workload != "text" or not row.lookahead:
        what = f"row {row.run_id!r}: {row.workload}, {row.mode}"
        raise ConfigError(f"{what}: allowed: text that drafts")
    try:
        with np.load(rounds, allow_pickle=False) as archive:
            lines = archive["sequences"]
    except (OSError, KeyError, ValueError, EOFError, BadZipFile) as error:
        raise ConfigError(f"{rounds}: {error}") from error
    lines = lines[np.lexsort((lines[:, 0], lines[:, 1]))]
    kept = _drafted_whole(lines, row)
    ids, k = lines[kept, 1], lines[kept, 3]
    if not len(ids):
        what = f"row {row.run_id!r}: no round of {row.lookahead} tokens by the draft"
        raise ConfigError(f"{what}: allowed: longer answers")
    return Outcomes(
        source=f"{row.run_id}",
        lookahead=row.lookahead,
        temperature=row.temperature or 0.0,
        sequence=np.unique(ids, return_inverse=True)[1].reshape(-1),
        accepted=k,
        rank=None,
        limit=max(row.fan_out or [0]),
        knows_vocabulary=False,
        counted=_counted(row.learned or {}),
    )


def _drafted_whole(lines: Array, row: Row) -> NDArray[np.bool_]:
    """Returns which rounds served K tokens of the draft's.

    Shorter speculations, and in SSD those from a fast backup, have other acceptance rates.
    """
    whole = lines[:, 7] == row.lookahead
    return np.asarray(whole & (lines[:, 5] != Source.FAST) if row.mode == "ssd" else whole)


def _counted(learned: Mapping[str, Any]) -> tuple[Array, Array]:
    each: Sequence[Any] = [
        learned.get(f"ranks_{end}") or [] for end in ("rejected", "all_accepted")
    ]
    rejected, complete = (np.array(counts, np.int64).reshape(-1, 3) for counts in each)
    return rejected, complete
