"""Every family's config.json is understood: logits as transformers computes them, kept in a file.

reference/families.json has its own source: the same folders, read by the library.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.engine.model.transformer.sources import open_checkpoint
from tests.transformer_reference import logits
from tests.weight_files import CONFIG, values_of, write_folder

REFERENCE = json.loads(Path(__file__).with_name("reference").joinpath("families.json").read_text())
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_scaling": LLAMA3, "rope_theta": 5e5},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 8},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "rms_norm_eps": 1e-6},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_the_library(tmp_path: Path, family: str) -> None:
    """Random weights of seed 1, 40 tokens; the library's float32 differs by 3e-6 of 4."""
    config = {**CONFIG, **FAMILIES[family]}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    values = values_of(open_checkpoint(str(tmp_path / "config.json"), seed=1))
    found = logits(
        open_checkpoint(str(write_folder(tmp_path, config, values))), REFERENCE["tokens"]
    )
    wanted = REFERENCE["logits"][family]
    assert found.argmax(-1).tolist() == wanted["argmax"]
    np.testing.assert_allclose(found[-1, :8], wanted["last"], atol=5e-5)
