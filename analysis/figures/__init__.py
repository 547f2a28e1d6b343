"""One function a figure: rows in, a matplotlib figure out."""

from __future__ import annotations

from analysis.figures.registry import FIGURES, Spec

__all__ = ["FIGURES", "Spec"]
