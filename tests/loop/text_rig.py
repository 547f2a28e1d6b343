"""Pairs of tiny transformers whose sampled text is enumerated in the same way as markov models'."""

import json
from collections import abc
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import tokenizers

from mpissd.common.rounds import Request, Sampling
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.comm.wire import LinkShape
from mpissd.engine.law import sampling
from mpissd.engine.law.tree import BranchLayout
from mpissd.engine.model.shard import ForwardOptions, TransformerShard
from mpissd.engine.model.stepper import ModelSource, Stepper
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.sources import config_of, open_checkpoint
from mpissd.engine.oracle.logits import LogitsDraft, LogitsTarget
from mpissd.engine.oracle.sampled import GrammarStates
from mpissd.engine.round.rows import DraftWorker, TargetWorker
from mpissd.engine.round.sequence import LiveSequence, Placement
from mpissd.engine.text.grammar import Grammars
from mpissd.engine.text.tokenizer import Tokenizer
from mpissd.engine.trees import TreeBatch
from tests.loop.enumeration import Case, Judging, Watching
from tests.loop.markov_rig import Pair

_CAPACITY, _LANES = 96, 32
Rules = tuple[tuple[str, Any], ...]  # further values of Sampling
Penalties = tuple[tuple[tuple[int, float], ...], float, float] | None  # bias, presence, frequency
# A grammar over the tokens a, b, c and the end, 0 … 3, and by state the next state of each token
# that it allows; state 3 is after the end, where no token is masked.
GRAMMAR = json.dumps({"grammars": [{"lark_grammar": "start: /(ab|b[bc]|c)*/"}]})
MOVES = ({0: 1, 1: 2, 2: 0, 3: 3}, {1: 0}, {1: 0, 2: 0}, dict.fromkeys(range(4), 3))


@lru_cache(maxsize=1)
def grammars() -> Grammars:
    vocabulary = {"a": 0, "b": 1, "c": 2, "<|e|>": 3}
    end = tokenizers.AddedToken("<|e|>", special=True)
    words = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    words.decoder = tokenizers.decoders.ByteLevel()
    words.add_special_tokens([end])
    return Grammars(Tokenizer(frozenset({3}), {}, {}, words, "four"), 4, {3})


@lru_cache(maxsize=8)
def stepper_of(where: str, target: str, batch: int, lookahead: int, which: str) -> Stepper:
    """A model on a cache of its own; `which` separates two models of the same weights."""
    sizes = {"capacity": _CAPACITY, "lanes": _LANES, "steps": max(1, 2 * lookahead)}
    config = config_of(where, target)
    top_k = min(4, config.head_vocab)
    return Stepper(
        NumpyBackend(), SoloGroup(), TransformerShard(config),
        ForwardOptions(lm_head=True, values=True, top_k=top_k, **sizes),
        buckets=[1, 2, 4, 8, 32, _CAPACITY], num_sequences=batch, seed=0,
        model=ModelSource(where, target, page=16),
    )  # fmt: skip


@lru_cache(maxsize=100_000)
def logits_behind(where: str, context: tuple[int, ...]) -> Any:
    """The target's logits after a context, from only a prefill."""
    stepper = stepper_of(where, where, 1, 0, "alone")
    stepper.release([0])
    stepper.upload(len(context), np.array(context, np.int32), trunk_rows(0, 0, len(context)))
    stepper.launch()
    return stepper.logits([len(context) - 1])[0].copy()


@dataclass(frozen=True)
class TextModel:
    """The target in the form that the enumeration reads; a token that top_p or the grammar cuts
    has −inf. has_grammar: whether answers are of GRAMMAR."""

    where: str
    temperature: float
    top_p: float
    prompt_tokens: int = 0
    penalties: Penalties = None
    has_grammar: bool = False
    rules: Rules = ()

    def context(self, tokens: abc.Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens)

    def logits(self, context: tuple[int, ...]) -> Any:
        logits, state = logits_behind(self.where, context).astype(np.float64), 0
        answer = context[self.prompt_tokens :]
        if self.has_grammar:
            for token in answer:
                state = MOVES[state].get(token, 3)
            logits[[token not in MOVES[state] for token in range(4)]] = -np.inf
        if self.penalties is not None:
            bias, presence, frequency = self.penalties
            for token in range(len(logits)):
                logits[token] += dict(bias).get(token, 0.0) - presence * (token in answer)
                logits[token] -= frequency * answer.count(token)
        rules = dict(self.rules)
        for token in set(context):
            factor = rules.get("repetition_penalty", 1.0)
            logits[token] *= 1 / factor if logits[token] > 0 else factor
        if len(answer) < rules.get("min_tokens", 0):
            logits[list(rules["stop_ids"])] = -np.inf
        probs = sampling.weigh(logits, self.temperature).probs
        probs[probs < rules.get("min_p", 0.0) * probs.max()] = 0.0
        probs[np.argsort(-probs, kind="stable")[rules.get("top_k", len(probs)) :]] = 0.0
        with np.errstate(divide="ignore"):
            return np.log(sampling.nucleus(probs / probs.sum(), self.top_p)) * self.temperature


@dataclass(frozen=True)
class TextLaws:
    """The part of a markov pair's models that the rig reads."""

    target: TextModel
    temperature: float
    prompts: tuple[tuple[int, ...], ...]

    def prompt(self, request_id: int) -> list[int]:
        return list(self.prompts[request_id])


@dataclass(frozen=True)
class TextPair(Pair):
    """A Pair whose models are folders of weights."""

    target_where: str = ""
    draft_where: str = ""
    top_p: float = 1.0
    prompts: tuple[tuple[int, ...], ...] = ((1, 0, 2), (2, 1))
    wrong_top_p: float | None = None  # the target's top_p, if it is to differ from top_p
    penalties: Penalties = None
    rules: Rules = ()
    forgets_drafts: bool = False  # whether penalties count only committed tokens
    has_grammar: bool = False
    forces: bool = False
    forgets_path: bool = False  # whether the target masks each row as the first one
    is_parallel: bool = False  # whether one draft forward drafts all levels, by mask tokens
    draft_oracle: Any = None  # the class of a biased draft's oracle

    @property
    def masks(self) -> int:
        return self.K - 1 if self.is_parallel else 0

    @property
    def laws(self) -> TextLaws:  # type: ignore[override]
        told = self.top_p, len(self.prompts[0]), self.penalties, self.has_grammar, self.rules
        model = TextModel(self.target_where, self.temperature, *told)
        return TextLaws(model, self.temperature, self.prompts)

    def requests(self) -> list[Request]:
        asked = self.prompts[: self.batch]
        bias, presence, frequency = self.penalties or ((), 0.0, 0.0)
        penalties = {"presence_penalty": presence, "frequency_penalty": frequency}
        grammar = GRAMMAR if self.has_grammar else ""
        told = Sampling(self.temperature, self.top_p, logit_bias=bias, grammar=grammar, **penalties)
        told = replace(told, **dict(self.rules))
        return [Request(n, prompt[-1], 0, prompt, told) for n, prompt in enumerate(asked)]

    def forced(self, answer: list[int]) -> list[int]:
        if not self.forces:
            return []
        grammar = grammars().begin(GRAMMAR)
        grammar.forces = True
        return grammar.forced(answer)

    @property
    def ids(self) -> Any:
        return open_checkpoint(self.draft_where, target=self.target_where).head_ids

    @property
    def shape(self) -> LinkShape:
        width = self.vocab if self.ids is None else len(self.ids)
        vocab = width if self.K else 0
        nodes = self.tree.ends[self.K]
        return LinkShape(3, self.batch, nodes, vocab=vocab, prompt_tokens=9)


class WatchedText(Watching, LogitsDraft):
    """The draft oracle of the `text` workload, watched."""


class JudgedText(Judging, LogitsTarget):
    """The target oracle of the `text` workload, forked."""

    wrong_top_p: float | None = None
    forgets_drafts = forgets_path = False

    def _masked(self, sequence: LiveSequence, start: int, node: int) -> Any:
        if not self.forgets_path:
            return super()._masked(sequence, start, node)
        grammar = self._grammars.of(sequence)
        return grammar.masked(self.logits_of(start + node), sequence.answer)

    def _target_row(
        self, sequence: LiveSequence, start: int, i: int
    ) -> sampling.Floats | sampling.Weights:
        if self.wrong_top_p is not None:
            told = replace(sequence.request.sampling, top_p=self.wrong_top_p)
            sequence.request = replace(sequence.request, sampling=told)
        return super()._target_row(sequence, start, i)

    def _answer(self, sequence: LiveSequence, node: int) -> list[int]:
        return super()._answer(sequence, 0 if self.forgets_drafts else node)


def text_workers(case: Case) -> tuple[DraftWorker, TargetWorker]:
    """New workers over models that are made once; their slots of earlier workers are released."""
    pair = case.pair
    told = pair.target_where, pair.batch, pair.K
    target = stepper_of(pair.target_where, *told, "target")
    draft = stepper_of(pair.draft_where, *told, "draft")
    for stepper in (target, draft):
        stepper.release(range(pair.batch))
    drafter = (pair.draft_oracle or WatchedText)(
        draft, pair.seed, pair.K, pair.fans,
        samples=True, saguaro_c=pair.saguaro_c, ids=pair.ids,
        shape=pair.tree, grammars=GrammarStates(grammars, forces=pair.forces), masks=pair.masks,
    )  # fmt: skip
    judge = JudgedText(
        target, pair.seed, samples=True, draft_ids=pair.ids, shape=pair.tree,
        grammars=GrammarStates(grammars, forces=pair.forces),
    )  # fmt: skip
    judge.forgets_path = pair.forgets_path
    judge.forgets_drafts = pair.forgets_drafts
    judge.wrong_top_p = pair.wrong_top_p
    batches = None if pair.tree.is_chain else TreeBatch
    places = Placement(batches=batches)
    if batches is not None and pair.mode == "ssd":
        layout = BranchLayout(pair.tree, pair.fans.after_hit, pair.masks)
        batches = partial(TreeBatch, layout=layout)
    masks = range(pair.vocab, pair.vocab + pair.masks)
    drafts = DraftWorker(draft, drafter, Placement(batches=batches, masks=masks))
    return drafts, TargetWorker(target, judge, places)
