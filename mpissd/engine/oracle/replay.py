"""The `replay` workload: a recording of a real pair decides tokens, acceptance and cache hits.

At temperature 0 everything that speculative decoding decides is a function of the committed text. A
recording holds, for each prompt, the target's greedy tokens, and after each of them the draft's
greedy continuation and its likeliest tokens. This replays every K, fan-out and timing exactly.

The file is a NumPy archive (.npz): `header`, JSON as bytes, and arrays over all prompts,
concatenated. docs/recordings.md describes it.

Tables of these tokens replace the imposed tokens of the `gemm` workload, under the same workers.
Sequence n replays prompt n modulo their number. A sequence that is not ended continues in the next
prompt's answer, as in warm-up and calibration.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.files import read_file
from mpissd.common.output import whole_file
from mpissd.common.rounds import Ints, Request, Source, Speculation
from mpissd.engine.law.fanout import lanes_of
from mpissd.engine.law.lookup import make_lookup
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.oracle.imposed import ImposedDraft, ImposedTarget, Stream
from mpissd.engine.oracle.workload import Workload, laws_label
from mpissd.engine.round.scheduler import Endings
from mpissd.engine.round.sequence import Batch, Index, LiveSequence

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
    would have followed it, because the last round may accept some of them. end: number of tokens of
    the answer, the stop token included. stopped: whether the answer ended with a stop token, and
    not at a limit. Indexed by the number of tokens generated before: rollout, [end, K], the draft's
    greedy tokens from there on; top, [end, F + 1], its likeliest next tokens, best first.
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
    """Reads a recording; raises ConfigError in one line for any other file."""
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
    data = read_file(Path(path))
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


class RecordedStream(Stream):
    """The target's recorded tokens of all prompts, in one table.

    Each prompt has end + K entries, K of the recording: entry c follows c generated tokens.
    """

    def __init__(self, recording: Recording, capacity: int, lookahead: int) -> None:
        self.recording, self.lookahead = recording, lookahead
        counts = [len(part.tokens) for part in recording.sequences]
        self._starts = np.cumsum([0, *counts])
        self._size = int(self._starts[-1])
        self._table = self._tabled([part.tokens for part in recording.sequences])
        # By slot: the table entry of the prompt's token 0, minus 1.
        self._base = np.zeros(capacity, np.int64)

    def _tabled(self, parts: Sequence[Ids]) -> Ints:
        """Joins [end or end + K, …] of all prompts to int32 [entries, …]; zeros fill the rest.

        The first entries are repeated after the last: a round reads at most 2·(K + 1) entries.
        """
        table = np.zeros((self._size, *parts[0].shape[1:]), np.int32)
        for start, part in zip(self._starts.tolist(), parts, strict=False):
            table[start : start + len(part)] = part
        again = np.arange(2 * self.lookahead + 2) % self._size
        return np.concatenate([table, table[again]])

    def begin_round(self, batch: Batch, started: Sequence[LiveSequence]) -> None:
        for sequence in started:
            number = sequence.request.request_id % len(self.recording.sequences)
            self._base[sequence.slot] = self._starts[number] - 1
        self._origin = (self._base[batch.slots] + batch.lengths) % self._size


class RecordedDraft(RecordedStream):
    """The draft's recorded continuations and likeliest tokens after every true prefix.

    The tables follow the target's own tokens. After a served token that the target will reject, the
    keys are therefore wrong. No outcome equals such a key, so they are never looked up.
    """

    def __init__(
        self,
        recording: Recording,
        capacity: int,
        lookahead: int,
        widest: int,
        lookup: str | None = "prompt",
    ) -> None:
        """Makes the tables; `widest` is the most candidates that a row keeps (max F_k).

        lookup: kind of lookup of a fast backup; None without one.
        """
        super().__init__(recording, capacity, lookahead)
        parts = recording.sequences
        self._rollout = self._tabled([part.rollout[:, :lookahead] for part in parts])
        self._top = self._tabled([part.top[:, : widest + 1] for part in parts])
        self._width = widest + 1
        self._trunk: Index = np.arange(lookahead + 1, dtype=np.int64)
        self._lanes: dict[tuple[int, ...], tuple[Index, Index]] = {}
        self._fast: Ints | None = None
        if lookup is not None:
            each = [copied(recording, n, lookahead, lookup) for n in range(len(parts))]
            self._fast = self._tabled(each)

    def grown(
        self, speculation: Speculation, fan_out: tuple[int, ...], rows: Index | None = None
    ) -> tuple[Ints, Ints]:
        """Returns candidates and their tokens, as Stream.grown.

        The candidates of k are the likeliest tokens after k accepted ones, without the one served
        there. After a hit the bonus token is committed, so that its branch is the draft's
        continuation of the true prefix.
        """
        chosen = slice(None) if rows is None else rows
        origin = self._origin[chosen]
        if fan_out not in self._lanes:
            lane_k, lane_place = lanes_of(fan_out)
            self._lanes[fan_out] = lane_k.astype(np.int64), lane_place.astype(np.int64)
        k, place = self._lanes[fan_out]
        # [n, K+1], the rank from 0 of the served token among the likeliest of its place; a rank
        # beyond them if it is none of them, or if no token was served.
        served = np.full((len(origin), self.lookahead + 1), -1, np.int32)
        served[:, :-1] = speculation.tokens[chosen]
        served[self._trunk >= speculation.num_draft[chosen][:, None]] = -1
        is_same = self._top[origin[:, None] + self._trunk] == served[..., None]
        ranks = np.where(is_same.any(axis=2), is_same.argmax(axis=2), self._width)
        column = place + (place >= ranks[:, k])
        first = self._top.take((origin[:, None] + k) * self._width + column)
        return first, self._rollout[origin[:, None] + k + 1]

    def restarts(self, source: Source, rows: Index) -> Ints:
        origin = self._origin[rows]
        if source != Source.FAST:
            return self._rollout[origin]
        assert self._fast is not None, "a fast backup without its table"
        return self._fast[origin]

    def ranked(self, rows: Index, depths: Index, ranks: Index, ahead: Index | int = 0) -> Ints:
        origin = (self._origin[rows] + ahead)[:, None]
        return self._top.take((origin + depths) * self._width + ranks)


def copied(recording: Recording, n: int, count: int, kind: str) -> Ints:
    """Returns the `count` tokens that a fast backup drafts after each token of prompt n's answer,
    int32 [end + K, count]: entry c is after c tokens."""
    part, lookup = recording.sequences[n], make_lookup(kind, recording.longest)
    lookup.follow(part.prompt.tolist())
    drafts = []
    for token in part.tokens.tolist():
        drafts.append(lookup.padded(count, recording.filler))
        lookup.add(token)
    return np.array(drafts, np.int32)


class ReplayWorkload(Workload):
    """A recording of a real pair at temperature 0 decides tokens, acceptance and hits."""

    reports_outcomes = True

    @cached_property
    def recording(self) -> Recording:
        """The recording that --recording names."""
        path = self.job.config.recording
        if path is None:
            raise ConfigError(
                "recording: needed with workload=replay: allowed: a file of `mpissd pair`"
            )
        return load(path)

    @property
    def vocab(self) -> int:
        return self.recording.vocab

    @property
    def num_sequences(self) -> int:
        return len(self.recording.sequences)

    @property
    def law(self) -> str:
        about = self.recording.about
        pair = "/".join(str(about.get(model, "?")) for model in ("target", "draft"))
        return f"recording {self.recording.label}: {self.num_sequences} prompts by {pair}"

    def check(self) -> None:
        """Refuses a job that needs more than was recorded (K, candidates a row, prompts), and a
        transformer that lacks recorded tokens."""
        super().check()
        job, recording = self.job, self.recording
        wanted = [
            (f"lookahead={job.lookahead}", job.lookahead, recording.lookahead),
            (f"batch_size={job.config.batch_size}", job.config.batch_size, len(self.share(0))),
        ]
        if job.fan_out:
            fan_out = f"fan_out={job.config.fan_out}: {job.widest} candidates a row"
            wanted.append((fan_out, job.widest, recording.widest))
        tree = f"tree={job.config.tree}: {job.tree.width} children of a node"
        wanted.append((tree, job.tree.width, recording.widest + 1))
        if job.config.is_transformer and self.vocab > job.target.vocab_size:
            raise ConfigError(
                f"recording={job.config.recording} has {self.vocab} tokens, {job.target.name} "
                f"{job.target.vocab_size}: allowed: forward=gemm, or a target that has as many"
            )
        for name, value, most in wanted:
            if value > most:
                raise ConfigError(
                    f"{name} with recording={job.config.recording}: allowed: at most {most}, as "
                    "recorded"
                )

    def keep(self, start: int, count: int) -> None:
        every = self.recording.sequences
        kept = [every[n % len(every)] for n in range(start, start + count)]
        self.recording = replace(self.recording, sequences=kept)

    def longest_answer(self, request_id: int) -> int:
        parts, limit = self.recording.sequences, super().longest_answer(request_id)
        end = parts[request_id % len(parts)].end
        return end if limit is None else min(end, limit)

    def endings(self) -> Endings:
        ends = [part.end for part in self.recording.sequences]
        return Endings(room=lambda request_id: ends[request_id % len(ends)])

    def target_oracle(self, stepper: Forwards) -> ImposedTarget:
        job = self.job
        stream = RecordedStream(self.recording, job.config.batch_size, job.lookahead)
        return ImposedTarget(stream, job.tree)

    def draft_oracle(self, stepper: Forwards) -> ImposedDraft:
        job, batch = self.job, self.job.config.batch_size
        widest = min(job.widest, self.recording.widest)  # no candidates are read without branches
        lookup = job.config.fast_lookup
        stream = RecordedDraft(self.recording, batch, job.lookahead, widest, lookup)
        return ImposedDraft(stream, tree=job.tree)

    def requests(self, first_id: int, count: int) -> list[Request]:
        parts = self.recording.sequences
        ids = range(first_id, first_id + count)
        return [Request(n, first_token=int(parts[n % len(parts)].prompt[-1])) for n in ids]

    def row_fields(self) -> dict[str, Any]:
        config = self.job.config
        return {
            "recording": self.recording.label,
            "lookup": config.fast_lookup,
            "laws": laws_label(config),
        }
