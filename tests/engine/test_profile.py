"""Device profiles: the time of a forward, computed by hand, and refused profiles."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.errors import ConfigError
from mpissd.engine.backend.base import Cost
from mpissd.engine.backend.profile import known_profiles, load_profile

COST = Cost(
    rows=8,
    weight_bytes=900,
    kv_bytes=100,
    flops=16_000,
    num_products=7,
    num_all_reduces=4,
    all_reduce_bytes=64,
    tp=2,
)
GOOD: dict[str, Any] = {
    "schema": 1,
    "name": "box",
    "device_name": "A box",
    "numbers": {
        "read_bytes_per_s": {"value": 10.0, "from": "assumed"},
        "peak_flops_per_s": {"value": 100.0, "from": "assumed"},
        "product_overhead_s": {"value": 2.0, "from": "assumed"},
        "launch_s": {"value": 3.0, "from": "assumed"},
        "memory_bytes": {"value": 1000, "from": "assumed"},
    },
    "all_reduce": {
        "from": "assumed",
        "latency_s": {"2": 5.0, "4": 6.0},
        "bytes_per_s": {"2": 32.0, "4": 16.0},
    },
}


def write(path: Path, data: Any) -> str:
    file = path / "profile.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(file)


def test_the_profiles_that_come_along() -> None:
    assert set(known_profiles()) == {"h100", "h200", "a100-80", "v100-32", "null"}
    for name in known_profiles():
        profile = load_profile(name)
        assert profile.name == name
        said = ("measured", "datasheet", "assumed", "defined")
        assert all(source.startswith(said) for source in profile.sources.values())
        assert {"read_bytes_per_s", "memory_bytes", "all_reduce"} <= set(profile.sources)


def test_a_forward_is_its_roofline_products_all_reduces_and_launch(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, GOOD))
    assert profile.floor_s(COST) == 16_000 / 100  # the products bound it
    assert profile.forward_s(COST) == 160 + 7 * 2 + 4 * (5 + 64 / 32) + 3
    slow = copy.deepcopy(GOOD)
    slow["numbers"]["read_bytes_per_s"]["value"] = 4.0
    assert load_profile(write(tmp_path, slow)).floor_s(COST) == 1000 / 4  # so do the bytes, KV too


def change(path: str, value: Any) -> Any:
    data = copy.deepcopy(GOOD)
    at, keys = data, path.split("/")
    for key in keys[:-1]:
        at = at[key]
    if value is None:
        del at[keys[-1]]
    else:
        at[keys[-1]] = value
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "schema None"),
        ("null", "schema None"),
        (change("schema", 2), "schema 2, this version reads 1"),
        (change("schema", None), "schema None"),
        (change("name", None), "'name'"),
        (change("numbers", None), "'numbers'"),
        (change("numbers", [1]), "malformed"),
        (change("numbers/launch_s", None), "'launch_s'"),
        (change("numbers/launch_s/from", None), "'from'"),
        (change("numbers/launch_s/value", "soon"), "malformed"),
        (change("numbers/launch_s", 3.0), "malformed"),
        (change("numbers/read_bytes_per_s/value", 0), "must be positive"),
        (change("numbers/read_bytes_per_s/value", -1), "must be positive"),
        (change("numbers/peak_flops_per_s/value", float("nan")), "must be positive"),
        (change("all_reduce/latency_s/two", 1.0), "malformed"),
        (change("all_reduce/bytes_per_s/2", None), r"latency_s of \[2, 4\], bytes_per_s of \[4\]"),
        (change("all_reduce/bytes_per_s/2", 0), "must be positive"),
        (change("all_reduce/latency_s", None), "'latency_s'"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, data: Any, message: str
) -> None:
    text = write(tmp_path, data)
    with pytest.raises(ConfigError, match=message) as caught:
        load_profile(text)
    assert text in str(caught.value)
