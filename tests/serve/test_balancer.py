"""HAProxy over two replicas without ranks: one is killed, one is replaced."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.needs import module
from tests.serve.balancer import cluster, needs_haproxy
from tests.serve.test_front import FAKE, pair
from tests.tiny_pair import TinyPair

module("uvicorn", "the extra serve")
module("httpx", "the extra serve")
pytestmark = [needs_haproxy, pytest.mark.slow]
__all__ = ["pair"]  # a fixture


def test_one_is_killed_under_load(pair: TinyPair, tmp_path: Path) -> None:
    """Its requests fail within seconds; the other one answers later ones."""
    with cluster(pair, tmp_path, FAKE) as found:
        one, other = found.start(), found.start()
        found.balance()

        def kill() -> None:
            time.sleep(3)
            one.kill()

        row = found.under_load(kill, rate=10, duration=7, tokens=8)
        assert row["num_refused"] == 0 and row["num_requests"] > 30
        assert row["num_failed"] <= 10  # at most those that it had
        after = found.load(rate=10, duration=2, tokens=8)
        assert after["num_answered"] == after["num_requests"]
        assert found.ids == {one.id, other.id}  # a killed replica leaves its file


def test_a_rolling_restart_loses_none(pair: TinyPair, tmp_path: Path) -> None:
    with cluster(pair, tmp_path, FAKE) as found:
        old = [found.start(), found.start()]
        found.balance()

        def replace() -> None:
            for each in old:
                new = found.start()
                assert each.drain() == 0
                assert each.id not in found.ids and new.id in found.ids

        row = found.under_load(replace, rate=10, duration=16, tokens=8)
        assert row["num_answered"] == row["num_requests"] > 100
        assert len(found.ids) == 2
