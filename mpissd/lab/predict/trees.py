"""Chooses the tree of --tree=auto from a pair's laws and a device's profile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.engine.backend.profile import Profile, device_kind, known_profiles
from mpissd.lab.predict.advice import with_laws
from mpissd.lab.predict.derive import shipped_profiles, with_hosts
from mpissd.lab.predict.search import Space, candidates, placed, weigh

_GAIN = 1.03  # a tree must promise so many times the best chain's rate


def profile_of(device_name: str) -> Profile:
    """Returns the shipped profile of a device; raises ConfigError if there is none."""
    kind = device_kind(device_name)
    if (profile := shipped_profiles().get(kind)) is not None:
        return profile
    known = ", ".join(known_profiles())
    raise ConfigError(f"tree=auto on {kind}: no profile of it: allowed: tree=1..256, or on {known}")


def with_best_tree(
    config: RunConfig, profile: Profile, tp: int, levels: int | None = None
) -> tuple[RunConfig, dict[str, Any]]:
    """Returns a configuration of --tree=auto with the fastest tree, or chain, and their rates.

    levels: K, if it is given (None: any). A chain stays unless the best tree is _GAIN as fast.
    Raises ConfigError if laws, forwards or host costs are not known, or for SSD.
    """
    if config.mode == "ar":
        return replace(config, tree=None), {}
    if config.mode == "ssd":
        raise ConfigError(
            "tree=auto with mode=ssd: predictions err by more than a tree gains: allowed: mode=sd"
        )
    if config.workload not in ("gemm", "text", "replay"):
        raise ConfigError(f"tree=auto with workload={config.workload}: allowed: gemm, text, replay")
    if config.workload != "gemm" and config.laws is None:
        raise ConfigError(
            f"tree=auto with workload={config.workload}: needs laws: a file of `mpissd pair`"
        )
    whole = "transformer" if config.is_transformer else config.forward
    imposed = replace(config, tree=None, workload="gemm", recording=None, forward=whole)
    if config.laws is not None:
        imposed = with_laws(imposed, config.context > 0)
    place = placed(imposed, with_hosts(profile), tp, tp + config.drafts)
    every = candidates(imposed, place, tp + config.drafts, Space((), ()), trees=True)
    choices = [
        choice
        for choice in every
        if choice.mode in ("sd", "tree") and choice.num_drafts == config.drafts
        if levels in (None, choice.lookahead)
    ]
    weighed = weigh(choices, imposed, [place])
    chains = [choice for choice in weighed if choice.tree is None]
    if not chains:
        raise ConfigError(
            f"tree=auto: profile {profile.name!r} has no host costs of SD, D={config.drafts}, or "
            "no forwards of so many rows: allowed: tree=1..256"
        )
    chain, best = (max(those, key=lambda one: one.tok_per_s) for those in (chains, weighed))
    if best.tok_per_s < _GAIN * chain.tok_per_s:
        best = chain
    chosen = {
        "tree": best.tree,
        "lookahead": best.lookahead,
        "tok_per_s": best.tok_per_s,
        "chain": {"lookahead": chain.lookahead, "tok_per_s": chain.tok_per_s},
        "profile": profile.name,
        "acceptance": imposed.acceptance_text,
    }
    return replace(config, tree=best.tree, lookahead=best.lookahead), chosen
