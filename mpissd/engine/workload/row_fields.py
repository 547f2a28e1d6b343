"""The result-row keys that a workload fills."""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.workload_flags import WorkloadFlags
from mpissd.engine.spec.lawfile import load_laws


def laws_label(flags: WorkloadFlags) -> str | None:
    """Returns the name and digest of the file of laws; None without one."""
    return None if flags.laws is None else load_laws(flags.laws).label


@dataclass(frozen=True)
class RowFields:
    """Values of the result-row keys that a workload fills; None is written as null."""

    acceptance: str | None = None
    acceptance_fast: str | None = None
    hit_law: str | None = None
    laws: str | None = None
    temperature: float | None = None
    vocab: int | None = None
    order: int | None = None
    divergence: float | None = None
    saguaro_c: float | None = None
    prompt_tokens: int | None = None
    top_p: float | None = None
    stop: list[str] | None = None
    num_prompts: int | None = None
    prompts_sha256: str | None = None
    recording: str | None = None
    lookup: str | None = None
