"""A forward's products by PyTorch as a CUDA graph, for comparison (see replays.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]


def graph_seconds(
    shapes: Sequence[tuple[int, int]],
    layers: int,
    rows: int,
    device: int,
    samples: int,
    queued: int,
) -> list[float]:
    """Returns the seconds of each sample's last replay: x [rows, in] through every [in, out]
    weight.

    Each weight multiplies the first columns of the previous output.
    """
    kind: dict[str, Any] = {"device": f"cuda:{device}", "dtype": torch.float16}
    outs = [torch.empty((rows, columns), **kind) for _, columns in shapes]
    x = torch.randn((rows, shapes[0][0]), **kind)
    weights = [
        [torch.randn(shape, **kind).mul_(shape[0] ** -0.5) for shape in shapes]
        for _ in range(layers)
    ]

    def forward() -> None:
        source = x
        for layer in weights:
            for weight, out in zip(layer, outs, strict=True):
                torch.mm(source[:, : len(weight)], weight, out=out)
                source = out

    return _replays(forward, samples, queued)


def _replays(forward: Any, samples: int, queued: int) -> list[float]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            forward()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    seconds = []
    for _ in range(samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(queued - 1):
            graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds
