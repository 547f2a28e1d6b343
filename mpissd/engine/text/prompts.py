"""Reads, checks and encodes the prompts of a run: one given by a flag, or a file of lines.

A line is {"prompt": …} or {"messages": […]}. A prompt becomes one user message in the model's chat
template if it has one and --chat_template allows it; otherwise the model continues the text.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.files import read_file
from mpissd.engine.text.tokenizer import Tokenizer

_ID = re.compile(r"[0-9]{1,18}")

Entry = Mapping[str, Any]  # {"prompt": text} or {"messages": [{"role": …, "content": …}, …]}


@dataclass(frozen=True)
class Prompt:
    """One prompt: its JSON object as given ({} for --prompt_ids), and its token ids."""

    entry: Entry
    tokens: tuple[int, ...]


def digest_of(prompts: Sequence[Prompt]) -> str:
    """Returns the SHA-256 of a text with one line for each prompt, its token ids in decimal."""
    lines = (" ".join(map(str, prompt.tokens)) + "\n" for prompt in prompts)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_prompts(
    config: RunConfig,
    tokenizer: Tokenizer | None,
    *,
    context: int | None = None,
    vocab: int | None = None,
) -> list[Prompt]:
    """Returns the encoded prompts of a run. tokenizer: may be None with --prompt_ids. context: the
    most tokens of a sequence; vocab: the number of token ids (None: not checked). Raises
    ConfigError, which names the prompt or the line of the file, for invalid UTF-8 or JSON, and for
    a prompt that is missing, empty, or leaves no room for an answer."""
    named: list[tuple[str, Prompt]] = []
    if config.prompt_ids is not None:  # For example, "1,2,3;4,5" holds two prompts.
        for number, part in enumerate(config.prompt_ids.split(";"), 1):
            where = f"prompt_ids: prompt {number}"
            ids = part.split(",")
            if not all(_ID.fullmatch(token.strip()) for token in ids):
                raise ConfigError(f"{where}: {part!r}: allowed: whole numbers, a comma between")
            named.append((where, Prompt({}, tuple(int(token) for token in ids))))
    else:
        assert tokenizer is not None, "text without a tokenizer"
        entries = [] if config.prompts is None else read_entries(config.prompts)
        if not entries and config.prompt is None:
            needed = "prompt: needed with workload=text (or prompts=FILE.jsonl, prompt_ids)"
            raise ConfigError(needed)
        for where, entry in entries or [("prompt", {"prompt": config.prompt})]:
            tokens = encoded(where, entry, tokenizer, chat=config.chat_template, context=context)
            named.append((where, Prompt(entry, tokens)))
    for where, prompt in named:
        count = len(prompt.tokens)
        if not count:
            raise ConfigError(f"{where}: has no tokens")
        if vocab is not None and (largest := max(prompt.tokens)) >= vocab:
            raise ConfigError(f"{where}: token {largest}: allowed: 0..{vocab - 1}")
        if context is not None and count >= context:
            raise ConfigError(
                f"{where}: {count} tokens: allowed: at most {context - 1} with "
                f"context={context}, which --context=N raises up to the model's own"
            )
    return [prompt for _, prompt in named]


def read_entries(file: str, flag: str = "prompts") -> list[tuple[str, Entry]]:
    """Reads a JSONL file of prompts. Returns for each line that is not blank its name in error
    messages, and its JSON object. flag: the name of the flag that gave the file. Raises ConfigError
    if the file cannot be read, or has no prompt."""
    path = Path(file).expanduser()
    name = f"{flag}={str(path)!r}"
    try:
        lines = read_file(path).split(b"\n")
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from error
    entries: list[tuple[str, Entry]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}: line {number}"
        try:
            entry = json.loads(line.decode("utf-8-sig"))  # Some editors write a byte-order mark.
        except UnicodeDecodeError as error:
            raise ConfigError(f"{where}: is no UTF-8 text (byte {error.start + 1})") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: is no JSON: {error}") from error
        if not isinstance(entry, dict) or len({"prompt", "messages"} & entry.keys()) != 1:
            raise ConfigError(f'{where}: allowed: {{"prompt": "…"}} or {{"messages": […]}}')
        _check_unicode(where, json.dumps(entry, ensure_ascii=False))  # Answers repeat it.
        entries.append((where, entry))
    if not entries:
        raise ConfigError(f"{name}: holds no prompt")
    return entries


def encoded(
    where: str, entry: Entry, tokenizer: Tokenizer, *, chat: bool, context: int | None = None
) -> tuple[int, ...]:
    """Returns the tokens of one prompt or conversation, given as a JSON object; raises ConfigError
    if it holds neither. where: names the object in errors. chat: whether a prompt becomes a message
    in the model's chat template, if any. context: the most tokens; a far longer text is refused
    before it is encoded."""
    if "messages" in entry:
        messages = entry["messages"]
        if not isinstance(messages, list) or not messages:
            raise ConfigError(f"{where}: messages: allowed: a list of at least one message")
        for number, message in enumerate(messages, 1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                allowed = 'allowed: {"role": "…", "content": "…"}'
                raise ConfigError(f"{where}: message {number}: {allowed}")
            check_text(f"{where}: message {number}", message.get("content"))
    else:
        text = check_text(where, entry["prompt"])
        messages = [{"role": "user", "content": text}]
        chat = chat and tokenizer.template is not None
    try:
        if "messages" in entry or chat:
            return tuple(tokenizer.chat(messages, context=context))
        return tuple(tokenizer.encode(text, context=context))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def check_text(where: str, text: Any) -> str:
    """Returns `text`; raises ConfigError, which begins with `where`, if it is no valid Unicode."""
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {json.dumps(text)} is no text")
    _check_unicode(where, text)
    return text


def _check_unicode(where: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # Python reads invalid bytes of arguments as surrogates.
        raise ConfigError(f"{where}: is no UTF-8 text (character {error.start + 1})") from error
