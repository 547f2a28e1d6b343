"""What is exhaustive (marker `long`) runs only where it is asked for: pytest --long."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also what is exhaustive, as CI does")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    skip = pytest.mark.skip(reason="exhaustive: pytest --long, as in CI")
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(skip)
