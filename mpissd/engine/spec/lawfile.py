"""Files of measured models of a real pair ("laws"): counts of its rounds, and fits to them.

`python -m mpissd pair` writes them (mpissd/lab/pair), docs/laws.md describes them. `--laws=FILE`
imposes one: its counts at the run's own K give the acceptance rates, its fitted (A, r) and floors
the hit model, and its counts of looked-up tokens the acceptance of a fast backup.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mpissd.common.errors import ConfigError

SCHEMA = 1
_BROKEN = (ValueError, KeyError, TypeError, RecursionError, AttributeError)


@dataclass(frozen=True)
class FittedHits:
    """The hit model miss(F) = min(1, floor + A·F^−r) of a bonus token's rank."""

    hit_a: float
    hit_r: float
    floor: float


@dataclass(frozen=True)
class LawsAt:
    """Acceptance counts and hit models of rounds of K = `lookahead` drafted tokens.

    accepted: number of rounds with k = 0 … K. fast: the same for looked-up tokens, by kind of
    lookup. rejected, complete: the hit model after a rejection and after K accepted tokens; None if
    too few outcomes determine it.
    """

    lookahead: int
    accepted: tuple[int, ...]
    fast: Mapping[str, tuple[int, ...]]
    rejected: FittedHits | None
    complete: FittedHits | None


@dataclass(frozen=True)
class LawFile:
    """A file of measured models: `at` is sorted by K; `about` names the origin of the outcomes."""

    name: str
    sha256: str
    about: Mapping[str, Any]
    at: tuple[LawsAt, ...]

    @property
    def label(self) -> str:
        """Names the file and its contents, as a result row does."""
        return f"{self.name} sha256:{self.sha256[:16]}"

    @property
    def longest(self) -> int:
        """The largest K that was measured."""
        return self.at[-1].lookahead

    @property
    def longest_fitted(self) -> int:
        """The largest K whose hit models are determined; if none is, the largest K."""
        fitted = [laws.lookahead for laws in self.at if laws.rejected and laws.complete]
        return max(fitted, default=self.longest)

    def behind(self, lookahead: int) -> LawsAt:
        """Returns the models at the smallest measured K that is not below this one."""
        for laws in self.at:
            if laws.lookahead >= lookahead:
                return laws
        raise ConfigError(
            f"lookahead={lookahead} with laws={self.name}: allowed: at most {self.longest}, as "
            "measured"
        )


def load_laws(path: str) -> LawFile:
    """Reads a file of measured models; raises ConfigError for another kind of file."""
    try:
        stat = Path(path).stat()
        return _load(path, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error


@lru_cache(maxsize=16)
def _load(path: str, changed: int, size: int) -> LawFile:
    """Reads a file; one that has not changed is read once."""
    data = Path(path).read_bytes()
    try:
        read = json.loads(data)
        if read["kind"] != "laws" or read["schema"] != SCHEMA:
            raise ValueError(f"schema {read['schema']} of {read['kind']}: allowed: {SCHEMA}")
        at = tuple(sorted(map(_laws_at, read["laws"]), key=lambda laws: laws.lookahead))
        if not at:
            raise ValueError("it holds no laws")
        about = dict(read["about"])
    except _BROKEN as error:
        raise _refused(path, f"{type(error).__name__}: {error}") from error
    return LawFile(Path(path).name, hashlib.sha256(data).hexdigest(), about, at)


def _laws_at(read: Mapping[str, Any]) -> LawsAt:
    lookahead = int(read["lookahead"])
    fast = {name: _counts(counts, lookahead) for name, counts in read["fast"].items()}
    accepted = _counts(read["accepted"], lookahead)
    return LawsAt(lookahead, accepted, fast, _fitted(read["rejected"]), _fitted(read["complete"]))


def _counts(read: list[int], lookahead: int) -> tuple[int, ...]:
    counts = tuple(read)
    if len(counts) != lookahead + 1 or not all(type(n) is int and n >= 0 for n in counts):
        raise ValueError(f"counts {counts} with K = {lookahead}")
    if not any(counts):
        raise ValueError(f"no round with K = {lookahead}")
    return counts


def _fitted(read: Mapping[str, Any]) -> FittedHits | None:
    fit = read["fit"]
    if fit is None:
        return None
    return FittedHits(float(fit["A"]), float(fit["r"]), float(fit["floor"]))


def _refused(path: str, reason: str) -> ConfigError:
    reason = " ".join(reason.split())
    return ConfigError(f"laws={path}: {reason}: allowed: a whole file of `mpissd pair`")
