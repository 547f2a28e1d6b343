"""Forwards at a T that was not measured: by hand, and against a machine measured at two."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.rivals import Family
from mpissd.engine.backend.profile import Curve, Profile, load_profile
from mpissd.engine.job import resolve
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.lab.predict.advisor import plan
from mpissd.lab.predict.derive import derive, with_derived
from mpissd.lab.predict.search import survey

PROFILES = Path(__file__).resolve().parents[2] / "results/h200/profiles"
FUSED = ForwardOptions(fuse=True)
EIGHT = RunConfig(pair="8b/1b", fuse=True)


def probed(name: str) -> Profile:
    return load_profile(str(PROFILES / f"{name}.json"))


def shard(pair: str, tp: int) -> Shard:
    config = RunConfig(pair=pair, mode="ar")
    return Shard(resolve(config, 1, backend="emulated", memory_bytes=None).target, tp)


def seconds(profile: Profile, of: Shard, rows: int) -> float:
    curve = profile.tables.forward(of.cost(rows, 1, 2, FUSED))
    assert curve is not None
    return curve(rows)


def with_all_reduces(profile: Profile, *others: Profile) -> Profile:
    latency, rate = {}, {}
    for known in (profile, *others):
        latency |= known.all_reduce_latency_s or {}
        rate |= known.all_reduce_bytes_per_s or {}
    return replace(profile, all_reduce_latency_s=latency, all_reduce_bytes_per_s=rate)


@pytest.mark.parametrize("most_rows", [None, 32])
def test_by_hand(most_rows: int | None) -> None:
    """8B from T=1 to T=2: half the bytes and 64 all-reduces more; a product with a launch of its
    own loses as much time as before, the chain half as much."""
    one, two = shard("8b/1b", 1), shard("8b/1b", 2)
    alone = by_one_kernel(
        replace(
            probed("h200-8b-1b-T1D1"),
            launch_s=2e-6,
            all_reduce_latency_s={2: 3e-6},
            all_reduce_bytes_per_s={2: 8192 / 1e-6},
        ),
        one,
        most_rows,
    )
    (found,) = derive(alone, one, two, 1, FUSED)
    assert found.params == 6979321856 // 2 and found.most_rows == most_rows
    assert alone.read_bytes_per_s is not None
    lost = seconds(alone, one, 1) - 2 * 6979321856 / alone.read_bytes_per_s
    for rows in (1, 16):
        kept = 2e-6 if most_rows else lost
        wanted = kept + (seconds(alone, one, rows) - kept) / 2 + 64 * (3e-6 + rows * 1e-6)
        assert found.seconds(rows) == pytest.approx(wanted, rel=1e-12)
    assert found.seconds.source.startswith("derived from T=1")
    (back,) = derive(with_derived(alone, two, 1, FUSED), two, one, 1, FUSED)
    assert back.seconds(5) == pytest.approx(seconds(alone, one, 5), rel=1e-12)


def by_one_kernel(
    profile: Profile, of: Shard, most_rows: int | None, one_row_s: float = 0.0
) -> Profile:
    """The profile with the measured forward assigned to another kernel, or given another time."""
    key, forwards = of.key(1, FUSED), dict(profile.tables.forwards)
    (known,) = forwards[key]
    curve = Curve((1,), (one_row_s,)) if one_row_s else known.seconds
    forwards[key] = (replace(known, most_rows=most_rows, seconds=curve),)
    return replace(profile, tables=replace(profile.tables, forwards=forwards))


@pytest.mark.parametrize(("have", "want"), [(2, 4), (4, 2)])
def test_near_to_what_was_measured_there(have: int, want: int) -> None:
    """70B on H200, probed with T = 2 and with T = 4."""
    profiles = {2: probed("h200-70b-1b-T2D1"), 4: probed("h200-70b-T4")}
    known = with_all_reduces(profiles[have], profiles[want])
    (found,) = derive(known, shard("70b/1b", have), shard("70b/1b", want), 1, FUSED)
    for rows, most in {1: 0.016, 2: 0.016, 4: 0.016, 8: 0.016, 16: 0.05, 64: 0.016}.items():
        measured = seconds(profiles[want], shard("70b/1b", want), rows)
        assert found.seconds(rows) == pytest.approx(measured, rel=most)


def test_all_reduces_are_those_of_the_same_device_or_unknown() -> None:
    alone = probed("h200-8b-1b-T1D1")
    found = with_derived(alone, shard("8b/1b", 2), 1, FUSED)
    assert "all-reduces of profile h200" in str(found.tables.forwards)
    other = replace(alone, device_name="Another device")
    with pytest.raises(ConfigError, match="knows no all-reduce over 2 ranks"):
        with_derived(other, shard("8b/1b", 2), 1, FUSED)


def test_a_survey_drops_no_t_silently() -> None:
    alone = probed("h200-8b-1b-T1D1")
    here = survey(EIGHT, alone, 4)
    judged = plan(EIGHT, here.placements, 4).judged
    assert {(c.tp, c.derived is None) for c in judged if c.mode != "ssd"} == {
        (1, True),
        (2, False),
        (3, False),
        (4, False),
    }
    assert not here.unjudged
    there = survey(EIGHT, replace(alone, device_name="Another device"), 4)
    assert [p.tp for p in there.placements] == [1] and {f.tp for f in there.unjudged} == {2, 3, 4}
    assert "all-reduce over 4 ranks" in there.unjudged[Family("ar", 4, 0)]


def test_a_prediction_at_two_ranks_takes_the_measured_share(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As in an advice; from only the profile's numbers 70B was 12% too fast."""

    def last(*flags: str) -> dict[str, Any]:
        assert (
            main(["plan", "--profile=h200", "--pair=70b/1b", "--forward=transformer", *flags]) == 0
        )
        told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return told

    judged = last("--gpus=2")["judged"]
    (advised,) = (c for c in judged if (c["mode"], c["tp"], c["num_drafts"]) == ("sd", 2, 0))
    flags = "--mode=sd", "--num_drafts=0", "--tp=2", f"--lookahead={advised['lookahead']}"
    row = last(*flags)
    assert row["expected_tok_per_s"] == pytest.approx(advised["tok_per_s"], rel=0.01)
