"""Compares two result rows and formats the comparison; refuses rows that are not comparable."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.row import Row
from mpissd.lab.tables.compare import FEW_SEEDS, FEW_VISITS, Comparison, compare_rows
from mpissd.lab.tables.uses import FAR, missed_by, unit

# Two compared rows must agree in these keys, which decide the tokens and the work for each.
_SAME = (
    "workload target batch_size context lm_head seed temperature vocab order prompt_tokens "
    "stop_token recording top_p stop prompts_sha256"
).split()
_LATER = ("top_p", "stop", "prompts_sha256")  # keys that older rows of text lack
# Two compared rows may differ in these keys; the output lists the differences.
_CHOSEN = (
    "mode backend device_name dtype tp num_drafts inline_draft draft lookahead fan_out "
    "fan_out_miss cache acceptance acceptance_fast hit_law divergence saguaro_c on_late backup "
    "backup_lookahead all_reduce graph fuse"
).split()


@dataclass(frozen=True)
class Pair:
    """The speedup of configuration b over configuration a in tokens/s, and a row of each to show.
    a, b: these rows, with the same seed if possible. comparison: the speedup, by all rows."""

    a: Row
    b: Row
    comparison: Comparison

    @classmethod
    def of(cls, a: Sequence[Row], b: Sequence[Row]) -> Pair:
        """Compares the rows of configuration b with those of configuration a; the latest two rows
        with a common seed are shown. Raises ConfigError if they have no common seed, or if rows
        with one seed are not comparable (see check_alike)."""
        pairs = [(x, y) for x in reversed(a) for y in reversed(b) if x.seed == y.seed]
        pairs = pairs or [(a[-1], b[-1])]
        for pair in pairs:
            check_alike(*pair)
        comparison = compare_rows(a, b)
        if comparison.num_seeds == 1:  # Only the two shown rows are compared.
            comparison = compare_rows(*([row] for row in pairs[0]))
        return cls(*pairs[0], comparison)

    @property
    def per_gpu(self) -> Comparison:
        return self.comparison.scaled(self.a.world_size / self.b.world_size)

    @property
    def differ(self) -> dict[str, list[Any]]:
        """The settings that differ between rows a and b, as {key: [a's value, b's value]}."""
        both = {key: [self.a.get(key), self.b.get(key)] for key in _CHOSEN}
        both["draft_device_name"] = [self.a.draft_device, self.b.draft_device]
        return {key: values for key, values in both.items() if values[0] != values[1]}

    def __str__(self) -> str:
        """Returns the comparison as a few lines for a terminal."""
        gain = self.comparison
        lines = []
        for name, row in (("a", self.a), ("b", self.b)):
            ranks = f"{row.world_size} rank{'s' * (row.world_size > 1)}"
            rate = f"{row.tok_per_s:.1f} tok/s"
            lines.append(f"{name} = {row.run_id}: {rate}, {ranks}, {row.num_rounds} rounds")
            if missed_by([row.prediction_error]) > FAR:
                lines.append(f"! {name} is {row.prediction_error:+.0%} off its own prediction")
        differ = (f"{key} {' → '.join(map(_text, both))}" for key, both in self.differ.items())
        lines += [f"differ in: {'; '.join(differ) or 'nothing'}", f"b over a: {gain}"]
        if self.a.world_size != self.b.world_size:
            lines.append(f"per {unit(self.a)}: {self.per_gpu}")
        lines.append(f"(by pairs of one seed: {gain.num_seeds})")
        if not gain.one_visit:
            lines.append(f"({FEW_VISITS})")
        elif not gain.is_headline:
            lines.append(f"({FEW_SEEDS})")
        wrap = textwrap.TextWrapper(100, initial_indent="   ", subsequent_indent="      ")
        return "\n".join(wrap.fill(line) for line in lines)


def _text(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return "–" if value is None else text


def configurations(rows: Iterable[Row]) -> list[list[Row]]:
    """Groups rows that differ at most in seed or repeat, in the order of their first rows."""
    names = {*_SAME, *_CHOSEN, "world_size", "num_rounds", "token_limit"} - {"seed"}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        values = [*(row.get(name) for name in sorted(names)), row.draft_device]
        groups.setdefault(str(values), []).append(row)
    return [*groups.values()]


def check_alike(a: Row, b: Row) -> None:
    """Raises ConfigError unless the speeds of rows a and b can be compared: the same target model
    must have decoded the same tokens, and either both rows were measured, or both were emulated."""
    for key in ("world_size", "num_rounds", "token_digest", "backend"):
        for row in (a, b):
            if key not in row:
                raise ConfigError(f"row {row.get('run_id')!r}: no {key}: allowed: a row of `run`")
    for key in _SAME:
        is_unknown = key in _LATER and not (key in a and key in b)
        # Every transformer has an LM head, even if an older row does not say so.
        has_head = key == "lm_head" and a.forward == b.forward == "transformer"
        if not is_unknown and not has_head and a.get(key) != b.get(key):
            values = f"{key}={a.get(key)!r} and {b.get(key)!r}"
            raise ConfigError(f"{values}: allowed: two runs of one {key}")
    if (a.groups or 1) != (b.groups or 1):
        raise ConfigError(f"groups={a.groups} and {b.groups}: allowed: as many target groups")
    if (a.backend == "emulated") != (b.backend == "emulated"):
        values = f"backend={a.backend!r} and {b.backend!r}"
        raise ConfigError(f"{values}: allowed: two measured runs, or two emulated ones")
    # Digests are compared at temperature 0, if they cover equally many tokens of each sequence.
    limit = a.token_limit
    covers = limit == b.token_limit and (limit is not None or a.num_rounds == b.num_rounds)
    if not a.temperature and covers and a.token_digest != b.token_digest:
        values = f"token_digest={a.token_digest!r} and {b.token_digest!r}"
        raise ConfigError(f"{values}: allowed: two runs that decoded the same tokens")
