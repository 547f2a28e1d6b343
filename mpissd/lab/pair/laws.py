"""Measures a pair's acceptance and hit models from recordings and rows; writes --laws files.

A recording at temperature 0 determines every round of K tokens (docs/recordings.md), so one file
has the outcomes of each K. A row of text has the outcomes of its own K and temperature; the ranks
of its bonus tokens are counted in its key `learned`.

Intervals are of 95%, by a jackknife over groups of whole sequences: rounds of one text are no
independent draws. The file keeps the models without each group, so that `plan` can carry the
sampling error to its verdict.

miss(F) = floor + A·F^−r [Kumar, Dao, May 2026, definition 11, with A and a floor]. The floor is the
measured share of tokens that the draft does not know, and (A, r) are the maximum-likelihood fit to
the others, whose ranks are known up to the candidates kept (mpissd/engine/spec/fit.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from mpissd.common.compare import jackknife
from mpissd.common.errors import ConfigError
from mpissd.common.output import check_file, tool, whole_file
from mpissd.common.rounds import Source as DraftSource
from mpissd.common.row import Row
from mpissd.common.theory import power_law_miss
from mpissd.engine.spec.acceptance import SCHEMA, hazards_of_counts
from mpissd.engine.spec.fit import most_likely
from mpissd.engine.spec.lookup import LOOKUPS
from mpissd.engine.workload.replay import Ids, Recorded, Recording, copied, load
from mpissd.lab.pair.config import PairConfig
from mpissd.lab.tables.load import load_rows

Array = NDArray[np.int64]
BEYOND, OUTSIDE = 0, -1  # instead of a rank
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # fan-outs at which misses are listed
GROUPS = 20  # the most groups of sequences; fewer sequences are a group each
_FIT = ("A", "r", "floor")
_FAILS = 0.1  # relative error of the fitted miss rate beyond which the fit counts as failed
_ABOUT = ("target", "draft", "target_sha256", "draft_sha256", "prompts", "licence", "temperature")


class Ranks(NamedTuple):
    """Ranks of bonus tokens, counted by sequence.

    counts: [S, F + 2]; columns: rank 1 … F, beyond the F candidates kept, outside the draft's
    vocabulary. knows_vocabulary: whether the last two are counted separately.
    """

    counts: Array
    knows_vocabulary: bool

    @classmethod
    def of(cls, sequence: Array, rank: Array, num_sequences: int, limit: int, knows: bool) -> Ranks:
        """Counts ranks [n] (from 1, BEYOND or OUTSIDE) of these sequences [n]; limit: F."""
        counts = np.zeros((num_sequences, limit + 2), np.int64)
        np.add.at(counts, (sequence, np.where(rank > 0, rank - 1, limit - rank)), 1)
        return cls(counts, knows)


class Outcomes(NamedTuple):
    """The rounds of one source at one K.

    accepted: counts of k = 0 … K by sequence, [S, K + 1]. ranks: of bonus tokens after a rejection
    and after K accepted tokens; None if the source lacks them.
    """

    accepted: Array
    ranks: tuple[Ranks, Ranks] | None


@dataclass(frozen=True)
class Source:
    """A recording, or the rounds of one row: its origin, and its outcomes by K."""

    about: dict[str, Any]
    outcomes: Mapping[int, Outcomes]
    recording: Recording | None = None


def print_laws(config: PairConfig) -> None:
    """Prints the models of the sources at K; writes the models of every K if `to` is given."""
    if config.to is not None:
        check_file("to", config.to)
        if Path(config.to).exists():
            raise ConfigError(f"to={config.to}: exists: allowed: a new file")
    sources = [source for name in str(config.sources).split(",") for source in read(name)]
    document = measured(sources, config.steps)
    at = next(laws for laws in document["laws"] if laws["lookahead"] == config.steps)
    print("\n".join(_text(at)))
    if config.to is not None:
        path = Path(config.to)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(f"{json.dumps(document, indent=1)}\n".encode())
        print(f"{path}: impose it with --laws={path}")


def read(name: str) -> Iterator[Source]:
    """Yields the sources of a name; raises ConfigError if there is none."""
    if name.endswith(".npz"):
        recording = load(name)
        about = {key: recording.about.get(key) for key in _ABOUT}
        file = {"file": recording.name, "sha256": recording.sha256}
        by_k = {k: _of_recording(recording, k) for k in range(1, recording.lookahead + 1)}
        yield Source({**file, **about}, by_k, recording)
        return
    path = Path(name)
    folder = path if path.is_dir() else path.parent
    rows = [row for row in load_rows([path]) if row.workload == "text" and row.mode != "ar"]
    if not rows:
        raise ConfigError(
            f"sources={name}: allowed: a recording (.npz), or rows of text that draft"
        )
    for row in rows:
        weights = row.weights or {}
        about = {
            "file": f"{folder.name}/{row.run_id}",
            "sha256": hashlib.sha256(json.dumps(dict(row)).encode()).hexdigest(),
            "target": row.target,
            "draft": row.draft,
            **{f"{of}_sha256": (weights.get(of) or {}).get("sha256") for of in ("target", "draft")},
            "temperature": row.temperature,
            "saguaro_c": row.saguaro_c,
        }
        yield Source(about, {row.lookahead: _of_row(row, folder / "rounds" / f"{row.run_id}.npz")})


def _of_recording(recording: Recording, lookahead: int) -> Outcomes:
    """Returns the rounds of SD and SSD with K tokens after hits and jit backups."""
    known, widest, num = recording.known, recording.widest, len(recording.sequences)
    accepted = np.zeros((num, lookahead + 1), np.int64)
    ranked: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for n, part in enumerate(recording.sequences):
        for c, k in _rounds(part, part.rollout[:, :lookahead]):
            accepted[n, k] += 1
            at = c + k
            if at + 1 >= part.end:
                continue  # the answer ends: its bonus token is not looked up
            token, kept = part.tokens[at], part.top[at]
            if k < lookahead:
                kept = kept[kept != part.rollout[c, k]]
            places = np.flatnonzero(kept[:widest] == token)
            rank = BEYOND
            if len(places):
                rank = int(places[0]) + 1
            elif known is not None and known[np.searchsorted(known, token) % len(known)] != token:
                rank = OUTSIDE
            ranked[k == lookahead].append((n, rank))
    tables = [np.array(ranks, np.int64).reshape(-1, 2).T for ranks in ranked]
    rejected, complete = (Ranks.of(of[0], of[1], num, widest, known is not None) for of in tables)
    return Outcomes(accepted, (rejected, complete))


def _rounds(part: Recorded, drafts: Ids) -> Iterator[tuple[int, int]]:
    """Yields (c, k) of each round of an answer: the tokens before it, and how many it accepts of
    these drafts [≥ end, K]."""
    end, lookahead = part.end, drafts.shape[1]
    same = drafts[:end] == part.tokens[np.arange(end)[:, None] + np.arange(lookahead)]
    runs, c = np.cumprod(same, axis=1).sum(axis=1).tolist(), 0
    while c < end:
        yield c, runs[c]
        c += runs[c] + 1


def _of_row(row: Row, rounds: Path) -> Outcomes:
    """Returns the measured rounds of a row of text; raises ConfigError if they are not kept."""
    try:
        with np.load(rounds, allow_pickle=False) as archive:
            lines = archive["sequences"]
    except (OSError, KeyError, ValueError, EOFError, BadZipFile) as error:
        raise ConfigError(f"{rounds}: {error}") from error
    # Shorter speculations, and in SSD those from a fast backup, have other acceptance rates.
    whole = lines[:, 7] == row.lookahead
    if row.mode == "ssd":
        whole &= lines[:, 5] != DraftSource.FAST
    lines = lines[whole]
    if not len(lines):
        what = f"row {row.run_id!r}: no round of {row.lookahead} tokens by the draft"
        raise ConfigError(f"{what}: allowed: longer answers")
    ids, sequence = np.unique(lines[:, 1], return_inverse=True)
    accepted = np.zeros((len(ids), row.lookahead + 1), np.int64)
    np.add.at(accepted, (sequence.reshape(-1), lines[:, 3]), 1)
    ranks = []
    for end in ("rejected", "all_accepted"):  # (F, rank, count); one outcome a sequence
        counts = np.array((row.learned or {}).get(f"ranks_{end}") or [], np.int64).reshape(-1, 3)
        if len(np.unique(counts[:, 0])) != 1:
            return Outcomes(accepted, None)
        rank = np.repeat(counts[:, 1], counts[:, 2])
        ranks.append(Ranks.of(np.arange(len(rank)), rank, len(rank), int(counts[0, 0]), False))
    return Outcomes(accepted, (ranks[0], ranks[1]))


def measured(sources: Sequence[Source], lookahead: int) -> dict[str, Any]:
    """Returns the document of a --laws file; raises ConfigError for several pairs, temperatures or
    C, or a K that is not measured."""
    for name in ("target_sha256", "draft_sha256"):
        files = {source.about[name]: source.about["file"] for source in sources}
        if len(files) > 1:
            raise ConfigError(
                f"sources of several models ({', '.join(files.values())}): allowed: one pair"
            )
    sampled: dict[str, str] = {}
    for about in (source.about for source in sources):
        warmth, c = about["temperature"] or 0.0, about.get("saguaro_c")
        # Saguaro's C has no effect at temperature 0.
        shaped = f", C = {1.0 if c is None else c:g}" if warmth else ""
        sampled.setdefault(f"T = {warmth:g}{shaped}", about["file"])
    if len(sampled) > 1:
        each = "; ".join(f"{file}: {how}" for how, file in sampled.items())
        raise ConfigError(f"sources of unlike sampling ({each}): allowed: one temperature and C")
    known = sorted({k for source in sources for k in source.outcomes})
    if lookahead not in known:
        had = ", ".join(map(str, known))
        raise ConfigError(f"lookahead={lookahead}: allowed with these sources: {had}")
    every = {k: [source for source in sources if k in source.outcomes] for k in known}
    prompts = min(sum(len(s.outcomes[k].accepted) for s in here) for k, here in every.items())
    groups, laws = min(GROUPS, prompts), []
    for k, here in every.items():
        ranked = [ranks for source in here if (ranks := source.outcomes[k].ranks) is not None]
        recordings = [source.recording for source in here if source.recording is not None]
        accepted = _by_group([source.outcomes[k].accepted for source in here], groups)
        rejected, rejected_without = hits_of([one for one, _ in ranked], groups)
        complete, complete_without = hits_of([one for _, one in ranked], groups)
        fast = {
            kind: _by_group([_looked_up(of, k, kind) for of in recordings], groups)
            for kind in (LOOKUPS if recordings else ())
        }
        without = [
            {
                "accepted": counts.tolist(),
                "rejected": {"fit": rejected_without[n]},
                "complete": {"fit": complete_without[n]},
                "fast": {kind: _without_each(of)[n].tolist() for kind, of in fast.items()},
            }
            for n, counts in enumerate(_without_each(accepted))
        ]
        laws.append(
            {
                "lookahead": k,
                **_acceptance(accepted),
                "rejected": rejected,
                "complete": complete,
                "fast": {kind: of.sum(axis=0).tolist() for kind, of in fast.items()},
                "without": without,
            }
        )
    about = {
        "sources": [source.about for source in sources],
        "prompts": prompts,
        "groups": groups,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "tool": tool("pair"),
    }
    return {"kind": "laws", "schema": SCHEMA, "about": about, "laws": laws}


def _looked_up(recording: Recording, lookahead: int, kind: str) -> Array:
    """Returns counts of k = 0 … K by sequence if only a lookup drafts, [S, K + 1]."""
    counts = np.zeros((len(recording.sequences), lookahead + 1), np.int64)
    for n, part in enumerate(recording.sequences):
        runs = [run for _, run in _rounds(part, copied(recording, n, lookahead, kind))]
        np.add.at(counts[n], runs, 1)
    return counts


def _by_group(tables: Sequence[Array], groups: int) -> Array:
    """Returns the sums over groups of the tables' rows, [G, columns]; group g has rows g + i·G."""
    rows = np.concatenate(tables)
    sums = np.zeros((groups, rows.shape[1]), np.int64)
    np.add.at(sums, np.arange(len(rows)) % groups, rows)
    return sums


def _without_each(sums: Array) -> Array:
    """Returns the sums over all groups but one, for each group; none if there is only one group."""
    return (sums.sum(axis=0) - sums) if len(sums) > 1 else sums[:0]


def _intervals(
    values: Sequence[float], without: Sequence[Sequence[float] | None], most: Any = None
) -> list[list[float] | None]:
    """Returns the 95% interval of each number, cut to 0 … most; without: the numbers without each
    group. They are None with fewer than two groups, or where one's absence leaves no numbers."""
    known = [of for of in without if of is not None]
    if len(known) < max(2, len(without)):
        return [None] * len(values)
    half = jackknife(np.array(known))
    return np.clip([values - half, values + half], 0, most).T.tolist()  # type: ignore[no-any-return]


def _acceptance(sums: Array) -> dict[str, Any]:
    """Returns counts of k, tokens a round, and acceptance by position: marginal, conditional.

    alpha is accepted / (accepted + rejected): the mean acceptance rate of the judged tokens. sums:
    counts by group, [G, K + 1].
    """

    def numbers(total: Array) -> list[float]:
        accepted, rounds = float((total * np.arange(len(total))).sum()), int(total.sum())
        judged = accepted + float(total[:-1].sum())
        marginal = total[::-1].cumsum()[::-1][1:] / rounds
        hazards = hazards_of_counts(total.tolist(), len(total) - 1)
        alpha = accepted / judged if judged else 0.0
        return [1 + accepted / rounds, alpha, *marginal.tolist(), *hazards]

    total, width = sums.sum(axis=0), sums.shape[1] - 1
    values, most = numbers(total), np.array([width + 1, *[1] * (2 * width + 1)])
    bounds = _intervals(values, [numbers(of) for of in _without_each(sums)], most)
    return {
        "rounds": int(total.sum()),
        "accepted": total.tolist(),
        "tokens_a_round": values[0],
        "tokens_a_round_95": bounds[0],
        "alpha": values[1],
        "alpha_95": bounds[1],
        "marginal": values[2 : 2 + width],
        "marginal_95": bounds[2 : 2 + width],
        "conditional": values[2 + width :],
        "conditional_95": bounds[2 + width :],
    }


def hits_of(tables: Sequence[Ranks], groups: int) -> tuple[dict[str, Any], list[Any]]:
    """Returns counts of ranks, the miss rate by fan-out, and the fit, of all sources' sequences.

    The second result holds the fits without each group of sequences. Counts have the F of the
    source that kept the fewest candidates.
    """
    if not tables:
        return {"outcomes": 0, "fit": None}, [None] * groups
    limit = min(table.counts.shape[1] for table in tables) - 2
    knows = all(table.knows_vocabulary for table in tables)
    parts = []
    for counts, _ in tables:
        beyond = counts[:, limit:-1].sum(axis=1, keepdims=True)
        parts.append(np.concatenate([counts[:, :limit], beyond, counts[:, -1:]], axis=1))
    sums = _by_group(parts, groups)
    total, again = sums.sum(axis=0), _without_each(sums)
    hits: dict[str, Any] = {
        "outcomes": int(total.sum()),
        "ranks": total[:-2].tolist(),
        "beyond": int(total[-2]),
        "outside": int(total[-1]) if knows else None,
        "misses": {},
        "fit": None,
    }
    fit, fits = _fitted(total), [_fitted(of) for of in again]
    for width in (f for f in WIDTHS if f <= limit and total.any()):
        miss, *misses = (float(of[width:].sum() / max(of.sum(), 1)) for of in (total, *again))
        (bounds,) = _intervals([miss], [[of] for of in misses], 1.0)
        law = None if fit is None else power_law_miss(width, *fit)
        fails = law is not None and abs(law - miss) > _FAILS * miss
        fails &= law is not None and bounds is not None and not bounds[0] <= law <= bounds[1]
        of_width = {"miss": miss, "miss_95": bounds, "law": law, "fails": fails}
        hits["misses"][str(width)] = of_width
    if fit is not None:
        intervals = zip((f"{name}_95" for name in _FIT), _intervals(fit, fits), strict=True)
        fails_at = [int(f) for f, miss in hits["misses"].items() if miss["fails"]]
        hits["fit"] = {**dict(zip(_FIT, fit, strict=True)), **dict(intervals), "fails_at": fails_at}
    return hits, [None if of is None else dict(zip(_FIT, of, strict=True)) for of in fits]


def _fitted(total: Array) -> tuple[float, float, float] | None:
    """Returns (A, r, floor) of counts [F + 2], or None if they do not determine a fit."""
    limit, outcomes = len(total) - 2, int(total.sum())
    ranks = np.repeat([*range(1, limit + 1), 0], total[:-1])
    law = most_likely(ranks, np.full(len(ranks), limit))
    if law is None:
        return None
    floor = float(total[-1]) / outcomes
    return (1.0 - floor) * law[0], law[1], floor


def _text(at: Mapping[str, Any]) -> Iterator[str]:
    """Yields the models at one K as lines of text."""

    def bounded(of: Mapping[str, Any], name: str) -> str:
        low, high = of[f"{name}_95"] or (math.nan, math.nan)
        return f"{of[name]:.3f} [{low:.3f}, {high:.3f}]"

    def cells(values: Iterable[Any]) -> str:
        return " ".join(f"{v:>6}" if isinstance(v, (int, str)) else f"{v:6.3f}" for v in values)

    yield (
        f"K = {at['lookahead']}, {at['rounds']} rounds: {bounded(at, 'tokens_a_round')} tokens a "
        f"round, alpha {bounded(at, 'alpha')}   (in brackets: 95% intervals)"
    )
    yield f"   position        {cells(range(1, at['lookahead'] + 1))}"
    yield f"   reached         {cells(at['marginal'])}"
    yield f"   given the last  {cells(at['conditional'])}"
    ends = {"rejected": "a rejection", "complete": "K accepted tokens"}
    for end, ranks in ((end, at[end]) for end in ends):
        title, fit = f"bonus after {ends[end]}", ranks["fit"]
        if fit is None:
            yield f"{title}: {ranks['outcomes']} outcomes determine no law"
            continue
        floor = "not known" if ranks["outside"] is None else f"{fit['floor']:.3f}"
        yield (
            f"{title}, {ranks['outcomes']} outcomes: A = {bounded(fit, 'A')}, "
            f"r = {bounded(fit, 'r')}, floor of the draft's vocabulary: {floor}"
        )
        misses = ranks["misses"]
        yield f"   F       {cells(misses)}"
        yield f"   miss    {cells(one['miss'] for one in misses.values())}"
        yield f"   law     {cells(one['law'] for one in misses.values())}"
        if fit["fails_at"]:
            failed = ", ".join(map(str, fit["fails_at"]))
            yield f"   the law fails at F = {failed}: off by over 10%"
    for kind, counts in at["fast"].items():
        tokens = 1 + sum(k * n for k, n in enumerate(counts)) / sum(counts)
        yield f"{kind} lookup alone: {tokens:.3f} tokens a round"
