"""Compares SSD with the strongest alternative on as many GPUs, and decides what may be claimed.

A "use" of GPUs is AR, SD, SSD or a lookup on T target and D draft ranks at one K; uses.py lists
those that SSD must beat. SSD is taken at the K, fan-out and backup with the highest predicted mean.
It is compared with the measured use for which the speedup's lower bound is smallest. Both must
be of one visit: the same commit and GPU, within 12 hours. If an alternative was measured only on
another visit, its rate there plus DRIFT bounds it; if it was not measured, `bound_of` does.
docs/definitions.md says when a verdict holds.
"""

from __future__ import annotations

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

LEVEL = 0.05  # probability that any verdict of a table is a false alarm
_OF_T = ("tp", "all_reduce")  # Rows compared with each other may differ in these keys.


@dataclass(frozen=True)
class Open:
    """An alternative to SSD that might be the fastest, but has no comparable measurement. why: the
    reason, such as "not measured", too few seeds, or "another visit" (another commit, machine or
    day). rate: its tokens/s on that visit."""

    family: Family
    why: str
    rate: float | None = None

    def __str__(self) -> str:
        if self.why == "another visit":
            return f"few visits: {self.family}, {self.rate or 0:.0f} tok/s on another"
        return f"{self.family} {self.why}"


@dataclass(frozen=True)
class Claim:
    """SSD compared with the strongest measured alternative on at most as many GPUs. setting: model
    pair, machine, batch size and so on, which both share. gain: the speedup of `ssd` over `other`.
    unknown: unmeasured alternatives that may be faster. copies: the number of independent copies of
    a smaller alternative with the most total tokens/s, and that alternative. p_value: after Holm's
    correction over a table."""

    setting: dict[str, Any]
    ssd: Use
    other: Use | None
    gain: Comparison | None
    unknown: tuple[Open, ...]
    copies: tuple[int, Use] | None
    p_value: float = 1.0

    @property
    def gpus(self) -> int:
        """The number of GPUs that SSD runs on."""
        return self.ssd.family.gpus

    @property
    def table(self) -> tuple[Any, ...]:
        """The values that all claims of one table share: pair, device, batch, GPUs, hit model."""
        names = "target draft device_name dtype forward batch_size context fuse".split()
        shared = (self.setting.get(name) for name in names)
        return (*shared, self.gpus, self.ssd.rows[0].hit_law)

    @property
    def text(self) -> str:
        """The speedup as text; as one number only if it may be claimed, else as an interval. If SSD
        is slower than a measured alternative, unmeasured alternatives cannot change that."""
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
    """Returns the claims of each setting (pair, machine, batch, …), in the order of `settings`.
    Holm's correction is applied to the p-values of the claims of a table together."""
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
    """Returns a claim for each number of GPUs, hit model and schedule that SSD was measured with.
    setting: the values that the rows must have; SSD must have its T, alternatives may have another.
    rows: rows of any setting; rows whose draft ran on another kind of device are left out."""
    methods: dict[tuple[Any, ...], list[list[Row]]] = {}  # rows by (family, method, K) and visit
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
    """Returns the elements that were measured with enough seeds to claim a speedup, or all."""
    return [use for use in uses if len(use.seeds) >= HEADLINE_SEEDS] or uses


def _claim(setting: dict[str, Any], ssd: Use, uses: Sequence[Use]) -> Claim:
    seeds = HEADLINE_SEEDS if len(ssd.seeds) >= HEADLINE_SEEDS else 1  # needed by an alternative
    gpus = ssd.family.gpus
    first = ssd.rows[0]
    rivals = [use for use in uses if use.family.mode != "ssd" and use.family.gpus <= gpus]
    if first.acceptance is not None:  # a simulated lookup must have SSD's acceptance of lookups
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
    """Returns the acceptance model of a row's lookup drafts; the default if the row has none."""
    return str(row.acceptance_fast or RunConfig.acceptance_fast)


def bound_of(family: Family, rows: Iterable[Row], ssd: Row) -> float | None:
    """Returns an upper bound of the tok/s of an unmeasured `family` (mode, T, D) at batch size 1;
    None if unknown. AR on T ranks is no faster than AR on the next larger measured T. A lookup
    whose drafts have the imposed acceptance rate a emits at most 1/(1 − a) tokens in the time of
    one AR step. Other modes have no bound. ssd: a row of the SSD runs to compare with."""
    fast = number_of(_fast_of(ssd), "alpha")
    wider = [row for row in rows if row.mode == "ar" and row.tp >= family.tp]
    is_imposed = number_of(ssd.acceptance, "alpha") is not None and fast is not None
    if not is_imposed or ssd.batch_size != 1 or not wider or family.mode not in ("ar", *LOOKUPS):
        return None
    next_tp = min(row.tp for row in wider)
    rate = max(row.tok_per_s for row in wider if row.tp == next_tp)
    return rate * (1 + DRIFT) * (1.0 if family.mode == "ar" else 1 / (1 - (fast or 0.0)))
