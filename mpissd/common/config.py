"""The configuration of a run: joins the groups of flags, and checks them before MPI starts.

The flags of the command line, their help and their defaults are the fields of the groups
(mpissd.common.flag_groups), so a flag is added in one place. Values arrive as text and are typed by
their fields (mpissd.common.flags).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from mpissd.common.errors import ConfigError
from mpissd.common.flag_groups import (
    MachineFlags,
    MeasurementFlags,
    MethodFlags,
    ModelFlags,
    OutputFlags,
)
from mpissd.common.flags import flags_of, parse_into
from mpissd.common.implied import with_measured, with_text
from mpissd.common.learner_flags import LearnerFlags
from mpissd.common.workload_flags import WorkloadFlags
from mpissd.common.workloads import refused_flags

_ANSWER_TOKENS = 256


@dataclass(frozen=True)
class RunConfig(  # a dataclass lists the fields of its last base first
    OutputFlags,
    LearnerFlags,
    MeasurementFlags,
    MachineFlags,
    WorkloadFlags,
    ModelFlags,
    MethodFlags,
):
    """All flags of a run; None means not given, and is resolved when the machine is known."""

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Adds what a prompt, or a pair with weights, stands for, and a shipped pair's own K and
        fan-out."""
        return with_measured(with_text(super().completed(flags)))

    @property
    def is_text(self) -> bool:
        """Whether the models' own logits decide."""
        return self.workload == "text"

    @property
    def is_transformer(self) -> bool:
        """Whether forwards are those of a whole transformer, with attention over a KV cache."""
        return self.is_text or self.forward == "transformer"

    @property
    def fast_lookup(self) -> str | None:
        """How a fast backup finds what to copy; None if none may draft."""
        return self.lookup if self.mode != "ar" and self.backup in ("fast", "auto") else None

    @property
    def token_limit(self) -> int | None:
        """Most tokens of a sequence; an answer that nothing limits has 256."""
        unlimited = self.is_text and self.num_tokens is None and self.rounds is None
        return _ANSWER_TOKENS if unlimited else self.num_tokens

    @property
    def max_rounds(self) -> int | None:
        """Most measured rounds; None: rounds continue until every sequence has ended."""
        return self.rounds if self.is_text else super().max_rounds

    def check_forward(self) -> None:
        """Refuses text from a model of products alone."""
        if self.is_text and self.forward == "gemm":
            raise ConfigError("forward=gemm with workload=text: allowed: transformer")

    def check_models(self) -> None:
        """Refuses one model of a pair without the other, where both are needed."""
        needs_draft = self.mode != "ar" and not (self.is_lookup and self.draft is None)
        if (self.target is None) != (self.draft is None) and needs_draft:
            missing, there = ("draft", "target") if self.draft is None else ("target", "draft")
            raise ConfigError(f"{missing}: needed beside {there} with mode={self.mode}")
        if self.draft is not None and self.target is None:
            raise ConfigError("target: needed beside draft")

    def check_workload(self) -> None:
        """Refuses flags that only other workloads read: they would change nothing."""
        for name, readers in refused_flags(self.workload):
            value = getattr(self, name)
            if value != flags_of(RunConfig)[name].default:
                raise ConfigError(
                    f"{name}={value} with workload={self.workload}: allowed: "
                    f"workload={' or '.join(readers)}"
                )

    def check_saguaro(self) -> None:
        """Refuses Saguaro sampling where no cache is filled, or where tokens are not sampled."""
        damped = self.saguaro_c is not None and self.saguaro_c < 1
        if damped and (self.mode != "ssd" or self.temperature == 0):
            at = f"mode={self.mode}, temperature={self.temperature:g}"
            raise ConfigError(
                f"saguaro_c={self.saguaro_c} with {at}: allowed: 1, or mode=ssd and a "
                "temperature above 0"
            )

    def check_groups(self) -> None:
        """Refuses several target groups without a draft rank, and what only one group has."""
        if self.groups == 1:
            return
        if not self.drafts:
            at = f"mode={self.mode}, num_drafts={self.drafts}"
            raise ConfigError(f"groups={self.groups} with {at}: allowed: 1, or a draft rank")
        if self.on_draft_loss == "ar":
            raise ConfigError(f"groups={self.groups} with on_draft_loss=ar: allowed: abort")
        for name in ("trace", "ledger_ab", "show"):
            if getattr(self, name):
                raise ConfigError(f"{name} with groups={self.groups}: allowed: groups=1")

    def check_learners(self) -> None:
        """Refuses a learner where no draft rank's model drafts text."""
        if not self.learners:
            return
        allowed = (
            ("workload", self.workload, "text"),
            ("num_drafts", self.drafts, 1),
            ("on_draft_loss", self.on_draft_loss, "abort"),
            ("groups", self.groups, 1),
        )
        for name, value, wanted in allowed:
            if value != wanted:
                raise ConfigError(f"learners=1 with {name}={value}: allowed: {name}={wanted}")
        if self.is_lookup:
            raise ConfigError("learners=1 with backup=fast in sd: allowed: a draft model")

    def check_draft_loss(self) -> None:
        """Refuses on_draft_loss=ar where the run cannot go on without its draft."""
        if self.on_draft_loss != "ar":
            return
        if self.drafts != 1:
            raise ConfigError(f"on_draft_loss=ar with num_drafts={self.drafts}: allowed: 1")
        if self.temperature > 0:  # verifying sampled tokens needs the lost draft's distributions
            raise ConfigError(
                f"on_draft_loss=ar with temperature={self.temperature:g}: allowed: temperature=0"
            )
        for name in ("trace", "ledger_ab"):
            if getattr(self, name):
                raise ConfigError(f"{name} with on_draft_loss=ar: allowed: on_draft_loss=abort")

    @property
    def digest(self) -> str:
        """Hash that names the configuration: equal flags in any order have equal digests."""
        named = {
            name: getattr(self, name)
            for name, field in flags_of(RunConfig).items()
            if _is_in_digest(field.metadata["in_digest"], getattr(self, name) != field.default)
        }
        text = json.dumps(named, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_in_digest(in_digest: bool | str, is_said: bool) -> bool:
    return is_said if in_digest == "said" else bool(in_digest)


def parse_flags(flags: Mapping[str, str]) -> RunConfig:
    """Parses flags into a RunConfig; raises ConfigError, with a suggestion for unknown names."""
    return parse_into(RunConfig, flags)
