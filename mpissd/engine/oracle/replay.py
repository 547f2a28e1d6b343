"""The `replay` workload: a recording of a real target and draft decides all tokens.

At temperature 0 everything that speculative decoding decides is a function of the committed text. A
recording holds, for each prompt, the target's greedy tokens, and after each of these tokens the
draft's greedy continuation and its likeliest tokens. So decoding with any K, fan-out and timing can
be replayed exactly.

The file is a NumPy archive (docs/recordings.md). Sequence n replays prompt n modulo the number of
prompts. A sequence that is not ended, as in warm-up, goes on with the next prompt's answer.
"""

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
from mpissd.engine.law.tree import Shape
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.trees import CHOICES, accepted
from mpissd.engine.oracle.imposed import ImposedDraft, ImposedTarget, Stream
from mpissd.engine.oracle.workload import Workload, laws_label
from mpissd.engine.round.oracle import OpenGather
from mpissd.engine.round.rows import TargetWorker
from mpissd.engine.round.scheduler import Endings
from mpissd.engine.round.sequence import Batch, Index, LiveSequence

SCHEMA = 3
LONGEST = 3  # the most last tokens that a prompt lookup compares
_SMALL = 1 << 16  # the largest vocabulary whose token ids are stored in two bytes each
_ARRAYS = "prompts prompt_counts tokens ends stopped rollout top".split()
# the errors that zipfile, zlib, NumPy and json raise for a damaged file or one of another kind
_BROKEN = (
    *(OSError, ValueError, LookupError, EOFError, RuntimeError, MemoryError),
    *(TypeError, AttributeError, zipfile.BadZipFile, zlib.error),
)
Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Recorded:
    """The recording of one prompt: the target's answer, and what the draft predicts along it.

    prompt: the prompt's tokens, [≥ 1]. tokens: the target's greedy tokens, [end + K]: the answer,
    and the K tokens that would follow it, because the last round may accept some of them. end: the
    number of tokens of the answer, with the stop token. stopped: whether the answer ended with a
    stop token, and not at a limit. rollout: row n has the draft's K greedy tokens after n tokens of
    the answer, [end, K]. top: row n has the draft's likeliest next tokens there, best first, [end,
    F + 1]. marginals: for a draft whose one forward drafts K tokens, its R likeliest tokens for the
    2nd, 3rd, … of them after n tokens, best first, [end, K − 1, R]; None for other drafts. ranking:
    of such a draft, for R = CHOICES, the nodes of the tree that trees.search finds there, the
    likeliest first, uint8 [end, nodes]: CHOICES · the number of the parent (0: the root) + the rank
    of the token among its level's candidates.
    """

    prompt: Ids
    tokens: Ids
    end: int
    stopped: bool
    rollout: Ids
    top: Ids
    marginals: Ids | None = None
    ranking: Ids | None = None


@dataclass(frozen=True)
class Recording:
    """The recordings of some prompts, by one target and one draft.

    vocab: the size of the vocabulary. longest, filler: a prompt lookup compares the last `longest`
    tokens, and repeats `filler` (None: the last token) if it finds too few tokens. known: the ids
    of the tokens that the draft knows, rising (None: all, or not recorded). about: the provenance:
    target, draft, prompts, SHA-256 of the weights, licence, date, tool.
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
        """The largest K (tokens drafted in a round) that was recorded."""
        return int(self.sequences[0].rollout.shape[1])

    @property
    def widest(self) -> int:
        """The number of bonus candidates that were recorded after each token of an answer."""
        return int(self.sequences[0].top.shape[1]) - 1

    @property
    def at_once(self) -> tuple[int, int]:
        """(the largest number of drafted tokens, the most children of a tree node) for which a
        draft that drafts all tokens in one forward was recorded; (1, 0) if none was."""
        marginals = self.sequences[0].marginals
        return (1, 0) if marginals is None else (marginals.shape[1] + 1, marginals.shape[2])

    @property
    def most_ranked(self) -> int:
        """The most nodes of a tree of the likeliest ones that was recorded; 0 if none was."""
        ranking = self.sequences[0].ranking
        return 0 if ranking is None else int(ranking.shape[1])

    @property
    def label(self) -> str:
        """The file's name and 16 digits of its SHA-256, which identify it in result rows."""
        return f"{self.name} sha256:{self.sha256[:16]}"


def save(path: Path, recording: Recording) -> None:
    """Writes a recording to a new file. An error leaves no incomplete file."""
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
    if marginals := [part.marginals for part in parts if part.marginals is not None]:
        arrays["marginals"] = np.concatenate(marginals).astype(kind)
    if ranking := [part.ranking for part in parts if part.ranking is not None]:
        arrays["ranking"] = np.concatenate(ranking)
    with whole_file(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load(path: str) -> Recording:
    """Returns the recording in a file; a file that has not changed is read only once. Raises
    ConfigError for a file that holds no whole recording."""
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
    """Reads a recording. changed, size: the file's time of change and size, so that the cache
    misses if they change. Raises ValueError for arrays of wrong lengths or unknown tokens."""
    data = read_file(Path(path))
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        header = json.loads(archive["header"].tobytes())
        arrays = {name: archive[name] for name in _ARRAYS}
        draft_ids = archive.get("known")
        marginals = archive.get("marginals")  # None in files of schema 1
        ranking = archive.get("ranking")  # None in files of schemas 1 and 2
    if header.get("schema") not in range(1, SCHEMA + 1):
        raise ValueError(f"schema {header.get('schema')}: allowed: 1 to {SCHEMA}")
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
    if marginals is not None:
        arrays["marginals"] = marginals
        wanted["marginals"] = rows
        sizes = f"[{rows}, 1..{lookahead - 1}, 1..{arrays['top'].shape[1]}]"
        is_table = marginals.ndim == 3 and 0 < marginals.shape[1] < lookahead
        if not (is_table and 0 < marginals.shape[2] <= arrays["top"].shape[1]):
            raise ValueError(f"marginals {marginals.shape}: allowed: {sizes}")
    if ranking is not None:
        arrays["ranking"] = ranking
        wanted["ranking"] = rows
        is_table = ranking.ndim == 2 and ranking.dtype == np.uint8 and ranking.shape[1] > 0
        if not is_table or marginals is None or marginals.shape[2] != CHOICES:
            raise ValueError(f"ranking {ranking.shape}: allowed: with {CHOICES} marginals a place")
        depths = _depths(ranking // CHOICES)
        if not ((depths > 0) & (depths <= marginals.shape[1] + 1)).all():
            raise ValueError("ranking has a node before its parent, or beyond the last level")
    for name, count in wanted.items():
        if len(arrays[name]) != count:
            raise ValueError(f"{name} has {len(arrays[name])} rows, {count} are meant")
    if not rows or not lookahead or min(ends.min(), counts.min()) < 1:
        raise ValueError("a prompt, its answer or its drafts are empty")
    for name in {"prompts", "tokens", "rollout", "top", "marginals"} & arrays.keys():
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
        [None] * len(ends) if marginals is None else parts("marginals", ends),
        [None] * len(ends) if ranking is None else parts("ranking", ends),
        strict=True,
    )
    return Recording(
        vocab=header["vocab"],
        sequences=tuple(Recorded(*column) for column in columns),
        about=header["about"],
        longest=header["longest"],
        filler=header["filler"],
        known=draft_ids,
        name=Path(path).name,
        sha256=hashlib.sha256(data).hexdigest(),
    )


class RecordedStream(Stream):
    """A table of the target's recorded tokens, prompt after prompt. Each prompt has the tokens of
    its answer, and the K tokens (one draft) that would follow the answer."""

    def __init__(self, recording: Recording, capacity: int, lookahead: int) -> None:
        self.recording = recording
        self.lookahead = lookahead
        counts = [len(part.tokens) for part in recording.sequences]
        self._starts = np.cumsum([0, *counts])
        self._size = int(self._starts[-1])
        self._table = self._tabled([part.tokens for part in recording.sequences])
        # By KV cache slot, the table index before that of the answer's first token.
        self._base = np.zeros(capacity, np.int64)

    def _tabled(self, parts: Sequence[Ids]) -> Ints:
        """Joins the arrays of all prompts to one table, int32 [positions, …]. parts: an array for
        each prompt, with one row for each token of its answer, or K more; missing rows become
        zeros. The table's first rows, as many as a round may read, are repeated at its end."""
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
    """Tables of a draft's recorded continuations and likeliest tokens after each prefix of answers.

    After a drafted token that the target will reject, the recorded candidates are wrong. That does
    no harm, because the round cannot end after a rejected token.
    """

    def __init__(
        self,
        recording: Recording,
        capacity: int,
        lookahead: int,
        widest: int,
        lookup: str | None = "prompt",
        *,
        at_once: bool = False,
        dynamic: int = 0,
    ) -> None:
        """capacity: the most live sequences. lookahead: the number of drafted tokens. widest: the
        most bonus candidates after any number of accepted tokens. lookup: the kind of lookup of a
        fast backup (None: there is none). at_once: whether one draft forward drafts all K tokens
        (needs recorded marginals). dynamic: the number of nodes of trees that change shape each
        round (0: there are none)."""
        super().__init__(recording, capacity, lookahead)
        parts = recording.sequences
        self._rollout = self._tabled([part.rollout[:, :lookahead] for part in parts])
        self._top = self._tabled([part.top[:, : widest + 1] for part in parts])
        self._levels: Ints | None = None  # a parallel draft's R likeliest tokens, [·, K, R]
        if at_once and lookahead > 1:
            self._levels = self._tabled([levels_of(part, lookahead) for part in parts])
            self._rollout = self._levels[:, :, 0]
        self._dynamic: tuple[Ints, Ints] | None = None
        if dynamic:
            nodes = [trees_of(part, dynamic) for part in parts]
            parents, tokens = (self._tabled(of) for of in zip(*nodes, strict=True))
            self._dynamic = parents, tokens
        self._width = widest + 1
        self._trunk: Index = np.arange(lookahead + 1, dtype=np.int64)
        self._lanes: dict[tuple[int, ...], tuple[Index, Index]] = {}
        self._fast: Ints | None = None
        if lookup is not None:
            drafts = [copied(recording, n, lookahead, lookup) for n in range(len(parts))]
            self._fast = self._tabled(drafts)

    def grown(
        self, speculation: Speculation, fan_out: tuple[int, ...], rows: Index | None = None
    ) -> tuple[Ints, Ints]:
        # Candidates after k accepted tokens: the draft's likeliest tokens, without the drafted one.
        # The tokens after a candidate are those recorded after k + 1 tokens of the answer.
        chosen = slice(None) if rows is None else rows
        origin = self._origin[chosen]
        if fan_out not in self._lanes:
            lane_k, lane_place = lanes_of(fan_out)
            self._lanes[fan_out] = lane_k.astype(np.int64), lane_place.astype(np.int64)
        k, place = self._lanes[fan_out]
        # ranks, [n, K + 1]: the rank of each verified token among the draft's likeliest ones.
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
        if (trees := self.trees()) is not None:
            true = self.true(self._trunk)
            is_accepted = self._trunk[:-1] < accepted(*trees, true)[:, None]
            return np.where(is_accepted, true[:, :-1], -1)[rows]
        if source != Source.FAST:
            return self._rollout[origin]
        assert self._fast is not None, "a fast backup without its table"
        return self._fast[origin]

    def trees(self) -> tuple[Ints, Ints] | None:
        # As in decoding, a batch that is not full drafts chains.
        if self._dynamic is None or len(self._origin) < len(self._base):
            return None
        parents, tokens = (table[self._origin] for table in self._dynamic)
        return parents, tokens

    def ranked(self, rows: Index, depths: Index, ranks: Index, ahead: Index | int = 0) -> Ints:
        origin = (self._origin[rows] + ahead)[:, None]
        return self._top.take((origin + depths) * self._width + ranks)

    def nodes(self, shape: Shape, rows: Index, ahead: Index | int = 0) -> Ints:
        if self._levels is None:
            return super().nodes(shape, rows, ahead)
        origin = (self._origin[rows] + ahead)[:, None]
        drafts: Ints = self._levels[origin, shape.depths[1:] - 1, shape.ranks[1:]]
        return drafts

    def after(
        self, speculation: Speculation, shape: Shape, rows: Index, nodes: Ints, ranks: Ints
    ) -> Ints:
        if self._levels is None:
            return super().after(speculation, shape, rows, nodes, ranks)
        # A node's candidates are the tokens of `top` that are not among the node's children.
        children = np.full((len(nodes), shape.width), -1)
        for n, node in enumerate(nodes.tolist()):
            children[n, : len(shape.children[node])] = shape.children[node]
        served = speculation.tokens[rows][:, children - 1]
        served[:, children < 0] = -1
        top = self._top[self._origin[rows][:, None] + shape.depths[nodes]]
        is_served = (top[..., None] == served[:, :, None]).any(axis=-1)
        order = np.argsort(is_served, axis=-1, kind="stable")  # children last
        places = order[:, np.arange(len(nodes)), ranks]
        return np.take_along_axis(top, places[..., None], axis=-1)[..., 0]


def levels_of(part: Recorded, lookahead: int) -> Ids:
    """Returns the R likeliest tokens for each of the next K = lookahead places after each prefix of
    an answer, [end, K, R], predicted by one forward of a draft that drafts K tokens at once."""
    marginals = part.marginals
    assert marginals is not None, "a recording without marginals"
    first = part.top[:, None, : marginals.shape[2]]
    return np.concatenate([first, marginals[:, : lookahead - 1]], axis=1)


def trees_of(part: Recorded, nodes: int) -> tuple[Ints, Ints]:
    """Returns the trees of the `nodes` likeliest nodes after each prefix of an answer: the parents
    and the tokens of nodes 1, 2, …, int32 [end, nodes] each."""
    assert part.marginals is not None and part.ranking is not None, "a recording without trees"
    parents, ranks = np.divmod(part.ranking[:, :nodes], CHOICES)
    rows = np.arange(part.end)[:, None]
    tokens = levels_of(part, part.marginals.shape[1] + 1)[rows, _depths(parents) - 1, ranks]
    return parents.astype(np.int32), tokens.astype(np.int32)


def _depths(parents: Ids) -> Index:
    """Returns the depths of the nodes 1, 2, … of trees, [n, nodes], from their parents' numbers; 0
    for a node whose parent does not come before it."""
    depths = np.zeros((len(parents), parents.shape[1] + 1), np.int64)
    for node, above in enumerate(parents.T):
        depths[:, node + 1] = np.where(above > node, 0, 1 + depths[np.arange(len(parents)), above])
    return depths[:, 1:]


def copied(recording: Recording, n: int, count: int, kind: str) -> Ints:
    """Returns the `count` tokens that a lookup, which copies earlier text, drafts after 0, 1, …
    tokens of prompt n's answer, int32 [that many places, count]. kind: a value of --lookup."""
    part = recording.sequences[n]
    lookup = make_lookup(kind, recording.longest)
    lookup.follow(part.prompt.tolist())
    drafts = []
    for token in part.tokens.tolist():
        drafts.append(lookup.padded(count, recording.filler))
        lookup.add(token)
    return np.array(drafts, np.int32)


class ReplayedTrees(TargetWorker):
    """A target worker whose host replays trees that change shape each round: of their `nodes`
    tokens it knows those that will be accepted. Forwards verify as many rows as trees have."""

    knows_trees = True

    def __init__(self, *common: Any, nodes: int) -> None:
        super().__init__(*common)
        self._rows = nodes + 1

    def upload(self, batch: Batch, speculation: Speculation, fill: int = 0) -> None:
        batch.serve(speculation)
        rows = len(batch) * self._rows if len(batch) == batch.capacity else None
        self._verified = self._upload_trunk(batch, speculation, rows, fill)


class ReplayWorkload(Workload):
    """The workload that replays the recorded greedy decoding of a real target and draft."""

    reports_outcomes = True

    @cached_property
    def recording(self) -> Recording:
        """The recording in the file that --recording names; raises ConfigError without the flag."""
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
        """Raises ConfigError if the job needs more drafted tokens, bonus candidates or prompts than
        were recorded, or if its transformer's vocabulary lacks recorded tokens."""
        super().check()
        job = self.job
        recording = self.recording
        wanted = [
            (f"lookahead={job.lookahead}", job.lookahead, recording.lookahead),
            (f"batch_size={job.config.batch_size}", job.config.batch_size, len(self.share(0))),
        ]
        if job.fan_out:
            fan_out = f"fan_out={job.config.fan_out}: {job.widest} candidates a row"
            wanted.append((fan_out, job.widest, recording.widest))
        asked = f"tree={job.config.tree}: {job.shape.width} children of a node"
        wanted.append((asked, job.shape.width, recording.widest + 1))
        if job.config.is_transformer and self.vocab > job.target.vocab_size:
            raise ConfigError(
                f"recording={job.config.recording} has {self.vocab} tokens, {job.target.name} "
                f"{job.target.vocab_size}: allowed: forward=gemm, or a target that has as many"
            )
        if (size := job.dynamic) is not None:
            dynamic = f"tree_shape=dynamic with recording={job.config.recording}"
            if not job.config.parallel_drafting:
                raise ConfigError(f"{dynamic}: allowed: with parallel_drafting")
            wanted.append((f"tree={size.nodes}, dynamic,", size.nodes, recording.most_ranked))
            if size.depth < min(size.nodes, recording.at_once[0]):
                asked = f"lookahead={job.config.lookahead}, {dynamic}"
                raise ConfigError(f"{asked}: allowed: {recording.at_once[0]}, as recorded")
        if job.config.parallel_drafting:
            most, children = recording.at_once
            if not children:
                raise ConfigError(
                    f"parallel_drafting with recording={job.config.recording}: its draft has no "
                    "mask tokens: allowed: a recording of one that has"
                )
            wanted[0] = (f"lookahead={job.lookahead} in one forward", job.lookahead, most)
            wanted.append((asked, job.shape.width, children))
        for name, value, limit in wanted:
            if value > limit:
                raise ConfigError(
                    f"{name} with recording={job.config.recording}: allowed: at most {limit}, as "
                    "recorded"
                )

    def keep(self, start: int, count: int) -> None:
        parts = self.recording.sequences
        kept = [parts[n % len(parts)] for n in range(start, start + count)]
        self.recording = replace(self.recording, sequences=kept)

    def longest_answer(self, request_id: int) -> int:
        parts = self.recording.sequences
        limit = super().longest_answer(request_id)
        end = parts[request_id % len(parts)].end
        return end if limit is None else min(end, limit)

    def endings(self) -> Endings:
        ends = [part.end for part in self.recording.sequences]
        return Endings(room=lambda request_id: ends[request_id % len(ends)])

    def target_worker(
        self, stepper: Forwards, open_gather: OpenGather | None = None
    ) -> TargetWorker:
        worker = super().target_worker(stepper, open_gather)
        is_emulated = isinstance(stepper, Stepper) and stepper.backend.info.kind == "emulated"
        if self.job.dynamic is None or (self.job.config.is_transformer and not is_emulated):
            return worker
        return ReplayedTrees(stepper, worker.oracle, worker.placement, nodes=self.job.verified)

    def target_oracle(self, stepper: Forwards) -> ImposedTarget:
        job = self.job
        stream = RecordedStream(self.recording, job.config.batch_size, job.lookahead)
        return ImposedTarget(stream, job.shape)

    def draft_oracle(self, stepper: Forwards) -> ImposedDraft:
        job = self.job
        config = job.config
        widest = min(job.widest, self.recording.widest)  # without branches, no candidates are read
        stream = RecordedDraft(
            self.recording,
            config.batch_size,
            job.lookahead,
            widest,
            config.fast_lookup,
            at_once=config.parallel_drafting,
            dynamic=0 if job.dynamic is None else job.dynamic.nodes,
        )
        return ImposedDraft(stream, job.tokens_a_forward, job.shape)

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
