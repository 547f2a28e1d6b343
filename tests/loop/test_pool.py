"""Target groups that share a draft decode the same as each with a draft of its own."""

from typing import Any

import pytest

from tests.loop.pool_rig import Pool, config_of, decided
from tests.text_config import finished, text_config
from tests.tiny_pair import TinyPair, tiny_pair

V, ROUNDS = 61, 12
PROMPTS = ";".join(
    ",".join(str((7 * n + j * j) % V) for j in range(length))
    for n, length in enumerate((3, 20, 9, 1, 33, 5))
)
GEMM = {"pair": "toy", "workload": "gemm", "backend": "numpy", "seed": 3}
MARKOV = "vocab=12 order=2 prompt_tokens=3 divergence=0.35".split()
MARKOV_FLAGS = {"pair": "toy", "workload": "markov", **dict(flag.split("=") for flag in MARKOV)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return tiny_pair(tmp_path_factory.mktemp("pair"), vocab=V, heads=4, kv_heads=2, noise=0.1)


def alone(flags: dict[str, Any]) -> dict[int, list[tuple[int, ...]]]:
    """The decisions of one group that has all sequences in one batch."""
    batch = int(flags.get("groups", 1)) * int(flags["batch_size"])
    one = config_of(**{**flags, "groups": 1, "batch_size": batch})
    return decided(finished(one, ROUNDS).records)


def together(flags: dict[str, Any], order: tuple[int, ...]) -> dict[int, list[tuple[int, ...]]]:
    found: dict[int, list[tuple[int, ...]]] = {}
    with Pool(config_of(**flags)) as pool:
        pool.decode(order, ROUNDS)
    for number, group in enumerate(pool.groups):
        mine, share = decided(group.records), pool.job.workload.share(number)
        assert set(mine) <= set(share), "a group decodes its own sequences alone"
        found |= mine
    return found


CASES: dict[str, dict[str, Any]] = {
    "ssd": {**GEMM, "groups": 2, "batch_size": 2},
    "sd": {**GEMM, "groups": 3, "batch_size": 1, "mode": "sd"},
    "fast": {**GEMM, "groups": 2, "batch_size": 2, "backup": "fast"},
    "markov": {**MARKOV_FLAGS, "groups": 2, "batch_size": 2, "temperature": 0},
    "markov, drawn": {**MARKOV_FLAGS, "groups": 3, "batch_size": 1, "temperature": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_groups_decide_what_one_batch_of_them_decides(name: str) -> None:
    """In whatever order they ask."""
    flags = CASES[name]
    assert together(flags, (1, 0, 0, 1, *range(flags["groups"]))) == alone(flags)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("groups", [2, 3])
def test_groups_answer_prompts_as_one_does(pair: TinyPair, groups: int, temperature: float) -> None:
    """Bit for bit: tokens, outcomes and hits, with more prompts than places."""
    told = {"prompt_ids": PROMPTS, "num_tokens": 20, "temperature": temperature}
    flags = {**told, "fan_out": "uniform:2", "lookahead": 3, "seed": 5}
    one = text_config(pair, **{**flags, "batch_size": 6})
    decoder = finished(one)
    wanted, tokens = decided(decoder.records), decoder.tokens
    several = text_config(pair, **{**flags, "batch_size": 1, "groups": groups})
    with Pool(several) as pool:
        pool.decode(range(groups), 10**6)
    found: dict[int, list[tuple[int, ...]]] = {}
    emitted: dict[int, list[int]] = {}
    for group in pool.groups:
        found |= decided(group.records)
        emitted |= group.records.tokens()
    assert found == wanted and emitted == tokens


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_group_that_leaves_early_leaves_the_others_their_draft(leaver: int) -> None:
    flags = {**GEMM, "groups": 3, "batch_size": 1}
    with Pool(config_of(**flags)) as pool:
        pool.decode((0, 1, 2), 3)
        pool.groups[leaver].stop()
        pool.decode((2, 1, 0), ROUNDS)
    wanted = alone(flags)
    for number, group in enumerate(pool.groups):
        rounds = 3 if number == leaver else ROUNDS
        assert decided(group.records)[number] == wanted[number][:rounds]


def test_groups_stop_in_any_order_even_before_they_began() -> None:
    with Pool(config_of(**{**GEMM, "groups": 3, "batch_size": 1})) as pool:
        for number in (2, 0, 1):
            pool.groups[number].stop()
    assert all(group.is_stopped for group in pool.groups)  # and the draft loop has ended
