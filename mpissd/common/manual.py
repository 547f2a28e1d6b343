"""Gives fire a command's signature, and a help text without fire's own words."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from mpissd.common.flags import flags_of


def signed(command: Any, kind: type) -> Any:
    """Gives a function (*words, **flags) the signature of a configuration's flags, for fire."""
    command.__signature__ = inspect.Signature(
        [
            inspect.Parameter("words", inspect.Parameter.VAR_POSITIONAL),
            *_parameters(kind),
            inspect.Parameter("flags", inspect.Parameter.VAR_KEYWORD),
        ]
    )
    return command


def manual(about: str, kind: type, words: Sequence[str] = ()) -> Any:
    """Returns a function that does nothing, of which fire shows a command's help.

    words: the flags that arguments without -- give, in order.
    """

    def shown() -> None: ...

    ways = [inspect.Parameter.POSITIONAL_ONLY] * len(words[1:]) + [inspect.Parameter.VAR_POSITIONAL]
    named = [inspect.Parameter(word.upper(), way) for word, way in zip(words, ways, strict=False)]
    vars(shown)["__signature__"] = inspect.Signature([*named, *_parameters(kind)])
    told = {name: flag.metadata["help"] for name, flag in flags_of(kind).items()}
    told |= {word.upper(): f"the value of --{word}" for word in words}
    lines = "\n".join(f"    {name}: {text}" for name, text in told.items())
    shown.__doc__ = f"{about}\n\nArgs:\n{lines}\n"
    return shown


class _Unset:
    """A default that is None, of which fire would make the type Optional[]."""

    def __repr__(self) -> str:
        return "none"


def _parameters(kind: type) -> list[inspect.Parameter]:
    flags = {name: flag.default for name, flag in flags_of(kind).items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(name, keyword, default=_Unset() if default is None else default)
        for name, default in flags.items()
    ]
