"""The command `record`: answers prompts with a target, and keeps what its draft would have done."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.output import check_file, tool
from mpissd.common.presets import files_of, split_pair
from mpissd.engine.backend.registry import choose, open_backend
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.transformer.sources import config_of, known_ids, open_checkpoint
from mpissd.engine.model.transformer.stack import TransformerStacks
from mpissd.engine.workload.replay.recording import Recorded, Recording, save
from mpissd.engine.workload.text.prompts import Prompt, read_prompts
from mpissd.engine.workload.text.tokenizer import Tokenizer, load_tokenizer
from mpissd.lab.record.config import RecordConfig
from mpissd.lab.record.greedy import Model, answered, drafted

_CHUNK = {"numpy": 32, "cupy": 128}  # rows of the largest forward
_TELL_S = 5.0


def record(config: RecordConfig) -> int:
    """Writes a recording and prints a summary of it."""
    if config.to is None:
        raise ConfigError("to: needed: a new file, such as recording.npz")
    path = Path(config.to)
    if path.exists():
        raise ConfigError(f"to={config.to}: exists: allowed: a new file")
    check_file("to", config.to)
    recording = make(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(path, recording)
    parts = recording.sequences
    tokens = sum(part.end for part in parts)
    print(f"{path}: {len(parts)} prompts, {tokens} tokens, {path.stat().st_size:,} bytes")
    print(f"   {_agreement(recording)}")
    return 0


def _agreement(recording: Recording) -> str:
    """Says how often the draft's first choice was the target's."""
    same = [part.rollout[:, 0] == part.tokens[: part.end] for part in recording.sequences]
    return f"the draft's likeliest token is the target's in {np.concatenate(same).mean():.3f}"


def make(config: RecordConfig) -> Recording:
    """Records a pair; raises ConfigError where its models or the prompts cannot be read."""
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


def _prompts(config: RecordConfig, tokenizer: Tokenizer | None, target: str) -> list[Prompt]:
    told = RunConfig(
        workload="text",
        prompts=config.prompts,
        prompt_ids=config.prompt_ids,
        chat_template=config.chat_template,
    )
    known = config_of(target)
    room = None
    if known.max_positions is not None:
        room = known.max_positions - config.num_tokens - config.lookahead
    found = read_prompts(told, tokenizer, context=room, vocab=known.shape.vocab_size)
    return found[: config.count]


def _stops(config: RecordConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    own = frozenset() if tokenizer is None else tokenizer.stop_ids
    return own if config.stop_token is None else own | {config.stop_token}


def _answers(
    config: RecordConfig, target: str, prompts: list[tuple[int, ...]], stops: frozenset[int]
) -> list[tuple[list[int], int]]:
    """Returns (tokens, end) of every prompt's answer by the target."""
    batch, more = min(config.batch_size, len(prompts)), config.lookahead
    capacity = max(map(len, prompts)) + config.num_tokens + more
    options = ForwardOptions(lm_head=True, capacity=capacity)
    found: list[tuple[list[int], int]] = []
    with ExitStack() as resources:
        stacks = TransformerStacks(target)
        model = _open(config, stacks, options, resources, slots=batch, seed=2 * config.seed)
        told = Progress("answered", len(prompts))
        for start in range(0, len(prompts), batch):
            group = prompts[start : start + batch]
            found += answered(model, group, config.num_tokens, stops, more)
            told.tell(len(found))
    return found


def _recorded(
    config: RecordConfig,
    target: str,
    draft: str,
    prompts: list[Prompt],
    answers: list[tuple[list[int], int]],
    stops: frozenset[int],
) -> Iterator[Recorded]:
    """Yields each prompt's recording, with what the draft would have done."""
    capacity = max(len(prompt.tokens) for prompt in prompts) + config.num_tokens
    with ExitStack() as resources:
        rows = _CHUNK[choose(config.backend)]
        options = ForwardOptions(
            lm_head=True,
            capacity=capacity,
            top_k=config.fan_out + 1,
            lanes=rows,
            steps=config.lookahead,
        )
        stacks = TransformerStacks(draft, target)
        model = _open(config, stacks, options, resources, slots=1, seed=2 * config.seed + 1)
        told = Progress("drafted", len(prompts))
        for number, (prompt, (tokens, end)) in enumerate(zip(prompts, answers, strict=True), 1):
            rollout, top = drafted(model, prompt.tokens, tokens[:end], config.lookahead)
            stopped = tokens[end - 1] in stops
            asked = np.array(prompt.tokens)
            yield Recorded(asked, np.array(tokens), end, stopped, rollout, top)
            told.tell(number)


def _open(
    config: RecordConfig,
    stacks: TransformerStacks,
    options: ForwardOptions,
    resources: ExitStack,
    *,
    slots: int,
    seed: int,
) -> Model:
    name = choose(config.backend)
    backend = open_backend(name, device="h100", local_rank=0)
    resources.callback(backend.close)
    model = Model(backend, stacks, options, rows=_CHUNK[name], slots=slots, seed=seed)
    resources.callback(model.close)
    return model


class Progress:
    """Says on stderr, every few seconds, how many prompts are done."""

    def __init__(self, verb: str, total: int) -> None:
        self._verb, self._total, self._told = verb, total, perf_counter()

    def tell(self, count: int) -> None:
        """Prints the count, unless it was printed a short time ago."""
        if perf_counter() - self._told > _TELL_S or count == self._total:
            self._told = perf_counter()
            print(f"{self._verb} {count} of {self._total} prompts", file=sys.stderr, flush=True)


def _about(config: RecordConfig, target: str, draft: str) -> dict[str, Any]:
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
        "tool": tool("record"),
    }
