"""What `pip install` brings: each file of mpissd/ that is not Python is listed in setup.cfg."""

import configparser
import subprocess

import pytest

from tests.needs import lack
from tests.scripts import ROOT


@pytest.fixture(scope="module")
def data() -> set[str]:
    """The files of the package that are not Python, below mpissd/."""
    told = subprocess.run(
        ["git", "ls-files", "mpissd"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if told.returncode:
        lack("a clone with its git")
    found = {name.partition("/")[2] for name in told.stdout.split() if not name.endswith(".py")}
    assert {"py.typed", "engine/backend/profiles/h200.json"} <= found
    return found


def test_each_pattern_finds_files_and_together_they_find_all(data: set[str]) -> None:
    """setuptools splits a value at its newlines if it has one, and if not at its commas."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    value = config["options.package_data"]["mpissd"]
    parts = value.splitlines() if "\n" in value else value.split(",")
    package = ROOT / "mpissd"
    found = {
        pattern: {str(path.relative_to(package)) for path in package.glob(pattern)}
        for pattern in filter(None, map(str.strip, parts))
    }
    assert [pattern for pattern, names in found.items() if not names] == []
    assert data - set[str]().union(*found.values()) == set()
