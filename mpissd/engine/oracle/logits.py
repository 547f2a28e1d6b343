"""The `text` workload: a target and a draft transformer answer prompts by their logits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar
from zlib import crc32

import numpy as np

from mpissd.common.errors import ConfigError, ProtocolError
from mpissd.common.presets import has_weights
from mpissd.common.rounds import Ints, Logprob, Request, Sampling, Scored, Speculation
from mpissd.common.wait import Waiter
from mpissd.common.workloads import class_of
from mpissd.engine.law import sampling
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.law.lookup import LONGEST
from mpissd.engine.law.tree import CHAIN, Shape
from mpissd.engine.model.forwards import Drafting, Forwards, Judging
from mpissd.engine.model.shard import StateShard, TransformerShard
from mpissd.engine.model.transformer.sources import config_of, known_ids, open_checkpoint
from mpissd.engine.oracle.sampled import (
    Case,
    Draws,
    DrawState,
    GrammarStates,
    Proposal,
    SampledDraft,
    SampledTarget,
    check_finite,
    weigh,
)
from mpissd.engine.oracle.workload import Workload, laws_label
from mpissd.engine.round.branches import Branches
from mpissd.engine.round.oracle import Logits, LogitsGather, OpenGather, Proposals
from mpissd.engine.round.rows import TargetWorker
from mpissd.engine.round.scheduler import Endings
from mpissd.engine.round.sequence import Batch, Index, LiveSequence, Part
from mpissd.engine.sizes import WARM_TOKENS, Sizes
from mpissd.engine.text.answer import AnswerText
from mpissd.engine.text.grammar import Grammar, Grammars, read_grammar
from mpissd.engine.text.prompts import Prompt, digest_of, read_prompts
from mpissd.engine.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from mpissd.engine.model.transformer.cupy_ops.draws import CupyDraws


class LogitsTarget(SampledTarget):
    """Verifies drafted tokens by the target's logits, greedily or by rejection sampling."""

    reads_forwards = True

    def __init__(
        self,
        stepper: Forwards,
        seed: int,
        *,
        samples: bool = False,
        draft_ids: Ints | None = None,
        widths: Sequence[int] = (0,),
        keeps_logits: bool = False,
        shape: Shape = CHAIN,
        gather: LogitsGather | None = None,
        grammars: GrammarStates | None = None,
    ) -> None:
        """Makes the oracle, which decides tokens, of one target rank.

        stepper: runs the rank's forwards. seed: the job's seed of random draws. samples: whether
        requests may have a temperature above 0. draft_ids: the ids of the tokens that the draft
        knows (None: all). widths: for each target rank, how many tokens' logits it computes.
        keeps_logits: whether a learner reads the logits. gather: collects the logits of all target
        ranks on rank 0 (None: there is one rank). grammars: makes the grammars of sequences.
        """
        super().__init__(seed, shape)
        self._stepper = stepper
        self._samples = samples
        self._draft_ids = draft_ids
        self.chains = not samples
        self._widths = widths
        self._keeps_logits = keeps_logits
        self._gather = gather
        self._grammars = grammars or GrammarStates()
        # Whether any live sequence is sampled, and whether any live sequence needs logits.
        self._draws_any = self._reads_logits = False
        self._live: list[LiveSequence] | None = None
        self._parts: Logits

    def begin_round(self, batch: Batch, started: Sequence[LiveSequence]) -> None:
        if batch.sequences is self._live:
            return
        self._live = batch.sequences
        settings = [sequence.request.sampling for sequence in batch.sequences]
        self._draws_any = self._samples and any(setting.temperature > 0 for setting in settings)
        asked = self._keeps_logits or any(setting.reads_logits for setting in settings)
        self._reads_logits = self._draws_any or asked

    def gather(self, rows: int, waiter: Waiter) -> None:
        if self._gather is not None and (self._reads_logits or self.scores):
            local = self._stepper.logits(range(rows))
            padded = np.full((rows, max(self._widths)), -np.inf, np.float32)
            padded[:, : local.shape[1]] = local
            self._parts = self._gather(padded, waiter)

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        if not len(batch):
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        results = self._stepper.results()
        if results.values is not None:
            check_finite(results.values[0, :, 0], "target")
        self._best = results.ids[0, :, 0].tolist()  # each row's greedy token
        return super().judge(batch, speculation, proposals)

    def _certain(self, sequence: LiveSequence, start: int) -> tuple[int, int] | None:
        """Returns (number of accepted tokens, bonus token) of a greedy sequence, without reading
        logits. Returns None if the sequence is sampled, or its logits are adjusted or masked."""
        settings = sequence.request.sampling
        if not settings.is_plain or (settings.temperature > 0 and self._draws_any):
            return None
        count = len(sequence.served)
        rows = range(start, start + count + 1)
        node = self.shape.walk(sequence.served, self._best, rows, count)
        return node, self._best[start + node]

    def _judge_all(self, cases: Sequence[Case]) -> list[tuple[int, int]]:
        draws: CupyDraws | None = getattr(self._stepper, "draws", None)
        if draws is None or self._gather is not None or not self.shape.is_chain:
            return super()._judge_all(cases)
        settings = [case.sequence.request.sampling for case in cases]
        is_drawn = [s.is_plain and not s.cuts for s in settings]
        drawn = list(compress(cases, is_drawn))
        verdicts = iter(judged(draws, drawn, self._draft_ids) if drawn else ())
        pairs = zip(cases, is_drawn, strict=True)
        return [next(verdicts) if is_on else self._judge_one(case) for case, is_on in pairs]

    def logprobs(self, batch: Batch, accepted: Ints, bonus: Ints) -> Mapping[int, list[Logprob]]:
        logprobs = dict[int, list[Logprob]]()
        start = 0
        for row, sequence in enumerate(batch.sequences):
            if (count := sequence.request.sampling.logprobs) is not None:
                path = self.shape.paths[accepted[row]]
                tokens = [*sequence.path(path), int(bonus[row])]
                rows = (start + 1 + node for node in (-1, *path))
                each = zip(rows, tokens, strict=True)
                logprobs[row] = [self._logprob(at, token, count) for at, token in each]
            start += len(sequence.served) + 1
        return logprobs

    def scored(self, parts: Sequence[Part]) -> list[Scored]:
        found = list[Scored]()
        for sequence, gap, row in parts:
            request, count = sequence.request, sequence.request.sampling.prompt_logprobs or 0
            following = request.prompt[gap.start + 1 : gap.stop + 1]
            each = [self._logprob(row + n, token, count) for n, token in enumerate(following)]
            found.append(Scored(request.request_id, gap.start + 1, each))
        return found

    def _logprob(self, row: int, token: int, count: int) -> Logprob:
        """Returns the log-probabilities of `token` and the `count` likeliest tokens after a row."""
        found = self.logits_of(row)
        check_finite(found, "target")
        logits = found.astype(np.float64)
        logits -= logits.max()
        logits -= np.log(np.exp(logits).sum())
        likeliest = sampling.largest(logits, count).tolist()
        return Logprob(float(logits[token]), [(one, float(logits[one])) for one in likeliest])

    def forced(self, batch: Batch, accepted: Ints, bonus: Ints) -> Mapping[int, list[int]]:
        forced = dict[int, list[int]]()
        for row, sequence in enumerate(batch.sequences if self._grammars.forces else ()):
            if (grammar := self._grammars.of(sequence)) is not None:
                path = sequence.path(self.shape.paths[accepted[row]])
                forced[row] = grammar.forced([*sequence.answer, *path, int(bonus[row])])
        return forced

    def logits_of(self, row: int) -> Logits:
        """Returns the target's logits [V] in row `row` of the last forward."""
        if self._gather is None:
            logits: Logits = self._stepper.logits([row])[0]
            return logits
        parts = zip(self._parts[:, row], self._widths, strict=True)
        return np.concatenate([part[:width] for part, width in parts])

    def _masked(self, sequence: LiveSequence, start: int, node: int) -> Logits:
        """Returns the target's logits [V] after node `node` of the draft (0: the last committed
        token), with −inf for tokens that the grammar forbids. start: the row of node 0."""
        logits = self.logits_of(start + node)
        check_finite(logits, "target")
        grammar = self._grammars.of(sequence)
        if grammar is None:
            return logits
        return grammar.masked(logits, self._answer(sequence, node))

    def _target_row(self, sequence: LiveSequence, start: int, i: int) -> sampling.Weights:
        logits = self._masked(sequence, start, i)
        request = sequence.request
        return weigh(logits, request.sampling, self._answer(sequence, i), prompt=request.prompt)

    def _answer(self, sequence: LiveSequence, node: int) -> list[int]:
        """Returns the answer's tokens and the drafted tokens up to node `node` of the draft."""
        return sequence.answer + sequence.path(self.shape.paths[node])


def judged(draws: CupyDraws, cases: Sequence[Case], ids: Ints | None) -> list[tuple[int, int]]:
    """Verifies drafted tokens by rejection sampling on the GPU. Returns (number of accepted tokens,
    bonus token) of each sequence. Raises ProtocolError for a token drafted with probability 0. One
    kernel launch judges all tokens; each rejected token whose distribution q is needed takes one
    more. ids: the token of each entry of the draft's distributions (None: entry t is token t)."""
    asked = []
    for case in cases:
        rows = list[Judging]()
        temperature = case.sequence.request.sampling.temperature
        for token, q, coin in zip(case.tokens, case.q, case.coins, strict=False):
            if not 0 < q <= 1:
                raise ProtocolError(f"token {token} was proposed with probability {q}")
            rows.append(Judging(case.start + len(rows), temperature, case.u, token, q, coin))
        rows.append(Judging(case.start + len(rows), temperature, case.u))  # draws the bonus token
        asked.append(rows)
    verdicts = iter(draws.judge([row for rows in asked for row in rows], ids))
    decided = []
    for case, rows in zip(cases, asked, strict=True):
        answers = [next(verdicts) for _ in rows]
        for i, verdict in enumerate(answers):
            if verdict.needs_row:
                kept: Any = case.proposal(i)  # the draft's distribution of token i
                if not hasattr(kept, "total"):  # It is a host array.
                    total = sampling.checked_total(kept, case.tokens[i], case.q[i], ids)
                    kept = draws.keep(kept, total)
                (verdict,) = draws.judge([replace(rows[i], kept=kept)], ids)
            if verdict.is_replaced or i == len(case.tokens):
                decided.append((i, verdict.token))
                break
    return decided


class LogitsDraft(SampledDraft):
    """Drafts the likeliest tokens by the draft's logits, or sampled tokens. The likeliest tokens
    after each drafted token are the candidates for the bonus token."""

    reads_forwards = True

    def __init__(
        self,
        stepper: Forwards,
        seed: int,
        lookahead: int,
        fan_outs: FanOuts,
        *,
        samples: bool = False,
        saguaro_c: float = 1.0,
        ids: Ints | None = None,
        lookup: str = "prompt",
        heads: int | None = None,
        masks: int = 0,
        shape: Shape = CHAIN,
        grammars: GrammarStates | None = None,
    ) -> None:
        """stepper: runs the draft's forwards. lookahead: the number of drafted tokens. fan_outs:
        how many candidates get a branch. ids: the ids of the tokens that the draft knows, rising
        (None: all). lookup: what copies tokens as a fast backup. heads: how many tokens one forward
        drafts, for a draft that reads the target's hidden states; None for other drafts, whose
        forward drafts 1 + masks tokens."""
        super().__init__(seed, lookahead, fan_outs, shape)
        self._stepper = stepper
        self._saguaro_c = saguaro_c
        self._ids = ids
        self.samples = samples
        self.copies = (lookup, LONGEST, None)
        self.chains = not samples and heads is None
        self._masks = masks
        self._levels = heads or 1 + masks  # the levels that one forward drafts
        self._grammars = grammars or GrammarStates()
        self._is_replaced = False

    def _grammar(self, sequence: LiveSequence) -> Grammar | None:
        grammar = self._grammars.of(sequence)
        if grammar is not None:
            grammar.branch(sequence.answer)
        return grammar

    def _likeliest(self, batch: Batch, count: int) -> Iterator[list[int]]:
        best = self._stepper.results().ids[0].tolist()
        row = 0
        for sequence in batch.sequences:
            grammar = self._grammar(sequence)
            for node in range(len(sequence.served) + 1):
                if grammar is None:
                    yield best[row]
                else:
                    path = sequence.path(self.shape.paths[node])
                    logits = self._stepper.logits([row])[0]
                    logits = grammar.masked(logits, [*sequence.answer, *path], self._ids)
                    ranked = sampling.largest(logits, count).tolist()
                    yield [self._named(entry) for entry in ranked if logits[entry] > -np.inf]
                row += 1

    def _context(self, sequence: LiveSequence, ahead: list[int]) -> tuple[int, ...]:
        return (*sequence.answer, *ahead) if sequence.request.sampling.grammar else ()

    def _follow(self, state: DrawState, token: int) -> None:
        if state.grammar is not None:
            state.context = (*state.context, token)

    def forget(self) -> None:
        self._is_replaced = self.is_sound = True

    def collect(self, grown: Sequence[Branches], first_row: int) -> None:
        results = self._stepper.results()
        _, num_rows, width = results.ids.shape
        all_best = results.ids.reshape(-1, width)
        for level in range(self._levels):
            counts = [len(part) * len(part.shape.inner[part.steps]) for part in grown]
            if self._masks:  # a branch has a row for each level, which all nodes of the level read
                row_of = np.arange(sum(map(len, grown))) * (1 + self._masks)
                rows = first_row + level + np.repeat(row_of, sum(counts) // len(row_of))
            else:  # a node has a row; the rows of a second head follow those of the first
                rows = np.arange(sum(counts)) + first_row + level * num_rows
            best = all_best[rows]
            if self._is_replaced and results.values is not None:
                values = results.values.reshape(-1, width)
                self.is_sound = bool(np.isfinite(values[rows, 0]).all())
            drawn = Draws()
            states = [state for branches in grown for state in branches.states or ()]
            if any(state.grammar is not None for state in states):
                best = self._masked(states, best, rows)
            firsts = self._drawn(grown, best[:, 0], rows, drawn)
            for branches, count, end in zip(grown, counts, np.cumsum(counts), strict=True):
                part = slice(end - count, end)
                if firsts is not None:
                    self._grow(branches, firsts[part], drawn, best[part].tolist().__getitem__)
                else:
                    branches.take(best[part])

    def _masked(self, states: Sequence[DrawState], best: Ints, rows: Index) -> Ints:
        """Returns the k likeliest tokens that grammars allow after each of n branches, [n, k], and
        stores the masked logits in `states`. best: the likeliest tokens, [n, k], which stay the
        result for branches without a grammar. rows: the row of the forward of each branch."""
        best = best.copy()
        for n, state in enumerate(states):
            if state.grammar is not None:
                logits = self._stepper.logits([int(rows[n])])[0]
                check_finite(logits, "draft")
                state.logits = state.grammar.masked(logits, state.context, self._ids)
                ranked = sampling.largest(state.logits, best.shape[1])
                best[n] = ranked if self._ids is None else self._ids[ranked]
        return best

    def _drawn(
        self, grown: Sequence[Branches], best: Ints, rows: Index, shared: Draws
    ) -> list[Proposal] | None:
        """Returns the first token drafted after each node of the branches' last level, sampled
        where the request has a temperature above 0. Returns None if no token is sampled, so that
        all are the likeliest ones (`best`). rows: the row of the forward of each node. shared: the
        uniform numbers drawn so far."""
        if not self.samples:
            return None
        nodes = [pair for branches in grown for pair in self._pairs(branches)]
        chosen = [n for n, (state, _) in enumerate(nodes) if state.settings.temperature > 0]
        if not chosen and all(state.grammar is None for state, _ in nodes):
            return None
        proposals = [Proposal(token) for token in best.tolist()]
        u = {n: nodes[n][0].u(nodes[n][1], shared) for n in chosen}
        free = [n for n in chosen if nodes[n][0].grammar is None]
        tops = [self._damped(*nodes[n]) for n in free]
        draws: CupyDraws | None = getattr(self._stepper, "draws", None)
        if draws is not None and free and max(tops) <= draws.most_damped:
            asked = [
                Drafting(int(rows[n]), nodes[n][0].settings.temperature, u.pop(n), top)
                for n, top in zip(free, tops, strict=True)
            ]
            for n, drawn in zip(free, draws.propose(asked, self._saguaro_c), strict=True):
                proposals[n] = Proposal(self._named(drawn.token), drawn.q, drawn.kept)
        elif free:
            logits = self._stepper.logits(rows.tolist())
            for n in free:
                check_finite(logits[n], "draft")
                nodes[n][0].logits = logits[n]
        for n, draw in u.items():
            proposals[n] = self._propose(*nodes[n], draw)
        return proposals

    def _propose(self, state: DrawState, place: int, u: float) -> Proposal:
        assert state.logits is not None, "a step without logits"
        top = self._damped(state, place)
        weights = weigh(state.logits, state.settings, None, top, self._saguaro_c)
        entry, q, row = sampling.propose(weights.probs, u)
        return Proposal(self._named(entry), q, row)

    def _damped(self, state: DrawState, place: int) -> int:
        """Returns how many of the likeliest tokens Saguaro's sampling makes rarer at this place."""
        return state.fan_out[place] if state.fan_out and self._saguaro_c < 1 else 0


class TextEndings(Endings):
    """Ends answers at a stop token or a stop string, or when the context is full."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        strings: Sequence[str],
        stop_ids: Collection[int],
        room: Mapping[int, int],
        prompts: Mapping[int, Sequence[int]],
    ) -> None:
        """strings: the stop strings. stop_ids: the stop tokens. room: {request id: the most tokens
        of the answer}. prompts: {request id: the tokens of the prompt}. Raises ConfigError for stop
        strings without a tokenizer."""
        super().__init__(*stop_ids, room=room.__getitem__)
        if tokenizer is None and strings:
            raise ConfigError("stop: needs a tokenizer: allowed: stop_token")
        self._tokenizer = tokenizer
        self._strings = strings
        self._prompts = prompts
        self._texts: dict[int, AnswerText] = {}

    def _stopped(self, request_id: int, tokens: Sequence[int]) -> int | None:
        if self._tokenizer is None or not self._strings:  # no text is needed
            return super()._stopped(request_id, tokens)
        text = self._texts.get(request_id)
        if text is None:
            prompt = self._prompts[request_id]
            text = AnswerText(self._tokenizer, self._strings, self._stop, prompt)
            self._texts[request_id] = text
        for n, token in enumerate(tokens, 1):
            text.push(token)
            if text.ended is not None:
                del self._texts[request_id]
                return n
        return None


class TextWorkload(Workload):
    """The workload whose transformers answer prompts, greedily or sampled at --temperature and
    --top_p. draft_class: the class of the oracle that decides drafted tokens."""

    is_text = True
    reports_outcomes = True
    draft_class: ClassVar[type[LogitsDraft]] = LogitsDraft

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer; None if --prompt_ids gives tokens and no grammar needs text."""
        if self.job.config.prompt_ids is not None and self.job.config.grammar is None:
            return None
        return load_tokenizer(self.job.target_where)

    @cached_property
    def grammar(self) -> str:
        """The text of --grammar, which all answers must match; "" without one. Only rank 0 reads
        it. Raises ConfigError for a grammar that cannot be used."""
        flag = self.job.config.grammar
        if flag is not None and not self.stop_ids:
            raise ConfigError(f"grammar={flag}: the model has no token that ends an answer")
        return "" if flag is None else read_grammar(flag, self.tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        """Makes the grammars that answers must match, over the target's vocabulary."""
        return Grammars(load_tokenizer(self.job.target_where), self.vocab, self.stop_ids)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The prompts, which only rank 0 reads; raises ConfigError if one cannot be read."""
        job = self.job
        return read_prompts(job.config, self.tokenizer, context=job.longest, vocab=self.vocab)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        ids = frozenset[int]() if self.tokenizer is None else self.tokenizer.stop_ids
        token = self.job.config.stop_token
        return ids if token is None else ids | {token}

    @property
    def vocab(self) -> int:
        return config_of(self.job.target_where).shape.vocab_size

    @cached_property
    def draft_ids(self) -> Ints | None:
        """The ids of the tokens that the draft knows, rising; None if these are all tokens."""
        if not self.job.drafts_by_transformer:
            return None
        draft = open_checkpoint(self.job.draft_where, target=self.job.target_where)
        return known_ids(draft, self.vocab)

    @property
    def proposal_width(self) -> int:
        return self.vocab if self.draft_ids is None else len(self.draft_ids)

    @property
    def prompt_tokens(self) -> int:
        return self.job.longest

    @property
    def samples(self) -> bool:
        config = self.job.config
        if config.temperature > 0 or config.grammar is not None:
            return True
        return self.job.serving is not None and self.job.serving.samples

    @property
    def forces(self) -> bool:
        """Whether a token is committed without a forward if a grammar allows no other. False if the
        draft reads the target's hidden states, since such a token would have none."""
        return self.job.serving is not None and not self.job.reads_states

    @property
    def law(self) -> str:
        config = self.job.config
        weights = "" if has_weights(self.job.target_where) else " of random weights"
        sampled = f"temperature {config.temperature:g}, top_p {config.top_p:g}"
        how = sampled if self.samples else "greedy"
        return f"text by {self.job.target.name}{weights}, {how}"

    def check(self) -> None:
        """Raises ConfigError for an invalid stop token, or a context without room for answers."""
        super().check()
        token = self.job.config.stop_token
        longest = self.job.longest
        if token is not None and token >= self.vocab:
            raise ConfigError(f"stop_token={token}: allowed: 0..{self.vocab - 1}")
        if longest < 2:
            raise ConfigError(f"context={longest} with workload=text: allowed: 2 or more tokens")

    def target_worker(
        self, stepper: Forwards, open_gather: OpenGather | None = None
    ) -> TargetWorker:
        gather = open_gather() if open_gather is not None and self.job.tp > 1 else None
        oracle = self.target_oracle(stepper, gather)
        return TargetWorker(stepper, oracle, self.job.placement(drafts=False))

    def target_oracle(self, stepper: Forwards, gather: LogitsGather | None = None) -> LogitsTarget:
        job = self.job
        shard = job.target_shard
        assert isinstance(shard, TransformerShard), "text without a transformer"
        ranks = [TransformerShard(shard.config, job.tp, n) for n in range(job.tp)]
        return LogitsTarget(
            stepper,
            job.config.seed,
            samples=self.samples,
            draft_ids=self.draft_ids if self.samples and job.draft is not None else None,
            widths=[part.vocab for part in ranks],
            keeps_logits=job.config.learners > 0,
            shape=job.shape,
            gather=gather,
            grammars=GrammarStates(lambda: self.grammars, forces=self.forces),
        )

    def draft_oracle(self, stepper: Forwards) -> LogitsDraft:
        job = self.job
        config = job.config
        shard = job.draft_shard
        return self.draft_class(
            stepper,
            config.seed,
            job.lookahead,
            job.fan_outs,
            samples=self.samples,
            saguaro_c=1.0 if config.saguaro_c is None else config.saguaro_c,
            ids=self.draft_ids,
            lookup=config.lookup,
            heads=shard.num_heads_used if isinstance(shard, StateShard) else None,
            masks=job.masks,
            shape=job.shape,
            grammars=GrammarStates(lambda: self.grammars, forces=self.forces),
        )

    def requests(self, first_id: int, count: int) -> list[Request]:
        """Returns the requests with the `count` ids from first_id on. Ids beyond the number of
        prompts get the beginning of a prompt, which is decoded only for warm-up."""
        config = self.job.config
        settings = Sampling(config.temperature, config.top_p, grammar=self.grammar)
        size = len(self.prompts)
        requests = []
        for n in range(first_id, first_id + count):
            tokens = tuple(self.prompts[n % size].tokens[: None if n < size else WARM_TOKENS])
            requests.append(Request(n, tokens[-1], 0, tokens, settings))
        return requests

    def tabulated(self, group: int = 0) -> list[Request]:
        return []

    @property
    def num_sequences(self) -> int:
        return len(self.prompts)

    def keep(self, start: int, count: int) -> None:
        prompts = self.prompts
        self.prompts = [prompts[n % len(prompts)] for n in range(start, start + count)]

    def endings(self) -> TextEndings:
        job = self.job
        prompts = {n: prompt.tokens for n, prompt in enumerate(self.prompts)}
        room = {n: job.longest - len(tokens) for n, tokens in prompts.items()}
        return TextEndings(self.tokenizer, job.config.stop_strings, self.stop_ids, room, prompts)

    def row_fields(self) -> dict[str, Any]:
        config = self.job.config
        digest = crc32(self.grammar.encode())
        return {
            "temperature": config.temperature,
            "vocab": self.vocab,
            "saguaro_c": 1.0 if config.saguaro_c is None else config.saguaro_c,
            "lookup": config.fast_lookup,
            "laws": laws_label(config),
            "top_p": config.top_p,
            "stop": list(config.stop_strings),
            "grammar": None if config.grammar is None else f"{config.grammar} ({digest:08x})",
            "num_prompts": len(self.prompts),
            "prompts_sha256": digest_of(self.prompts),
        }


def check_prompts(job: Sizes) -> None:
    """Raises ConfigError if a text job has a prompt that cannot be answered, or fewer prompts than
    target groups. Called on rank 0, because other ranks may have no access to the prompts' file."""
    if not job.config.is_text:
        return
    workload: TextWorkload = class_of(job.config.workload)(job)
    count = len(workload.prompts)
    groups = job.config.groups
    _ = workload.grammar
    if count < groups:
        raise ConfigError(f"groups={groups} with {count} prompts: allowed: at most {count}")
