"""Recordings of a real pair of models at temperature 0, each in one small file.

At temperature 0 everything that speculative decoding decides is a function of the committed text. A
recording holds, for each prompt, the target's greedy tokens, and after each of them the draft's
greedy continuation and its likeliest tokens. This replays every K, fan-out and timing exactly.

The file is a NumPy archive (.npz): `header`, JSON as bytes, and arrays over all prompts,
concatenated. docs/recordings.md describes it. This module needs only NumPy.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.output import whole_file

SCHEMA = 1
LONGEST = 3  # tokens that a prompt lookup compares at most
_SMALL = 1 << 16  # ids of a vocabulary up to this size are stored in two bytes
_ARRAYS = "prompts prompt_counts tokens ends stopped rollout top".split()
# Errors of zipfile, zlib, NumPy and json for a file that is damaged or of another kind.
_BROKEN = (
    *(OSError, ValueError, LookupError, EOFError, RuntimeError, MemoryError),
    *(TypeError, AttributeError, zipfile.BadZipFile, zlib.error),
)
Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Recorded:
    """One prompt's recording; positions count generated tokens from 0.

    prompt: [P], P ≥ 1. tokens: [end + K], the target's greedy tokens: the answer, and the K that
    would have come after it, because the last round may accept some of them. end: number of tokens
    of the answer, the stop token included. stopped: whether the answer ended with a stop token, and
    not at a limit. By position, the number of tokens generated before: rollout, [end, K], the
    draft's greedy tokens from there on; top, [end, F + 1], its likeliest next tokens, best first.
    """

    prompt: Ids
    tokens: Ids
    end: int
    stopped: bool
    rollout: Ids
    top: Ids


@dataclass(frozen=True)
class Recording:
    """The recordings of some prompts, by one target and one draft.

    vocab: token ids are 0 … vocab − 1. longest, filler: how a fast backup drafts: it looks up the
    last `longest` tokens, and repeats `filler` (None: the last token) if that gives too few. known:
    the tokens that the draft knows, rising (None: all, or not recorded). about: provenance: target,
    draft, prompts, sha256 of the weights, licence, date, tool.
    """

    vocab: int
    sequences: Sequence[Recorded]
    about: Mapping[str, Any]
    longest: int = LONGEST
    filler: int | None = None
    known: Ids | None = None
    name: str = ""
    sha256: str = ""

    @property
    def lookahead(self) -> int:
        """K, the most tokens that a replay can draft in a round."""
        return int(self.sequences[0].rollout.shape[1])

    @property
    def widest(self) -> int:
        """F, the most bonus candidates that a replay can keep for one k."""
        return int(self.sequences[0].top.shape[1]) - 1

    @property
    def label(self) -> str:
        """Names the file and its contents, as a result row does."""
        return f"{self.name} sha256:{self.sha256[:16]}"


def save(path: Path, recording: Recording) -> None:
    """Writes a recording to a new file, completely or not at all."""
    kind = np.uint16 if recording.vocab <= _SMALL else np.uint32
    header = {
        "schema": SCHEMA,
        "vocab": recording.vocab,
        "longest": recording.longest,
        "filler": recording.filler,
        "about": dict(recording.about),
    }
    parts = recording.sequences
    arrays: dict[str, NDArray[Any]] = {
        "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
        "prompts": np.concatenate([part.prompt for part in parts]).astype(kind),
        "prompt_counts": np.array([len(part.prompt) for part in parts], np.int32),
        "tokens": np.concatenate([part.tokens for part in parts]).astype(kind),
        "ends": np.array([part.end for part in parts], np.int32),
        "stopped": np.array([part.stopped for part in parts], np.bool_),
        "rollout": np.concatenate([part.rollout for part in parts]).astype(kind),
        "top": np.concatenate([part.top for part in parts]).astype(kind),
    }
    if recording.known is not None:
        arrays["known"] = recording.known.astype(kind)
    with whole_file(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load(path: str) -> Recording:
    """Reads a recording; raises ConfigError in one line for a file that is none."""
    try:
        stat = Path(path).stat()
        return _load(path, stat.st_mtime_ns, stat.st_size)
    except _BROKEN as error:
        reason = error.strerror if isinstance(error, OSError) else None
        reason = " ".join((reason or str(error) or type(error).__name__).split())
        allowed = "allowed: a whole file of `mpissd pair`"
        raise ConfigError(f"recording={path}: {reason}: {allowed}") from error


@lru_cache(maxsize=4)
def _load(path: str, changed: int, size: int) -> Recording:
    """Reads a recording; a file that has not changed is read once.

    Raises ValueError for arrays of other lengths than they need, or of unknown tokens.
    """
    data = Path(path).read_bytes()
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        header = json.loads(archive["header"].tobytes())
        arrays = {name: archive[name] for name in _ARRAYS}
        known = archive.get("known")
    if header.get("schema") != SCHEMA:
        raise ValueError(f"schema {header.get('schema')}: allowed: {SCHEMA}")
    ends, counts = (arrays[name].astype(np.int64) for name in ("ends", "prompt_counts"))
    rows, lookahead = arrays["rollout"].shape
    wanted = {
        "prompts": int(counts.sum()),
        "prompt_counts": len(ends),
        "tokens": rows + len(ends) * lookahead,
        "stopped": len(ends),
        "rollout": int(ends.sum()),
        "top": rows,
    }
    for name, count in wanted.items():
        if len(arrays[name]) != count:
            raise ValueError(f"{name} has {len(arrays[name])} rows, {count} are meant")
    if not rows or not lookahead or min(ends.min(), counts.min()) < 1:
        raise ValueError("a prompt, its answer or its drafts are empty")
    for name in ("prompts", "tokens", "rollout", "top"):
        if int(arrays[name].max()) >= header["vocab"] or int(arrays[name].min()) < 0:
            raise ValueError(f"{name} holds a token beyond the vocabulary of {header['vocab']}")

    def parts(name: str, sizes: NDArray[np.int64]) -> list[Ids]:
        return np.split(arrays[name], np.cumsum(sizes)[:-1])

    columns = zip(
        parts("prompts", counts),
        parts("tokens", ends + lookahead),
        ends.tolist(),
        arrays["stopped"].tolist(),
        parts("rollout", ends),
        parts("top", ends),
        strict=True,
    )
    return Recording(
        vocab=header["vocab"],
        sequences=tuple(Recorded(*column) for column in columns),
        about=header["about"],
        longest=header["longest"],
        filler=header["filler"],
        known=known,
        name=Path(path).name,
        sha256=hashlib.sha256(data).hexdigest(),
    )
