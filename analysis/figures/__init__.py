"""The figures: one function each, from rows to a matplotlib figure."""

from __future__ import annotations

from analysis.figures.registry import FIGURES, Spec

__all__ = ["FIGURES", "Spec"]
