"""Whose fault it is, as an exit code, and the did-you-mean of a mistyped name."""

from __future__ import annotations

import pytest

from mpissd.common import errors
from mpissd.common.errors import ConfigError, MpissdError, unknown


@pytest.mark.parametrize(
    ("name", "code"),
    [("ConfigError", 2), ("GateError", 3), ("ProtocolError", 4), ("FaultError", 5)],
)
def test_each_class_has_an_exit_code_of_its_own(name: str, code: int) -> None:
    error = getattr(errors, name)
    assert issubclass(error, MpissdError)
    assert error.exit_code == code


def test_a_near_miss_is_named_and_a_far_one_is_not() -> None:
    error = unknown("mode", "sdd", ("sd", "ar", "ssd"))
    assert isinstance(error, ConfigError)
    assert str(error) in (
        "unknown mode 'sdd': did you mean 'sd'? allowed: ar, sd, ssd",
        "unknown mode 'sdd': did you mean 'ssd'? allowed: ar, sd, ssd",
    )
    assert str(unknown("mode", "zebra", ("sd", "ar"))) == "unknown mode 'zebra': allowed: ar, sd"
