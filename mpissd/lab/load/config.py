"""The flags of the command `load`: arrivals, server, and latencies of a good request."""

import math
from dataclasses import dataclass

from mpissd.common.errors import ConfigError
from mpissd.common.flags import Checked, flag, integer, number, switch, words
from mpissd.serve.config import KEY_VARIABLE

DEFAULT_URL = "http://127.0.0.1:8000/v1"


def rates(name: str, text: str) -> tuple[float, ...]:
    """Parses the value `text` of the flag `name`: request rates in 1/s, separated by commas, where
    "inf" means all requests at once. Raises ConfigError for other values."""
    parts = [part.strip() for part in text.strip("()").split(",") if part.strip()]
    values = tuple(math.inf if part == "inf" else number(0)(name, part) for part in parts)
    if not values or 0 in values:
        raise ConfigError(f"{name}={text}: allowed: numbers above 0 or inf, a comma between")
    return values


@dataclass(frozen=True)
class LoadConfig(Checked):
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
    url: str = flag(DEFAULT_URL, words, "an OpenAI-compatible server")
    model: str | None = flag(None, words, "model to ask for (default: the server's first)")
    api_key: str | None = flag(None, words, f"key to send (or {KEY_VARIABLE})")
    ttft: float = flag(1.0, number(0), "objective: seconds to the first token, at most")
    tpot: float = flag(0.1, number(0), "objective: seconds per further token, at most")
    deadline_s: float = flag(600.0, number(0.1), "longest wait for an answer, in seconds")
    out: str = flag("out", words, "folder of loads.jsonl and loads/")
    stream_usage: bool = flag(True, switch, "ask for usage in streams; some servers refuse it")

    def check(self) -> None:
        super().check()
        if math.inf in self.rate and self.requests is None:
            raise ConfigError("rate=inf without requests: allowed: with requests=N, all at once")
        if self.prompts is None:
            raise ConfigError("prompts: needed: a file, such as tests/data/prompts/chat.jsonl")
