"""Compares two result rows, if they are comparable, and prints the comparison."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpissd.common.compare import FEW_SEEDS, FEW_VISITS, Comparison, How, compare_rows
from mpissd.common.errors import ConfigError
from mpissd.common.rates import Rounds
from mpissd.common.row import Row

_WIDTH = 100
_HOW = {
    How.SEEDS: "by pairs: {} seeds",
    How.BLOCKS: "by pairs: blocks of the tokens that both emitted, one seed",
    How.ROUNDS: "as independent runs, by their rounds",
    How.ROWS: "rounds not kept: intervals from the rows' draws and percentiles, which don't see "
    "what neighbouring rounds have in common",
}
# Keys that decide which tokens are decoded, and how much work a token is.
_SAME = (
    "workload target batch_size context lm_head seed temperature vocab order prompt_tokens "
    "stop_token recording top_p stop prompts_sha256"
).split()
_LATER = ("top_p", "stop", "prompts_sha256")  # missing in older rows of text
# Keys that may differ; differences are printed.
_CHOSEN = (
    "mode backend device_name dtype tp num_drafts inline_draft draft lookahead fan_out "
    "fan_out_miss acceptance acceptance_fast hit_law divergence saguaro_c on_late backup "
    "backup_lookahead all_reduce graph fuse"
).split()


@dataclass(frozen=True)
class Pair:
    """The comparison of row b with row a, in tokens/s and in tokens/s per rank.

    differ: the settings that differ, as {key: (a's value, b's value)}.
    """

    a: Row
    b: Row
    comparison: Comparison
    per_gpu: Comparison
    differ: dict[str, tuple[Any, Any]]

    @classmethod
    def of(
        cls,
        a: Row,
        b: Row,
        rounds: Mapping[str, Rounds],
        others: Sequence[Row] = (),
        others_of_b: Sequence[Row] | None = None,
    ) -> Pair:
        """Compares two rows.

        others: rows among which further seeds of the same two configurations are looked for;
        others_of_b: those for b, if they are not the same rows. Raises ConfigError if a comparison
        would mean nothing, or with under 20 rounds.
        """
        check_alike(a, b)
        sides = [siblings(a, others), siblings(b, others if others_of_b is None else others_of_b)]
        if any(row in sides[1] for row in sides[0]):  # one configuration: whose row is not known
            sides = [[a], [b]]
        for one in sides[0]:
            for other in sides[1]:
                if one.seed == other.seed:
                    check_alike(one, other)
        comparison = compare_rows(sides[0], sides[1], rounds)
        if comparison.how is not How.SEEDS:  # compare only the two rows that were named
            comparison = compare_rows([a], [b], rounds)
        share = a.world_size / b.world_size
        return cls(
            a=a, b=b, comparison=comparison, per_gpu=comparison.scaled(share), differ=_differ(a, b)
        )

    def __str__(self) -> str:
        """Returns the comparison as a few lines for a terminal."""
        lines = [f"{name} = {_side(row)}" for name, row in (("a", self.a), ("b", self.b))]
        differences = "; ".join(
            f"{key} {_short(x)} → {_short(y)}" for key, (x, y) in self.differ.items()
        )
        lines.append(f"differ in: {differences or 'nothing'}")
        lines.append(f"b over a: {self.comparison}")
        if self.a.world_size != self.b.world_size:
            lines.append(f"per GPU: {self.per_gpu}")
        lines.append(f"({_HOW[self.comparison.how].format(self.comparison.num_seeds)})")
        if not self.comparison.one_visit:
            lines.append(f"({FEW_VISITS})")
        elif self.comparison.is_real and not self.comparison.is_headline:
            lines.append(f"({FEW_SEEDS})")
        for name, row in (("a", self.a), ("b", self.b)):
            if row.stable is False:
                lines.append(f"({name} is not stable: blocks of its rounds differ in their median)")
        wrap = textwrap.TextWrapper(_WIDTH, initial_indent="   ", subsequent_indent="      ")
        return "\n".join(wrap.fill(line) for line in lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as JSON; a speedup is null if its interval holds 1."""
        return {
            "a": self.a.run_id,
            "b": self.b.run_id,
            **self.comparison.to_dict(),
            "per_gpu": self.per_gpu.to_dict(),
            "from_rounds": self.comparison.how in (How.BLOCKS, How.ROUNDS),
            "differ": {key: list(values) for key, values in self.differ.items()},
        }


def siblings(row: Row, others: Sequence[Row]) -> list[Row]:
    """Returns the row, and the others of the same configuration and length under any seed."""
    own = _configuration(row)
    return [row, *(o for o in others if o is not row and o != row and _configuration(o) == own)]


def _configuration(row: Row) -> tuple[Any, ...]:
    """Returns all settings of a run except its seed, and the machine that it ran on."""
    names = (*_SAME, *_CHOSEN, "world_size", "num_rounds", "token_limit")
    return (*(row.get(name) for name in names if name != "seed"), row.draft_device)


def check_alike(a: Row, b: Row) -> None:
    """Raises ConfigError unless the two rows can be compared.

    Both must have decoded the same tokens of the same model on the same kind of machine. Emulated
    forwards are modelled, so they cannot be compared with measured ones.
    """
    for key in (*_SAME, "world_size", "num_rounds", "token_digest", "backend"):
        for row in (a, b):
            if key not in row and key not in _SAME:
                raise ConfigError(f"row {row.get('run_id')!r}: no {key}: allowed: a row of `run`")
        is_unknown = key in _LATER and not (key in a and key in b)
        if key in _SAME and not is_unknown and a.get(key) != b.get(key):
            if key == "lm_head" and a.forward == b.forward == "transformer":
                continue  # each has its head, even if older rows lack the key
            values = f"{key}={a.get(key)!r} and {b.get(key)!r}"
            raise ConfigError(f"{values}: allowed: two runs of one {key}")
    if (a.groups or 1) != (b.groups or 1):
        raise ConfigError(f"groups={a.groups} and {b.groups}: allowed: as many target groups")
    if (a.backend == "emulated") != (b.backend == "emulated"):
        values = f"backend={a.backend!r} and {b.backend!r}"
        raise ConfigError(f"{values}: allowed: two measured runs, or two emulated ones")
    # Above temperature 0, equal models may give different tokens.
    if not a.temperature and _cover_alike(a, b) and a.token_digest != b.token_digest:
        values = f"token_digest={a.token_digest!r} and {b.token_digest!r}"
        raise ConfigError(f"{values}: allowed: two runs that decoded the same tokens")


def _cover_alike(a: Row, b: Row) -> bool:
    """Returns whether both digests cover the same number of tokens.

    A digest covers num_tokens a sequence, or one token a round without such a limit.
    """
    limits = a.token_limit, b.token_limit
    return limits[0] == limits[1] and (limits[0] is not None or a.num_rounds == b.num_rounds)


def _side(row: Row) -> str:
    ranks = f"{row.world_size} rank{'s' * (row.world_size > 1)}"
    return f"{row.run_id}: {row.tok_per_s:.1f} tok/s, {ranks}, {row.num_rounds} rounds"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "–" if value is None else str(value)


def _differ(a: Row, b: Row) -> dict[str, tuple[Any, Any]]:
    both = {key: (a.get(key), b.get(key)) for key in _CHOSEN}
    both["draft_device_name"] = a.draft_device, b.draft_device
    return {key: values for key, values in both.items() if values[0] != values[1]}
