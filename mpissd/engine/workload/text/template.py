"""Renders a chat template: a model's own jinja2 program, in a sandbox that reaches nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from mpissd.common.errors import ConfigError

if TYPE_CHECKING:
    from jinja2 import Template


def render(
    template: str, messages: Sequence[Mapping[str, str]], specials: Mapping[str, str]
) -> str:
    """Returns the text of a conversation, up to where the model's answer begins.

    specials: named special tokens, such as bos_token. Raises ConfigError with the reason where the
    template refuses the messages or is no template.
    """
    try:
        compiled = _compiled(template)
        text = compiled.render(messages=messages, add_generation_prompt=True, **specials)
        text.encode("utf-8")
        return text
    except Exception as error:  # a program of the model's: it may fail in any way
        raise ConfigError(f"chat template: {' '.join(str(error).split())}") from error


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    """Compiles a template with the functions that Hugging Face's templates may use."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(reason: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(reason)
