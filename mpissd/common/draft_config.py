"""The flags of `draft`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpissd.common.config import RunConfig, with_measured, with_text
from mpissd.common.flags import Checked, choice, contained, flag, words


@dataclass(frozen=True)
class DraftConfig(Checked):
    """Flags of `draft`: those of its models and its rounds, and its socket."""

    run: RunConfig = contained(
        RunConfig,
        only="pair target draft mode lookahead fan_out backup backup_lookahead lookup batch_size "
        "context backend graph deadline_s workload".split(),
        mode=flag("ssd", choice("sd", "ssd"), "sd: drafts only when asked; ssd: also ahead"),
        workload=flag("text", choice("text"), "what draft drafts"),
    )
    socket: str = flag("mpissd.sock", words, "Unix socket to serve; fd:N: an inherited one")

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Adds pair=smollm2 if the flags name no model, and that pair's K and fan-out."""
        return with_measured(with_text({"workload": "text", **super().completed(flags)}))
