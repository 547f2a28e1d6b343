"""SIGTERM drains a server: it finishes its requests, refuses new ones, and ends."""

from __future__ import annotations

import http.client
import re
import signal
import time
from pathlib import Path

import pytest

from tests.needs import module
from tests.serve.rig import answered, until
from tests.serve.test_front import pair, started
from tests.tiny_pair import TinyPair

module("uvicorn", "the extra serve")
__all__ = ["pair"]  # a fixture


def test_it_finishes_what_it_has(pair: TinyPair, tmp_path: Path) -> None:
    with started(pair, tmp_path, "--drain_s=30", FAKE_PACE_S="0.5") as serving:
        with serving.asked() as unfinished:
            until(lambda: "mpissd_outstanding 1.0" in metrics(serving.port))
            serving.process.send_signal(signal.SIGTERM)
            until(lambda: serving.ask("/ready")[0] == 503)
            with serving.asked() as late:
                status, refused, headers = answered(late)
            assert (status, refused["error"]["code"]) == (503, "draining")
            assert headers["retry-after"] == "5"
            assert serving.ask("/health")[0] == 200
            status, answer, _ = answered(unfinished)
        assert (status, answer["choices"][0]["text"]) == (200, "hello there")
        assert serving.process.wait(15) == 0
    began, ended = (tmp_path / "log").read_text().splitlines()[-2:]
    assert began == "mpissd: serve: SIGTERM: 1 requests have 30 s to end"
    assert re.fullmatch(r"mpissd: serve: drained in \d+\.\d s; requests cut off: none", ended)


@pytest.mark.parametrize("second", [None, signal.SIGTERM])
def test_it_waits_no_longer_than_it_was_told(
    pair: TinyPair, tmp_path: Path, second: signal.Signals | None
) -> None:
    """After the deadline, or at a second signal, requests are failed as without a drain."""
    longest = "--drain_s=1.5" if second is None else "--drain_s=60"
    with started(pair, tmp_path, longest, FAKE_PACE_S="20") as serving:
        with serving.asked() as unfinished:
            until(lambda: "mpissd_outstanding 1.0" in metrics(serving.port))
            began = time.monotonic()
            serving.process.send_signal(signal.SIGTERM)
            until(lambda: serving.ask("/ready")[0] == 503)
            if second is not None:
                serving.process.send_signal(second)
            assert answered(unfinished)[0] == 503
        assert serving.process.wait(15) == 0
        assert time.monotonic() - began >= (1.5 if second is None else 0)
    assert (tmp_path / "log").read_text().endswith(" s; requests cut off: 1\n")


def metrics(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text
