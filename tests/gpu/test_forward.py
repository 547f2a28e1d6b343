"""Programs and whole forwards: graph against eager, float16 against the float32 oracle."""

from typing import Any

import numpy as np
import pytest

from mpissd.common.presets import resolve_model
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Cost
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.stepper import Stepper
from tests.gpu.agreement import relative_error, tolerance

pytestmark = pytest.mark.gpu
NO_COST = Cost(1, 0, 0, 0, 0, 0, 0, 1)
WAITER = Waiter(60.0, spin=True)
ROWS = [[1, 3, 8, 24], [5, 64]]  # few enough for a chain, if there is one, and too many


def stepper(backend: Any, model: str, options: ForwardOptions, rows: list[int]) -> Stepper:
    """A T = 1 model with one program for each row count."""
    shard = Shard(resolve_model(model))
    return Stepper(backend, SoloGroup(), shard, options, buckets=rows, num_sequences=1, seed=1)


def forward(model: Stepper, rows: int, seed: int) -> Any:
    """The hidden vectors after one forward of random tokens, on the host."""
    tokens = np.random.default_rng(seed).integers(0, 100_000, rows).astype(np.int32)
    model.upload(rows, tokens, lists=True)
    model.launch()
    model.wait(WAITER)
    return model.backend.to_host(model.stack.buffers.hidden)[:rows]


@pytest.mark.parametrize("buckets", ROWS)
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("context", [0, 128])
@pytest.mark.parametrize("model, lm_head", [("toy-target", True), ("1b@2L", False)])
def test_a_forward_is_the_oracles(
    backend: Any, model: str, lm_head: bool, context: int, fuse: bool, buckets: list[int]
) -> None:
    options = ForwardOptions(fuse=fuse, lm_head=lm_head, context=context, top_k=4)
    on_device, oracle = (stepper(b, model, options, buckets) for b in (backend, NumpyBackend()))
    chain = 4 * oracle.shard.shape.num_layers
    for rows in buckets:
        out, ref = forward(on_device, rows, seed=rows), forward(oracle, rows, seed=rows)
        assert relative_error(out, ref) <= tolerance(chain), f"{rows} rows"
        check_written(on_device, rows)
        # The ids read out are among the oracle's best: only near ties may swap.
        buffers, ids = oracle.stack.buffers, on_device.results().ids[0]
        scores = (buffers.hidden if buffers.logits is None else buffers.logits)[:rows]
        slack = 8 * tolerance(chain) * np.abs(scores).std(axis=1, keepdims=True)
        best = -np.sort(-scores, axis=1)[:, :4]
        assert (np.take_along_axis(scores, ids, axis=1) >= best - slack).all()
    on_device.close()


@pytest.mark.parametrize("buckets", ROWS)
@pytest.mark.parametrize("model", ["eagle:8b", "medusa:8b", "mlp:8b"])
def test_a_head_is_the_oracles(backend: Any, model: str, buckets: list[int]) -> None:
    """A head-sized draft's joined inputs, its layer, its heads, and the ids of each.

    Without LM heads, which NumPy would take a minute to fill.
    """
    options = ForwardOptions(fuse=True, top_k=4)
    on_device, oracle = (stepper(b, model, options, buckets) for b in (backend, NumpyBackend()))
    bound = tolerance(on_device.cost(1).num_products)
    for rows in buckets:
        out, ref = forward(on_device, rows, seed=rows), forward(oracle, rows, seed=rows)
        assert relative_error(out, ref) <= bound, f"{rows} rows"
        if oracle.stack.buffers.states is not None:
            found = backend.to_host(on_device.stack.buffers.states)[:rows]
            assert relative_error(found, oracle.stack.buffers.states[:rows]) <= bound
        check_written(on_device, rows)
        ids, expected = (s.results().ids for s in (on_device, oracle))
        assert (ids == expected).mean() > 0.9, f"{rows} rows"  # only near ties may swap
    on_device.close()


def check_written(model: Stepper, rows: int) -> None:
    """No poison is left in the first `rows` rows of any buffer that the model writes."""
    memory, names = model.stack.buffers, ["hidden", "entry", "states", "logits"]
    names += ["qkv", "middle", "gate_up"] * (model.shard.shape.num_layers > 0)
    for name in names:
        if (array := getattr(memory, name)) is not None:
            assert np.isfinite(model.backend.to_host(array)[:rows]).all(), name
    lists = model.stack.candidates.by_k[model.options.top_k]
    assert np.isfinite(model.backend.to_host(lists.values)[:rows]).all()


def test_a_graph_replays_what_eager_runs(gpu: None) -> None:
    from mpissd.engine.backend.cupy_backend import CupyBackend

    options = ForwardOptions(lm_head=True, top_k=3)
    graph, eager = (CupyBackend(0, graph=flag) for flag in (True, False))
    models = [stepper(b, "toy-target", options, [8]) for b in (graph, eager)]
    for seed in range(3):  # other tokens every time: a graph that had captured them would differ
        first, second = (forward(model, 8, seed) for model in models)
        assert np.array_equal(first, second)
        assert np.array_equal(*(model.results().ids for model in models))
        assert models[0].elapsed_s() > 0
    assert models[0].current._graph and not models[1].current._graph
    graph.close()
    eager.close()


def test_a_program_is_asynchronous_and_timed(backend: Any) -> None:
    read = backend.read(4 * 10**9)
    program = backend.program(read, NO_COST)
    program.launch()
    assert not program.done()  # 4 GB take most of a millisecond
    program.wait(WAITER)
    assert 1e-4 < program.elapsed_s() < 1.0
