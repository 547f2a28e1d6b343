"""The flags of `load`: the arrivals, their server, and the objective of a good request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.flags import (
    Checked,
    choice,
    contained,
    flag,
    flags_of,
    integer,
    number,
    said,
    switch,
    words,
)
from mpissd.serve.config import AUTO, KEY_VARIABLE

DEFAULT_URL = "http://127.0.0.1:8000/v1"
# Flags of a run that a simulated server does not read, or that this command has itself.
_UNREAD = (
    "prompt prompts prompt_ids batch_size rounds num_tokens warmup_rounds seed trace "
    "dry_run out progress show beside json chat_template temperature top_p stop stop_token backend "
    "all_reduce graph deadline_s on_draft_loss groups tree"
).split()
_SIMULATED = frozenset(flags_of(RunConfig)).difference(_UNREAD)


def rates(name: str, text: str) -> tuple[float, ...]:
    """Parses rates, separated by commas: numbers above 0, or inf (all at once)."""
    parts = [part.strip() for part in text.strip("()").split(",") if part.strip()]
    values = tuple(math.inf if part == "inf" else number(0)(name, part) for part in parts)
    if not values or 0 in values:
        raise ConfigError(f"{name}={text}: allowed: numbers above 0 or inf, a comma between")
    return values


@dataclass(frozen=True)
class LoadConfig(Checked):
    """Flags of `load`."""

    rate: tuple[float, ...] = flag(
        (1.0,), rates, "requests a second, in the mean: 2,4,8; inf: all at once"
    )
    duration: float = flag(60.0, number(0.01), "seconds in which requests arrive, at each rate")
    requests: int | None = flag(
        None, integer(1), "number of requests at each rate, instead of a duration"
    )
    prompts: str | None = flag(
        None, words, 'file of lines {"prompt": …} or {"messages": …}; with "max_tokens" if it has'
    )
    num_tokens: int = flag(128, integer(1), "tokens of an answer where its line has no max_tokens")
    chat_template: bool = flag(True, switch, "send a prompt as a user's message of a chat")
    temperature: float = flag(0.0, number(0, 2), "sampling temperature")
    seed: int = flag(0, integer(0, 2**63 - 1), "of arrivals, and of the order of prompts")
    url: str | None = flag(
        None,
        words,
        f"an OpenAI-compatible server (default: {DEFAULT_URL}; without it a pair is "
        "simulated in this process, on an emulated device)",
    )
    model: str | None = flag(None, words, "model to ask for (default: the server's first)")
    api_key: str | None = flag(None, words, f"key to send (or {KEY_VARIABLE})")
    ttft: float = flag(1.0, number(0), "objective: seconds to the first token, at most")
    tpot: float = flag(0.1, number(0), "objective: seconds per further token, at most")
    deadline_s: float = flag(600.0, number(0.1), "longest wait for an answer, in seconds")
    out: str = flag("out", words, "folder of loads.jsonl and loads/")
    stream_usage: bool = flag(True, switch, "ask for usage in streams; some servers refuse it")

    run: RunConfig = contained(
        RunConfig,
        only=_SIMULATED,
        mode=flag("ssd", choice(AUTO, "ar", "sd", "ssd"), "decoding mode; auto: by the round"),
    )
    auto: bool = flag(False, switch, "as mode=auto")
    tp: int = flag(1, integer(1), "target ranks to simulate")
    replicas: int = flag(1, integer(1, 64), "servers to simulate, which get requests in turn")
    max_running: int = flag(16, integer(1, 4096), "most sequences that decode together")
    kv_tokens: int = flag(0, integer(0), "tokens of KV cache for all of them; 0: enough")

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Adds the flags that mode=auto implies."""
        given = super().completed(flags)
        if given.get("mode") == AUTO:
            given |= {"mode": "sd" if given.get("num_drafts") == "0" else "ssd", "auto": "true"}
        return given

    @property
    def is_simulated(self) -> bool:
        """Whether a pair is named, and no server."""
        return self.url is None and bool(self.run.pair or self.run.target)

    @property
    def simulated(self) -> RunConfig:
        """The configuration of the pair that is simulated."""
        return replace(
            self.run,
            backend="emulated",
            batch_size=self.max_running,
            seed=self.seed,
            num_tokens=self.num_tokens,
        )

    def check(self) -> None:
        """Refuses contradictory flags; raises ConfigError."""
        super().check()
        if self.url is not None and said(self.run):
            name = min(said(self.run))
            raise ConfigError(f"{name} with url={self.url}: allowed: without url, to simulate it")
        if math.inf in self.rate and self.requests is None:
            raise ConfigError("rate=inf without requests: allowed: with requests=N, all at once")
        if self.prompts is None:
            raise ConfigError("prompts: needed: a file, such as tests/data/prompts/chat.jsonl")
