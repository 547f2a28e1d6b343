"""A test that needs more than set-up brings says so in the one way: tests/needs.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.needs import lack, missing, needs

TESTS = Path(__file__).parents[1]
SKIPS = re.compile(r"skipif\(|pytest\.skip\(|mark\.skip\(|importorskip\(")


def test_no_test_skips_in_its_own_words() -> None:
    allowed = {TESTS / "needs.py", TESTS / "conftest.py", Path(__file__)}
    found = [p for p in TESTS.rglob("*.py") if p not in allowed and SKIPS.search(p.read_text())]
    assert found == []


def test_what_is_missing_is_named() -> None:
    assert missing("sh", "no-such-program", "nor-this") == "no-such-program, nor-this"
    assert missing("sh") == ""
    with pytest.raises(pytest.skip.Exception, match=r"^needs a GPU: more than set-up brings$"):
        lack("a GPU")
    mark = needs("a GPU", False)
    assert mark.args == (True,) and mark.kwargs["reason"].startswith("needs a GPU: ")
    assert needs("a GPU", True).args == (False,)
