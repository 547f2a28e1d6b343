"""The fields of requests: their types and ranges, declared once, and how a body becomes them.

A field has the name and meaning that it has in OpenAI's API or vLLM's. One that this server cannot
honour passes at the values in NEUTRAL, which change nothing, and is refused at others. An unknown
field is refused, as OpenAI does; vLLM ignores it, and a mistyped name with it. A null is an absent
field. `deadline_s`, `mode`, `speculation` and stream_options.include_sources are this server's own.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.inspect import type_info

from mpissd.common.errors import unknown

MOST_BIASES, MOST_CHOICES, MOST_STOPS, MOST_TOP = 1024, 8, 16, 20
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
# Fields that are not honoured, the list of JSON values at which they change nothing ("any": they
# never change an answer), and the nearest field that is honoured
_OTHERS = """
user metadata request_id safety_identifier prompt_cache_key prompt_cache_retention = any
client_metadata = any
store use_beam_search early_stopping return_token_ids return_tokens_as_token_ids = [false]
include_stop_str_in_output background add_special_tokens = [false]
echo = [false] echo of /v1/completions
skip_special_tokens spaces_between_special_tokens include_reasoning = [true]
priority top_a mirostat = [0]
length_penalty = [1]
best_of = [1] n
repeat_penalty = [1] repetition_penalty
typical_p = [1] top_p
documents include = [[]]
bad_words = [[]] logit_bias
allowed_token_ids = [[]] guided_choice
functions = [[]] tools
suffix = [""]
service_tier = ["auto","default"]
guided_decoding_backend = ["auto","guidance"]
function_call = ["auto","none"] tool_choice
verbosity = ["medium"] max_tokens
truncation = ["disabled"]
modalities = [["text"]]
prompt_logprobs = [] echo and logprobs of /v1/completions
guided_grammar = [] guided_json, guided_regex, guided_choice
previous_response_id conversation = [] input with all earlier items
cache_salt = [] --prefix_cache=false of the server
truncate_prompt_tokens web_search_options prediction max_tool_calls = []
"""
NEUTRAL = {  # {field: (values, nearest field)}
    name: (None if values == "any" else json.loads(values), nearest)
    for names, _, rest in (line.partition(" = ") for line in _OTHERS.strip().splitlines())
    for values, _, nearest in [rest.partition(" ")]
    for name in names.split()
}

Count = Annotated[int, Meta(ge=0, le=2**31)]
Positive = Annotated[int, Meta(ge=1, le=2**31)]
Share = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Text = Annotated[str, Meta(min_length=1)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
Choice = Annotated[list[Text], Meta(min_length=1)]
TokenId = Annotated[str, Meta(pattern="^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Form = tuple[str, str, Any]  # (field, kind and value for make_grammar)
Kind = TypeVar("Kind", bound=Struct)
_decode = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(eq=False)
class Problem(Exception):
    """Ends a request with an HTTP status and an error message. param: the name of the field at
    fault. code: a machine-readable name of the error. headers: further response headers."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the body of the response, {"error": …} as in OpenAI's API."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _KINDS.get(self.status, default)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def refused(told: str, allowed: str, param: str | None = None) -> Problem:
    """Returns the refusal of a field. told: begins with its name, unless `param` names it."""
    return Problem(400, f"{told}: allowed: {allowed}", param or re.split("\\W", told)[0])


class Strict(Struct, forbid_unknown_fields=True):
    """Base class of objects with these fields only."""


class StreamOptions(Strict, kw_only=True):
    """Further contents of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None
    include_sources: bool | None = None


class DraftLimits(Strict, kw_only=True):
    """lookahead: the most drafted tokens a round."""

    lookahead: Count | None = None


class JsonSchema(Struct):
    """The schema of an answer; its name and description change nothing."""

    schema: dict[str, Any]


class ResponseFormat(Strict, kw_only=True):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict, kw_only=True):
    """The form of an answer, as vLLM's StructuredOutputsParams. JSON has no free white space, and
    there is one library."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Choice | None = None
    json_object: bool | None = None
    grammar: None = None
    structural_tag: None = None
    whitespace_pattern: None = None
    disable_any_whitespace: bool = False
    disable_fallback: bool = False
    disable_additional_properties: Literal[False] = False


class Part(Struct):
    """A part of a message's content."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class CalledFunction(Struct):
    """arguments: a JSON object, as text."""

    name: str
    arguments: str


class Call(Struct, kw_only=True):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Strict, kw_only=True, omit_defaults=True):
    """A message of a conversation. Of the fields that answers have, empty ones are ignored."""

    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: Literal[""] | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: Annotated[dict[str, Any], Meta(max_length=0)] | None = None
    function_call: Annotated[dict[str, Any], Meta(max_length=0)] | None = None


class Function(Struct):
    """A function that an answer may call. parameters: a JSON schema of its arguments, which hold to
    it if `strict` is set, or the call is forced."""

    name: Text
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    """A tool that an answer may call."""

    function: Function
    type: Literal["function"] = "function"


class Asked(Strict, kw_only=True):
    """The fields of both endpoints. None: a default of the server."""

    model: str | None = None
    max_tokens: Positive | None = None
    stream: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MOST_BIASES)] = {}
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] = 1
    stop: Stop | Annotated[list[Stop], Meta(max_length=MOST_STOPS)] = []
    stop_token_ids: Annotated[list[Count], Meta(max_length=MOST_STOPS)] = []
    ignore_eos: bool = False
    min_tokens: Count = 0
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=86400)] | None = None
    mode: Literal["ar", "sd", "ssd"] | None = None
    speculation: DraftLimits = msgspec.field(default_factory=DraftLimits)

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def form(self) -> Form | None:
        """The form that answers must have; raises Problem if several are given."""
        forms = list(self._forms())
        if len(forms) > 1:
            raise refused(f"{forms[1][0]} with {forms[0][0]}", "one of them")
        if not forms:
            return None
        form = forms[0]
        for name in ("min_tokens", "ignore_eos"):  # a complete answer ends, and not before
            if getattr(self, name):
                raise refused(f"{name} with {form[0]}", "one of them")
        return form

    def _forms(self) -> list[Form]:
        found = list[tuple[str, str, Any]]()
        if (asked := self.response_format) is not None and asked.type != "text":
            if asked.type == "json_schema" and asked.json_schema is None:
                raise refused("response_format: json_schema", 'with "json_schema": {"schema": {…}}')
            schema = {"type": "object"} if asked.json_schema is None else asked.json_schema.schema
            found.append(("response_format", "json", schema))
        found += [(f"guided_{kind}", kind, getattr(self, f"guided_{kind}")) for kind in _FORMS]
        if (inner := self.structured_outputs) is not None:
            name = "structured_outputs"
            found += [(name, kind, getattr(inner, kind)) for kind in _FORMS]
            found.append((name, "json", {"type": "object"} if inner.json_object else None))
        texts = ((n, k, json.dumps(v) if isinstance(v, dict) else v) for n, k, v in found)
        return [(name, kind, value) for name, kind, value in texts if value is not None]


_FORMS = ("json", "regex", "choice")


class ChatBody(Asked, kw_only=True):
    """The fields of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_TOP)] = 0
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none", "required"] | Tool = "auto"
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None

    @property
    def must_call(self) -> bool:
        """Whether an answer is one or more tool calls."""
        return self.tool_choice not in ("auto", "none")

    def _forms(self) -> list[Form]:
        found = super()._forms()
        if self.must_call:
            call = self._call()
            if self.parallel_tool_calls and not isinstance(self.tool_choice, Tool):
                several = {"type": "array", "items": call, "minItems": 1}
                call = {**several, "$defs": call["$defs"]} if "$defs" in call else several
            found.append(("tool_choice", "json", json.dumps(call)))
        is_strict = self.tool_choice == "auto" and any(tool.function.strict for tool in self.tools)
        if is_strict and not found:  # an answer of another form has no calls
            found.append(("tools", "calls", json.dumps(self._call())))
        return found

    def _call(self) -> dict[str, Any]:
        """Returns the JSON schema of a tool call."""
        tools, chosen = [tool.function for tool in self.tools], self.tool_choice
        if isinstance(chosen, Tool):
            tools = [tool for tool in tools if tool.name == chosen.function.name]
        if not tools:
            raise refused("tool_choice", "one of the tools")
        defined, calls = dict[str, Any](), list[dict[str, Any]]()
        for tool in tools:
            is_held = self.must_call or tool.strict
            schema = dict((is_held and tool.parameters) or {"type": "object"})
            defs = schema.pop("$defs", None)  # "$ref" names them from the root
            for name, inner in (defs if isinstance(defs, dict) else {}).items():
                if defined.setdefault(name, inner) != inner:
                    raise Problem(400, f"tools: two definitions of {shown(name)}", "tools")
            if other := re.search(r'"\$ref": ("#(?!/\$defs/)[^"]*")', json.dumps([schema, defs])):
                raise refused(f"tools: $ref={other[1]}", "#/$defs/…")
            properties = {"name": {"const": tool.name}, "arguments": schema}
            told = {"type": "object", "properties": properties, "additionalProperties": False}
            calls.append({**told, "required": ["name", "arguments"]})
        call = calls[0] if len(calls) == 1 else {"anyOf": calls}
        return {**call, "$defs": defined} if defined else call


class CompletionBody(Asked, kw_only=True):
    """The fields of /v1/completions. prompt: a text, token ids, or a list of either."""

    prompt: Any
    logprobs: Annotated[int, Meta(ge=0, le=MOST_TOP)] | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts; raises Problem for another value."""
        prompt = self.prompt
        several = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
        prompts = prompt if several else [prompt]
        for one in prompts:
            is_ids = isinstance(one, list) and one and all(type(t) is int and t >= 0 for t in one)
            if not (isinstance(one, str) or is_ids):
                allowed = "a text, a list of token ids, or a list of these"
                raise refused(f"prompt={shown(one)}", allowed)
        return list(prompts)


class Tokenize(Strict, kw_only=True):
    """The fields of /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] = []
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class Detokenize(Strict, kw_only=True):
    """The fields of /detokenize."""

    model: str | None = None
    tokens: list[Count]


def read_object(body: bytes) -> dict[str, Any]:
    """Returns a body's JSON object, without nulls; raises Problem for another body."""
    try:
        fields = _decode(body)
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the body is no JSON object: {error}") from error
    return {name: value for name, value in fields.items() if value is not None}


def read_fields(fields: Mapping[str, Any], kind: type[Kind]) -> Kind:
    """Returns the fields of a body as an object. Raises Problem for a field that is unknown, has a
    value that is not allowed, or cannot be honoured."""
    chosen = dict[str, Any]()
    for name, value in fields.items():
        if name in kind.__struct_fields__:
            chosen[name] = value
        elif name in NEUTRAL:
            values, nearest = NEUTRAL[name]
            is_flag = isinstance(value, bool)
            same = (value == one and is_flag == isinstance(one, bool) for one in values or ())
            if values is not None and not any(same):
                told = [*map(json.dumps, values), *filter(None, [nearest])]
                raise refused(f"{name}={shown(value)}", ", ".join(told) or "none")
        elif kind.__struct_config__.forbid_unknown_fields:
            name = shown(name)[1:-1]
            raise Problem(400, str(unknown("field", name, kind.__struct_fields__)), name)
    try:
        return msgspec.convert(chosen, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), chosen, kind) from error


def _explained(text: str, fields: Any, kind: type[Struct]) -> Problem:
    """Returns the refusal of a body. text: msgspec's message, which names the place of the wrong
    value as "… - at `$.messages[0].role`"."""
    reason, _, place = text.rpartition(" - at ")  # a value in it may have these words, too
    reason = reason or text
    path = re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", place)
    where, value, types = "", fields, [type_info(kind)]
    for name, index in path:
        where += f".{name}" if name else f"[{index}]"
        if name or index.isdigit():
            value = value[name or int(index)]
        types = [part for one in types for part in _inside(one, name)]
    where = where.lstrip(".")
    param = path[0][0] if path else None
    if missing := re.search("missing required field `(.*)`", reason):
        name = f"{where}.{missing[1]}" if where else missing[1]
        return Problem(400, f"{name}: needed", param or name)
    if extra := re.search("unknown field `(.*)`", reason, re.DOTALL):
        known = [each.name for one in types for each in getattr(one, "fields", ())]
        name = shown(extra[1])[1:-1]
        return Problem(400, str(unknown(f"{where} field", name, known)), param)
    values = [str(each) for one in types for each in getattr(one, "values", ())]
    expected = reason.partition(", got ")[0].removeprefix("Expected ").replace("`", "")
    return refused(f"{where}={shown(value)}", ", ".join(values) or expected, param)


def _inside(one: Any, name: str) -> Sequence[Any]:
    """Returns the types, as msgspec.inspect describes them, of what a type has in the field `name`,
    or as items if that is empty."""
    if name:
        inner = [field.type for field in getattr(one, "fields", ()) if field.name == name]
    else:
        inner = [getattr(one, "item_type", getattr(one, "value_type", None))]
    return [part for each in inner for part in getattr(each, "types", (each,))]


def shown(value: Any) -> str:
    """Returns a JSON value as text for an error message, cut to 60 characters."""
    try:
        text = json.dumps(value)
    except RecursionError:  # the parser accepts deeper nesting than json.dumps
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}…"
