"""Drafts on hidden states on a GPU: their logits are the CPU's, step by step, within float16."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.common.wait import Waiter
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.cache import trunk_rows
from tests.gpu.agreement import relative_error
from tests.gpu.transformer_rig import state_steppers, use_megakernel
from tests.tiny_pair import KINDS, config

pytestmark = pytest.mark.gpu
V, LENGTH, HEADS = 101, 40, 3
WAITER = Waiter(60.0, spin=True)


@pytest.fixture(scope="module", params=KINDS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """config.json of a random target and of a random draft of each kind."""
    home: Path = tmp_path_factory.mktemp(request.param)
    told = config(2, vocab=V, heads=4, kv_heads=2, hidden=64, head_dim=32)
    own = {**told, "num_hidden_layers": HEADS if request.param == "medusa" else 1}
    for name, one in (("target", told), ("draft", {**own, "mpissd": {"kind": request.param}})):
        (home / f"{name}.json").write_text(json.dumps(one))
    return request.param, str(home / "target.json"), str(home / "draft.json")


def logits(model: Stepper, tokens: Any, places: Any, heads: int = 1) -> Any:
    model.upload(len(tokens), tokens, places)
    model.launch()
    model.wait(WAITER)
    model.results()
    return model.logits(range(heads * len(tokens)))


@pytest.mark.parametrize("is_whole", [False, True])
def test_the_logits_are_the_cpu_s(
    backend: Any, models: tuple[str, str, str], is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one kernel for few rows of the target, and with separate ones."""
    use_megakernel(monkeypatch, is_on=is_whole)
    kind, target, draft = models
    tokens = (np.arange(LENGTH) ** 2 % V).astype(np.int32)
    heads, last = HEADS if kind == "medusa" else 1, LENGTH - 4
    found = []
    for device in (backend, NumpyBackend()):
        whole, own = state_steppers(device, target, draft)
        got = [logits(whole, tokens, trunk_rows(1, 0, LENGTH))]
        got.append(logits(own, tokens[: last + 1], trunk_rows(1, 0, last + 1), heads))
        for step in (1, 2) if heads == 1 else ():
            place = trunk_rows(1, last + step, last + step + 1)
            place = replace(place, trunks=np.array([last], np.int32))
            got.append(logits(own, tokens[last + step : last + step + 1], place))
        found.append(got)
        own.close()
        whole.close()
    for device_part, cpu_part in zip(*found, strict=True):
        assert relative_error(device_part, cpu_part) < 0.02
