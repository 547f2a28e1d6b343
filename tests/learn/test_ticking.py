"""The line that shows a terminal that `distill` runs."""

import io
import time
from collections.abc import Callable

import pytest

from mpissd.learn import command


def test_a_terminal_sees_the_seconds_while_nothing_is_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shown(*, is_shown: bool, until: Callable[[str], bool]) -> str:
        with command.ticking(time.monotonic() - 100, is_shown=is_shown):
            deadline = time.monotonic() + 20
            while not until(stderr.getvalue()) and time.monotonic() < deadline:
                time.sleep(0.01)
        return stderr.getvalue()

    stderr = io.StringIO()
    monkeypatch.setattr(command.sys, "stderr", stderr)
    monkeypatch.setattr(command, "_TICK_S", 0.01)
    assert shown(is_shown=False, until=lambda text: True) == ""
    first, second, *_ = shown(is_shown=True, until=lambda text: text.count("\r") > 2).split("\r")
    assert first.startswith("  100.") and first.endswith(" s  …") and second.endswith(" s  …")
