"""The names of the workloads and of the lookups, and the classes that implement them.

A workload decides the tokens; its class (engine/oracle/workload.Workload) is imported when a job
asks for it. `register` adds a workload, whose name is then a value of --workload.
"""

from collections.abc import Collection
from importlib import import_module
from typing import Any

from mpissd.common.errors import unknown

_ENGINE = "mpissd.engine.oracle"
# {workload: ("module:class", flags of other workloads that it uses, too)}
_KNOWN: dict[str, tuple[str, frozenset[str]]] = {
    "gemm": (f"{_ENGINE}.imposed:GemmWorkload", frozenset()),
    "markov": (f"{_ENGINE}.markov:MarkovWorkload", frozenset()),
    "text": (f"{_ENGINE}.logits:TextWorkload", frozenset()),
    "replay": (f"{_ENGINE}.replay:ReplayWorkload", frozenset()),
}
# Lookups by their value of --lookup: "module:class", a subclass of engine.law.lookup.Lookup.
LOOKUPS = {
    "prompt": "mpissd.engine.law.lookup:PromptLookup",
    "suffix": "mpissd.engine.law.lookup:SuffixLookup",
}


def register(name: str, where: str, flags: str = "") -> None:
    """Adds a workload; raises ValueError if the name is taken. where: "module:class". flags: flags
    declared for other workloads (common.config) that this one uses too, separated by spaces; a
    workload's name stands for all flags of that workload."""
    if name in _KNOWN:
        raise ValueError(f"workload {name!r} is registered already, as {_KNOWN[name][0]}")
    _KNOWN[name] = where, frozenset(flags.split())


def class_of(name: str) -> Any:
    """Imports and returns the class of the workload `name`; raises ConfigError if it is unknown."""
    return imported(_KNOWN[parse_name("workload", name)][0])


def imported(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def is_text(name: str) -> bool:
    """Returns whether a workload's tokens are text: `text`, or a registered class says so."""
    where, _ = _KNOWN.get(name, (_ENGINE, None))
    return name == "text" or (not where.startswith(_ENGINE) and bool(class_of(name).is_text))


def parse_name(flag: str, text: str) -> str:
    if text not in _KNOWN:
        raise unknown(flag, text, _KNOWN)
    return text


def readers(flag: str, declared: Collection[str]) -> list[str]:
    """Returns the names of the workloads that use `flag`: those in `declared`, and registered ones
    that name the flag; all workloads if `declared` is empty."""
    others = (name for name, (_, flags) in _KNOWN.items() if flags & {flag, *declared})
    return sorted({*declared, *others} if declared else _KNOWN)
