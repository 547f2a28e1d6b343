"""The result-row keys that a workload fills."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowFields:
    """Values of the result-row keys that a workload fills; None is written as null."""

    acceptance: str | None = None
    acceptance_fast: str | None = None
    hit_law: str | None = None
    temperature: float | None = None
    vocab: int | None = None
    order: int | None = None
    divergence: float | None = None
    saguaro_c: float | None = None
    prompt_tokens: int | None = None
    recording: str | None = None
