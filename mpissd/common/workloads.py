"""The names of the workloads, and where each one is defined.

A workload is a class (engine/workload/base.Workload) that is imported when a job asks for it.
`register` adds one; its name is then a value of --workload.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mpissd.common.errors import unknown


@dataclass(frozen=True)
class Known:
    """A registered workload: "module:class", and the flags of other workloads that it reads."""

    where: str
    flags: frozenset[str]


_KNOWN: dict[str, Known] = {}


def register(name: str, where: str, flags: str = "") -> None:
    """Adds a workload; raises ValueError if the name is taken.

    where: "module:class" of the Workload. flags: the flags of some workloads (`workloads` in
    mpissd.common.config) that it reads too, separated by spaces.
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


def readers(flag: str, declared: Collection[str]) -> list[str]:
    """Returns the workloads that read a flag: those that its field declares (none: every one), and
    registered ones that name it."""
    others = (name for name, entry in _KNOWN.items() if flag in entry.flags)
    return sorted({*declared, *others} if declared else _KNOWN)


register("gemm", "mpissd.engine.workload.gemm:GemmWorkload")
register("markov", "mpissd.engine.workload.markov:MarkovWorkload")
register("text", "mpissd.engine.workload.text.workload:TextWorkload")
register("replay", "mpissd.engine.workload.replay.workload:ReplayWorkload")
