"""Two real replicas behind HAProxy, on CPUs: one is killed under load, both are replaced."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from tests.mpi.harness import needs_mpi
from tests.needs import module
from tests.serve.balancer import Cluster, Replica, cluster, needs_haproxy
from tests.serve.rig import until
from tests.text import tiny
from tests.tiny_pair import TinyPair, tiny_pair

module("uvicorn", "the extra serve")
module("httpx", "the extra serve")
pytestmark = [*needs_mpi, needs_haproxy]
LAYERS = 40
ASKED = {"prompt": "hello", "max_tokens": 900}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """Of so many layers that ASKED takes seconds, and a kill finds it under way."""
    folder = tmp_path_factory.mktemp("pair")
    found = tiny_pair(folder, layers=LAYERS, vocab=len(tiny.tokens()), noise=0.02)
    tiny.write(found.target)
    return found


def caught(found: Cluster, replica: Replica, *, stream: bool) -> tuple[int, str]:
    """Kills a replica under a request of its own; what its client was told."""
    began = Event()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(found.ask, "/v1/completions", began, **ASKED, stream=stream)
        until(began.is_set if stream else lambda: found.outstanding(replica) == 1)
        replica.kill()
        return asked.result(30)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_of_a_killed_replica_fails_and_the_next_does_not(
    pair: TinyPair, tmp_path: Path, stream: bool
) -> None:
    with cluster(pair, tmp_path) as found:
        one = found.start()
        found.balance()
        status, said = caught(found, one, stream=stream)
        if stream:
            assert status == 0 and said.startswith("data: ") and "[DONE]" not in said
        else:
            assert status == 502
            assert (
                json.loads(said)["error"]["message"] == "the replica that had the request is gone"
            )
        status, said = found.ask("/v1/completions", **ASKED)
        assert (status, json.loads(said)["error"]["code"]) == (503, "replicas")
        found.start()
        until(lambda: found.ask("/v1/completions", **ASKED)[0] == 200, 30)


def test_under_load_one_is_killed_and_then_all_are_replaced(pair: TinyPair, tmp_path: Path) -> None:
    with cluster(pair, tmp_path) as found:
        one, other = found.start(), found.start()
        found.balance()

        def kill() -> None:
            time.sleep(5)
            one.kill()

        row = found.under_load(kill, rate=3, duration=12, tokens=16)
        assert row["num_failed"] <= row["most_together"] and row["num_refused"] == 0
        assert row["num_answered"] > row["num_requests"] / 2

        def replace() -> None:
            found.start()
            assert other.drain() == 0

        row = found.under_load(replace, rate=2, duration=40, tokens=16)
        assert row["num_answered"] == row["num_requests"] > 40
