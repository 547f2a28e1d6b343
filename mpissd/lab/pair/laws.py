"""Fits models of acceptance and of cache hits ("laws") to data, and writes the files for --laws.

The data are recordings or result rows of one model pair. A recording at temperature 0
(docs/recordings.md) determines the rounds of SD at each K, the number of tokens drafted a round. A
result row of text has only the rounds of its own K and temperature; its key `learned` counts how
high the draft ranked the bonus tokens (those that the target emits after the accepted ones).

Rounds of one text are not independent. Therefore the 95% intervals come from a jackknife over
groups of whole sequences. The file also holds the models fitted without each group, from which
`plan` computes the sampling error.

The probability that the bonus token is not among the draft's top F candidates is modelled as
miss(F) = floor + A·F^−r [Kumar, Dao, May 2026, definition 11, with A and a floor added]. The floor
is the measured share of tokens outside the draft's vocabulary; A and r are fitted by maximum
likelihood to the ranks of the others (mpissd/engine/law/fit.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

import mpissd
from mpissd.common.errors import ConfigError
from mpissd.common.files import check_regular
from mpissd.common.output import check_file, whole_file
from mpissd.common.rounds import Source
from mpissd.common.row import Row
from mpissd.common.theory import power_law_miss
from mpissd.common.workloads import LOOKUPS
from mpissd.engine.law.acceptance import PARALLEL, SCHEMA, hazards_of_counts, rounds
from mpissd.engine.law.fit import most_likely
from mpissd.engine.model.transformer.trees import accepted as accepted_of
from mpissd.engine.oracle.replay import Ids, Recorded, Recording, copied, levels_of, load, trees_of
from mpissd.lab.pair.config import PairConfig
from mpissd.lab.tables.compare import jackknife
from mpissd.lab.tables.load import load_rows

Array = NDArray[np.int64]
DYNAMIC = "dynamic"
TREES = (7, 15, 23, 31)  # numbers of nodes of the dynamic trees whose rounds are counted
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # numbers of candidates whose miss rates are printed
GROUPS = 20  # largest number of groups of sequences in the jackknife
_FAILS = 0.1  # A fit counts as failed if its miss rate has a larger relative error.
_ABOUT = ("target", "draft", "target_sha256", "draft_sha256", "prompts", "licence", "temperature")


class Ranks(NamedTuple):
    """Counts of how high a draft model ranked the bonus tokens (the target's tokens after the
    accepted ones). counts: int64 [sequences, F + 2], with columns for rank 1 … F among its F
    recorded candidates, for tokens beyond these, and for tokens outside the draft's vocabulary.
    knows_vocabulary: whether the last two kinds of token were told apart."""

    counts: Array
    knows_vocabulary: bool


class Outcomes(NamedTuple):
    """Counts of the rounds in one recording or row with K drafted tokens. accepted: int64
    [sequences, K + 1], how many rounds of a sequence accepted 0 … K tokens. ranks: how high the
    draft ranked the bonus token after a rejection, and after K accepted tokens ((): unknown). fast:
    {kind of lookup: the same table as `accepted` if only that lookup drafts}; the kind PARALLEL is
    a draft model that drafts all K tokens in one forward, and DYNAMIC + "N", only at the recorded
    K, its tree of N nodes that changes shape each round. levels: for that model, int64 [sequences,
    K, R + 1], the rank of the target's token at each of the K positions among R candidates, or
    beyond them, where all tokens before it are candidates."""

    accepted: Array
    ranks: tuple[Ranks, ...]
    fast: Mapping[str, Array] = {}
    levels: Array | None = None

    def without(self, group: int, groups: int) -> Outcomes:
        """Returns the counts without the sequences n for which n mod `groups` = `group`."""

        def kept(table: Array) -> Array:
            return np.compress(np.arange(len(table)) % groups != group, table, axis=0)

        ranks = tuple(part._replace(counts=kept(part.counts)) for part in self.ranks)
        fast = {kind: kept(counts) for kind, counts in self.fast.items()}
        levels = None if self.levels is None else kept(self.levels)
        return Outcomes(kept(self.accepted), ranks, fast, levels)


@dataclass(frozen=True)
class Dataset:
    """The data of a recording or of one result row. about: its origin (file, models, temperature).
    outcomes: {K: counts of its rounds with K drafted tokens}."""

    about: dict[str, Any]
    outcomes: Mapping[int, Outcomes]


def new_file(out: str) -> Path:
    """Returns `out` as a path. Raises ConfigError if that file exists or cannot be written."""
    check_file("out", out)
    if Path(out).exists():
        raise ConfigError(f"out={out}: exists: allowed: a new file")
    return Path(out)


def print_laws(config: PairConfig) -> None:
    """Fits models of acceptance and of cache hits to the data in config.sources, and prints those
    of one K. If config.out is given, the models of every K are written to that file. Raises
    ConfigError if the data cannot be read or do not fit together, or if that file exists."""
    path = None if config.out is None else new_file(config.out)
    sources = [source for name in str(config.sources).split(",") for source in read(name)]
    document = measured(sources, config.steps)
    variants = (document["laws"], *document["without"])
    at = [laws for of in variants for laws in of if laws["lookahead"] == config.steps]
    print("\n".join(_text(document["about"], *at)))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(f"{json.dumps(document)}\n".encode())
        print(f"{path}: impose it with --laws={path}")


def read(name: str) -> Iterator[Dataset]:
    """Yields the data in a recording (a .npz file), or those of each run on real text in a file or
    folder of result rows. Raises ConfigError if there are none."""
    if name.endswith(".npz"):
        recording = load(name)
        about = {key: recording.about.get(key) for key in _ABOUT}
        file: dict[str, Any] = {"file": recording.name, "sha256": recording.sha256}
        # The "context" is the mean number of tokens before a token of an answer.
        total = sum((len(p.prompt) + p.end / 2) * p.end for p in recording.sequences)
        file["tokens"] = sum(p.end for p in recording.sequences)
        file["context"] = round(total / file["tokens"])
        by_k = {k: _of_recording(recording, k) for k in range(1, recording.lookahead + 1)}
        yield Dataset({**file, **about}, by_k)
        return
    path = Path(name)
    folder = path if path.is_dir() else path.parent
    rows = [row for row in load_rows([path]) if row.workload == "text" and row.mode != "ar"]
    if not rows:
        allowed = "allowed: a recording (.npz), or rows of text that draft"
        raise ConfigError(f"sources={name}: {allowed}")
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
        yield Dataset(about, {row.lookahead: _of_row(row, folder / "rounds" / f"{row.run_id}.npz")})


def _of_recording(recording: Recording, lookahead: int) -> Outcomes:
    """Counts the rounds that SD would have had on this recording with K = lookahead: with tokens
    drafted by the draft model, and with tokens drafted by each kind of lookup."""
    vocabulary = None if recording.known is None else set(recording.known.tolist())
    widest = recording.widest
    num = len(recording.sequences)
    accepted = np.zeros((num, lookahead + 1), np.int64)
    ranked = np.zeros((2, num, widest + 2), np.int64)
    for n, part in enumerate(recording.sequences):
        for c, k in rounds(_runs(part, part.rollout[:, :lookahead]).tolist()):
            accepted[n, k] += 1
            at = c + k
            if at + 1 >= part.end:
                continue  # The answer ends here, so no bonus token is drafted for.
            token = part.tokens[at]
            kept = part.top[at]
            if k < lookahead:
                kept = kept[kept != part.rollout[c, k]]
            places = np.flatnonzero(kept[:widest] == token)
            is_outside = vocabulary is not None and token not in vocabulary
            column = int(places[0]) if len(places) else widest + is_outside
            ranked[int(k == lookahead), n, column] += 1
    ranks = tuple(Ranks(table, vocabulary is not None) for table in ranked)
    fast = dict[str, Array]()

    def count(kind: str, n: int, runs: Array) -> None:
        table = fast.setdefault(kind, np.zeros((num, lookahead + 1), np.int64))
        np.add.at(table[n], [run for _, run in rounds(runs.tolist())], 1)

    for kind, (n, part) in product(LOOKUPS, enumerate(recording.sequences)):
        count(kind, n, _runs(part, copied(recording, n, lookahead, kind)))
    most, num_ranks = recording.at_once
    if not num_ranks or lookahead > most:
        return Outcomes(accepted, ranks, fast)
    sizes = [n for n in TREES if lookahead == most and n <= recording.most_ranked]
    levels = np.zeros((num, lookahead, num_ranks + 1), np.int64)
    for n, part in enumerate(recording.sequences):
        drafts = levels_of(part, lookahead)
        count(PARALLEL, n, _runs(part, drafts[:, :, 0]))
        true = part.tokens[np.arange(part.end)[:, None] + np.arange(lookahead + 1)]
        for nodes in sizes:
            count(f"{DYNAMIC}{nodes}", n, accepted_of(*trees_of(part, nodes), true))
        is_true = drafts == true[:, :-1, None]
        place = np.where(is_true.any(axis=-1), is_true.argmax(axis=-1), num_ranks)
        is_reached = np.ones(part.end, np.bool_)
        for level in range(lookahead):
            np.add.at(levels[n, level], place[is_reached, level], 1)
            is_reached &= place[:, level] < num_ranks
    return Outcomes(accepted, ranks, fast, levels)


def _runs(part: Recorded, drafts: Ids) -> Array:
    """Returns how many drafted tokens a round accepts that begins after 0, 1, … tokens of an
    answer, [end]. drafts: the tokens drafted there, [≥ end, K]."""
    places = np.arange(part.end)[:, None] + np.arange(drafts.shape[1])
    same = drafts[: part.end] == part.tokens[places]
    return np.asarray(np.cumprod(same, axis=1).sum(axis=1))


def _of_row(row: Row, rounds: Path) -> Outcomes:
    """Counts the measured rounds of a row of text. rounds: path of the file with its raw rounds.
    Raises ConfigError if the file cannot be read or has no round with K drafted tokens."""
    try:
        check_regular(rounds)
        with np.load(rounds, allow_pickle=False) as archive:
            lines = archive["sequences"]
    except (OSError, KeyError, ValueError, EOFError, BadZipFile) as error:
        raise ConfigError(f"{rounds}: {error}") from error
    # Only rounds with K tokens from the draft model count; in SSD a lookup may have drafted some.
    is_full = lines[:, 7] == row.lookahead
    if row.mode == "ssd":
        is_full &= lines[:, 5] != Source.FAST
    lines = lines[is_full]
    if not len(lines):
        what = f"row {row.run_id!r}: no round of {row.lookahead} tokens by the draft"
        raise ConfigError(f"{what}: allowed: longer answers")
    ids, sequence = np.unique(lines[:, 1], return_inverse=True)
    accepted = np.zeros((len(ids), row.lookahead + 1), np.int64)
    np.add.at(accepted, (sequence.reshape(-1), lines[:, 3]), 1)
    ranks = []
    for end in ("rejected", "all_accepted"):  # The row has ranks_rejected and so on.
        counts = np.array((row.learned or {}).get(f"ranks_{end}") or [], np.int64).reshape(-1, 3)
        if len(np.unique(counts[:, 0])) != 1:
            return Outcomes(accepted, ())
        rank = np.repeat(counts[:, 1], counts[:, 2])
        limit = int(counts[0, 0])
        table = np.zeros((len(rank), limit + 2), np.int64)
        table[np.arange(len(rank)), np.where(rank > 0, rank - 1, limit)] = 1
        ranks.append(Ranks(table, False))
    return Outcomes(accepted, tuple(ranks))


def measured(sources: Sequence[Dataset], lookahead: int) -> dict[str, Any]:
    """Returns the JSON content of a --laws file, fitted to all sources together. Raises ConfigError
    if the sources differ in models or sampling, or if none has rounds of K = lookahead."""
    for name in ("target_sha256", "draft_sha256"):
        files = {source.about[name]: source.about["file"] for source in sources}
        if len(files) > 1:
            names = ", ".join(files.values())
            raise ConfigError(f"sources of several models ({names}): allowed: one pair")
    sampled: dict[str, str] = {}
    for about in (source.about for source in sources):
        warmth = about["temperature"] or 0.0
        c = about.get("saguaro_c")
        # Saguaro sampling's constant C has no effect at temperature 0.
        shaped = f", C = {1.0 if c is None else c:g}" if warmth else ""
        sampled.setdefault(f"T = {warmth:g}{shaped}", about["file"])
    if len(sampled) > 1:
        ways = "; ".join(f"{file}: {how}" for how, file in sampled.items())
        raise ConfigError(f"sources of unlike sampling ({ways}): allowed: one temperature and C")
    levels = sorted({k for source in sources for k in source.outcomes})
    if lookahead not in levels:
        had = ", ".join(map(str, levels))
        raise ConfigError(f"lookahead={lookahead}: allowed with these sources: {had}")
    by_k = {k: [s.outcomes[k] for s in sources if k in s.outcomes] for k in levels}
    groups = min(GROUPS, *(len(of.accepted) for here in by_k.values() for of in here))
    without = [
        [_laws(k, [of.without(n, groups) for of in here]) for k, here in by_k.items()]
        for n in range(groups if groups > 1 else 0)
    ]
    about = {
        "sources": [source.about for source in sources],
        "prompts": min(sum(len(of.accepted) for of in here) for here in by_k.values()),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "tool": f"mpissd {mpissd.__version__} pair",
    }
    laws = [_laws(k, here) for k, here in by_k.items()]
    return {"kind": "laws", "schema": SCHEMA, "about": about, "laws": laws, "without": without}


def _laws(lookahead: int, outcomes: Sequence[Outcomes]) -> dict[str, Any]:
    """Returns the counts and the fitted models at one K, as JSON: acceptance by position, cache
    hits, and lookups. The member alpha is accepted / (accepted + rejected) of all judged tokens."""
    total = np.sum([of.accepted.sum(axis=0) for of in outcomes], axis=0)
    accepted = int(total @ np.arange(lookahead + 1))
    rounds = int(total.sum())
    judged = accepted + int(total[:-1].sum())
    ranked = [of.ranks for of in outcomes if of.ranks]
    looked_up = [of.fast for of in outcomes if of.fast]
    kinds = [kind for kind in (looked_up or [{}])[0] if all(kind in of for of in looked_up)]
    levels = [of.levels for of in outcomes if of.levels is not None]
    known = len(levels) == len(outcomes) and len({of.shape[2] for of in levels}) == 1
    return {
        "lookahead": lookahead,
        "rounds": rounds,
        "accepted": total.tolist(),
        "tokens_a_round": 1 + accepted / rounds,
        "alpha": accepted / judged if judged else 0.0,
        "marginal": (total[::-1].cumsum()[::-1][1:] / rounds).tolist(),
        "conditional": list(hazards_of_counts(total.tolist(), lookahead)),
        "rejected": _hits([rejected for rejected, _ in ranked]),
        "complete": _hits([complete for _, complete in ranked]),
        "fast": {
            kind: np.sum([of[kind].sum(axis=0) for of in looked_up], axis=0).tolist()
            for kind in kinds
        },
        "levels": np.sum([of.sum(axis=0) for of in levels], axis=0).tolist() if known else [],
    }


def _hits(tables: Sequence[Ranks]) -> dict[str, Any]:
    """Returns, as JSON, how often the bonus token had each rank among the draft's candidates, the
    measured and the fitted miss rate by number F of candidates, and the parameters of miss(F) =
    floor + A·F^−r. Tables with different numbers of candidates are cut to the smallest."""
    if not tables:
        return {"outcomes": 0, "fit": None}
    limit = min(table.counts.shape[1] for table in tables) - 2
    total = np.zeros(limit + 2, np.int64)
    for table in tables:
        counts = table.counts.sum(axis=0)
        total += [*counts[:limit], counts[limit:-1].sum(), counts[-1]]
    outcomes = int(total.sum())
    ranks = np.repeat([*range(1, limit + 1), 0], total[:-1])
    fit = None
    if (law := most_likely(ranks, np.full(len(ranks), limit))) is not None:
        floor = float(total[-1]) / outcomes
        fit = (1.0 - floor) * law[0], law[1], floor
    misses = {}
    for width in (f for f in WIDTHS if f <= limit and outcomes):
        fitted = None if fit is None else power_law_miss(width, *fit)
        misses[str(width)] = {"miss": float(total[width:].sum() / outcomes), "law": fitted}
    return {
        "outcomes": outcomes,
        "ranks": total[:-2].tolist(),
        "beyond": int(total[-2]),
        "outside": int(total[-1]) if all(table.knows_vocabulary for table in tables) else None,
        "misses": misses,
        "fit": None if fit is None else dict(zip(("A", "r", "floor"), fit, strict=True)),
    }


def _text(about: Mapping[str, Any], *variants: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines that print the models at one K. about: description of the data. variants:
    first the models fitted to all sequences, then those fitted without each group of sequences."""
    at = variants[0]

    def read(*keys: str | int) -> tuple[float, float]:
        """Follows keys into the models; returns (number, half-width of its 95% interval)."""
        values = list[Any](variants)
        for key in keys:
            values = [value and value[key] for value in values]
        value, *others = values
        is_certain = len(others) > 1 and None not in others
        return value, float(jackknife(np.array(others, float))) if is_certain else math.nan

    def bounded(*keys: str | int) -> str:
        value, half = read(*keys)
        return f"{value:.3f} [{value - half:.3f}, {value + half:.3f}]"

    def cells(values: Iterable[Any]) -> str:
        return " ".join(f"{v:>6}" if isinstance(v, (int, str)) else f"{v:6.3f}" for v in values)

    tokens = sum(of.get("tokens") or 0 for of in about["sources"])
    terms = [f"{about['prompts']} prompts", *([f"{tokens:,} answered tokens"] if tokens else [])]
    terms.append(f"{at['rounds']} rounds of SD at K = {at['lookahead']}")
    part = "a prompt" if len(variants) > about["prompts"] else f"1 in {GROUPS} prompts"
    yield ", ".join(terms)
    reached = [read("conditional", n) for n in range(at["lookahead"])]
    rates = ", ".join(f"{value:.2f} ±{half:.2f}" for value, half in reached)
    yield f"accepted at positions 1 to {at['lookahead']} (±: 95%): {rates}"
    yield (
        f"K = {at['lookahead']}, {at['rounds']} rounds: {bounded('tokens_a_round')} tokens a "
        f"round, alpha {bounded('alpha')}"
    )
    yield f"   (±, in brackets: 95% intervals, by leaving out {part} at a time)"
    yield f"   position        {cells(range(1, at['lookahead'] + 1))}"
    yield f"   reached         {cells(at['marginal'])}"
    yield f"   given the last  {cells(at['conditional'])}"
    ends = {"rejected": "a rejection", "complete": "K accepted tokens"}
    for end, cause in ends.items():
        ranks = at[end]
        title = f"bonus after {cause}"
        fit = ranks["fit"]
        if fit is None:
            yield f"{title}: {ranks['outcomes']} outcomes determine no law"
            continue
        floor = "not known" if ranks["outside"] is None else f"{fit['floor']:.3f}"
        yield (
            f"{title}, {ranks['outcomes']} outcomes: A = {bounded(end, 'fit', 'A')}, "
            f"r = {bounded(end, 'fit', 'r')}, floor of the draft's vocabulary: {floor}"
        )
        misses = ranks["misses"]
        yield f"   F       {cells(misses)}"
        yield f"   miss    {cells(at_width['miss'] for at_width in misses.values())}"
        yield f"   law     {cells(at_width['law'] for at_width in misses.values())}"
        failed = []
        for width, at_width in misses.items():
            miss, half = read(end, "misses", width, "miss")
            failed += [width] if abs(at_width["law"] - miss) > max(_FAILS * miss, half) else []
        if failed:
            yield f"   the law fails at F = {', '.join(failed)}: off by over 10%"
    for kind, counts in at["fast"].items():
        tokens = 1 + sum(k * n for k, n in enumerate(counts)) / sum(counts)
        name = f"{kind} lookup alone" if kind in LOOKUPS else "all tokens in one forward"
        if kind.startswith(DYNAMIC):
            name += f", a dynamic tree of {kind.removeprefix(DYNAMIC)}"
        yield f"{name}: {tokens:.3f} tokens a round"
