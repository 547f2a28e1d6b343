"""Records a pair at temperature 0: the target's answers, and the draft's continuations."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.output import check_file, tool
from mpissd.common.presets import files_of, split_pair
from mpissd.common.rounds import Ints
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend
from mpissd.engine.backend.registry import choose, open_backend
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stepper import ModelSource, Stepper
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.shard import TransformerShard
from mpissd.engine.model.transformer.sources import config_of, known_ids, open_checkpoint
from mpissd.engine.workload.replay.recording import Recorded, Recording, save
from mpissd.engine.workload.text.prompts import Prompt, read_prompts
from mpissd.engine.workload.text.tokenizer import Tokenizer, load_tokenizer
from mpissd.lab.pair.config import PairConfig

_CHUNK = {"numpy": 32, "cupy": 128}  # rows of the largest forward
_TELL_S = 5.0

Tokens = Sequence[int]


def write(config: PairConfig, to: str) -> None:
    """Writes a recording to a new file and prints a summary; raises ConfigError if it exists."""
    path = Path(to)
    if path.exists():
        raise ConfigError(f"to={to}: exists: allowed: a new file")
    check_file("to", to)
    recording = make(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(path, recording)
    parts = recording.sequences
    tokens = sum(part.end for part in parts)
    same = np.concatenate([part.rollout[:, 0] == part.tokens[: part.end] for part in parts])
    print(f"{path}: {len(parts)} prompts, {tokens} tokens, {path.stat().st_size:,} bytes")
    print(f"   the draft's likeliest token is the target's in {same.mean():.3f}")


def make(config: PairConfig) -> Recording:
    """Records a pair; raises ConfigError if its models or the prompts cannot be read."""
    target, draft = split_pair(config.pair) if config.pair else (config.target, config.draft)
    assert target is not None and draft is not None, "a pair without a model"
    vocab = config_of(target).shape.vocab_size
    config_of(draft, target)
    tokenizer = None if config.prompt_ids else _tokenizer(target)
    prompts, stops = _prompts(config, tokenizer, target), _stops(config, tokenizer)
    answers = _answers(config, target, [prompt.tokens for prompt in prompts], stops)
    parts = list(_recorded(config, target, draft, prompts, answers, stops))
    known = known_ids(open_checkpoint(draft, target=target), vocab)
    return Recording(vocab, parts, _about(config, target, draft), known=known)


def _tokenizer(target: str) -> Tokenizer:
    path = files_of(target)
    if path is None:
        raise ConfigError(f"target={target} has no tokenizer: allowed: weights, or prompt_ids")
    return load_tokenizer(str(path))


def _prompts(config: PairConfig, tokenizer: Tokenizer | None, target: str) -> list[Prompt]:
    told = RunConfig(
        workload="text",
        prompts=config.prompts,
        prompt_ids=config.prompt_ids,
        chat_template=config.chat_template,
    )
    known = config_of(target)
    room = None
    if known.max_positions is not None:
        room = known.max_positions - config.num_tokens - config.steps
    found = read_prompts(told, tokenizer, context=room, vocab=known.shape.vocab_size)
    return found[: config.count]


def _stops(config: PairConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    own = frozenset() if tokenizer is None else tokenizer.stop_ids
    return own if config.stop_token is None else own | {config.stop_token}


def _answers(
    config: PairConfig, target: str, prompts: list[tuple[int, ...]], stops: frozenset[int]
) -> list[tuple[list[int], int]]:
    """Returns (tokens, end) of every prompt's answer by the target."""
    batch, more = min(config.batch_size, len(prompts)), config.steps
    capacity = max(map(len, prompts)) + config.num_tokens + more
    options = ForwardOptions(lm_head=True, capacity=capacity)
    found: list[tuple[list[int], int]] = []
    with ExitStack() as resources:
        source = ModelSource(target)
        model = _open(config, source, options, resources, slots=batch, seed=2 * config.seed)
        bar = resources.enter_context(_counted("answered", len(prompts)))
        for start in range(0, len(prompts), batch):
            group = prompts[start : start + batch]
            found += answered(model, group, config.num_tokens, stops, more)
            bar.update(len(group))
    return found


def _recorded(
    config: PairConfig,
    target: str,
    draft: str,
    prompts: list[Prompt],
    answers: list[tuple[list[int], int]],
    stops: frozenset[int],
) -> Iterator[Recorded]:
    """Yields each prompt's recording, with the draft's continuations."""
    capacity = max(len(prompt.tokens) for prompt in prompts) + config.num_tokens
    with ExitStack() as resources:
        rows = _CHUNK[choose(config.backend)]
        options = ForwardOptions(
            lm_head=True,
            capacity=capacity,
            top_k=config.fan_out + 1,
            lanes=rows,
            steps=config.steps,
        )
        source = ModelSource(draft, target)
        model = _open(config, source, options, resources, slots=1, seed=2 * config.seed + 1)
        bar = resources.enter_context(_counted("drafted", len(prompts)))
        for prompt, (tokens, end) in zip(prompts, answers, strict=True):
            rollout, top = drafted(model, prompt.tokens, tokens[:end], config.steps)
            stopped = tokens[end - 1] in stops
            asked = np.array(prompt.tokens)
            yield Recorded(asked, np.array(tokens), end, stopped, rollout, top)
            bar.update()


def _open(
    config: PairConfig,
    source: ModelSource,
    options: ForwardOptions,
    resources: ExitStack,
    *,
    slots: int,
    seed: int,
) -> Model:
    name = choose(config.backend)
    backend = open_backend(name, device="h100", local_rank=0)
    resources.callback(backend.close)
    model = Model(backend, source, options, rows=_CHUNK[name], slots=slots, seed=seed)
    resources.callback(model.close)
    return model


def _counted(verb: str, total: int) -> Any:
    """Returns a bar on stderr that counts prompts, on a terminal or every few seconds."""
    return tqdm(total=total, desc=verb, unit=" prompts", mininterval=_TELL_S, leave=False)


def _about(config: PairConfig, target: str, draft: str) -> dict[str, Any]:
    """Returns the provenance that the file carries."""
    models = open_checkpoint(target), open_checkpoint(draft, target=target)
    return {
        "target": models[0].name,
        "draft": models[1].name,
        "target_sha256": models[0].sha256,
        "draft_sha256": models[1].sha256,
        "sha256_of": [model.sha256_of for model in models],
        "prompts": Path(config.prompts).name if config.prompts else "prompt_ids",
        "licence": config.licence,
        "tokens": config.num_tokens,
        "chat_template": config.chat_template,
        "temperature": 0,
        "backend": choose(config.backend),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "tool": tool("pair"),
    }


class Model:
    """A whole model on one device; `feed` runs a forward and returns the likeliest tokens."""

    def __init__(
        self,
        backend: Backend,
        source: ModelSource,
        options: ForwardOptions,
        *,
        rows: int,
        slots: int,
        seed: int,
    ) -> None:
        """Reads the weights. rows: of the largest forward. slots: sequences in the cache."""
        shard = TransformerShard(config_of(source.where, source.target))
        self.rows, self._waiter = rows, Waiter(math.inf, spin=False)
        self._stepper = Stepper(
            backend,
            SoloGroup(),
            shard,
            options,
            buckets={min(slots, rows), rows},
            num_sequences=slots,
            seed=seed,
            model=source,
        )

    def feed(self, tokens: Tokens | Ints, places: Places) -> Ints:
        """Runs a forward of these rows; returns the likeliest tokens after each, [n, top_k]."""
        self._stepper.upload(len(tokens), np.asarray(tokens, np.int32), places, lists=True)
        self._stepper.launch()
        self._stepper.wait(self._waiter)
        found: Ints = self._stepper.results().ids[0].copy()
        return found

    def read(self, slot: int, tokens: Tokens, first: int) -> Ints:
        """Fills a slot with tokens; returns the likeliest after positions first … , [n, top_k]."""
        found = []
        for start in range(0, len(tokens), self.rows):
            stop = min(start + self.rows, len(tokens))
            reads = stop > first
            ids = self.feed(tokens[start:stop], trunk_rows(slot, start, stop, reads=reads))
            if reads:
                found.append(ids[max(0, first - start) :])
        return np.concatenate(found)

    def release(self, slots: Sequence[int]) -> None:
        """Frees the cache of these slots."""
        self._stepper.release(slots)

    def close(self) -> None:
        """Frees the forwards."""
        self._stepper.close()


def answered(
    model: Model, prompts: Sequence[Tokens], limit: int, stops: Collection[int], more: int
) -> list[tuple[list[int], int]]:
    """Returns (tokens, end) of the greedy answer to each prompt; at most one prompt a cache slot.

    end: tokens up to the stop token or the limit; `more` tokens follow it.
    """
    found: list[list[int]] = [[] for _ in prompts]
    ends = [limit] * len(prompts)

    def add(slot: int, token: int) -> None:
        found[slot].append(token)
        if ends[slot] == limit and token in stops:
            ends[slot] = min(limit, len(found[slot]))

    for slot, prompt in enumerate(prompts):
        add(slot, int(model.read(slot, prompt, len(prompt) - 1)[0, 0]))
    while live := [slot for slot, end in enumerate(ends) if len(found[slot]) < end + more]:
        length = [len(prompts[slot]) + len(found[slot]) - 1 for slot in live]
        slots, positions = np.array(live, np.int32), np.array(length, np.int32)
        none = np.full(len(live), -1, np.int32)
        ids = model.feed([found[s][-1] for s in live], Places(slots, positions, none, none))
        for slot, token in zip(live, ids[:, 0].tolist(), strict=True):
            add(slot, token)
    model.release(range(len(prompts)))
    return list(zip(found, ends, strict=True))


def drafted(model: Model, prompt: Tokens, answer: Tokens, lookahead: int) -> tuple[Ints, Ints]:
    """Returns (rollout [n, K], top [n, top_k]) after each prefix of an answer of n tokens.

    The whole answer is no prefix. Prefixes grow together, a lane of the cache each.
    """
    top = model.read(0, [*prompt, *answer[:-1]], len(prompt) - 1)
    rollout = np.repeat(top[:, :1], lookahead, axis=1)
    for start in range(0, len(answer), model.rows):
        part = rollout[start : start + model.rows]
        count = len(part)
        slots, lanes = np.zeros(count, np.int32), np.arange(count, dtype=np.int32)
        trunks = len(prompt) + start + lanes
        for step in range(lookahead - 1):
            places = Places(slots, trunks + np.int32(step), lanes, trunks)
            part[:, step + 1] = model.feed(part[:, step], places)[:, 0]
    model.release([0])
    return rollout, top
