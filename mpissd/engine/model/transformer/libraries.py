"""Imports the libraries of the extra `text` where they are used, or says how to install them."""

from __future__ import annotations

import importlib
from types import ModuleType

from mpissd.common.errors import ConfigError


def library(name: str, what: str) -> ModuleType:
    """Imports a library that `what` needs; raises ConfigError, one line, where it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        raise ConfigError(f"{what} needs {name}: pip install 'mpissd[text]'") from missing
