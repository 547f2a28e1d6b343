"""Compares SSD with the strongest alternative on as many GPUs, and decides what may be claimed
(docs/definitions.md, "The uses of G GPUs").

SSD is taken at the K and options with the highest predicted rate, and compared with the alternative
for which the lower end of the speedup's interval is smallest. Rows are compared within one visit.
The rate that an alternative reached on another visit, plus DRIFT, bounds its rate on this one; if
it was never measured, `bound_of` bounds it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpissd.common.config import RunConfig
from mpissd.common.row import Row
from mpissd.lab.tables.compare import DRIFT, HEADLINE_SEEDS, Comparison, holm, same_visit
from mpissd.lab.tables.uses import (
    LOOKUPS,
    Family,
    Use,
    best_use,
    family_of,
    is_in,
    is_lookup,
    method_of,
    number_of,
    tps_of,
    unit,
    widest,
)

LEVEL = 0.05  # largest accepted probability that any verdict in a table is a false alarm
_OF_T = ("tp", "all_reduce")  # row keys in which SSD and its alternatives may differ


@dataclass(frozen=True)
class Open:
    """An alternative to SSD that might be the fastest but has no comparable measurement. family:
    its mode and numbers of ranks. why: the reason: "not measured", too few seeds, or "another
    visit" (another machine, day or commit). rate: its tokens/s on that visit."""

    family: Family
    why: str
    rate: float | None = None

    def __str__(self) -> str:
        if self.why == "another visit":
            return f"few visits: {self.family}, {self.rate or 0:.0f} tok/s on another"
        return f"{self.family} {self.why}"


@dataclass(frozen=True)
class Claim:
    """SSD compared with the strongest measured alternative on at most as many GPUs. setting: {key:
    value} of models, machine, batch size and so on. gain: speedup of `ssd` over `other`. unknown:
    alternatives that may be faster but have no comparable measurement. copies: (n, alternative), if
    n independent copies of it on SSD's GPUs make the most tokens/s. p_value: of the hypothesis that
    the speedup is 1, after Holm's correction over a table."""

    setting: dict[str, Any]
    ssd: Use
    other: Use | None
    gain: Comparison | None
    unknown: tuple[Open, ...]
    copies: tuple[int, Use] | None
    p_value: float = 1.0

    @property
    def gpus(self) -> int:
        return self.ssd.family.gpus

    @property
    def table(self) -> tuple[Any, ...]:
        """The values that all claims of one table share: models, device, batch size, number of
        GPUs, hit model and so on. Holm's correction is made over the claims with equal values."""
        names = "target draft device_name dtype forward batch_size context fuse".split()
        shared = (self.setting.get(name) for name in names)
        return (*shared, self.gpus, self.ssd.rows[0].hit_law)

    @property
    def text(self) -> str:
        """The speedup as text: one number if it may be claimed, else its interval. If SSD surely is
        slower than one alternative, the text says "loses", even if others were not measured."""
        gain = self.gain
        if gain is None:
            return "not comparable"
        held = gain.is_headline and self.p_value < LEVEL
        if self.unknown:
            lost = gain.is_real and gain.speedup < 1 and (held or not gain.is_headline)
            verdict = f"loses, at most {gain.claim}" if lost else f"{gain.interval}, no verdict"
            return f"{verdict}: {'; '.join(map(str, self.unknown))}"
        if gain.is_headline and gain.is_real and not held:
            return f"{gain.interval}, no verdict after Holm's correction"
        return gain.claim

    def __str__(self) -> str:
        """Returns the claim as the line that the command `compare` prints below its table."""
        per = unit(self.ssd.rows[0])
        line = f"{self.ssd.method}, {self.ssd}: {self.ssd.tok_per_s:.1f} tok/s, "
        line += f"{self.ssd.per_gpu:.1f} a {per}"
        if self.other is None:
            line += f"; no other use of its {per}s was measured"
        else:
            line += f"; strongest other use of {self.gpus} {per}s, {self.other}: "
            line += f"{self.other.tok_per_s:.1f} tok/s, SSD over it {self.text}"
        if self.copies is not None:
            count, use = self.copies
            line += f"; {count} copies of {use}: {count * use.tok_per_s:.1f} tok/s in all"
        if str(self.ssd.rows[0].hit_law).startswith("p_hit:"):
            line += "; its hits are imposed and cost no branches"
        return line


def claims(settings: Iterable[Mapping[str, Any]], rows: Sequence[Row]) -> list[list[Claim]]:
    """Returns the claims about SSD in each setting (models, machine, batch size and so on), in
    order. rows: of all modes. Holm's correction is made over all claims in one table."""
    by_setting = [judged(setting, rows) for setting in settings]
    tables: dict[tuple[Any, ...], list[tuple[int, int, float]]] = {}
    for n, at_setting in enumerate(by_setting):
        for m, claim in enumerate(at_setting):
            if claim.gain is not None and claim.gain.is_headline:
                tables.setdefault(claim.table, []).append((n, m, claim.gain.p_value))
    for lines in tables.values():
        adjusted = holm([p_value for *_, p_value in lines])
        for (n, m, _), p_value in zip(lines, adjusted, strict=True):
            by_setting[n][m] = replace(by_setting[n][m], p_value=p_value)
    return by_setting


def judged(setting: Mapping[str, Any], rows: Iterable[Row]) -> list[Claim]:
    """Returns the claims about SSD in one setting: one for each measured number of GPUs, model of
    cache-hit probability, and value of the row's key `schedule`. setting: {key: value} that rows
    must have; alternatives may differ in target ranks. rows: result rows of any setting; rows whose
    draft ran on another kind of device than the target are ignored."""
    methods: dict[tuple[Any, ...], list[list[Row]]] = {}
    for row in rows:
        if is_in(row, setting, _OF_T) and row.other_draft_device is None:
            visits = methods.setdefault((family_of(row), method_of(row), row.lookahead), [])
            visit = next((visit for visit in visits if same_visit(visit[0], row)), None)
            if visit is None:
                visits.append([row])
            else:
                visit.append(row)
    uses = [Use.of(visit) for visits in methods.values() for visit in visits]
    cases: dict[tuple[int, str | None, str | None], list[Use]] = {}
    for use in uses:
        if use.family.mode == "ssd" and use.family.tp == setting["tp"]:
            first = use.rows[0]
            cases.setdefault((first.world_size, first.hit_law, first.schedule), []).append(use)
    return [_claim(dict(setting), best_use(_of_most_seeds(of)), uses) for of in cases.values()]


def _of_most_seeds(uses: Sequence[Use]) -> Sequence[Use]:
    """Returns the groups of rows that have enough seeds for a claim; all groups if none has."""
    return [use for use in uses if len(use.seeds) >= HEADLINE_SEEDS] or uses


def _claim(setting: dict[str, Any], ssd: Use, uses: Sequence[Use]) -> Claim:
    seeds = HEADLINE_SEEDS if len(ssd.seeds) >= HEADLINE_SEEDS else 1
    gpus = ssd.family.gpus
    first = ssd.rows[0]
    rivals = [use for use in uses if use.family.mode != "ssd" and use.family.gpus <= gpus]
    if first.acceptance is not None:  # Simulated lookups must have equal acceptance.
        fast = _fast_of(first)
        rivals = [u for u in rivals if not is_lookup(u.rows[0]) or _fast_of(u.rows[0]) == fast]
    here = [u for u in rivals if same_visit(u.rows[0], first) and len(u.seeds) >= seeds]
    gains = [(gain, use) for use in here if (gain := ssd.over(use)) is not None]
    gains.sort(key=lambda pair: pair[0].low if pair[0].has_interval else pair[0].speedup)
    gain, other = next(iter(gains), (None, None))
    best = max((use.tok_per_s for use in here), default=0.0)
    rows = [row for use in uses for row in use.rows]
    unknown = list[Open]()
    lookups = LOOKUPS if first.acceptance is None else LOOKUPS[:1]
    measured = {use.family for use in here}
    for family in widest(gpus, tps_of(str(setting["target"]), gpus), lookups):
        if family.mode == "ssd" or family in measured:
            continue
        elsewhere = [use for use in rivals if use.family == family]
        if elsewhere:
            rate = max(use.tok_per_s for use in elsewhere)
            count = max(len(use.seeds) for use in elsewhere)
            if rate * (1 + DRIFT) >= best:
                few = Open(family, f"has {count} of {seeds} seeds")
                unknown.append(few if count < seeds else Open(family, "another visit", rate))
        elif (bound := bound_of(family, rows, first)) is None or bound >= best:
            unknown.append(Open(family, "not measured"))
    unknown.sort(key=lambda use: -(use.rate or 0.0))
    several = [(gpus // use.family.gpus, use) for use in rivals if 2 * use.family.gpus <= gpus]
    copies = max(several, key=lambda pair: pair[0] * pair[1].tok_per_s, default=None)
    return Claim(setting, ssd, other, gain, tuple(unknown), copies)


def _fast_of(row: Row) -> str:
    """Returns the acceptance model of a row for tokens drafted by a lookup, or the default."""
    return str(row.acceptance_fast or RunConfig.acceptance_fast)


def bound_of(family: Family, rows: Iterable[Row], ssd: Row) -> float | None:
    """Returns an upper bound of the tokens/s of an alternative that was not measured; None if no
    bound is known, as at batch sizes above 1. family: the alternative's mode and numbers of ranks.
    ssd: a row of SSD, to compare with. The bound of AR is its rate on the next larger number of
    ranks, plus DRIFT. A lookup of acceptance a makes at most 1/(1 − a) times that."""
    fast = number_of(_fast_of(ssd), "alpha")
    wider = [row for row in rows if row.mode == "ar" and row.tp >= family.tp]
    is_imposed = number_of(ssd.acceptance, "alpha") is not None and fast is not None
    if not is_imposed or ssd.batch_size != 1 or not wider or family.mode not in ("ar", *LOOKUPS):
        return None
    next_tp = min(row.tp for row in wider)
    rate = max(row.tok_per_s for row in wider if row.tp == next_tp)
    return rate * (1 + DRIFT) * (1.0 if family.mode == "ar" else 1 / (1 - (fast or 0.0)))
