"""Prompts from the flags: one text, or a file of lines {"prompt": …} or {"messages": […]}.

A prompt is one user message in the model's chat template if it has one and --chat_template allows
it. If not, it is the text that the model continues.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.engine.workload.text.tokenizer import Tokenizer

_ID = re.compile(r"[0-9]{1,18}")

Entry = Mapping[str, Any]  # {"prompt": text} or {"messages": [{"role": …, "content": …}, …]}


@dataclass(frozen=True)
class Prompt:
    """One prompt as it was given ({} for --prompt_ids), and its tokens."""

    entry: Entry
    tokens: tuple[int, ...]


def digest_of(prompts: Sequence[Prompt]) -> str:
    """Returns the SHA-256 of the prompts' tokens: a line each, in decimal, a space between."""
    lines = (" ".join(map(str, prompt.tokens)) + "\n" for prompt in prompts)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_prompts(
    config: RunConfig,
    tokenizer: Tokenizer | None,
    *,
    context: int | None = None,
    vocab: int | None = None,
) -> list[Prompt]:
    """Returns the prompts of a run, encoded.

    tokenizer: may be None with --prompt_ids. context: the longest sequence in tokens (None:
    unknown). vocab: ids are below it (None: unknown). Raises ConfigError, which names the line of
    the file: no prompt, an empty one, invalid UTF-8 or JSON, or a prompt that leaves no room for an
    answer.
    """
    if config.prompt_ids is not None:
        named = _prompts_of_ids(config.prompt_ids)
    else:
        assert tokenizer is not None, "text without a tokenizer"
        named = [
            (where, Prompt(entry, _encoded(where, entry, tokenizer, chat=config.chat_template)))
            for where, entry in _entries(config)
        ]
    for where, prompt in named:
        _check_room(where, prompt.tokens, context, vocab)
    return [prompt for _, prompt in named]


def _check_room(
    where: str, tokens: tuple[int, ...], context: int | None, vocab: int | None
) -> None:
    """Refuses a prompt without tokens, with an unknown token, or without room after it."""
    if not tokens:
        raise ConfigError(f"{where}: has no tokens")
    if vocab is not None and max(tokens) >= vocab:
        raise ConfigError(f"{where}: token {max(tokens)}: allowed: 0..{vocab - 1}")
    if context is not None and len(tokens) >= context:
        raise ConfigError(
            f"{where}: {len(tokens)} tokens: allowed: at most {context - 1}, since the model's "
            f"context has {context}"
        )


def _prompts_of_ids(text: str) -> list[tuple[str, Prompt]]:
    """Parses 1,2,3;4,5 to two prompts."""
    prompts = []
    for number, part in enumerate(text.split(";"), 1):
        where, ids = f"prompt_ids: prompt {number}", part.split(",")
        if not all(_ID.fullmatch(token.strip()) for token in ids):
            raise ConfigError(f"{where}: {part!r}: allowed: whole numbers, a comma between")
        prompts.append((where, Prompt({}, tuple(int(token) for token in ids))))
    return prompts


def _entries(config: RunConfig) -> list[tuple[str, Entry]]:
    """Returns each prompt as it was given, with its name for error messages."""
    if config.prompts is not None:
        return read_entries(config.prompts)
    if config.prompt is None:
        raise ConfigError("prompt: needed with workload=text (or prompts=FILE.jsonl, prompt_ids)")
    return [("prompt", {"prompt": config.prompt})]


def read_entries(file: str) -> list[tuple[str, Entry]]:
    """Returns the entries of a JSONL file, each with its name for error messages; blank lines are
    skipped. Raises ConfigError."""
    path = Path(file).expanduser()
    name = f"prompts={str(path)!r}"
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from error
    named = [(f"{name}: line {number}", line) for number, line in enumerate(lines, 1)]
    entries = [(where, _entry(where, line)) for where, line in named if line.strip()]
    if not entries:
        raise ConfigError(f"{name}: holds no prompt")
    return entries


def _entry(where: str, line: bytes) -> Entry:
    try:
        entry = json.loads(line.decode("utf-8-sig"))  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: is no UTF-8 text (byte {error.start + 1})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is no JSON: {error}") from error
    if not isinstance(entry, dict) or len({"prompt", "messages"} & entry.keys()) != 1:
        raise ConfigError(f'{where}: allowed: {{"prompt": "…"}} or {{"messages": […]}}')
    _check_unicode(where, json.dumps(entry, ensure_ascii=False))  # the answers repeat it all
    return entry


def _encoded(where: str, entry: Entry, tokenizer: Tokenizer, *, chat: bool) -> tuple[int, ...]:
    """Returns the tokens of an entry; raises ConfigError for an empty one."""
    if "messages" in entry:
        return _chatted(where, _messages(where, entry["messages"]), tokenizer)
    text = check_text(where, entry["prompt"])
    if chat and tokenizer.template is not None:
        return _chatted(where, [{"role": "user", "content": text}], tokenizer)
    return tuple(tokenizer.encode(text))


def _chatted(where: str, messages: list[dict[str, str]], tokenizer: Tokenizer) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.chat(messages))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _messages(where: str, messages: Any) -> list[dict[str, str]]:
    """Returns messages that have a role and a content each."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages: allowed: a list of at least one message")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(
                f'{where}: message {number}: allowed: {{"role": "…", "content": "…"}}'
            )
        check_text(f"{where}: message {number}", message.get("content"))
    return messages


def check_text(where: str, text: Any) -> str:
    """Returns the text of a prompt; raises ConfigError if it is empty or is no Unicode text."""
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {json.dumps(text)} is no text")
    if not text.strip():
        raise ConfigError(f"{where}: is empty")
    _check_unicode(where, text)
    return text


def _check_unicode(where: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # arguments carry invalid bytes as lone surrogates
        raise ConfigError(f"{where}: is no UTF-8 text (character {error.start + 1})") from error
