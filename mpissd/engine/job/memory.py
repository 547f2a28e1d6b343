"""Fits a job into its devices' memory: weights, keys and values, the attention's sums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.engine.job.job import Job

_FLOAT32 = 4  # bytes of a weight on a CPU
_SPARE_BYTES = 1 << 30  # device memory that stays free for activations, graphs and libraries
_LEAST_CONTEXT = 256  # tokens; a default context is not made smaller


@dataclass(frozen=True)
class Room:
    """The memory of a job's devices: bytes of a target rank's and a draft rank's (None: unknown).

    itemsize: bytes of a weight.
    """

    itemsize: int
    target: int | None
    draft: int | None

    def fits(self, job: Job) -> bool:
        """Returns whether a job fits; any job fits into memory of unknown size."""
        rooms = zip(job.rank_bytes(self.itemsize), (self.target, self.draft), strict=True)
        return all(have is None or not need or need + _SPARE_BYTES <= have for need, have in rooms)

    def check(self, job: Job) -> None:
        """Refuses a job that does not fit.

        The error names the largest batch and the largest context that fit, each with the other as
        asked.
        """
        if self.fits(job):
            return
        target, draft = job.rank_bytes(self.itemsize)
        name, need, have = f"{job.target.name} at tp={job.tp}", target, self.target
        is_target = have is not None and need + _SPARE_BYTES > have
        if not is_target:
            name, need, have = job.draft.name if job.draft else "", draft, self.draft
        fixes = [f"--{field}={most}" for field in ("batch_size", "context")
                 if (most := self.most_that_fits(job, field))]  # fmt: skip
        # CPU ranks share one memory, so a larger T does not help.
        fixes += ["a larger TP"] * (is_target and self.itemsize != _FLOAT32)
        fixes += ["fewer layers (70b@8L)"] * is_target + ["another pair"]
        fixes += ["--backend=emulated"] * (self.itemsize == _FLOAT32 and not job.config.is_text)
        *others, last = fixes
        raise ConfigError(
            f"{name} needs {need / 1e9:.1f} GB a rank and 1.1 GB to spare; the device has "
            f"{(have or 0) / 1e9:.1f} GB: use {', '.join(others)}{' or ' * bool(others)}{last}"
        )

    def most_that_fits(self, job: Job, field: str) -> int:
        """Returns the largest value of batch_size or context with which a job fits, or 0.

        At most the job's own value, its default context included; the other flags stay.
        """
        context = job.longest if job.config.is_text else job.config.context
        low, high = 0, job.config.batch_size if field == "batch_size" else context
        while low < high:
            middle = (low + high + 1) // 2
            changes: dict[str, Any] = {field: middle}
            if self.fits(replace(job, config=replace(job.config, **changes))):
                low = middle
            else:
                high = middle - 1
        return low

    def sized(self, job: Job) -> Job:
        """Returns a job of text whose default context is as long as memory allows; others stay.

        A context given by --context is never changed, nor a server's, which has a pool of pages.
        """
        has_default = job.config.is_text and not job.config.context and job.serving is None
        if not has_default or self.fits(job):
            return job
        most = self.most_that_fits(job, "context")
        if most < _LEAST_CONTEXT:
            return job
        return replace(job, config=replace(job.config, context=most))
