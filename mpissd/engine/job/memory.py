"""Fits a job into its devices' memory: weights, keys and values, the attention's sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.engine.job.job import Job

_FLOAT32 = 4  # bytes of a weight on a CPU
_SPARE_BYTES = 1 << 30  # device memory that stays free for activations, graphs and libraries
_LEAST_CONTEXT = 256  # tokens; a default context is not made smaller


def check_memory(
    job: Job, itemsize: int, memory_bytes: int | None, draft_memory: int | None
) -> None:
    """Refuses a job that needs more bytes a rank than its device has (None: unknown).

    itemsize: bytes of a weight. memory_bytes: of a target rank. draft_memory: of a draft rank. The
    error names the largest batch and the largest context that fit, each with the other as asked.
    """
    target, draft = job.rank_bytes(itemsize)
    rooms = memory_bytes, draft_memory
    for name, need, have in (
        (f"{job.target.name} at tp={job.tp}", target, memory_bytes),
        (job.draft.name if job.draft else "", draft, draft_memory),
    ):
        if have is None or not need or need + _SPARE_BYTES <= have:
            continue
        fixes = [f"--{field}={most}" for field in ("batch_size", "context")
                 if (most := most_that_fits(job, field, itemsize, *rooms))]  # fmt: skip
        # CPU ranks share one memory, so a larger T does not help.
        is_target = need == target and have == memory_bytes
        fixes += ["a larger TP"] * (is_target and itemsize != _FLOAT32)
        fixes += ["fewer layers (70b@8L)"] * is_target + ["another pair"]
        fixes += ["--backend=emulated"] * (itemsize == _FLOAT32 and not job.config.is_text)
        *others, last = fixes
        raise ConfigError(
            f"{name} needs {need / 1e9:.1f} GB a rank and 1.1 GB to spare; the device has "
            f"{have / 1e9:.1f} GB: use {', '.join(others)}{' or ' * bool(others)}{last}"
        )


def most_that_fits(
    job: Job, field: str, itemsize: int, memory_bytes: int | None, draft_memory: int | None
) -> int:
    """Returns the largest value of batch_size or context with which a job fits, or 0.

    At most the job's own value, its default context included; the other flags stay as they are.
    """
    asked = job.config.batch_size if field == "batch_size" else _context(job)
    low, high = 0, asked
    while low < high:
        middle = (low + high + 1) // 2
        told: dict[str, Any] = {field: middle}
        smaller = replace(job, config=replace(job.config, **told))
        if fits(smaller, itemsize, memory_bytes, draft_memory):
            low = middle
        else:
            high = middle - 1
    return low


def fits(job: Job, itemsize: int, memory_bytes: int | None, draft_memory: int | None) -> bool:
    """Returns whether a job fits into memories of these sizes (None: unknown, any job does)."""
    needed = job.rank_bytes(itemsize)
    rooms = zip(needed, (memory_bytes, draft_memory), strict=True)
    return all(have is None or not need or need + _SPARE_BYTES <= have for need, have in rooms)


def sized(job: Job, itemsize: int, memory_bytes: int | None, draft_memory: int | None) -> Job:
    """Returns a job of text whose default context is as long as memory allows; others as they are.

    A context given by --context is never changed, nor a server's, which has a pool of pages.
    """
    has_default = job.config.is_text and not job.config.context and job.serving is None
    if not has_default or fits(job, itemsize, memory_bytes, draft_memory):
        return job
    most = most_that_fits(job, "context", itemsize, memory_bytes, draft_memory)
    if most < _LEAST_CONTEXT:
        return job
    return replace(job, config=replace(job.config, context=most))


def _context(job: Job) -> int:
    return job.longest if job.config.is_text else job.config.context
