"""Tables of the speedups that may be claimed: SSD against the best other use of the same GPUs.

Only rows of at least 400 rounds count, of configurations with at least five seeds. K and the best
other use are chosen by predicted mean (best_cell), so that the draws that are compared chose
neither. That prediction may be wrong by some percent, which could flatter SSD, and so could a mean
over sweeps, one of which met a slower machine. A line therefore compares SSD with the use, among
all at every measured K, by the rows of each sweep and by all of them, that leaves SSD the smallest
lower end of its interval. If a use that would fit was not measured, the line shows an interval and
makes no claim. Imposed hit rates have no line, because their branches cost nothing.

A file holds such a table between <!-- claims RESULTS --> and <!-- /claims -->. `claims --into=FILE`
rewrites it from the rows. A test makes the table again and looks for other sentences in the file
that claim a speedup. <!-- claims RESULTS lm_head --> keeps only the lines of rows with the LM head,
` real` only those whose hits follow no assumed law.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from mpissd.common.compare import HEADLINE_ROUNDS, HEADLINE_SEEDS, Comparison
from mpissd.common.errors import ConfigError
from mpissd.common.real_pairs import ASSUMED_LAW, under_real_pairs
from mpissd.common.rivals import Family
from mpissd.common.row import Row
from mpissd.lab.sweep.best import (
    Cell,
    compare_methods,
    is_lookup,
    is_row,
    method_of,
    setting_of,
)
from mpissd.lab.sweep.uses import MeasuredUse, Verdict, is_imposed, verdicts, ways_of

BLOCK = re.compile(
    r"(<!-- claims (\S+)( lm_head)?( real)? -->\n)(.*?)(<!-- /claims -->)", re.DOTALL
)
_HEAD = ("alpha", "LM head", "SSD", "tok/s", "best other use of {} GPUs", "tok/s", "SSD over it")
_REAL = "with a real pair's hits, predicted"  # left out where no line has one


@dataclass(frozen=True)
class Claim:
    """SSD in one setting, beside one other use of its GPUs, with its gain over that use.

    seeds: of each use that fits and was measured with too few seeds, how many it has.
    """

    setting: dict[str, Any]
    verdict: Verdict
    other: MeasuredUse
    gain: Comparison
    seeds: Mapping[Family, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The gain as text: a ratio only if every use that fits was measured with enough seeds."""
        missing = self.verdict.others.missing
        if not missing:
            return self.gain.claim
        why = [f"{use}: {n} seeds of {HEADLINE_SEEDS}" for use, n in self.seeds.items()]
        if none := [str(use) for use in missing if use not in self.seeds]:
            why.append(f"{', '.join(none)} not measured")
        return f"{self.gain.interval}, no claim: {'; '.join(why)}"

    @property
    def real(self) -> list[float]:
        """The gains predicted under the hit rates of the real pairs; empty if no row allows it."""
        shares: dict[str, list[float]] = {}
        for row in self.verdict.ssd.cell.rows:
            for name, rate in under_real_pairs(row).items():
                shares.setdefault(name, []).extend([rate / row.tok_per_s] if rate else [])
        return [self.gain.speedup * fmean(of) for of in shares.values() if of]

    @property
    def is_assumed(self) -> bool:
        """Whether SSD's hits follow the assumed law, of no real pair."""
        return self.verdict.ssd.cell.rows[0].hit_law == ASSUMED_LAW

    @property
    def group(self) -> tuple[Any, ...]:
        """The values that all lines of a table share, such as pair, device and batch size."""
        names = ("target", "draft", "device_name", "dtype", "batch_size", "context", "fuse")
        ssd = self.verdict.ssd
        law = ssd.cell.rows[0].hit_law
        return (*(self.setting.get(n) for n in names), ssd.tp + ssd.num_drafts, law)


def claims(rows: Iterable[Row]) -> list[Claim]:
    """Returns the claims of every setting, those with the LM head first, by increasing acceptance.

    Raises ConfigError if no SSD rows with enough seeds and rounds can be compared with another use.
    """
    long = _long(rows)
    kept = enough(long)
    judged = [
        replace(claim, seeds=_seeds_of(verdict.others.missing, claim.setting, long))
        for comparison in compare_methods(kept)
        for verdict in verdicts(comparison, kept)
        if (claim := claim_of(dict(comparison.setting), verdict)) is not None
    ]
    if not judged:
        least = f"{HEADLINE_SEEDS} seeds of {HEADLINE_ROUNDS} rounds"
        raise ConfigError(
            f"claims: no SSD beside another use of its GPUs: allowed: from {least} on"
        )
    return sorted(judged, key=lambda c: (not c.setting["lm_head"], str(c.setting["acceptance"])))


def _long(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of 400 rounds or more without imposed hits."""
    lawful = (row for row in rows if is_row(row) and not is_imposed(row.hit_law))
    return [row for row in lawful if (row.num_rounds or 0) >= HEADLINE_ROUNDS]


def enough(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows that may support a claim.

    They have 400 rounds or more, no imposed hits, and a configuration with five seeds or more.
    """
    long = _long(rows)
    seeds: dict[Any, set[Any]] = {}
    for row in long:
        seeds.setdefault(_configuration(row), set()).add(row.seed)
    return [row for row in long if len(seeds[_configuration(row)]) >= HEADLINE_SEEDS]


def _seeds_of(
    missing: Collection[Family], setting: dict[str, Any], long: Sequence[Row]
) -> dict[Family, int]:
    """Returns the most seeds that one K of a missing use has, for those with a row."""
    seeds: dict[Family, int] = {}
    for use in ways_of(setting, long):
        of = Family.of(use)
        if of in missing and not is_lookup(use.cell.rows[0]):
            seeds[of] = max(seeds.get(of, 0), len({row.seed for row in use.cell.rows}))
    return seeds


def _configuration(row: Row) -> tuple[Any, ...]:
    return setting_of(row), method_of(row), row.lookahead, row.world_size


def claim_of(setting: dict[str, Any], verdict: Verdict) -> Claim | None:
    """Returns SSD beside the other use that leaves its interval the smallest lower end; None where
    no use was measured that it can be compared with."""
    fastest, gain = verdict.others.fastest, verdict.gain
    if fastest is None or gain is None:
        return None
    uses = [one for use in verdict.every for one in _by_sweep(use)]
    every = [(verdict.ssd.cell.over(use.cell), use) for use in uses]
    measured = [(one, use) for one, use in every if one is not None]
    gain, fastest = min(measured, key=lambda pair: pair[0].low)
    return Claim(setting, verdict, fastest, gain)


def _by_sweep(use: MeasuredUse) -> Iterator[MeasuredUse]:
    """Yields a use, and behind it the use by the rows of each sweep that has enough seeds."""
    yield use
    sweeps: dict[object, list[Row]] = {}
    for row in use.cell.rows:
        sweep = (row.provenance or {}).get("sweep") or {}  # None: a run of its own
        sweeps.setdefault(sweep.get("id"), []).append(row)
    for rows in sweeps.values():
        if len(sweeps) > 1 and len({row.seed for row in rows}) >= HEADLINE_SEEDS:
            cell = Cell(use.cell.lookahead, tuple(rows))
            yield replace(use, cell=cell, tok_per_s=cell.median)


def render(judged: Sequence[Claim]) -> str:
    """Renders claims as Markdown, with a table for each pair, machine and number of GPUs."""
    groups: dict[tuple[Any, ...], list[Claim]] = {}
    for claim in judged:
        groups.setdefault(claim.group, []).append(claim)
    return "\n\n".join(_table(group, of) for group, of in groups.items())


def _table(group: tuple[Any, ...], group_claims: Sequence[Claim]) -> str:
    target, draft, device, dtype, batch, context, fuse, gpus, law = group
    rounds = min(claim.gain.num_rounds for claim in group_claims)
    seeds = min(claim.gain.num_seeds for claim in group_claims)
    issued = f"{dtype}{', fused' * bool(fuse)}, context {context}, batch {batch}"
    hits = f"{law}, assumed" if law == ASSUMED_LAW else law
    about = f"{target}/{draft} on {gpus} × {device} ({issued}), hits by {hits}. "
    about += f"{seeds} seeds × {rounds} rounds, paired by seed; tok/s: medians."
    cells = list(map(_cells, group_claims))
    width = len(_HEAD) + any(line[-1] != "–" for line in cells)
    head, *lines = (f"| {' | '.join(line[:width])} |" for line in [(*_HEAD, _REAL), *cells])
    return "\n".join([about, "", head.format(gpus), "|---" * width + "|", *lines])


def _cells(claim: Claim) -> tuple[str, ...]:
    ssd, other, others = claim.verdict.ssd, claim.other, claim.verdict.others
    alpha = str(claim.setting["acceptance"]).removeprefix("alpha:")
    rates = f"{ssd.cell.median:.0f}", f"{other.cell.median:.0f}"
    head = "yes" if claim.setting["lm_head"] else "no"
    where = other.where
    real = ", ".join(f"{gain:.2f}" for gain in claim.real)
    if others.missing:
        where, real = f"fastest measured: {where}", ""
    ours = f"T={ssd.tp} D={ssd.num_drafts} K={ssd.cell.lookahead}"
    return alpha, head, ours, rates[0], where, rates[1], claim.text, real or "–"


def rewritten(text: str, read: Callable[[str], Sequence[Row]]) -> str:
    """Returns the text with the table of each claims block made anew from its rows.

    read: returns the rows of a block's RESULTS, which are folders or files separated by commas.
    Raises ConfigError if the text has no block.
    """
    if not BLOCK.search(text):
        raise ConfigError("no <!-- claims RESULTS --> … <!-- /claims --> there")

    def table(block: re.Match[str]) -> str:
        judged = claims(read(block[2]))
        kept = [claim for claim in judged if claim.setting["lm_head"] or not block[3]]
        kept = [claim for claim in kept if not (block[4] and claim.is_assumed)]
        return f"{block[1]}{render(kept)}\n{block[6]}"

    return BLOCK.sub(table, text)
