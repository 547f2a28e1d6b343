"""A chat on a terminal, as the client of a server over a fake lead."""

import re
import sys
from collections.abc import Iterator

import pytest

from mpissd.cli.arguments import parse
from mpissd.engine.text.tokenizer import Tokenizer
from tests.needs import module
from tests.scripts import ROOT, python, until
from tests.serve.fake_lead import Script
from tests.serve.rig import Rig, serving
from tests.text.terminal_session import END_OF_FILE, INTERRUPT, TerminalSession

module("uvicorn", "the extra serve")
module("httpx", "the extra serve")

ABOUT = {"mode": "auto", "draft": "a draft", "tp": 1, "num_drafts": 1}


@pytest.fixture
def rig(words: Tokenizer) -> Iterator[Rig]:
    answer = [*words.encode("one two"), 1]
    with serving(words, Script(answer, context=1000), about=ABOUT) as found:
        yield found


def command(rig: Rig) -> list[str]:
    return [sys.executable, "-m", "mpissd", "chat", f"--url={rig.url}/v1", "--num_tokens=900"]


def opened(rig: Rig, **env: str) -> TerminalSession:
    return TerminalSession(command(rig), str(ROOT), env)


def said(screen: TerminalSession, line: str, until: str = "ssd> ") -> str:
    """Types a line; returns all that is printed until a text is."""
    screen.type(f"{line}\n")
    return screen.until(until)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


def test_a_conversation_is_coloured_and_its_history_goes_along(rig: Rig) -> None:
    with opened(rig) as screen:
        greeting = screen.until("ssd> ")
        assert "tiny, drafts by a draft; T=1, D=1 on numpy" in greeting
        assert "speculation cache" in greeting
        answer = said(screen, "hello")
        # On a busy machine the meter is drawn between the words, and more than once.
        assert re.search(r"\x1b\[32mone .*two", answer, re.DOTALL) and " tokens in " in answer
        said(screen, "hello")
        refusal = plain(said(screen, "x" * 1100))
        assert "the server's --context: /reset begins another conversation" in refusal
        said(screen, "hello")
        first, second, third = (len(each.prompt) for each in rig.script.submitted)
        assert second > 2 * first - 8, "the first answer is part of the history"
        assert third == 2 * second - first, "the refused question is not"
        assert rig.script.submitted[-1].sampling.mode == "ssd"
        screen.type(END_OF_FILE)
        assert screen.end() == 0


def test_commands_change_the_mode_the_colours_and_the_history(rig: Rig) -> None:
    with opened(rig) as screen:
        screen.until("ssd> ")
        for line, shown in (
            ("/stats", "no answer yet"),
            ("/mode fast", "mode=fast: allowed: ar, sd, ssd"),
            ("/dance", "/dance: unknown"),
            ("/", "Ctrl-D"),
        ):
            assert shown in said(screen, line)
        said(screen, "/mode ar", "ar> ")
        said(screen, "hello", "ar> ")
        stats = said(screen, "/stats", "ar> ")
        assert "all:  1 answers" in stats and "2 of them in the KV cache" in stats
        assert "colours off" in said(screen, "/show", "ar> ")
        said(screen, "/reset", "ar> ")
        assert "\x1b[32m" not in said(screen, "hello", "ar> ")
        first, second = rig.script.submitted
        assert first.prompt == second.prompt and first.sampling.mode == "ar"
        screen.type("/quit\n")
        assert screen.end() == 0


def test_ctrl_c_ends_the_answer_and_not_the_chat(words: Tokenizer) -> None:
    script = Script(words.encode("again ") * 900, pace_s=0.05, context=9000)
    with serving(words, script, about=ABOUT) as rig, opened(rig) as screen:
        screen.until("ssd> ")
        said(screen, "hello", "tok/round")
        screen.type(INTERRUPT)
        assert "stopped; " in screen.until("ssd> ")
        until(lambda: script.ended == {1: "cancelled"})
        said(screen, "hello", "tok/round")
        first, second = (len(each.prompt) for each in script.submitted)
        assert second > first + 5, "what was said stays"
        screen.type(INTERRUPT)
        screen.until("ssd> ")
        screen.type(END_OF_FILE)
        assert screen.end() == 0


def test_a_server_that_loses_its_ranks_ends_the_chat(words: Tokenizer) -> None:
    script = Script(words.encode("again ") * 200, pace_s=0.05, dies_after=3, context=2000)
    with serving(words, script, about=ABOUT) as rig, opened(rig) as screen:
        screen.until("ssd> ")
        said(screen, "hello", "mpissd: the job is gone")
        assert screen.end() == 5


def test_questions_from_a_file_are_answered_as_plain_text(rig: Rig) -> None:
    done = python(*command(rig)[1:], input="hello\n\n/stats\n")
    assert done.returncode == 0 and "\x1b" not in done.stdout
    assert "ssd> hello\none two" in done.stdout and "all:  1 answers" in done.stdout


def test_what_is_no_server_is_one_line(rig: Rig) -> None:
    done = python("-m", "mpissd", "chat", f"--url={rig.url}/nothing")
    assert done.returncode == 2 and "no mpissd serve there" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("text", "context"), [("", 1000), ("one two", 60), ("one\u2028two", 1000)])
def test_a_conversation_goes_on(words: Tokenizer, text: str, context: int) -> None:
    """After an empty answer, with less room than --num_tokens, after Unicode's line ends."""
    script = Script([*words.encode(text), 1], context=context)
    with serving(words, script, about=ABOUT) as rig:
        done = python(*command(rig)[1:], input="hello\nhello\n")
    assert done.returncode == 0 and "allowed" not in done.stdout and text in done.stdout
    first, second = script.submitted
    assert first.max_tokens == min(900, context - len(first.prompt))
    assert len(second.prompt) - len(first.prompt) >= len(first.prompt) - 20 + len(script.answer)


@pytest.mark.parametrize(
    "words",
    ["ar --target=x", "ar --target=x --draft=x", "ar", "sd --num_drafts=0", "ssd --pair=toy"],
)
def test_the_server_of_a_chat_can_decode_in_its_mode(words: str) -> None:
    config = parse(["chat", *f"--mode={words}".split()]).config
    server = parse(config.server_arguments()).config
    assert server.num_ranks == config.num_ranks and config.run.mode in server.modes
