"""The half of a chat that talks to the person: reads lines, shows answers, knows the history.

It starts the ranks as a job of its own (`mpirun … mpissd chat`) and talks to their lead through
pipes. Ctrl-C therefore reaches this process alone: it ends an answer, not the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.ranks import end_with_parent, ranks_command
from mpissd.engine.job import resolve_unopened
from mpissd.engine.workload.text.tokenizer import load_tokenizer
from mpissd.lab.chat.config import ChatConfig
from mpissd.lab.chat.lines import Ending, Inbox, packed
from mpissd.lab.show.painter import Painter, legend
from mpissd.lab.show.terminal import Terminal, open_terminal

HELP = """\
/mode ar|sd|ssd   decode otherwise from the next answer on
/stats            numbers of the last answer, and of all
/show             colours on or off
/reset            forget the conversation
/help             this
Ctrl-C ends an answer, Ctrl-D (or /quit) leaves."""
MODES = ("ar", "sd", "ssd")
_LEAVE_S = 15.0  # longest wait for the job to end by itself
_NO_WRAP = 1 << 16  # columns that stand for "no terminal"


class Job:
    """The ranks, as a process that is talked to in lines. Use it in a `with` block."""

    def __init__(self, command: Sequence[str], note: Callable[[str], object]) -> None:
        """Starts the job; `note` takes lines that it prints and that are no messages."""
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # keeps the terminal's Ctrl-C from the ranks
            preexec_fn=end_with_parent,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in: IO[bytes] = self._process.stdin
        self._inbox = Inbox(self._process.stdout.fileno(), note)

    def send(self, **message: Any) -> None:
        """Sends a message; raises FaultError if the job has ended."""
        try:
            self._in.write(packed(message))
            self._in.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def take(self) -> dict[str, Any]:
        """Waits for the next message; raises FaultError if the job ends instead."""
        message = self._inbox.take()
        if message is None:
            raise self._ended()
        return message

    def _ended(self) -> FaultError:
        code = self._process.wait(_LEAVE_S)
        error = FaultError(f"the ranks have ended (exit code {code})")
        error.exit_code = code or FaultError.exit_code
        return error

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *failure: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # where the job has ended already
            self._in.write(packed({"leave": True}))
            self._in.close()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.terminate()  # the launcher ends its ranks
            self._process.wait(_LEAVE_S)


class Chat:
    """A conversation: its messages, its mode, and how answers are shown."""

    def __init__(self, job: Job, terminal: Terminal | None, mode: str, *, colours: bool) -> None:
        self._job, self._terminal, self.mode = job, terminal, mode
        self._colours = colours and terminal is not None and "NO_COLOR" not in os.environ
        self._messages: list[dict[str, str]] = []
        self._endings: list[Ending] = []

    def say(self, text: str) -> None:
        """Prints a line for the person."""
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def legend(self) -> None:
        """Prints what the colours mean, if there are any."""
        if told := legend(colours=self._colours):
            self.say(f"{told}\n")

    def take(self, line: str) -> bool:
        """Executes the user's line; returns False if the line ends the chat."""
        if not line.strip():
            return True
        if line.startswith("/"):
            return self._command(*line[1:].split())
        try:
            line.encode()
        except UnicodeEncodeError:
            self.say("that is no UTF-8 text")
            return True
        self._ask(line)
        return True

    def _command(self, name: str = "help", *values: str) -> bool:
        actions: dict[str, Callable[[], None]] = {
            "mode": lambda: self._set_mode(*values[:1]),
            "stats": self._stats,
            "show": self._toggle,
            "reset": self._reset,
            "help": lambda: self.say(HELP),
        }
        if name in ("quit", "exit"):
            return False
        if name not in actions:
            self.say(f"/{name}: unknown; /help lists the commands")
        else:
            actions[name]()
        return True

    def _set_mode(self, mode: str = "") -> None:
        if mode and mode not in MODES:
            self.say(f"mode={mode}: allowed: {', '.join(MODES)}")
            return
        self.mode = mode or self.mode
        self.say(f"mode {self.mode}")

    def _stats(self) -> None:
        if not self._endings:
            self.say("no answer yet")
            return
        last, all_ = self._endings[-1], self._endings
        prompt = f"prompt of {last.prompt_tokens} tokens, {last.reused} of them in the KV cache"
        self.say(f"last: {last.summary}; {prompt}")
        tokens, seconds = sum(e.num_tokens for e in all_), sum(e.seconds for e in all_)
        rounds = max(1, sum(e.num_rounds for e in all_))
        self.say(
            f"all:  {len(all_)} answers, {tokens} tokens in {seconds:.1f} s, "
            f"{tokens / rounds:.2f} a round"
        )

    def _toggle(self) -> None:
        self._colours = not self._colours and self._terminal is not None
        self.say(f"colours {'on' if self._colours else 'off'}")

    def _reset(self) -> None:
        self._messages = []
        self.say("the conversation is forgotten")

    def _ask(self, text: str) -> None:
        """Sends the conversation and shows the answer; a refused question is forgotten."""
        asked = [*self._messages, {"role": "user", "content": text}]
        self._job.send(ask=asked, mode=self.mode)
        ending = self._answer()
        if ending is not None:
            self._messages = [*asked, {"role": "assistant", "content": ending.text}]
            self._endings.append(ending)

    def _answer(self) -> Ending | None:
        """Shows what arrives until the answer ends; Ctrl-C asks the ranks to end it."""
        columns = self._terminal.columns if self._terminal else _NO_WRAP
        painter = Painter(sys.stdout.write, columns, colours=self._colours)
        with _on_interrupt(lambda: self._job.send(stop=True)):
            while True:
                message = self._job.take()
                if "refused" in message:
                    self.say(str(message["refused"]))
                    return None
                if "end" in message:
                    painter.end()
                    return self._ended(Ending(**message["end"]))
                pieces = [(text, source) for text, source in message.get("pieces", ())]
                painter.add(pieces, message.get("margin", ""))
                sys.stdout.flush()

    def _ended(self, ending: Ending) -> Ending:
        told = {"length": "the longest answer that is allowed; ", "stopped": "stopped; "}
        text = f"{told.get(ending.ended, '')}{ending.summary}"
        self.say(f"\x1b[2m{text}\x1b[0m\n" if self._colours else "")
        return ending


def chat(config: ChatConfig, arguments: Sequence[str]) -> int:
    """Runs the command `chat`, whose arguments its ranks get as well; returns the exit code.

    Raises ConfigError where the models cannot be had, or where the target cannot chat.
    """
    mode = config.run.mode
    job = resolve_unopened(config.of_mode(mode), config.tp)
    if load_tokenizer(job.target_where).template is None:
        raise ConfigError(f"{job.target.name}: has no chat template: allowed: run --prompt=…")
    return converse(ranks_command(arguments, config.num_ranks), mode, colours=config.run.show)


def converse(command: Sequence[str], mode: str, *, colours: bool) -> int:
    """Runs a chat with the job that `command` starts; returns the exit code."""
    with open_terminal() as terminal, Job(command, _note) as job:
        try:
            if terminal is not None:
                terminal.write("loading the models …\n")
            chat = Chat(job, terminal, mode, colours=colours)
            chat.say(str(job.take().get("ready", "")))
            chat.legend()
            _read_lines(chat)
        except FaultError as fault:
            sys.stderr.write(f"mpissd: {fault}\n")
            return fault.exit_code
        except KeyboardInterrupt:  # while the models load
            return 128 + signal.SIGINT
    return 0


@contextmanager
def _on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """Calls a function on Ctrl-C inside the block, instead of raising KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, lambda number, frame: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _read_lines(chat: Chat) -> None:
    """Takes lines until the person leaves; Ctrl-C at the prompt only drops the line."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() editing and a history)
    while True:
        try:
            line = input(f"{chat.mode}> ")
            if not sys.stdin.isatty():
                chat.say(line)
            if not chat.take(line):
                return
        except EOFError:
            chat.say("")
            return
        except KeyboardInterrupt:
            chat.say("")


def _note(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
