"""The command `laws`: reads recordings and rows of one pair, prints its laws, and writes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from mpissd.common.atomic_file import whole_file
from mpissd.common.errors import ConfigError
from mpissd.common.output import check_file, tool
from mpissd.engine.spec.lawfile import SCHEMA
from mpissd.engine.spec.lookup import LOOKUPS
from mpissd.engine.workload.replay.recording import Recording, load
from mpissd.lab.laws import table
from mpissd.lab.laws.config import LawsConfig
from mpissd.lab.laws.measures import acceptance, accepted_table, correlation, parts, rank_tables
from mpissd.lab.laws.outcomes import Outcomes, looked_up_counts, of_recording, of_row
from mpissd.lab.laws.ranks import RankTable
from mpissd.lab.tables import load_rows

_SEED = 17  # of the resamples
_ABOUT = ("target", "draft", "target_sha256", "draft_sha256", "prompts", "licence", "temperature")


@dataclass(frozen=True)
class Source:
    """A recording, or the rounds of one row: what it is of, and its outcomes by K."""

    about: dict[str, Any]
    recording: Recording | None
    row: Outcomes | None

    def at(self, lookahead: int) -> Outcomes | None:
        """Returns the outcomes at K; None where the source has none."""
        if self.recording is not None:
            fits = lookahead <= self.recording.lookahead
            return of_recording(self.recording, lookahead) if fits else None
        return self.row if self.row is not None and self.row.lookahead == lookahead else None

    @property
    def lookaheads(self) -> range:
        """The K that it has outcomes of."""
        if self.recording is not None:
            return range(1, self.recording.lookahead + 1)
        assert self.row is not None
        return range(self.row.lookahead, self.row.lookahead + 1)


def laws(config: LawsConfig) -> int:
    """Prints the laws of the sources at K, and writes those of every K to a new file."""
    if config.sources is None:
        raise ConfigError("sources: needed: recordings (.npz), or folders of rows of text")
    if config.to is not None:
        check_file("to", config.to)
        if Path(config.to).exists():
            raise ConfigError(f"to={config.to}: exists: allowed: a new file")
    sources = [found for name in config.sources.split(",") for found in read(name)]
    document = measured(sources, config.lookahead)
    print(table.text(document, config.lookahead))
    if config.to is not None:
        path = Path(config.to)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(f"{json.dumps(document, indent=1)}\n".encode())
        print(f"{path}: impose it with --laws={path}")
    return 0


def read(name: str) -> Iterator[Source]:
    """Yields the sources that a name stands for; raises ConfigError if it stands for none."""
    if name.endswith(".npz"):
        recording = load(name)
        about = {key: recording.about.get(key) for key in _ABOUT}
        file = {"file": recording.name, "sha256": recording.sha256}
        yield Source({**file, **about}, recording, None)
        return
    path = Path(name)
    folder = path if path.is_dir() else path.parent
    found = False
    for row in load_rows([path]):
        if row.workload == "text" and row.mode != "ar":
            found = True
            rounds = folder / "rounds" / f"{row.run_id}.npz"
            yield Source(_about_row(row, folder), None, of_row(row, rounds))
    if not found:
        raise ConfigError(
            f"sources={name}: allowed: a recording (.npz), or rows of text that draft"
        )


def _about_row(row: Any, folder: Path) -> dict[str, Any]:
    weights = row.weights or {}
    hashes = {f"{of}_sha256": (weights.get(of) or {}).get("sha256") for of in ("target", "draft")}
    return {
        "file": f"{folder.name}/{row.run_id}",
        "sha256": hashlib.sha256(json.dumps(row.to_dict()).encode()).hexdigest(),
        "target": row.target,
        "draft": row.draft,
        **hashes,
        "temperature": row.temperature,
        "saguaro_c": row.saguaro_c,
    }


def measured(sources: Sequence[Source], lookahead: int) -> dict[str, Any]:
    """Returns the document of laws; raises ConfigError for several pairs, temperatures or C, or a K
    that is not measured."""
    _check_one_pair(sources)
    _check_one_sampling(sources)
    known = sorted({k for source in sources for k in source.lookaheads})
    if lookahead not in known:
        had = ", ".join(map(str, known))
        raise ConfigError(f"lookahead={lookahead}: allowed with these sources: {had}")
    rng = np.random.default_rng(_SEED)
    printed = [of for source in sources if (of := source.at(lookahead)) is not None]
    return {
        "kind": "laws",
        "schema": SCHEMA,
        "about": {
            "sources": [source.about for source in sources],
            "date": datetime.now(timezone.utc).date().isoformat(),
            "tool": tool("laws"),
        },
        "laws": [_laws_at(sources, k, rng) for k in known],
        "lookahead_of_parts": lookahead,
        "parts": parts(printed, rng),
        "correlation": correlation(printed, rng),
    }


def _check_one_pair(sources: Sequence[Source]) -> None:
    for name in ("target_sha256", "draft_sha256"):
        found = {source.about[name]: source.about["file"] for source in sources}
        if len(found) > 1:
            raise ConfigError(
                f"sources of several models ({', '.join(found.values())}): allowed: one pair"
            )


def _check_one_sampling(sources: Sequence[Source]) -> None:
    """Refuses to pool laws of unlike sampling; C (Saguaro's) has no effect at temperature 0."""
    found: dict[str, str] = {}
    for about in (source.about for source in sources):
        warmth, c = about["temperature"] or 0.0, about.get("saguaro_c")
        shaped = f", C = {1.0 if c is None else c:g}" if warmth else ""
        found.setdefault(f"T = {warmth:g}{shaped}", about["file"])
    if len(found) > 1:
        told = "; ".join(f"{name}: {how}" for how, name in found.items())
        raise ConfigError(f"sources of unlike sampling ({told}): allowed: one temperature and C")


def _laws_at(sources: Sequence[Source], lookahead: int, rng: np.random.Generator) -> dict[str, Any]:
    outcomes = [of for source in sources if (of := source.at(lookahead)) is not None]
    ranked = [tables for of in outcomes if (tables := rank_tables(of)) is not None]
    recordings = [s.recording for s in sources if s.recording and lookahead in s.lookaheads]
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
