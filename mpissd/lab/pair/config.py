"""The flags of the command `pair`: models and prompts to record, or recordings to evaluate."""

from dataclasses import dataclass

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.flags import Checked, choice, contained, flag, integer, words

_RECORDED = 8  # default of K, the number of draft tokens to record at each position
_PRINTED = 4  # default of K (tokens drafted a round) whose acceptance and hit models are printed


@dataclass(frozen=True)
class PairConfig(Checked):
    """Flags of the command `pair`. A flag that `run` has, too, has the same meaning here."""

    sources: str | None = flag(
        None,
        words,
        "measure the laws of these: recordings (.npz) of one pair and folders of its text rows, "
        "separated by commas",
    )
    run: RunConfig = contained(
        RunConfig,
        only="pair target draft prompts prompt_ids chat_template stop_token".split(),
        is_unchecked=True,
        pair=flag(None, words, "record this pair: smollm2, or TARGET/DRAFT with weights"),
    )
    backend: str = flag("auto", choice("auto", "numpy", "cupy"), "what computes")
    num_tokens: int = flag(128, integer(1), "tokens of an answer, at most")
    count: int | None = flag(None, integer(1), "prompts to record, at most (default: all)")
    lookahead: int | None = flag(
        None,
        integer(1, 256),
        f"longest K that a replay may use (default: {_RECORDED}); with sources: the K whose laws "
        f"are printed (default: {_PRINTED})",
    )
    fan_out: int = flag(16, integer(1, 63), "most candidates a row that a replay may use")
    batch_size: int = flag(8, integer(1, 256), "prompts that the target answers together")
    seed: int = flag(0, integer(0, 2**63 - 1), "of random weights")
    licence: str = flag("", words, "of the prompts, with their source")
    out: str | None = flag(
        None, words, "file to write: a new .npz; with sources: a new .json (default: only print)"
    )

    @property
    def steps(self) -> int:
        """K: the number of draft tokens to record or, with `sources`, the K to print models of."""
        return self.lookahead or (_RECORDED if self.sources is None else _PRINTED)

    def check(self) -> None:
        """Raises ConfigError unless the flags name a pair and prompts, or recordings (sources)."""
        super().check()
        run = self.run
        named = (run.target is not None) + (run.draft is not None)
        if self.sources is None and named != (2 if run.pair is None else 0):
            raise ConfigError(
                "needed: sources (recordings), or one pair to record: pair=NAME, or target and "
                "draft"
            )
        if self.sources is not None and (run.pair or run.target or run.draft):
            raise ConfigError("sources with a pair: allowed: one of them")
        given = (run.prompts is not None) + (run.prompt_ids is not None)
        if given != (self.sources is None):
            raise ConfigError(
                "recording a pair needs prompts: allowed: prompts=FILE.jsonl, or prompt_ids; none "
                "with sources"
            )
