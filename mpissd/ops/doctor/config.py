"""The configuration of the command `doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpissd.common.config import RunConfig
from mpissd.common.default_flags import PROMPTS, with_text
from mpissd.common.flags import Checked, contained, flag, integer, number, switch

_PROMPT = "Hello"


@dataclass(frozen=True)
class DoctorConfig(Checked):
    """The configuration of `doctor`: the examined run's flags, and flags of the examination."""

    run: RunConfig = contained(
        RunConfig, deadline_s=flag(60.0, number(0.1), "longest examination, in seconds")
    )
    tp: int | None = flag(None, integer(1), "target ranks to start (default 1; not under mpirun)")
    json: bool = flag(False, switch, "under mpirun: print what the ranks see as one line of JSON")

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Adds the flags implied by a prompt or a pair, and a prompt if none is given."""
        given = with_text(super().completed(flags))
        if given.get("workload") == "text" and not given.keys() & set(PROMPTS):
            given["prompt"] = _PROMPT
        return given
