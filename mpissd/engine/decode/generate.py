"""Answers a prompt in one process: `for token in generate("Why is the sky blue?"): …`."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.errors import ConfigError
from mpissd.engine.decode.in_process import Decoder
from mpissd.engine.job import resolve_unopened
from mpissd.engine.workload.text.prompts import read_prompts
from mpissd.engine.workload.text.stops import AnswerText, sources_of
from mpissd.engine.workload.text.tokenizer import Message, Tokenizer, load_tokenizer


class Token(NamedTuple):
    """One token of an answer. text: its addition to the answer; "" for a part of a character or of
    a possible stop string. source: "cache", "jit" or "fast", or "bonus" for the target's own.
    round: from 0."""

    text: str
    id: int
    source: str
    round: int


def generate(prompt: str | Sequence[Message], **flags: object) -> Iterator[Token]:
    """Yields the tokens of the answer to a prompt, or to a conversation, as they are decided.

    flags: the flags of `mpissd run`, for example mode="sd", pair="smollm2", num_tokens=64,
    temperature=0.7, stop="###". The texts of all tokens add up to the answer. Raises ConfigError as
    `mpissd run` does.
    """
    for name in {"prompts", "prompt_ids"} & flags.keys():
        raise ConfigError(f"{name} with generate: allowed: its first argument, the prompt")
    config = parse_flags({"workload": "text", **{k: str(v) for k, v in flags.items()}})
    tokenizer = load_tokenizer(resolve_unopened(config, 1).target_where)
    tokens = _encoded(prompt, config, tokenizer)
    own = set() if config.stop_token is None else {config.stop_token}
    text = AnswerText(tokenizer, config.stop_strings, tokenizer.stop_ids | own)
    ids = ",".join(str(token) for token in tokens)
    # Without a tokenizer the decoder knows no stops: they end the answer here.
    plain = replace(config, prompt=None, prompt_ids=ids, stop=None, stop_token=None)
    return _flushed(_tokens(plain, text), text)


def _encoded(
    prompt: str | Sequence[Message], config: RunConfig, tokenizer: Tokenizer
) -> Sequence[int]:
    if isinstance(prompt, str):
        (only,) = read_prompts(replace(config, prompt=prompt), tokenizer)
        return only.tokens
    if not prompt:
        raise ConfigError("prompt: is empty")
    return tokenizer.chat(prompt)


def _tokens(config: RunConfig, text: AnswerText) -> Generator[Token, None, None]:
    """Yields tokens up to the one that ends the answer."""
    with closing(Decoder(config)) as decoder:
        left, number = config.token_limit, 0
        while text.ended is None and not decoder.is_over:
            result = decoder.step()
            ((_, tokens),) = result.emitted()
            sources = sources_of(len(tokens) - 1, int(result.speculation.source[0]))
            for token, source in list(zip(tokens, sources, strict=True))[:left]:
                yield Token(text.push(token), token, source, number)
                if text.ended is not None:
                    return
                left = None if left is None else left - 1
            number += 1


def _flushed(tokens: Generator[Token, None, None], text: AnswerText) -> Iterator[Token]:
    """Yields the tokens; the last one also has the text that was held back."""
    last: Token | None = None
    with closing(tokens):  # a caller that stops early frees the models
        for token in tokens:
            if last is not None:
                yield last
            last = token
    if last is not None:
        yield last._replace(text=last.text + text.flush())
