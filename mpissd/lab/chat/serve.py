"""The half of a chat that runs on the ranks: each answer is a pass of the decoding loops.

Between two answers the ranks rest. A mode is a session on the machine; it keeps its workers, and
with them the KV cache of the turns before, until another mode is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from mpissd.common import guard
from mpissd.common.errors import ConfigError, MpissdError
from mpissd.common.stage import Stage
from mpissd.common.trace import LeadPhase
from mpissd.common.wait import sharpen_sleep
from mpissd.engine.comm.topology import agree
from mpissd.engine.decode.target import TargetLoop
from mpissd.engine.job import Job
from mpissd.engine.session.doubts import tell_doubts
from mpissd.engine.session.rank import Rank
from mpissd.engine.session.session import Machine, Session, opened_machine
from mpissd.engine.workload.text.stops import AnswerText
from mpissd.engine.workload.text.tokenizer import Tokenizer
from mpissd.engine.workload.text.workload import TextWorkload
from mpissd.lab.chat.config import ChatConfig
from mpissd.lab.chat.front import MODES
from mpissd.lab.chat.lines import Ending, Inbox, packed
from mpissd.lab.show.painter import Piece
from mpissd.lab.show.show import Show

_STDIN = 0
_SLOT = 0  # of the one sequence


def execute_chat(config: ChatConfig) -> int:
    """Serves a chat on all ranks until its front leaves; returns the exit code."""
    sharpen_sleep()
    with opened_machine(config.of_mode(config.run.mode), config.drafts) as machine:
        Server(machine, config).run()
    return 0


class Server:
    """One rank's part in a chat. The lead alone reads and writes messages."""

    def __init__(self, machine: Machine, config: ChatConfig) -> None:
        """Resolves every mode; collective. Raises Refused on every rank if the first is none."""
        self._machine, self._config = machine, config
        self._inbox = Inbox(_STDIN) if machine.topology.is_lead else None
        machine.divide({0, config.drafts})
        self._jobs = {mode: self._resolve(mode) for mode in MODES}
        first = self._jobs[config.run.mode]
        agree(machine.topology.world, first if isinstance(first, MpissdError) else None)
        machine.models.expect(job for job in self._jobs.values() if isinstance(job, Job))
        self._mode = ""
        self._session: Session | None = None
        self._rank: Rank | None = None
        self._turns = 0

    def _resolve(self, mode: str) -> Job | ConfigError:
        try:
            return self._machine.resolve(self._config.of_mode(mode))
        except ConfigError as refused:
            return refused

    def run(self) -> None:
        """Answers until the front leaves; collective."""
        self._enter(self._config.run.mode)
        if self._session is not None and self._inbox is not None:
            _tell(ready=_card(self._session))
        while (mode := self._next()) is not None:
            self._enter(mode)
            self._answer()
        self._leave()

    def _next(self) -> str | None:
        """Waits for a question; returns its mode, and None when the front has left."""
        mode = None
        if self._inbox is not None:
            mode = self._accepted(self._inbox)
        self._machine.rest()
        found: str | None = self._machine.topology.world.bcast(mode)
        return found

    def _accepted(self, inbox: Inbox) -> str | None:
        """Takes messages until one is a question that can be answered; refuses the others."""
        while (message := inbox.take()) is not None and "leave" not in message:
            if "ask" not in message:  # a stop that came too late
                continue
            mode = str(message.get("mode"))
            try:
                job = self._jobs.get(mode) or ConfigError(f"mode={mode}")
                if isinstance(job, ConfigError):
                    raise job
                self._tokens, self._limit = self._encoded(job, message["ask"])
            except ConfigError as refused:
                _tell(refused=str(refused))
                continue
            return mode
        return None

    def _encoded(self, job: Job, messages: Sequence[dict[str, str]]) -> tuple[list[int], int]:
        """Returns a conversation's tokens, and how many its answer may have; raises ConfigError."""
        workload = TextWorkload(job)
        tokens = _tokenizer_of(workload).chat(messages)
        room = job.longest - len(tokens)
        if room < 1:
            raise ConfigError(
                f"the conversation has {len(tokens)} tokens, and the model's context "
                f"{job.longest}: /reset begins another"
            )
        return tokens, min(room, job.config.num_tokens or room)

    def _enter(self, mode: str) -> None:
        """Opens the session of a mode where another one is open; collective."""
        if mode == self._mode:
            return
        self._leave()
        job = self._jobs[mode]
        assert isinstance(job, Job), "a mode that was refused"
        guard.stage(Stage.OPEN)
        if self._machine.topology.is_lead:
            tell_doubts(job)
        self._mode, self._session = mode, self._machine.session(job)
        if self._session is not None:
            self._rank = Rank(self._session)

    def _leave(self) -> None:
        if self._rank is not None and self._session is not None:
            self._rank.close()
            self._session.resources.close()
        self._mode, self._session, self._rank = "", None, None

    def _answer(self) -> None:
        """Runs one pass; ranks without a part in this mode only rest."""
        rank, self._turns = self._rank, self._turns + 1
        if rank is None:
            return
        guard.stage(Stage.ROUNDS)
        drafter = None if rank.draft is None else rank.drafter(rank.draft)
        ending = rank.run_pass(rank.target, drafter, self._drive)
        if ending is not None:
            _tell(end=vars(ending))

    def _drive(self, loop: TargetLoop) -> Ending:
        """Decodes one answer on the lead, and sends what each round adds."""
        assert self._session is not None and self._inbox is not None, "no lead"
        workload = self._session.workload
        assert isinstance(workload, TextWorkload), "no text"
        said: list[str] = []
        text = AnswerText(_tokenizer_of(workload), self._config.run.stop_strings, workload.stop_ids)
        show = Show(
            text,
            partial(_show, said),
            has_cache=self._mode == "ssd",
            limit=self._limit,
            watched=self._turns,
        )
        request = workload.request(self._turns, self._tokens)
        assert self._rank is not None and self._rank.target is not None, "a lead without a worker"
        reused = self._rank.target.reusable(_SLOT, request)
        loop.admit([request])
        loop.ledger.restart()
        stopped = False
        while not (show.is_over or stopped):
            show.take(loop.step())
            loop.ledger.close_round(loop.round - 1, LeadPhase.RECORD)
            stopped = self._is_stopped(self._inbox)
        show.end()
        loop.finish([self._turns])
        return Ending(
            ended=text.ended or ("stopped" if stopped else "length"),
            text="".join(said),
            summary=show.meter.long(),
            num_tokens=show.meter.num_tokens,
            num_rounds=show.meter.num_rounds,
            seconds=show.meter.seconds,
            prompt_tokens=len(self._tokens),
            reused=reused,
        )

    @staticmethod
    def _is_stopped(inbox: Inbox) -> bool:
        """Whether the front has asked for the end of the answer, or has left."""
        message = inbox.take(0)
        return inbox.is_closed or (message is not None and "stop" in message)


def _show(said: list[str], pieces: Sequence[Piece], margin: str) -> None:
    said.extend(text for text, _ in pieces)
    _tell(pieces=pieces, margin=margin)


def _tell(**message: Any) -> None:
    """Sends a message to the front."""
    sys.stdout.buffer.write(packed(message))
    sys.stdout.buffer.flush()


def _tokenizer_of(workload: TextWorkload) -> Tokenizer:
    assert workload.tokenizer is not None, "a chat of token ids"
    return workload.tokenizer


def _card(session: Session) -> str:
    """Describes the pair and the ranks in one line."""
    job, topology = session.job, session.topology
    draft = "" if job.draft is None else f", drafts by {job.draft.name}"
    ranks = f"T={job.tp}" + (f", D={topology.num_drafts}" if topology.num_drafts else "")
    return f"{job.target.name}{draft}; {ranks} on {session.backend.name}; /help lists the commands"
