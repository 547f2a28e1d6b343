"""Doubts about a job that can run all the same: one line on stderr, once."""

from __future__ import annotations

import sys
from functools import cache

from mpissd.engine.job import Job
from mpissd.engine.model.transformer.sources import doubt


def drafts_of(job: Job) -> dict[str, str]:
    """Returns the drafts with weights of a job, as its row names them: {name: model name}."""
    if not job.config.is_transformer or not job.drafts_by_transformer:
        return {}
    return {"draft": job.draft_where}


def doubts(job: Job) -> list[str]:
    """Returns a line for each draft that was made for another target than the job's."""
    lines = (doubt(each, job.target_where) for each in drafts_of(job).values())
    return [line for line in lines if line]


def tell_doubts(job: Job) -> None:
    """Writes the doubts about a job to stderr, each once in this process; for the lead."""
    for line in doubts(job):
        _tell(line)


@cache
def _tell(line: str) -> None:
    sys.stderr.write(f"mpissd: {line}\n")
    sys.stderr.flush()
