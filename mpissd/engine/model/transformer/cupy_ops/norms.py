"""Activations that wait for their norm: RMSNorm in two parts (arithmetic.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpissd.engine.model.transformer.cupy_ops.launching import Launcher

TILE = 16
LATE_FILES = ("types", "ampere", "skinny", "arithmetic", "late")
SKINNY_MACROS = (
    ("ROW_TILES", 1),
    ("TILES", 1),
    ("STAGES", 6),
)  # unused by kernels that do not multiply


@dataclass(frozen=True)
class Normed:
    """Rows of the residual stream times a norm's weight, and what is missing to their norm.

    values: float16 [rows, width], times a power of two. squares: float32 [2, rows, width / 16], the
    sum of each tile. norms, powers, factors: float32 [rows], 1 / rms, the power of two, and the
    factor of sums over `values`. A whole forward in one kernel has two norms in turn, the others
    the first.
    """

    values: Any
    squares: Any
    norms: Any
    powers: Any  # [2, rows]
    factors: Any

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width."""
        rows, width = self.values.shape
        return rows, width

    @property
    def state(self) -> tuple[Any, ...]:
        """The arrays that the kernels `norm_…` write beside the values."""
        return self.squares, self.norms, self.powers, self.factors


def normed(launcher: Launcher, values: Any) -> Normed:
    """Returns what `values` need beside them."""
    rows, width = values.shape
    shapes = (2, rows, width // TILE), (rows,), (2, rows), (rows,)
    return Normed(values, *(launcher.zeros(shape, np.float32) for shape in shapes))
