"""The flags of the workloads; mpissd.common.workloads says which workload reads which of them."""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.errors import ConfigError
from mpissd.common.flags import DRAFTING, GROWING, Checked, flag, integer, number, words
from mpissd.common.workloads import parse_name

DEFAULT_VOCAB = 64


@dataclass(frozen=True)
class WorkloadFlags(Checked):
    """What is decoded: how many sequences, and the laws or the models that draw their tokens."""

    workload: str = flag(
        "gemm", parse_name, "imposed laws, or a language-model pair that is sampled"
    )
    batch_size: int = flag(1, integer(1, 4096), "sequences b")
    alpha: float | None = flag(
        None,
        number(0, 1),
        "acceptance rate of every draft token",
        modes=DRAFTING,
    )
    acceptance: str | None = flag(
        None,
        words,
        "alpha:A, rates:a1,…,aK, marginal:… or histogram:FILE (default alpha:0.8)",
        modes=DRAFTING,
    )
    acceptance_fast: str = flag(
        "alpha:0.3", words, "acceptance of --backup=fast tokens", modes=DRAFTING
    )
    p_hit: float | None = flag(
        None,
        number(0, 1),
        "imposed cache-hit rate a sequence (ssd)",
        modes=GROWING,
    )
    hit_a: float | None = flag(
        None,
        number(0),
        "A of the hit law miss(F) = A·F^-r (ssd)",
        modes=GROWING,
    )
    hit_r: float | None = flag(None, number(0), "r of the hit law", modes=GROWING)
    hit_law: str | None = flag(
        None,
        words,
        "power:A=.75,r=1, power:A=.6/.2,r=.4/.5 (k<K/k=K), p_hit:.9 or smollm2-chat",
        modes=GROWING,
        in_digest="said",
    )
    temperature: float = flag(0.0, number(0), "of both models (markov); 0 is greedy")
    vocab: int | None = flag(None, integer(2, 50000), "V of both models (markov; default 64)")
    order: int | None = flag(None, integer(1, 3), "tokens a row depends on (markov; default 2)")
    divergence: float | None = flag(
        None,
        number(0, 1),
        "of draft from target, 0 none, 1 all (markov; default 0.2)",
        modes=DRAFTING,
    )
    saguaro_c: float | None = flag(
        None,
        number(0, 1),
        "C of Saguaro sampling (markov, ssd; default 1: plain)",
        modes=GROWING,
    )
    prompt_tokens: int | None = flag(None, integer(1, 1 << 20), "prompt length (markov; default 1)")
    stop_token: int | None = flag(None, integer(0), "ends a sequence (markov; default none)")

    @property
    def acceptance_text(self) -> str:
        """The acceptance law as text, with its default."""
        if self.acceptance is not None:
            return self.acceptance
        return f"alpha:{0.8 if self.alpha is None else self.alpha}"

    def check_acceptance(self) -> None:
        """Refuses flags that give two acceptance laws."""
        if self.alpha is not None and self.acceptance is not None:
            raise ConfigError("alpha and acceptance say the same thing: give one")

    def check_stop_token(self) -> None:
        """Refuses a stop token outside the vocabulary."""
        if self.stop_token is not None and self.stop_token >= (self.vocab or DEFAULT_VOCAB):
            raise ConfigError(
                f"stop_token={self.stop_token}: allowed: 0..{(self.vocab or DEFAULT_VOCAB) - 1}"
            )
