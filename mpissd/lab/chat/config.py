"""The configuration of `chat`: a run's, without what only a measurement has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.flags import Checked, choice, contained, flag, flags_of, integer, switch
from mpissd.common.implied import with_text
from mpissd.common.workloads import refused_flags

_MEASURED = (
    "prompt prompts prompt_ids batch_size rounds warmup_rounds trace ledger_ab dry_run world_size "
    "out progress on_draft_loss num_drafts chat_template workload"
).split()
_OF_OTHERS = [name for name, _ in refused_flags("text")]
_TAKEN = frozenset(flags_of(RunConfig)).difference(_MEASURED, _OF_OTHERS)


@dataclass(frozen=True)
class ChatConfig(Checked):
    """Flags of `chat`: those of a run that are about models, methods and sampling, and T."""

    run: RunConfig = contained(
        RunConfig,
        only=_TAKEN | {"workload", "num_tokens", "show"},
        workload=flag("text", choice("text"), "what chat decodes"),
        num_tokens=flag(512, integer(1), "most tokens of an answer"),
        show=flag(True, switch, "colour each token by what drafted it"),
    )
    tp: int = flag(1, integer(1), "target ranks")
    drafts: int = flag(1, integer(0, 1), "draft ranks; 0: ar, or sd with the draft on the lead")

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Adds pair=smollm2, the default pair with weights, if the flags name no model."""
        return with_text({"workload": "text", **super().completed(flags)})

    def check_drafts(self) -> None:
        """Refuses mode=ssd without a draft rank."""
        if self.run.mode == "ssd" and not self.drafts:
            raise ConfigError("drafts=0 with mode=ssd: allowed: 1 (or mode=sd, mode=ar)")

    @property
    def num_ranks(self) -> int:
        """Target and draft ranks of the job."""
        return self.tp + self.drafts

    def fit_world(self, num_ranks: int) -> None:
        """Refuses a launcher that started another number of ranks."""
        if num_ranks != self.num_ranks:
            raise ConfigError(
                f"chat with tp={self.tp}, drafts={self.drafts} on {num_ranks} ranks: allowed: "
                f"{self.num_ranks}"
            )

    def of_mode(self, mode: str) -> RunConfig:
        """Returns the configuration that answers in this mode; raises ConfigError if none does."""
        return replace(self.run, mode=mode, num_drafts=0 if mode == "ar" else self.drafts)
