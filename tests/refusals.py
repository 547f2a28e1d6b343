"""What a command that is refused leaves: exit code 2, and one line on stderr."""

import pytest

from mpissd.__main__ import main


def refused(capfd: pytest.CaptureFixture[str], *words: object) -> str:
    """Returns the one line."""
    assert main([*map(str, words)]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("mpissd: ") and err.count("\n") == 1
    return err
