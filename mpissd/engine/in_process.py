"""Runs a whole job in one process: the loops of `mpissd run`, threads, and queues in place of MPI.

This is for tests, notebooks and first steps: `for token in generate("Why is the sky blue?"): …`.
The draft's thread and the target share Python's global lock, so that times mean little. The decoded
tokens equal those of the same job under mpirun.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import NamedTuple, TypeVar

from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.records import RoundRecords
from mpissd.common.trace import LeadPhase
from mpissd.common.wait import Waiter
from mpissd.engine.backend.registry import choose, open_backend
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.comm.link import DraftEnd, queue_link
from mpissd.engine.features.device_rounds import DeviceSpeculator, DeviceTarget, chained_forwards
from mpissd.engine.features.joined_growth import joining
from mpissd.engine.features.learning import Updates
from mpissd.engine.job import Job, Serving, resolve, resolve_unopened
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.parts import link_shape, make_drafter
from mpissd.engine.round.draft import Drafter, serve
from mpissd.engine.round.rows import DraftWorker, TargetWorker
from mpissd.engine.round.speculator import InlineSpeculator, RemoteSpeculator, Speculator
from mpissd.engine.round.target import RoundResult, TargetLoop
from mpissd.engine.text.answer import AnswerText, sources_of
from mpissd.engine.text.prompts import read_prompts
from mpissd.engine.text.tokenizer import Message, load_tokenizer

L = TypeVar("L", bound="Loops")
_BACKENDS = ("numpy", "emulated")
_JOIN_S = 10.0  # the longest wait, in seconds, for a draft's thread to finish its last forward


def open_stepper(
    job: Job,
    backend_name: str,
    resources: ExitStack,
    *,
    drafts: bool = False,
    source: Stepper | None = None,
) -> Stepper:
    """Opens a backend, loads the whole target or draft with the weights that `mpissd run` would
    use, and returns the Stepper that runs its forwards. `resources` closes model and backend.

    drafts: whether to load the draft. source: the target's Stepper, for a draft that reads hidden
    states.
    """
    config, need = job.config, job.needs[drafts]
    device = (drafts and config.draft_device) or config.device
    name = (drafts and config.draft_backend) or backend_name
    backend = open_backend(name, device=device, local_rank=0)
    resources.callback(backend.close)
    stepper = Stepper(
        backend,
        SoloGroup(),
        need.shard,
        need.options,
        buckets=need.buckets,
        num_sequences=need.num_sequences,
        model=need.model,
        seed=2 * config.seed + drafts,
        source=source,
    )
    resources.callback(stepper.close)
    return stepper


class Loops:
    """The decoding loops of a job in one process: one target rank, and a thread as draft rank.

    `loop` is the target's loop. Use the object in a `with` block, or call close.
    """

    def __init__(self, job: Job, backend: str) -> None:
        """Opens a job's models and starts the draft's thread. backend: "numpy" or "emulated"."""
        self.job, self._backend = job, backend
        self.workload = job.workload
        self._resources = ExitStack()
        self._waiter = Waiter(job.config.deadline_s, spin=False)
        self._threads: list[Thread] = []
        self.draft_steppers: list[Stepper] = []
        self._faults: list[Exception] = []
        # A bound method would be a reference cycle, which would keep the models in memory.
        self._waiter.alarm = partial(_raise_first, self._faults)
        self.target_stepper = open_stepper(job, backend, self._resources)
        self.worker, speculator = self._sides(self.workload.target_worker(self.target_stepper))
        batch = job.config.batch_size
        self.loop = TargetLoop(self.worker, speculator, None, batch, self._waiter)

    def _sides(self, target: TargetWorker) -> tuple[TargetWorker, Speculator]:
        job = self.job
        waiter = self._waiter
        if job.config.drafts:
            patient = Waiter(math.inf, spin=False)  # no deadline: the caller starts rounds
            lead, end = queue_link(link_shape(job), waiter, patient)
            remote = make_drafter(job, joining(job, self._draft_worker()), patient)
            self._threads.append(Thread(target=self._serve, args=(end, remote), daemon=True))
            self._threads[-1].start()
            return target, RemoteSpeculator(lead)
        worker = self._draft_worker() if job.inline else None
        drafter = None if worker is None else make_drafter(job, worker, waiter)
        forwards = chained_forwards(job, target, worker)
        if forwards is None:
            return target, Speculator() if drafter is None else InlineSpeculator(drafter)
        self._resources.callback(forwards.close)
        draft = None if drafter is None else DeviceSpeculator(drafter, forwards)
        limit = self.workload.longest_answer
        return DeviceTarget(target, draft, forwards, limit, waiter), draft or Speculator()

    def _draft_worker(self) -> DraftWorker:
        job = self.job
        source = self.target_stepper if job.reads_states else None
        stepper = open_stepper(job, self._backend, self._resources, drafts=True, source=source)
        self.draft_steppers.append(stepper)
        worker = self.workload.draft_worker(stepper)
        worker.oracle.prepare(self.workload.tabulated())
        return worker

    def _serve(self, link: DraftEnd, drafter: Drafter) -> None:
        try:
            updates = self._updates(drafter)
            serve(link, drafter, None if updates is None else updates.work)
        except Exception as fault:  # noqa: BLE001  (the target's thread raises it)
            self._faults.append(fault)

    def _updates(self, drafter: Drafter) -> Updates | None:
        """Returns the source of newer draft weights. Here None: only subclasses train the draft."""
        return None

    def close(self) -> None:
        """Ends the draft's thread, then frees the models."""
        if not self._faults:
            self.loop.stop()
        for thread in self._threads:
            thread.join(_JOIN_S)
        self._resources.close()

    def __enter__(self: L) -> L:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def _raise_first(faults: list[Exception]) -> None:
    if faults:
        raise FaultError(f"the draft's thread ended: {faults[0]}") from faults[0]


class Decoder(Loops):
    """Decodes the sequences of a configuration round by round, in one process.

    At most batch_size sequences are decoded at once; when one ends, the next prompt begins.
    `records` holds every round so far. Use the object in a `with` block, or call close.
    """

    def __init__(self, config: RunConfig) -> None:
        """Opens the models; raises ConfigError for an impossible job or a GPU backend."""
        super().__init__(*in_one_process(config))
        self.records = RoundRecords(self.job.lookahead)
        self._scheduler = self.workload.scheduler()
        requests = self._scheduler.turn().join
        self.worker.oracle.prepare(requests)
        self.loop.admit(requests)
        self.loop.ledger.restart()

    def step(self) -> RoundResult:
        """Decodes one round of all sequences; returns its drafted and accepted tokens."""
        result = self._scheduler.step(self.loop, self.records)
        self.loop.ledger.close_round(self.loop.round - 1, LeadPhase.RECORD)
        return result

    @property
    def is_over(self) -> bool:
        """Whether every sequence has ended, by a stop token or with num_tokens tokens."""
        return not self._scheduler.running

    @property
    def tokens(self) -> dict[int, list[int]]:
        """The tokens emitted so far, as {request id: tokens of that sequence}."""
        return self.records.tokens()


def in_one_process(config: RunConfig, serving: Serving | None = None) -> tuple[Job, str]:
    """Resolves a configuration to a job for one process. Returns (job, backend name). serving: a
    server's settings. Raises ConfigError for an impossible job or a GPU backend."""
    backend = choose(config.backend)
    allowed = ", ".join(_BACKENDS)
    for flag, name in {"backend": backend, "draft_backend": config.draft_backend}.items():
        if name not in (None, *_BACKENDS):
            raise ConfigError(f"{flag}={name} in one process: allowed: {allowed}")
    if config.groups > 1:
        raise ConfigError(f"groups={config.groups} in one process: allowed: 1")
    return resolve(config, 1, backend=backend, memory_bytes=None, serving=serving), backend


class Token(NamedTuple):
    """One token of an answer.

    text: the text that the token adds to the answer; "" while it is part of a character or of a
    possible stop string. id: its id in the vocabulary. source: "cache" if it was drafted ahead,
    "jit" or "fast" if the draft model or the fast backup drafted it after a cache miss, "bonus" if
    the target emitted it. round: the number of its round, from 0.
    """

    text: str
    id: int
    source: str
    round: int


def generate(prompt: str | Sequence[Message], **flags: object) -> Iterator[Token]:
    """Yields the tokens of the answer to a prompt, or to a conversation, as they are decided.

    flags: flags of `mpissd run`, for example mode="sd", pair="smollm2", num_tokens=64,
    temperature=0.7, stop="###". The texts of all tokens add up to the answer. Raises ConfigError.
    """
    for name in {"prompts", "prompt_ids"} & flags.keys():
        raise ConfigError(f"{name} with generate: allowed: its first argument, the prompt")
    config = parse_flags({"workload": "text", **{k: str(v) for k, v in flags.items()}})
    tokenizer = load_tokenizer(resolve_unopened(config, 1).target_where)
    if isinstance(prompt, str):
        tokens: Sequence[int] = read_prompts(replace(config, prompt=prompt), tokenizer)[0].tokens
    elif prompt:
        tokens = tokenizer.chat(prompt)
    else:
        raise ConfigError("prompt: is empty")
    own = set() if config.stop_token is None else {config.stop_token}
    text = AnswerText(tokenizer, config.stop_strings, tokenizer.stop_ids | own, tokens)
    ids = ",".join(str(token) for token in tokens)
    # The Decoder has no tokenizer, so that _answer, not the Decoder, ends the answer at a stop.
    plain = replace(config, prompt=None, prompt_ids=ids, stop=None, stop_token=None)
    return _answer(plain, text)


def _answer(config: RunConfig, text: AnswerText) -> Iterator[Token]:
    """Yields the answer's tokens up to the one that ends it. The last token brings the text that
    was held back as the possible beginning of a stop string."""
    last: Token | None = None
    left, number = config.token_limit, 0
    with closing(Decoder(config)) as decoder:  # also closed if the caller stops early
        while text.ended is None and not decoder.is_over:
            result = decoder.step()
            ((_, tokens),) = result.emitted()
            sources = sources_of(len(tokens) - 1, int(result.speculation.source[0]))
            for token, source in list(zip(tokens, sources, strict=True))[:left]:
                if last is not None:
                    yield last
                last = Token(text.push(token), token, source, number)
                if text.ended is not None:
                    break
                left = None if left is None else left - 1
            number += 1
    if last is not None:
        yield last._replace(text=last.text + text.flush())
