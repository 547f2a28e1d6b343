"""The names of the workloads: where each one is defined, and the flags that it reads.

A workload is a class (engine/workload/base.Workload) that is imported when a job asks for it.
`register` adds one; its name is then a value of --workload.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.errors import unknown


@dataclass(frozen=True)
class Known:
    """A registered workload: `where` is "module:class", `flags` are those specific to some
    workloads."""

    where: str
    flags: frozenset[str]


_KNOWN: dict[str, Known] = {}


def register(name: str, where: str, flags: str = "") -> None:
    """Adds a workload; raises ValueError if the name is taken.

    where: "module:class" of the Workload. flags: the flags that it reads and other workloads may
    not, separated by spaces; a flag that no workload names may be given with every workload.
    """
    if name in _KNOWN:
        raise ValueError(f"workload {name!r} is registered already, as {_KNOWN[name].where}")
    _KNOWN[name] = Known(where, frozenset(flags.split()))


def known(name: str) -> Known:
    """Returns the workload of this name; raises ConfigError, which lists the names, for others."""
    if name not in _KNOWN:
        raise unknown("workload", name, _KNOWN)
    return _KNOWN[name]


def parse_name(flag: str, text: str) -> str:
    """Parses the name of a workload, as the flags' parsers do."""
    if text not in _KNOWN:
        raise unknown(flag, text, _KNOWN)
    return text


def refused_flags(name: str) -> list[tuple[str, list[str]]]:
    """Returns each flag that this workload does not read, with the workloads that do."""
    foreign = frozenset().union(*(entry.flags for entry in _KNOWN.values())) - known(name).flags
    return [
        (flag, sorted(other for other, entry in _KNOWN.items() if flag in entry.flags))
        for flag in sorted(foreign)
    ]


register(
    "gemm",
    "mpissd.engine.workload.gemm:GemmWorkload",
    "alpha acceptance acceptance_fast p_hit hit_a hit_r hit_law laws lookup",
)
register(
    "markov",
    "mpissd.engine.workload.markov:MarkovWorkload",
    "temperature vocab order divergence saguaro_c prompt_tokens stop_token",
)
register(
    "text",
    "mpissd.engine.workload.text.workload:TextWorkload",
    "temperature top_p saguaro_c stop_token prompt prompts prompt_ids chat_template stop show "
    "lookup laws",
)
register("replay", "mpissd.engine.workload.replay.workload:ReplayWorkload", "recording lookup laws")
