"""One HTTP request: its prompts, and its answers while tokens arrive."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import GREEDY, Logprob, Sampling
from mpissd.engine.text.answer import AnswerText
from mpissd.engine.text.grammar import CALL, CALL_END, make_grammar
from mpissd.engine.text.tokenizer import Tokenizer
from mpissd.serve.fields import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    Form,
    Problem,
    read_fields,
    refused,
    shown,
)
from mpissd.serve.protocol import End, PromptTokens, Ready, Tokens

_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # not in ASCII
_IF_ANY = ("tool_calls", "refusal", "annotations", "audio", "function_call")  # empty: ignored
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")  # variables of templates


class Piece(NamedTuple):
    """A token of an answer with its text. token: None for text that remains at the end. source:
    what drafted it, or the target. logprob: its own and the likeliest ones', if asked for."""

    text: str
    token: int | None = None
    source: str = ""
    logprob: Logprob | None = None


@dataclass(eq=False)
class Exchange:
    """A request and its answer so far. A request for several answers ("choices") has such an object
    for each: n for each of its prompts.

    asked: the fields of the body. tools: the body's descriptions of tools, for the template.
    sampling: how tokens are chosen. form: the form that answers must have. prompts: the token ids
    of all prompts. prompt: this choice's. scored: log-probabilities of the prompt's
    tokens, by position. id: names the choice in messages to the lead, set by `Lead.submit`.
    messages: the lead's about any of the choices; a Problem says why the lead is gone. index: the
    number of the choice. is_first: whether it is the first of its prompt. is_sent: whether the lead
    has it. ends_s, first_s: the times of the deadline and of the first token. num_tokens: tokens in
    the text; the lead may have decoded more. end: the lead's last message about the choice.
    """

    asked: ChatBody | CompletionBody
    sampling: Sampling
    tools: Sequence[Any] = ()
    form: Form | None = None
    max_tokens: int | None = None

    prompts: list[list[int]] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    scored: dict[int, Logprob] = field(default_factory=dict)
    id: int = 0
    messages: asyncio.Queue[PromptTokens | Tokens | End | Problem] = field(
        default_factory=asyncio.Queue
    )
    num_tokens: int = 0
    num_rounds: int = 0
    num_hits: int = 0
    index: int = 0
    is_first: bool = True
    is_sent: bool = False
    ends_s: float = math.inf
    first_s: float = 0.0
    end: End | None = None
    _new: list[Piece] = field(default_factory=list)  # tokens that are not in a response yet
    _held: str = ""  # text of a stream that may begin a tool call
    _has_role: bool = False  # whether the stream's first response was made
    _echo: str | None = None  # the text of the prompt, if it is to be returned before the answer
    _text: AnswerText = field(init=False)
    _head: dict[str, Any] = field(init=False)
    _tokenizer: Tokenizer = field(init=False)

    def encode(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Returns the tokens of the prompts, and stores the grammar that `form` asks for. Raises
        Problem if a prompt has no tokens, or if no answer can match the grammar."""
        if self.form is not None:
            if self.form[1] == "calls" and not self._tells_calls(tokenizer):
                allowed = (
                    f"with a chat template that has {CALL}, or a tool_choice that forces calls"
                )
                raise refused("tools: strict=true", allowed)
            try:
                grammar = make_grammar(*self.form, tokenizer)
            except ConfigError as error:
                raise Problem(400, str(error), self.form[0]) from error
            self.sampling = replace(self.sampling, grammar=grammar)
        if isinstance(self.asked, ChatBody):
            prompts = [self._chat(self.asked, tokenizer)]
        else:
            encode = partial(tokenizer.encode, specials=self.asked.add_special_tokens)
            prompts = [encode(one) if isinstance(one, str) else one for one in self.asked.prompts]
        for tokens in prompts:
            if not tokens:
                raise Problem(400, "prompt: has no tokens", "prompt")
        return prompts

    def _chat(self, asked: ChatBody, tokenizer: Tokenizer) -> list[int]:
        variables = dict(asked.chat_template_kwargs)
        if asked.reasoning_effort is not None:
            variables["reasoning_effort"] = asked.reasoning_effort
        for name, value in variables.items():
            if name in _RESERVED:
                raise refused(f"chat_template_kwargs.{name}", f"the field {name} of the body")
            if value not in (False, None, "none") and not tokenizer.reads(name, self.tools):
                told = f"{name}={shown(value)}: {tokenizer.name}'s chat template does not read it"
                raise refused(told, "false", "chat_template_kwargs")
        is_described = not asked.must_call or tokenizer.reads("tools", self.tools)
        return encode_chat(
            tokenizer,
            asked.messages,
            self.tools if is_described else (),
            begins=asked.add_generation_prompt,
            continues=asked.continue_final_message,
            variables=variables,
        )

    def _tells_calls(self, tokenizer: Tokenizer) -> bool:
        return CALL in (tokenizer.template_for(self.tools) or "")

    def begin(self, tokenizer: Tokenizer, ready: Ready, model: str) -> list[Exchange]:
        """Prepares and returns the choices (answers). ready: has the tokens that end an answer.
        model: the model's name for responses."""
        asked, self._tokenizer = self.asked, tokenizer
        is_chat = isinstance(asked, ChatBody)
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        if is_chat and asked.stream:
            self._head["object"] += ".chunk"
        ends = {*asked.stop_token_ids, *(() if asked.ignore_eos else ready.stop_ids)}
        if asked.min_tokens or ends != {*ready.stop_ids}:
            least = asked.min_tokens if ends else 0
            self.sampling = replace(self.sampling, stop_ids=tuple(sorted(ends)), min_tokens=least)
        echoed = asked.prompts if isinstance(asked, CompletionBody) and asked.echo else ()
        choices = list[Exchange]()
        for prompt, given in zip_longest(self.prompts, echoed):
            text = tokenizer.decode(given, specials=True) if isinstance(given, list) else given
            scored = dict[int, Logprob]()
            for n in range(asked.n):
                choice = copy(self) if choices else self
                choice.index, choice.is_first, choice._new = len(choices), not n, []
                choice.prompt, choice.scored, choice._echo = prompt, scored, text
                choice._text = AnswerText(tokenizer, asked.stops, ends, prompt, asked.min_tokens)
                if echoed and self.sampling.logprobs is not None and not n:
                    scores = self.sampling.logprobs
                    choice.sampling = replace(self.sampling, prompt_logprobs=scores)
                if len(choices) and self.sampling.seed is not None:
                    seed = (self.sampling.seed + len(choices)) % 2**63
                    choice.sampling = replace(choice.sampling, seed=seed)
                choices.append(choice)
        return choices

    @property
    def is_stopped(self) -> bool:
        """Whether the text has ended at a stop token or stop string."""
        return self._text.ended is not None

    def add(self, message: Tokens | PromptTokens) -> None:
        """Appends the tokens of one round to the answer, up to its end."""
        if isinstance(message, PromptTokens):
            self.scored.update(enumerate(message.logprobs, message.start))
            return
        for place, token in enumerate(message.tokens):
            if self.is_stopped:
                break
            source = message.sources[place] if message.sources else ""
            logprob = None if message.logprobs is None else message.logprobs[place]
            self._new.append(Piece(self._text.push(token), token, source, logprob))
            self.num_tokens += 1
        self.num_rounds, self.num_hits = self.num_rounds + 1, message.hits

    def close(self, end: End) -> None:
        """Ends the answer; adds text that was held back as the possible start of a stop string."""
        if rest := self._text.flush():
            self._new.append(Piece(rest))
        self.end = end

    def part(self) -> bytes:
        """Returns the part of a stream with the text since the last call."""
        new, options = self._new, self.asked.stream_options
        answer = {**self._head, "choices": [self.choice()]}
        if options.include_usage and options.continuous_usage_stats:
            answer["usage"] = usage_of([self])
        if options.include_sources:
            answer["speculation"] = {
                "pieces": [(piece.text, piece.source) for piece in new],
                "tokens": self.num_tokens,
                "rounds": self.num_rounds,
                "hits": self.num_hits,
            }
        return event(answer)

    def choice(self) -> dict[str, Any]:
        """Returns the text since the last call as an element of OpenAI's list `choices`."""
        new, self._new = self._new, []
        text, calls = self.said(new)
        logprobs, finish = self._logprobs(new), None
        content: dict[str, Any] = {"text": text}
        if self._echo is not None:
            content["text"], self._echo = self._echo + text, None
        if isinstance(self.asked, ChatBody):
            said: dict[str, Any] = {} if self._has_role else {"role": "assistant"}
            said |= {"content": text} if text or said else {}
            said |= {"content": text or None, "tool_calls": calls} if calls else {}
            content, self._has_role = {"delta" if self.asked.stream else "message": said}, True
        if self.end is not None:
            finish = "stop" if self.is_stopped else self.end.reason
            finish = "tool_calls" if calls else finish
        return {"index": self.index, **content, "logprobs": logprobs, "finish_reason": finish}

    def said(self, new: Sequence[Piece]) -> tuple[str, list[dict[str, Any]]]:
        """Returns the text of new tokens, and at the end the tool calls, which are no text."""
        text, asked = self._held + "".join(piece.text for piece in new), self.asked
        self._held = ""
        if not isinstance(asked, ChatBody) or not self.tools:
            return text, []
        if asked.must_call:
            if self.end is not None:
                return called(text, is_bare=True)
            self._held = text
            return "", []
        if not self._tells_calls(self._tokenizer):
            return text, []
        if self.end is not None:
            text, calls = called(text)
            return text, calls if asked.parallel_tool_calls else calls[:1]
        ends = (len(text) - n for n in range(len(CALL), -1, -1) if text.endswith(CALL[:n]))
        at = text.find(CALL) if CALL in text else next(ends)
        self._held = text[at:]
        return text[:at], []

    def _named(self, token: int, found: Logprob) -> dict[str, Any]:
        """Returns a token's log-probability and the likeliest ones. bytes: None if it is a part."""

        def named(token: int, value: float) -> dict[str, Any]:
            name = self._tokenizer.piece(token)
            raw = None if "\N{REPLACEMENT CHARACTER}" in name else list(name.encode())
            return {"token": name, "logprob": value, "bytes": raw}

        tops = [named(*each) for each in found.top]
        return {**named(token, found.value), "top_logprobs": tops}

    def _logprobs(self, new: Sequence[Piece]) -> dict[str, Any] | None:
        """Returns log-probabilities in OpenAI's form for a chat or a completion, with those of the
        prompt if it is returned, too; None if no token has any."""
        found = list[tuple[int, Logprob | None]]()
        if self._echo is not None and self.sampling.logprobs is not None:
            found += ((token, self.scored.get(n)) for n, token in enumerate(self.prompt))
        found += ((one.token, one.logprob) for one in new if one.token is not None and one.logprob)
        if not found:
            return None
        content = [one and self._named(token, one) for token, one in found]
        if isinstance(self.asked, ChatBody):
            return {"content": content, "refusal": None}
        names = [self._tokenizer.piece(token) for token, _ in found]
        values = [each and each["logprob"] for each in content]
        # Of two tokens with the same text the likelier one counts.
        value = itemgetter("logprob")
        every = (each and sorted([*each["top_logprobs"], each], key=value) for each in content)
        tops = [each and {one["token"]: one["logprob"] for one in each} for each in every]
        parts = {"tokens": names, "token_logprobs": values, "text_offset": None}
        return {**parts, "top_logprobs": tops if self.sampling.logprobs else None}

    def whole(self, choices: Sequence[Exchange]) -> dict[str, Any]:
        """Returns OpenAI's response object for choices that have ended."""
        answers = [one.choice() for one in choices]
        return {**self._head, "choices": answers, **accounts(choices)}

    def ending(self, choices: Sequence[Exchange]) -> bytes:
        """Returns the end of a stream."""
        last = {**self._head, "choices": [], **accounts(choices)}
        told = event(last) if self.asked.stream_options.include_usage else b""
        return told + b"data: [DONE]\n\n"

    def failed(self, problem: Problem) -> bytes:
        """Returns the end of a stream that failed after its HTTP status was sent."""
        return event(problem.to_dict()) + b"data: [DONE]\n\n"


def usage_of(choices: Sequence[Exchange]) -> dict[str, Any]:
    """Returns the numbers of tokens so far, in OpenAI's form."""
    prompt = sum(len(one.prompt) for one in choices if one.is_first or len(choices) == 1)
    tokens = sum(one.num_tokens for one in choices)
    counts = {"prompt_tokens": prompt, "completion_tokens": tokens}
    return {**counts, "total_tokens": prompt + tokens}


def accounts(choices: Sequence[Exchange]) -> dict[str, Any]:
    """Returns `usage` of choices that have ended, and, of a single one, vLLM's `metrics`. In them
    `usage.speculation` is of this server only."""
    ends = [one.end for one in choices if one.end is not None]
    names = ("drafted", "accepted", "hits", "rounds", "forced")
    cached = sum(one.end.cached for one in choices if one.end is not None and one.is_first)
    usage = {
        **usage_of(choices),
        "prompt_tokens_details": {"cached_tokens": cached},
        "speculation": {name: sum(getattr(end, name) for end in ends) for name in names},
    }
    steps = ends[0].steps if len(ends) == 1 else ()
    if len(steps) < 2:  # nothing is drafted
        return {"usage": usage}
    count, accepted, drafted = sum(steps), ends[0].accepted, ends[0].drafted
    speculative = {
        "mean_acceptance_length": 1 + accepted / count if count else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": steps,
        "num_spec_steps": count,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": len(steps) - 1,
    }
    return {"usage": usage, "metrics": {"speculative_decoding": speculative}}


def called(text: str, *, is_bare: bool = False) -> tuple[str, list[dict[str, Any]]]:
    """Splits an answer into its text and its tool calls, each CALL and a JSON object. If one has
    another form, or is no valid Unicode, all is text. is_bare: whether the answer is only such an
    object, or a list of them."""
    content, *parts = ("", text) if is_bare else text.split(CALL)
    calls = list[dict[str, Any]]()
    try:
        found = [json.loads(part.partition(CALL_END)[0]) for part in parts]
        for call in found[0] if is_bare and isinstance(found[0], list) else found:
            json.dumps(call, ensure_ascii=False).encode()
            arguments = json.dumps(call["arguments"], allow_nan=False)
            function = {"name": str(call["name"]), "arguments": arguments}
            name = {"index": len(calls), "id": f"call_{secrets.token_hex(12)}"}
            calls.append({**name, "type": "function", "function": function})
    except (ValueError, TypeError, LookupError, RecursionError):
        return text, []
    return content, calls


def encode_chat(
    tokenizer: Tokenizer, asked: Sequence[ChatMessage], tools: Sequence[Any] = (), **how: Any
) -> list[int]:
    """Returns the tokens of a conversation, as Tokenizer.chat; raises Problem if it has none."""
    try:
        return tokenizer.chat(_conversation(asked), tools, **how)
    except ConfigError as error:
        raise Problem(400, str(error), "messages") from error


def _conversation(asked: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Returns messages as chat templates expect them: contents are texts, arguments objects."""
    messages = list[dict[str, Any]]()
    for place, message in enumerate(asked):
        content, where = message.content, f"messages[{place}]"
        if content is None and message.role != "assistant":  # an answer may be only tool calls
            raise Problem(400, f"{where}.content: needed", "messages")
        if not isinstance(content, str):
            content = "".join(part.text for part in content or ())
        role = "system" if message.role == "developer" else message.role
        told = msgspec.to_builtins(message).items()
        given = {name: value for name, value in told if value or name not in _IF_ANY}
        given |= {"role": role, "content": content}
        for call in given.get("tool_calls", ()):
            function = call["function"]
            try:
                function["arguments"] = json.loads(function["arguments"])
            except (ValueError, RecursionError) as error:
                told = f"{where}.tool_calls: arguments={shown(function['arguments'])}"
                raise refused(told, "JSON") from error
        messages.append(given)
    return messages


def made(
    fields: Mapping[str, Any],
    kind: type[ChatBody] | type[CompletionBody],
    defaults: Sampling = GREEDY,
    make: type[Exchange] = Exchange,
) -> Exchange:
    """Makes an Exchange from a body's fields. kind: which it may have. defaults: of those that are
    absent. make: the Exchange's class. Raises Problem(400) for other bodies."""
    asked: ChatBody | CompletionBody = read_fields(fields, kind)
    names = "presence_penalty frequency_penalty repetition_penalty mode".split()
    told: dict[str, Any] = {name: getattr(asked, name) for name in names}
    if asked.temperature is not None:
        told["temperature"] = asked.temperature
    if told.get("temperature", defaults.temperature):  # at 0 these have no effect
        told |= {"top_p": asked.top_p, "top_k": max(0, asked.top_k), "min_p": asked.min_p}
    if asked.seed is not None:
        told["seed"] = asked.seed % 2**63
    told["logit_bias"] = tuple((int(token), bias) for token, bias in asked.logit_bias.items())
    told["lookahead"] = asked.speculation.lookahead
    if asked.stream_options.include_sources and not asked.stream:
        raise refused("stream_options.include_sources=true", "with stream=true")
    most, tools = asked.max_tokens, list[Any]()
    if isinstance(asked, ChatBody):
        most = asked.max_completion_tokens or most
        tools = [] if asked.tool_choice == "none" else fields.get("tools", [])
        if asked.top_logprobs and not asked.logprobs:
            raise refused(f"top_logprobs={asked.top_logprobs}", "with logprobs=true")
        told["logprobs"] = asked.top_logprobs if asked.logprobs else None
        if fields.get("add_generation_prompt") and asked.continue_final_message:
            raise refused("continue_final_message=true", "add_generation_prompt=false")
    else:
        told["logprobs"] = asked.logprobs
    if most is not None and asked.min_tokens > most:
        raise refused(f"min_tokens={asked.min_tokens}", f"at most max_tokens={most}")
    return make(asked, replace(defaults, **told), tools, asked.form, most)


def event(data: Mapping[str, Any]) -> bytes:
    """Returns a server-sent event; escapes Unicode's line ends, at which some clients split."""
    return f"data: {json.dumps(data, ensure_ascii=False).translate(_LINE_ENDS)}\n\n".encode()
