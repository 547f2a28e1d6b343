"""Measures a pair's acceptance and hit models from recordings and rows; writes --laws files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from mpissd.common.errors import ConfigError
from mpissd.common.output import check_file, tool, whole_file
from mpissd.engine.spec.acceptance import SCHEMA
from mpissd.engine.spec.lookup import LOOKUPS
from mpissd.engine.workload.replay.recording import Recording, load
from mpissd.lab.pair.config import PairConfig
from mpissd.lab.pair.measures import (
    RankTable,
    acceptance,
    accepted_table,
    rank_tables,
)
from mpissd.lab.pair.outcomes import Outcomes, looked_up_counts, of_recording, of_row
from mpissd.lab.tables.load import load_rows

Lines = Iterator[str]
_SEED = 17  # of the resamples
_ABOUT = ("target", "draft", "target_sha256", "draft_sha256", "prompts", "licence", "temperature")


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
    print(text(document, config.steps))
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
        by_k = {k: of_recording(recording, k) for k in range(1, recording.lookahead + 1)}
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
        outcomes = of_row(row, folder / "rounds" / f"{row.run_id}.npz")
        yield Source(_about_row(row, folder), {outcomes.lookahead: outcomes})


def _about_row(row: Any, folder: Path) -> dict[str, Any]:
    weights = row.weights or {}
    hashes = {f"{of}_sha256": (weights.get(of) or {}).get("sha256") for of in ("target", "draft")}
    return {
        "file": f"{folder.name}/{row.run_id}",
        "sha256": hashlib.sha256(json.dumps(dict(row)).encode()).hexdigest(),
        "target": row.target,
        "draft": row.draft,
        **hashes,
        "temperature": row.temperature,
        "saguaro_c": row.saguaro_c,
    }


def measured(sources: Sequence[Source], lookahead: int) -> dict[str, Any]:
    """Returns the document of a --laws file; raises ConfigError for several pairs, temperatures or
    C, or a K that is not measured."""
    _check_alike(sources)
    known = sorted({k for source in sources for k in source.outcomes})
    if lookahead not in known:
        had = ", ".join(map(str, known))
        raise ConfigError(f"lookahead={lookahead}: allowed with these sources: {had}")
    rng = np.random.default_rng(_SEED)
    return {
        "kind": "laws",
        "schema": SCHEMA,
        "about": {
            "sources": [source.about for source in sources],
            "date": datetime.now(timezone.utc).date().isoformat(),
            "tool": tool("pair"),
        },
        "laws": [_laws_at(sources, k, rng) for k in known],
    }


def _check_alike(sources: Sequence[Source]) -> None:
    """Refuses to pool several pairs, or outcomes of unlike sampling; C (Saguaro's) has no effect at
    temperature 0."""
    for name in ("target_sha256", "draft_sha256"):
        files = {source.about[name]: source.about["file"] for source in sources}
        if len(files) > 1:
            raise ConfigError(
                f"sources of several models ({', '.join(files.values())}): allowed: one pair"
            )
    sampled: dict[str, str] = {}
    for about in (source.about for source in sources):
        warmth, c = about["temperature"] or 0.0, about.get("saguaro_c")
        shaped = f", C = {1.0 if c is None else c:g}" if warmth else ""
        sampled.setdefault(f"T = {warmth:g}{shaped}", about["file"])
    if len(sampled) > 1:
        each = "; ".join(f"{file}: {how}" for how, file in sampled.items())
        raise ConfigError(f"sources of unlike sampling ({each}): allowed: one temperature and C")


def _laws_at(sources: Sequence[Source], lookahead: int, rng: np.random.Generator) -> dict[str, Any]:
    here = [source for source in sources if lookahead in source.outcomes]
    outcomes = [source.outcomes[lookahead] for source in here]
    ranked = [tables for of in outcomes if (tables := rank_tables(of)) is not None]
    recordings = [source.recording for source in here if source.recording is not None]
    fast = {
        kind: np.sum([looked_up_counts(one, lookahead, kind) for one in recordings], axis=0)
        for kind in (LOOKUPS if recordings else ())
    }
    return {
        "lookahead": lookahead,
        **acceptance(accepted_table(outcomes), rng),
        "rejected": _joined([one for one, _ in ranked], rng),
        "complete": _joined([one for _, one in ranked], rng),
        "fast": {kind: counts.tolist() for kind, counts in fast.items()},
    }


def _joined(tables: Sequence[RankTable], rng: np.random.Generator) -> dict[str, Any]:
    if not tables:
        return {"outcomes": 0, "fit": None}
    return reduce(RankTable.joined, tables).to_dict(rng)


def text(document: Mapping[str, Any], lookahead: int) -> str:
    """Returns the models at K as lines of text."""
    at = next(laws for laws in document["laws"] if laws["lookahead"] == lookahead)
    return "\n".join(
        [
            *_acceptance(at),
            *_ranks("bonus after a rejection", at["rejected"]),
            *_ranks("bonus after K accepted tokens", at["complete"]),
            *_fast(at),
        ]
    )


def _acceptance(at: Mapping[str, Any]) -> Lines:
    yield (
        f"K = {at['lookahead']}, {at['rounds']} rounds: {_with(at, 'tokens_a_round')} tokens a "
        f"round, alpha {_with(at, 'alpha')}   (in brackets: 95% intervals)"
    )
    yield f"   position        {_cells(range(1, at['lookahead'] + 1))}"
    yield f"   reached         {_cells(at['marginal'])}"
    yield f"   given the last  {_cells(at['conditional'])}"


def _ranks(title: str, ranks: Mapping[str, Any]) -> Lines:
    fit, misses = ranks["fit"], ranks.get("misses", {})
    if fit is None:
        yield f"{title}: {ranks['outcomes']} outcomes determine no law"
        return
    floor = "not known" if ranks["outside"] is None else f"{fit['floor']:.3f}"
    yield (
        f"{title}, {ranks['outcomes']} outcomes: A = {_with(fit, 'A')}, r = {_with(fit, 'r')}, "
        f"floor of the draft's vocabulary: {floor}"
    )
    yield f"   F       {_cells(misses)}"
    yield f"   miss    {_cells([one['miss'] for one in misses.values()])}"
    yield f"   law     {_cells([one['law'] for one in misses.values()])}"
    if fit["fails_at"]:
        yield f"   the law fails at F = {', '.join(map(str, fit['fails_at']))}: off by over 10%"


def _fast(at: Mapping[str, Any]) -> Lines:
    for kind, counts in at["fast"].items():
        tokens = 1 + sum(k * n for k, n in enumerate(counts)) / sum(counts)
        yield f"{kind} lookup alone: {tokens:.3f} tokens a round"


def _with(of: Mapping[str, Any], name: str) -> str:
    low, high = of[f"{name}_95"]
    return f"{of[name]:.3f} [{low:.3f}, {high:.3f}]"


def _cells(values: Any) -> str:
    return " ".join(f"{v:>6}" if isinstance(v, (int, str)) else f"{v:6.3f}" for v in values)
