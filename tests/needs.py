"""A test's needs beyond the set-up: it names them here, and is skipped by name without them.

Set-up brings the packages of setup.cfg and an mpirun, to a Linux with Python, make and git, and
to any user. A compiler, a GPU, Slurm, iproute2 or root is more than that.
"""

import importlib.util
import shutil
import sys
from typing import Any, NoReturn

import pytest

LINUX = sys.platform == "linux"


def missing(*programs: str) -> str:
    """Name the programs that are not on PATH, comma-separated; "" where all are."""
    return ", ".join(name for name in programs if shutil.which(name) is None)


def needs(what: str, there: object) -> pytest.MarkDecorator:
    """Mark tests that are skipped, by the name of their need, unless it is available."""
    return pytest.mark.skipif(not there, reason=_reason(what))


def lack(what: str) -> NoReturn:
    """Skip the calling test or fixture, by the name of the need that is missing."""
    pytest.skip(_reason(what))


def module(name: str, what: str) -> Any:
    """Import a module, or skip the calling file, by the name of its need."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(_reason(what), allow_module_level=True)
    return importlib.import_module(name)


def has_smollm2() -> bool:
    from mpissd.common.errors import ConfigError
    from mpissd.common.presets import has_weights

    try:
        return has_weights("smollm2")
    except ConfigError:
        return False


def _reason(what: str) -> str:
    return f"needs {what}: more than set-up brings"


needs_linux = needs("Linux and its /proc", LINUX)
