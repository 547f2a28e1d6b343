"""A chat on a terminal, with a stand-in for its ranks (tests/text/fake_ranks.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpissd.common.errors import ConfigError
from mpissd.common.ranks import ranks_command
from mpissd.lab.chat.config import ChatConfig
from mpissd.lab.chat.lines import Inbox, packed
from tests.needs import needs_linux
from tests.text.terminal_session import END_OF_FILE, INTERRUPT, TerminalSession

ROOT = Path(__file__).resolve().parents[2]
FAKE = [sys.executable, "-m", "tests.text.fake_ranks"]
PROGRAM = (
    "import sys; from mpissd.lab.chat.front import converse; "
    f"sys.exit(converse({FAKE!r}, 'ssd', colours=True))"
)


def opened(**env: str) -> TerminalSession:
    return TerminalSession([sys.executable, "-c", PROGRAM], str(ROOT), env)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


def test_a_conversation_is_coloured_and_its_history_goes_along() -> None:
    with opened() as screen:
        told = screen.until("ssd> ")
        assert "two models are ready" in told and "speculation cache" in told
        assert "a line of the launcher" in told  # what is no message is shown as it is
        screen.type("one two\n")
        answer = screen.until("ssd> ")
        assert "\x1b[32mtwo" in answer and "2.00 tok/round" in answer and "2 tokens" in answer
        screen.type("three\n")
        history = screen.until("ssd> ")
        sent = (
            "{'role': 'user', 'content': 'one two'}, {'role': 'assistant', 'content': 'one two '}"
        )
        assert sent in plain(history)
        screen.type(END_OF_FILE)
        assert screen.end() == 0


def interrupted(screen: TerminalSession) -> None:
    """Presses Ctrl-C at the prompt, again where Python was not waiting for a key yet.

    A signal between readline's prompt and that wait counts only at the next key or signal.
    """
    for _ in range(4):
        screen.asleep()
        screen.type(INTERRUPT)
        if screen.prints("ssd> ", 3.0):
            return
    screen.until("ssd> ")


def test_ctrl_c_ends_the_answer_and_not_the_chat() -> None:
    with opened() as screen:
        screen.until("ssd> ")
        screen.type("forever\n")
        screen.until("again ")
        screen.type(INTERRUPT)
        assert "stopped; " in screen.until("ssd> ")
        screen.type("unfinished")
        screen.until("unfinished")
        interrupted(screen)  # at the prompt it only drops the line
        screen.type("still here\n")
        assert "here" in screen.until("ssd> ")
        screen.type("/quit\n")
        assert screen.end() == 0


def test_commands_change_the_mode_the_colours_and_the_history() -> None:
    with opened() as screen:
        screen.until("ssd> ")
        for line, told in (
            ("/stats", "no answer yet"),
            ("/mode fast", "mode=fast: allowed: ar, sd, ssd"),
            ("/dance", "/dance: unknown"),
            ("/", "Ctrl-D"),
        ):
            screen.type(f"{line}\n")
            assert told in screen.until("ssd> ")
        screen.type("/mode ar\n")
        screen.until("ar> ")
        screen.type("one two\n")
        assert "'mode': 'ar'" in screen.until("ar> ")
        screen.type("/stats\n")
        assert "all:  1 answers, 2 tokens in 0.5 s" in screen.until("ar> ")
        screen.type("/show\n")
        assert "colours off" in screen.until("ar> ")
        screen.type("/reset\n")
        screen.until("ar> ")
        screen.type("three four\n")
        answer = screen.until("ar> ")
        assert "one two" not in answer and "\x1b[32m" not in answer
        screen.type(END_OF_FILE)
        assert screen.end() == 0


def test_a_refused_question_is_not_part_of_the_history() -> None:
    with opened() as screen:
        screen.until("ssd> ")
        screen.type("refuse this\n")
        assert "the conversation has 9000 tokens" in screen.until("ssd> ")
        screen.type("hello\n")
        assert "refuse" not in screen.until("ssd> ")
        screen.type(END_OF_FILE)
        assert screen.end() == 0


def test_ranks_that_die_end_the_chat_with_their_exit_code() -> None:
    with opened() as screen:
        screen.until("ssd> ")
        screen.type("die\n")
        screen.until("mpissd: the ranks have ended (exit code 5)")
        assert screen.end() == 5


@needs_linux
def test_ranks_end_with_a_front_that_is_killed() -> None:
    with opened() as screen:
        screen.until("ssd> ")
        told = re.search(r"ranks are process (\d+)", screen.seen)
        assert told is not None
        pid = int(told[1])
        screen.type("forever\n")
        screen.until("again ")
        screen.kill()
        deadline = time.monotonic() + 20
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, "the ranks outlived their front"
            time.sleep(0.05)


def test_without_colours_nothing_but_text_is_printed() -> None:
    with opened(NO_COLOR="1") as screen:
        screen.until("ssd> ")
        screen.type("one two\n")
        assert "\x1b[32m" not in screen.until("ssd> ")
        screen.type(END_OF_FILE)
        assert screen.end() == 0


def test_questions_from_a_file_are_answered_as_plain_text() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="one two\n\n/stats\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "ssd> one two\none two" in done.stdout and "all:  1 answers" in done.stdout


def test_a_message_may_arrive_in_parts_and_with_others() -> None:
    read, write = os.pipe()
    other: list[str] = []
    inbox = Inbox(read, other.append)
    line = packed({"pieces": [["é", "bonus"]]})
    os.write(write, line[:20])
    assert inbox.take(0.01) is None
    os.write(write, line[20:] + b"[1]\nnoise\n" + packed({"stop": True}))
    assert inbox.take(0) == {"pieces": [["é", "bonus"]]}
    assert inbox.take(0) == {"stop": True}
    os.close(write)
    assert inbox.take() is None and inbox.is_closed and other == ["[1]", "noise"]
    os.close(read)


def test_the_ranks_are_started_by_the_launcher_that_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MPIRUN", "sh --oversubscribe")
    found = ranks_command(["chat", "--mode=sd"], 2)
    assert found[:4] == ["sh", "--oversubscribe", "-np", "2"]
    assert found[-2:] == ["chat", "--mode=sd"]
    monkeypatch.setenv("MPIRUN", "no-such-launcher")
    with pytest.raises(ConfigError, match="no no-such-launcher"):
        ranks_command([], 2)


def test_the_configuration_of_a_chat_is_a_runs_without_its_measurement() -> None:
    config = ChatConfig()
    assert config.run.workload == "text" and config.run.num_tokens == 512
    with pytest.raises(ConfigError, match="drafts=0 with mode=ssd"):
        ChatConfig(drafts=0)
