"""The flags of the workloads; mpissd.common.workloads says which workload reads which of them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from mpissd.common.errors import ConfigError
from mpissd.common.flags import (
    DRAFTING,
    GROWING,
    Checked,
    choice,
    flag,
    integer,
    number,
    switch,
    words,
)
from mpissd.common.workloads import parse_name

DEFAULT_VOCAB = 64


@dataclass(frozen=True)
class WorkloadFlags(Checked):
    """Flags of the workload: the number of sequences, and the laws or models of their tokens."""

    workload: str = flag(
        "gemm",
        parse_name,
        "what decides tokens: imposed laws (gemm), sampled models, or a recording",
    )
    batch_size: int = flag(1, integer(1, 4096), "number b of sequences that decode together")
    alpha: float | None = flag(
        None,
        number(0, 1),
        "probability with which each draft token is accepted",
        modes=DRAFTING,
    )
    acceptance: str | None = flag(
        None,
        words,
        "acceptance law: alpha:A, rates:a1,…,aK, marginal:… or histogram:FILE",
        modes=DRAFTING,
    )
    acceptance_fast: str = flag(
        "alpha:0.3", words, "acceptance law of the tokens that --backup=fast drafts", modes=DRAFTING
    )
    p_hit: float | None = flag(
        None,
        number(0, 1),
        "cache-hit rate to impose on each sequence (ssd)",
        modes=GROWING,
    )
    hit_a: float | None = flag(
        None,
        number(0),
        "parameter A of the hit law miss(F) = A·F^-r (ssd)",
        modes=GROWING,
    )
    hit_r: float | None = flag(None, number(0), "parameter r of the hit law (ssd)", modes=GROWING)
    hit_law: str | None = flag(
        None,
        words,
        "hit law: power:A=.75,r=1, power:A=.6/.2,r=.4/.5 (k<K/k=K), p_hit:.9 or smollm2-chat",
        modes=GROWING,
        in_digest="said",
    )
    laws: str | None = flag(
        None,
        words,
        "file of `mpissd laws`: a real pair's acceptance and hits (text, replay: of its fan-outs)",
        modes=DRAFTING,
        in_digest="said",
    )
    lookup: str = flag(
        "prompt",
        choice("prompt", "suffix"),
        "how --backup=fast finds what to copy: prompt lookup, or a suffix automaton",
        modes=DRAFTING,
        in_digest="said",
    )
    temperature: float = flag(
        0.0, number(0), "sampling temperature of both models (markov, text); 0 is greedy"
    )
    vocab: int | None = flag(
        None, integer(2, 50000), "vocabulary size of both models (markov; default 64)"
    )
    order: int | None = flag(
        None, integer(1, 3), "number of tokens that the next one depends on (markov; default 2)"
    )
    divergence: float | None = flag(
        None,
        number(0, 1),
        "distance of the draft from the target: 0 equal, 1 independent (markov; default 0.2)",
        modes=DRAFTING,
    )
    saguaro_c: float | None = flag(
        None,
        number(0, 1),
        "factor C of Saguaro sampling (markov, ssd; default 1: plain sampling)",
        modes=GROWING,
    )
    prompt_tokens: int | None = flag(
        None, integer(1, 1 << 20), "tokens of each prompt (markov; default 1)"
    )
    stop_token: int | None = flag(
        None,
        integer(0),
        "token that ends a sequence (markov; text: in addition to the model's own)",
    )
    prompt: str | None = flag(
        None, words, "user message that the model answers (text)", in_digest="said"
    )
    prompts: str | None = flag(
        None,
        words,
        'file of prompts, lines of {"prompt": "…"} or {"messages": […]} (text)',
        in_digest="said",
    )
    prompt_ids: str | None = flag(
        None,
        words,
        "prompts as token ids: 1,2,3;4,5 are two prompts (text)",
        in_digest="said",
    )
    chat_template: bool = flag(
        True, switch, "put a prompt into the model's chat template (text)", in_digest="said"
    )
    top_p: float = flag(
        1.0,
        number(0, 1),
        "sample only from the likeliest tokens whose probabilities reach this sum (text)",
        in_digest="said",
    )
    stop: str | None = flag(
        None,
        words,
        'text that ends an answer: a string, or a JSON list of strings, ["\\n\\n","###"] (text)',
        in_digest="said",
    )

    recording: str | None = flag(
        None, words, "file of `mpissd record` that decides the tokens (replay)", in_digest="said"
    )

    @property
    def acceptance_text(self) -> str:
        """The acceptance law as text, with its default."""
        if self.acceptance is not None:
            return self.acceptance
        if self.laws is not None and self.alpha is None:
            return f"laws:{self.laws}"
        return f"alpha:{0.8 if self.alpha is None else self.alpha}"

    @property
    def acceptance_fast_text(self) -> str:
        """The acceptance law of a fast backup's tokens as text: a flag's, or the file of laws'."""
        if self.laws is None or self.acceptance_fast != type(self).acceptance_fast:
            return self.acceptance_fast
        return f"{self.lookup}:{self.laws}"

    def check_acceptance(self) -> None:
        """Refuses flags that give two acceptance laws."""
        if self.alpha is not None and self.acceptance is not None:
            raise ConfigError("alpha and acceptance say the same thing: give one")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings: none, one, or those of a JSON list; raises ConfigError."""
        if self.stop is None or not self.stop.startswith("["):
            return () if self.stop is None else (self.stop,)
        try:
            found = json.loads(self.stop)
        except (ValueError, RecursionError):
            return (self.stop,)  # a string that begins with a bracket
        if not found or not all(isinstance(each, str) and each for each in found):
            raise ConfigError(f"stop={self.stop}: allowed: a list of strings that are not empty")
        return tuple(found)

    def check_prompts(self) -> None:
        """Refuses two sources of prompts, and text that is no UTF-8."""
        names = [n for n in ("prompt", "prompts", "prompt_ids") if getattr(self, n) is not None]
        if len(names) > 1:
            raise ConfigError(f"{' and '.join(names)} say the same thing: give one")
        for name, text in (("prompt", self.prompt or ""), ("stop", "".join(self.stop_strings))):
            if any("\ud800" <= c <= "\udfff" for c in text):  # arguments carry bad bytes so
                raise ConfigError(f"{name}: is no UTF-8 text")

    def check_stop(self) -> None:
        """Refuses empty or malformed stop strings."""
        tuple(self.stop_strings)

    def check_top_p(self) -> None:
        """Refuses a top_p that leaves no token, or that a greedy choice does not read."""
        if self.top_p == 0:
            raise ConfigError("top_p=0: allowed: a number above 0, at most 1")
        if self.top_p < 1 and self.temperature == 0:
            raise ConfigError(
                f"top_p={self.top_p:g} with temperature=0: allowed: a temperature above 0"
            )

    def check_stop_token(self) -> None:
        """Refuses a stop token outside the vocabulary (text compares with the tokenizer's)."""
        if self.workload == "text":
            return
        if self.stop_token is not None and self.stop_token >= (self.vocab or DEFAULT_VOCAB):
            raise ConfigError(
                f"stop_token={self.stop_token}: allowed: 0..{(self.vocab or DEFAULT_VOCAB) - 1}"
            )
