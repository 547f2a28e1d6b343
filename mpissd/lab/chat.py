"""The command `chat`: a conversation in the terminal, through an HTTP server of `mpissd serve`.

The command starts a server on this machine, or uses the one that the flag --url names. Ctrl-C ends
the current answer, but not the server.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

import httpx

from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.flags import MODES
from mpissd.common.ranks import end_with_parent
from mpissd.engine.job import resolve_unopened
from mpissd.engine.text.tokenizer import load_tokenizer
from mpissd.lab.show import Meter, Painter, columns_of, legend, open_terminal
from mpissd.lab.sse import DAMAGED, DONE, EventStream
from mpissd.serve.config import KEY_VARIABLE, ChatConfig

HELP = """\
/mode ar|sd|ssd   decode otherwise from the next answer on
/stats            numbers of the last answer, and of all
/show             colours on or off
/reset            forget the conversation
/help             this
Ctrl-C ends an answer, Ctrl-D (or /quit) leaves."""
_LEAVE_S = 20.0  # seconds that the server is given to exit, before it is killed
_NO_WRAP = 1 << 16  # line width in characters that wraps no line, used if output is no terminal


class Chat:
    """A chat with a server: sends what is typed, prints answers, keeps the conversation."""

    def __init__(
        self,
        http: httpx.Client,
        config: ChatConfig,
        about: Mapping[str, Any],
        terminal: TextIO | None,
    ) -> None:
        """Begins an empty conversation. about: the server's description of itself (mode, models,
        ranks). terminal: the user's terminal (None: there is none, so that colours are off)."""
        self._http = http
        self._config = config
        self._terminal = terminal
        self.mode = config.run.mode if about["mode"] == "auto" else str(about["mode"])
        self._colours = config.run.show and not (terminal is None or "NO_COLOR" in os.environ)
        self._messages: list[dict[str, str]] = []
        self._meters: list[Meter] = []
        self._prompt = ""

    def greet(self, about: Mapping[str, Any], model: str) -> None:
        """Prints the names of the models, the server's ranks, and the meaning of colours."""
        draft = f", drafts by {about['draft']}" if about["draft"] else ""
        ranks = f"T={about['tp']}" + (f", D={about['num_drafts']}" if about["num_drafts"] else "")
        say(f"{model}{draft}; {ranks} on {about['backend']}; /help lists the commands")
        if self._colours:
            say(f"{legend()}\n")

    def take(self, line: str) -> bool:
        """Handles one typed line, a /command or a message. Returns False if the chat is to end."""
        if line.startswith("/"):
            return self._command(*line[1:].split())
        try:
            line.encode()
        except UnicodeEncodeError:
            say("that is no UTF-8 text")
            return True
        if line.strip():
            self._ask(line)
        return True

    def _command(self, name: str = "help", *values: str) -> bool:
        """Executes the command /NAME with its values. Returns False if the chat is to end."""
        match name:
            case "quit" | "exit":
                return False
            case "mode":
                mode = values[0] if values else self.mode
                if mode not in MODES:
                    say(f"mode={mode}: allowed: {', '.join(MODES)}")
                    return True
                self.mode = mode
                say(f"mode {mode}")
            case "stats" if self._meters:
                meters = self._meters
                say(f"last: {meters[-1].long()}{self._prompt}")
                tokens = sum(meter.num_tokens for meter in meters)
                seconds = sum(meter.seconds for meter in meters)
                rounds = max(1, sum(meter.num_rounds for meter in meters))
                answers = f"{len(meters)} answers, {tokens} tokens in {seconds:.1f} s"
                say(f"all:  {answers}, {tokens / rounds:.2f} a round")
            case "stats":
                say("no answer yet")
            case "show":
                self._colours = not self._colours and self._terminal is not None
                say(f"colours {'on' if self._colours else 'off'}")
            case "reset":
                self._messages = []
                say("the conversation is forgotten")
            case "help":
                say(HELP)
            case _:
                say(f"/{name}: unknown; /help lists the commands")
        return True

    def _ask(self, text: str) -> None:
        """Sends the conversation with `text` as the new message, and prints the answer while it
        arrives. If the server refuses the request, the new message is dropped."""
        run = self._config.run
        asked = [*self._messages, {"role": "user", "content": text}]
        body = {
            "messages": asked,
            "stream": True,
            "stream_options": {"include_usage": True, "include_sources": True},
            "mode": self.mode,
            "max_tokens": run.num_tokens,
            "temperature": run.temperature,
            "top_p": run.top_p,
            "stop": list(run.stop_strings),
        }
        columns = columns_of(self._terminal) if self._terminal else _NO_WRAP
        painter = Painter(sys.stdout.write, columns, colours=self._colours)
        meter = Meter(has_cache=self.mode == "ssd")
        ended = "stopped"
        texts = list[str]()
        self._prompt = ""
        try:
            for chunk in self._chunks(body):
                if usage := chunk.get("usage"):
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
                    tokens = f"prompt of {usage['prompt_tokens']} tokens"
                    self._prompt = f"; {tokens}, {cached} of them in the KV cache"
                if part := chunk.get("speculation"):
                    meter.count(part["tokens"], part["rounds"], part["hits"])
                    pieces = [(text, source or "bonus") for text, source in part["pieces"] if text]
                    texts += [text for text, _ in pieces]
                    painter.add(pieces, meter.short())
                    sys.stdout.flush()
                    ended = chunk["choices"][0]["finish_reason"] or ended
        except KeyboardInterrupt:  # Leaving the loop closes the stream, which cancels the request.
            pass
        except ConfigError as refused:
            say(str(refused))
            return
        except DAMAGED as error:
            raise FaultError(f"the server's answer is damaged: {error!r}") from error
        painter.end()
        notes = {"length": "the longest answer that is allowed; ", "stopped": "stopped; "}
        summary = f"{notes.get(ended, '')}{meter.long()}"
        say(f"\x1b[2m{summary}\x1b[0m\n" if self._colours else "")
        self._messages = [*asked, {"role": "assistant", "content": "".join(texts)}]
        self._meters.append(meter)

    def _chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Sends a request and yields the chunks of the streamed answer. If max_tokens exceeds the
        model's context length, the request is sent again without max_tokens. Raises ConfigError if
        the server refuses the request, and FaultError if the server fails."""
        with self._http.stream("POST", "chat/completions", json=body) as response:
            if response.status_code == 200:
                events = EventStream()
                for part in response.iter_bytes():
                    for event in events.push(part):
                        chunk = {} if event.data == DONE else json.loads(event.data)
                        if "error" in chunk:
                            raise FaultError(chunk["error"]["message"])
                        yield chunk
                return
            error = json.loads(response.read())["error"]
        if response.status_code >= 500:
            raise FaultError(error["message"])
        is_long = error["code"] == "context_length_exceeded"
        if is_long and error["param"] == "max_tokens" and "max_tokens" in body:
            yield from self._chunks({k: v for k, v in body.items() if k != "max_tokens"})
            return
        hint = ": /reset begins another conversation"
        raise ConfigError(f"{error['message']}{hint if is_long else ''}")


def chat(config: ChatConfig) -> int:
    """Runs the command `chat`; returns its exit code, which is the server's if the server ends
    first. Raises ConfigError if a model cannot be loaded or has no chat template."""
    try:
        if config.url is not None:
            code = _converse(config, config.url)
            return FaultError.exit_code if code is None else code
        job = resolve_unopened(config.of_mode(config.run.mode), config.tp)
        if load_tokenizer(job.target_where).template is None:
            raise ConfigError(f"{job.target.name}: has no chat template: allowed: run --prompt=…")
        with _server(config) as server:
            assert server.stdout is not None
            url = server.stdout.readline().partition(" ")[0]
            code = _converse(config, url) if url else None
            if code is None:  # The server has failed, and has printed the reason.
                try:
                    code = server.wait(_LEAVE_S) or FaultError.exit_code
                except subprocess.TimeoutExpired:
                    code = FaultError.exit_code
            return code
    except KeyboardInterrupt:  # The user pressed Ctrl-C before the chat began.
        return 128 + signal.SIGINT


@contextmanager
def _server(config: ChatConfig) -> Iterator[subprocess.Popen[str]]:
    """Starts a server process on this machine, yields it, and ends it after the `with` block."""
    os.environ[KEY_VARIABLE] = os.urandom(16).hex()  # keeps other users of the host from chatting
    server = subprocess.Popen(
        [sys.executable, "-m", "mpissd", *config.server_arguments()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that Ctrl-C does not reach the server
        preexec_fn=end_with_parent,
    )
    try:
        yield server
    finally:
        server.terminate()
        try:
            server.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            server.kill()


def _converse(config: ChatConfig, url: str) -> int | None:
    """Chats with the server at `url` until the user leaves. Returns 0, or None if the server has
    stopped answering. Raises ConfigError if no mpissd server is at `url`."""
    key = os.environ.get(KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with (
        open_terminal() as terminal,
        httpx.Client(base_url=url, headers=headers, timeout=None, trust_env=False) as http,
    ):
        try:
            models = http.get("models").raise_for_status().json()["data"]
            chat = Chat(http, config, models[0]["mpissd"], terminal)
            chat.greet(models[0]["mpissd"], models[0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, *DAMAGED) as error:
            why = str(error).partition("\n")[0]
            raise ConfigError(f"url={url}: no mpissd serve there: {why}") from error
        is_typed = sys.stdin.isatty()
        if is_typed:
            import readline  # noqa: F401  (gives input() editing and a history)
        while True:
            try:
                line = input(f"{chat.mode}> ")
                if not is_typed:
                    say(line)
                if not chat.take(line):
                    return 0
            except EOFError:
                say("")
                return 0
            except KeyboardInterrupt:
                say("")
            except (FaultError, httpx.HTTPError) as error:
                sys.stderr.write(f"mpissd: {error}\n")
                return None


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
