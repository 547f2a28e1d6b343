"""The configuration of `chat`: a run's, without what only a measurement has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpissd.common.config import RunConfig
from mpissd.common.flags import choice, contained, flag, integer, switch
from mpissd.common.implied import with_measured, with_text
from mpissd.common.ranks import ANSWERING, RanksFlags


@dataclass(frozen=True)
class ChatConfig(RanksFlags):
    """Flags of `chat`: those of a run that are about models, methods and sampling, and T."""

    run: RunConfig = contained(
        RunConfig,
        only=ANSWERING | {"workload", "num_tokens", "show"},
        workload=flag("text", choice("text"), "what chat decodes"),
        num_tokens=flag(512, integer(1), "most tokens of an answer"),
        show=flag(True, switch, "colour each token by what drafted it"),
    )

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Adds pair=smollm2, the default pair with weights, if the flags name no model, and its own
        K and fan-out."""
        return with_measured(with_text({"workload": "text", **super().completed(flags)}))
