"""Campaigns of minutes (marker `long`) run only where they are asked for: pytest --long."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also the campaigns that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    skip = pytest.mark.skip(reason="takes minutes: --long")
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(skip)
