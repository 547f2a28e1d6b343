"""Fixtures of the server's tests: a tokenizer, and a pair of models that has it."""

import pytest

from tests.text import tiny
from tests.tiny_pair import TinyPair, tiny_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    found = tiny_pair(tmp_path_factory.mktemp("pair"), vocab=len(tiny.tokens()))
    tiny.write(found.target)
    return found
