"""Which probe, and which kernel of it, figures take a forward from."""

from __future__ import annotations

from analysis.probed import Key, forwards, newest, tables

BARE = {"model": "m", "tp": 1, "fuse": True, "lm_head": False, "kv_tokens": 0, "params": 10}


def profile(started: str | None, *entries: dict, reduces: float = 1.0) -> dict:
    told = {"provenance": {"started_at": started}} if started else {}
    all_reduces = [{"name": "nccl", "ranks": 2, "graph": True, "seconds": {"8192": reduces}}]
    return {**told, "tables": {"forwards": list(entries), "all_reduces": all_reduces}}


def test_each_row_count_has_the_kernel_that_its_jobs_run() -> None:
    chain = {**BARE, "kernel": "chain", "most_rows": 8, "seconds": {"1": 1.0, "8": 2.0}}
    cublas = {**BARE, "kernel": "cublas", "most_rows": None, "seconds": {"1": 3, "8": 4, "64": 5}}
    for entries in ((chain, cublas), (cublas, chain)):
        (found,) = forwards([profile("2026", *entries)]).values()
        assert found.seconds == {1: 1.0, 8: 2.0, 64: 5.0} and found.params == 10
        assert [found.at(m) for m in (1, 8, 36, 64, 99)] == [1.0, 2.0, 4.5, 5.0, 5.0]


def test_the_newest_probe_counts_and_an_lm_head_is_another_forward() -> None:
    old = profile(None, {**BARE, "seconds": {"1": 9, "2": 9}}, reduces=9.0)
    head = profile("2026-02", {**BARE, "lm_head": True, "seconds": {"1": 7}}, reduces=2.0)
    new = profile("2026-01", {**BARE, "seconds": {"1": 3}, "spread": {"1": 0.1}})
    found = forwards([old, new, head])
    bare = found[Key("m", 1, True, False, 0)]
    assert bare.seconds == {1: 3.0} and bare.spread == {1: 0.1}
    assert found[Key("m", 1, True, True, 0)].seconds == {1: 7.0}
    (reduce,) = tables([old, new, head], "all_reduces", "name", "ranks", "graph")
    assert reduce["seconds"] == {"8192": 2.0}
    assert newest([old, new, head]) == [head, new, old]
