"""A trained draft: its files, its report and its evaluation."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpissd.engine.model.transformer.checkpoint import dequantize, quantize
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.sources import origin_of
from mpissd.learn import card, export
from mpissd.learn.config import DistillConfig
from mpissd.learn.evaluate import judge, summary
from mpissd.learn.llama import mapped, named
from mpissd.learn.sample import Samples
from mpissd.learn.source import Source

Log = Callable[[str], None]


class Result:
    """One draft, its training's curves, and the folder that it is written to."""

    def __init__(
        self,
        config: DistillConfig,
        source: Source,
        pair: Any,
        architecture: TransformerConfig,
        folder: Path,
        facts: dict[str, Any],
    ) -> None:
        self.config, self.pair, self.architecture, self.folder = config, pair, architecture, folder
        own = source.checkpoint
        head = "target" if architecture.kind else config.head
        self.about = {**origin_of(own).to_dict(), "head": head}
        self.report = {"target": own.name, "sha256": own.sha256, **facts}
        self.curves: list[dict[str, Any]] = []

    def point(self, point: dict[str, Any], log: Log) -> None:
        """Keeps a point of the training's curves, and shows some of them."""
        self.curves.append(point)
        if len(self.curves) % 10 == 1 or "stopped" in point:
            log(f"trained {point}")

    @property
    def draft(self) -> Any:
        """The draft as it was trained."""
        return self.pair.draft

    def rounded(self) -> Any:
        """Returns the pair with the draft as it is stored."""
        return dataclasses.replace(self.pair, draft=mapped(self.pair.draft, rounded))

    def figures(self, pair: Any, asked: Samples, deadline: float) -> dict[str, Any]:
        """Returns the figures of a pair on answers."""
        return summary(judge(pair, asked, deadline))

    def arrays(self, draft: Any) -> dict[str, Any]:
        """Returns the weights of a draft that are stored, by their names in files."""
        weights = named(draft, self.architecture)
        if self.config.head == "target":
            del weights["lm_head.weight"]
        return {name: tensor.float().cpu().numpy() for name, tensor in weights.items()}

    def trained(self, draft: Any) -> Result:
        """Takes the trained draft."""
        self.pair = dataclasses.replace(self.pair, draft=draft)
        return self

    def try_save(self, draft: Any, log: Log) -> bool:
        """Saves the draft so far; logs one line if the files cannot be written."""
        try:
            log(self.save(draft))
        except OSError as error:
            told = error.strerror or error
            log(f"{self.folder}: {told}: not saved; the files of before are kept")
            return False
        return True

    def save(self, draft: Any) -> str:
        """Writes the quantised draft, its curves and a report; returns a summary line.

        An OSError leaves the folder's files as they were.
        """
        arrays = self.arrays(draft)
        ids = self.pair.head_ids.cpu().numpy().astype(np.int32)
        with export.whole_folder(self.folder) as folder:
            stored = export.quantized(arrays, ids)
            size = export.save(folder, self.architecture, stored, self.about)
            export.write_lines(folder / "curves.jsonl", self.curves)
            self.report |= {
                "parameters": sum(a.size for a in arrays.values()) / 1e6,
                "bytes": size,
                "steps": max([0, *(point.get("step", 0) for point in self.curves)]),
            }
            self._write_report(folder)
        return f"wrote {self.folder}: {size / 1e6:.2f} MB of weights"

    def _write_report(self, folder: Path) -> None:
        export.write_json(folder / "report.json", self.report)
        card.write(folder, self.report, self.config.license)

    def evaluate(self, answers: Any, deadline: float, log: Log) -> None:
        """Judges the draft as it is stored on held-out answers; completes the report.

        answers: (name, samples) each; those that are reached before the deadline.
        """
        stored, figures = self.rounded(), dict[str, Any]()
        self.report["evaluation"] = figures
        for name, asked in answers:
            figures[name] = self.figures(stored, asked, deadline)
            with export.whole_folder(self.folder) as folder:
                self._write_report(folder)
            log(f"{name}: {figures[name]}")
            if time.monotonic() > deadline:
                break


def rounded(tensor: Any) -> Any:
    """Returns a matrix rounded as quantising rounds it; a vector unchanged."""
    if tensor.ndim == 1:
        return tensor
    stored = dequantize(*quantize(tensor.float().cpu().numpy()))
    return torch.from_numpy(stored).to(tensor.device)
