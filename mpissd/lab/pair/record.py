"""The command `pair`: records the target's greedy answers and the draft model's continuations."""

import math
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

import mpissd
from mpissd.common.errors import ConfigError
from mpissd.common.presets import files_of, split_pair
from mpissd.common.rounds import Ints
from mpissd.common.wait import Waiter
from mpissd.engine.backend.registry import choose, open_backend
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.shard import ForwardOptions, TransformerShard
from mpissd.engine.model.stepper import ModelSource, Stepper
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.sources import config_of, known_ids, open_checkpoint
from mpissd.engine.model.transformer.trees import CHOICES, searched
from mpissd.engine.oracle.replay import Recorded, Recording, save
from mpissd.engine.text.prompts import read_prompts
from mpissd.engine.text.tokenizer import load_tokenizer
from mpissd.lab.pair.config import PairConfig
from mpissd.lab.pair.laws import new_file, print_laws

_CHUNK = {"numpy": 32, "cupy": 128}  # {backend: largest number of tokens in one forward}
_TELL_S = 2.0
_NODES = 31  # the most nodes of a tree of the likeliest ones that a replay may use

Tokens = Sequence[int]
Likeliest = tuple[Ints, NDArray[np.float32]]


def pair(config: PairConfig) -> int:
    """Runs the command `pair`; returns the exit code 0. It records a model pair to the file
    config.out or, if config.sources is given, prints the acceptance and hit models fitted to these
    recordings. Raises ConfigError if an input cannot be read, or if the file exists."""
    if config.sources is not None:
        print_laws(config)
        return 0
    if config.out is None:
        raise ConfigError("out: needed: a new file, such as recording.npz")
    path = new_file(config.out)
    recording = make(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(path, recording)
    parts = recording.sequences
    tokens = sum(part.end for part in parts)
    same = np.concatenate([part.rollout[:, 0] == part.tokens[: part.end] for part in parts])
    print(f"{path}: {len(parts)} prompts, {tokens} tokens, {path.stat().st_size:,} bytes")
    print(f"   the draft's likeliest token is the target's in {same.mean():.3f}")
    return 0


def make(config: PairConfig) -> Recording:
    """Answers the prompts with the target, drafts after every token of the answers, and returns the
    recording of both. Raises ConfigError if the models or prompts cannot be read."""
    given = replace(config.run, workload="text")
    target, draft = split_pair(given.pair) if given.pair else (given.target, given.draft)
    assert target is not None and draft is not None, "a pair without a model"
    architecture = config_of(target)
    config_of(draft, target)
    vocab = architecture.shape.vocab_size
    limit = config.num_tokens
    steps = config.steps
    tokenizer = None
    if not given.prompt_ids:
        files = files_of(target)
        if files is None:
            raise ConfigError(f"target={target} has no tokenizer: allowed: weights, or prompt_ids")
        tokenizer = load_tokenizer(str(files))
    room = architecture.max_positions
    room = None if room is None else room - limit - steps
    prompts = read_prompts(given, tokenizer, context=room, vocab=vocab)[: config.count]
    asked = [prompt.tokens for prompt in prompts]
    stops = {given.stop_token} - {None} | (tokenizer.stop_ids if tokenizer else set())
    capacity = max(map(len, asked)) + limit

    answers: list[tuple[list[int], int]] = []
    batch = min(config.batch_size, len(asked))
    options = ForwardOptions(lm_head=True, values=True, capacity=capacity + steps)
    count = sum(map(len, asked)) + len(asked) * (limit + steps)
    with closing(Model(config, ModelSource(target), options, batch, "answering", count)) as model:
        for start in range(0, len(asked), batch):
            answers += answered(model, asked[start : start + batch], limit, stops, steps)

    parts = []
    top_k = config.fan_out + 1
    source = ModelSource(draft, target)
    rows = _CHUNK[choose(config.backend)]
    options = replace(options, capacity=capacity, top_k=top_k, lanes=rows, steps=steps)
    masks = range(vocab, vocab + min(config_of(draft, target).masks, steps - 1, rows))
    a_prefix = steps + len(masks)  # number of tokens that the draft computes for one prefix
    count = sum(len(p) + end * a_prefix for p, (_, end) in zip(asked, answers, strict=True))
    with closing(Model(config, source, options, 1, "drafting", count)) as model:
        for prompt, (tokens, end) in zip(asked, answers, strict=True):
            drafts = drafted(model, prompt, tokens[:end], steps, masks)
            stopped = tokens[end - 1] in stops
            parts.append(Recorded(np.array(prompt), np.array(tokens), end, stopped, *drafts))

    models = open_checkpoint(target), open_checkpoint(draft, target=target)
    about = {
        "target": models[0].name,
        "draft": models[1].name,
        "target_sha256": models[0].sha256,
        "draft_sha256": models[1].sha256,
        "sha256_of": [model.sha256_of for model in models],
        "prompts": Path(given.prompts).name if given.prompts else "prompt_ids",
        "licence": config.licence,
        "tokens": limit,
        "chat_template": given.chat_template,
        "temperature": 0,
        "backend": choose(config.backend),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "tool": f"mpissd {mpissd.__version__} pair",
    }
    return Recording(vocab, parts, about, known=known_ids(models[1], vocab))


class Model:
    """A whole model on one device, with a KV cache. A progress bar on stderr counts its tokens."""

    def __init__(
        self,
        config: PairConfig,
        source: ModelSource,
        options: ForwardOptions,
        slots: int,
        verb: str,
        count: int,
    ) -> None:
        """Reads the weights. slots: largest number of sequences in the KV cache. verb, count: label
        of the bar, and the number of tokens at which it is full."""
        name = choose(config.backend)
        self.rows = rows = _CHUNK[name]  # largest number of tokens in a forward
        self._waiter = Waiter(math.inf, spin=False)
        bar = tqdm(total=count, desc=verb, unit=" rows", mininterval=_TELL_S, leave=False, ncols=80)
        with ExitStack() as resources:
            self._stepper = Stepper(
                resources.enter_context(closing(open_backend(name, device="h100", local_rank=0))),
                SoloGroup(),
                TransformerShard(config_of(source.where, source.target)),
                options,
                buckets={min(slots, rows), rows},
                num_sequences=slots,
                seed=2 * config.seed + bool(source.target),
                model=source,
            )
            resources.callback(self._stepper.close)
            self._advance = resources.enter_context(bar).update
            self.release = self._stepper.release
            self.close = resources.pop_all().close

    def feed(self, tokens: Tokens | Ints, places: Places) -> Likeliest:
        """Runs a forward over n tokens; returns the top_k likeliest next tokens after each of them,
        best first, and their logits, [n, top_k]. places: the tokens' places in the KV cache."""
        self._stepper.upload(len(tokens), np.asarray(tokens, np.int32), places, lists=True)
        self._stepper.launch()
        self._stepper.wait(self._waiter)
        results = self._stepper.results()
        self._advance(len(tokens))
        assert results.values is not None, "a model without ForwardOptions.values"
        return results.ids[0], results.values[0]

    def read(self, slot: int, tokens: Tokens, first: int) -> Likeliest:
        """Stores a sequence in the KV cache under slot `slot`; returns the likeliest next tokens
        after each of tokens[first:], best first, and their logits, [len(tokens) − first, top_k]."""
        parts = list[Likeliest]()
        for start in range(0, len(tokens), self.rows):
            stop = min(start + self.rows, len(tokens))
            reads = stop > first
            ids, logits = self.feed(tokens[start:stop], trunk_rows(slot, start, stop, reads=reads))
            if reads:
                skipped = max(0, first - start)
                parts.append((ids[skipped:], logits[skipped:]))
        ids, logits = map(np.concatenate, zip(*parts, strict=True))
        return ids, logits


def answered(
    model: Model, prompts: Sequence[Tokens], limit: int, stops: Collection[int | None], extra: int
) -> list[tuple[list[int], int]]:
    """Decodes the prompts greedily as one batch; returns (tokens, end) for each. end: the answer's
    number of tokens, up to a stop token (one of `stops`) or `limit`; `extra` tokens follow."""
    answers: list[list[int]] = [[] for _ in prompts]
    ends = [limit] * len(prompts)

    def add(slot: int, token: int) -> None:
        answers[slot].append(token)
        if ends[slot] == limit and token in stops:
            ends[slot] = min(limit, len(answers[slot]))

    for slot, prompt in enumerate(prompts):
        add(slot, int(model.read(slot, prompt, len(prompt) - 1)[0][0, 0]))
    while live := [slot for slot, end in enumerate(ends) if len(answers[slot]) < end + extra]:
        length = [len(prompts[slot]) + len(answers[slot]) - 1 for slot in live]
        none = np.full(len(live), -1, np.int32)
        places = Places(np.array(live, np.int32), np.array(length, np.int32), none, none)
        ids, _ = model.feed([answers[slot][-1] for slot in live], places)
        for slot, token in zip(live, ids[:, 0].tolist(), strict=True):
            add(slot, token)
    model.release(range(len(prompts)))
    return list(zip(answers, ends, strict=True))


def drafted(
    model: Model, prompt: Tokens, answer: Tokens, lookahead: int, masks: Sequence[int] = ()
) -> tuple[Any, ...]:
    """Returns the arrays rollout, top, marginals and ranking of Recorded: what a draft model
    predicts after each proper prefix of an answer of n tokens, in chains of K = lookahead tokens.
    masks: ids of the mask tokens, by which one forward predicts several tokens."""
    top, logits = model.read(0, [*prompt, *answer[:-1]], len(prompt) - 1)
    rollout = np.repeat(top[:, :1], lookahead, axis=1)
    for start in range(0, len(answer), model.rows):
        part = rollout[start : start + model.rows]
        slots = np.zeros(len(part), np.int32)
        lanes = np.arange(len(part), dtype=np.int32)  # one scratch row of KV cache a prefix
        trunks = len(prompt) + start + lanes
        for step in range(lookahead - 1):
            places = Places(slots, trunks + np.int32(step), lanes, trunks)
            part[:, step + 1] = model.feed(part[:, step], places)[0][:, 0]
    count = len(masks)
    if not count:
        model.release([0])
        return rollout, top, None, None
    parts = list[Likeliest]()
    group = model.rows // count  # number of prefixes in one forward
    for start in range(0, len(answer), group):
        size = min(group, len(answer) - start)
        lanes = np.repeat(np.arange(size, dtype=np.int32), count)
        trunks = len(prompt) + start + lanes
        ahead = np.tile(np.arange(count, dtype=np.int32), size)
        places = Places(np.zeros_like(lanes), trunks + ahead, lanes, trunks)
        parts.append(model.feed(np.tile(masks, size), places))
    model.release([0])
    tables = map(np.concatenate, zip(*parts, strict=True))
    marginals, later = (table[:, :CHOICES].reshape(len(answer), count, -1) for table in tables)
    levels = np.concatenate([logits[:, None, :CHOICES], later], axis=1)
    if levels.shape[-1] < CHOICES:
        return rollout, top, marginals, None
    parents, ranks = searched(levels, _NODES)
    return rollout, top, marginals, (CHOICES * parents + ranks).astype(np.uint8)
