"""Compares SSD with the strongest other use of as many GPUs, and judges which speedups hold.

rivals.py defines the uses that SSD must beat. A line takes SSD at the K, fan-out and backup of its
largest predicted mean, from one visit (compare.same_visit), and the use of the same visit, at any
measured K, that leaves the lower end of its interval smallest. A verdict needs more:

- five seeds of 400 rounds on both sides, paired;
- every use that would fit measured on that visit, or shown to be slower than the fastest one there:
  by its rows of another visit and DRIFT (the most that visits differ), or by a bound (Times.bound);
- a p-value below .05 after Holm's correction for all lines of the table.

A use that is neither is named, with the rate expected from measured times, and the line has no
verdict. Imposed hit rates have no verdict either, because their branches cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from mpissd.common.compare import (
    DRIFT,
    HEADLINE_ROUNDS,
    HEADLINE_SEEDS,
    Comparison,
    holm,
    same_visit,
)
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.real_pairs import ASSUMED_LAW
from mpissd.common.rivals import LOOKUPS, Family, between, copies, tps_of, widest
from mpissd.common.row import Row
from mpissd.common.theory import expected_tokens
from mpissd.lab.tables.best import (
    Use,
    best_use,
    compare_methods,
    is_in,
    is_lookup,
    is_row,
    method_of,
    mode_of,
)

LEVEL = 0.05  # Of all verdicts of a table together.
MOST_K = 16
_OF_T = ("tp", "all_reduce")  # keys that may differ between the uses of one setting


@dataclass(frozen=True)
class Open:
    """A use that may be the strongest: not measured, of too few seeds, or of another visit.

    rate: tok/s on the other visit, or expected from measured times (None: unknown).
    """

    family: Family
    why: str
    rate: float | None = None

    def __str__(self) -> str:
        rate = {True: "", False: f" ({self.rate or 0:.0f} tok/s expected)"}[self.rate is None]
        if self.why == "another visit":
            return f"few visits: {self.family}, {self.rate or 0:.0f} tok/s on another"
        return f"{self.family} {self.why}{rate}"


@dataclass(frozen=True)
class Claim:
    """SSD in one setting against the strongest other measured use of its GPUs.

    others: the fastest measured use of each other family, of any visit. unknown: uses that may be
    stronger. copies: the best number of independent copies, and their use. p_value: after Holm's
    correction.
    """

    setting: dict[str, Any]
    ssd: Use
    other: Use | None
    gain: Comparison | None
    others: tuple[Use, ...]
    unknown: tuple[Open, ...]
    copies: tuple[int, Use] | None
    p_value: float = 1.0

    @property
    def gpus(self) -> int:
        return self.ssd.family.gpus

    @property
    def hit_law(self) -> str | None:
        return self.ssd.rows[0].hit_law

    @property
    def is_assumed(self) -> bool:
        """Whether SSD's hits follow the assumed model, of no real pair."""
        return self.hit_law == ASSUMED_LAW

    @property
    def is_verdict(self) -> bool:
        """Whether the line decides which is faster, or that there is no difference."""
        known = self.gain is not None and self.gain.is_headline and not self.unknown
        return known and (self.p_value < LEVEL or not (self.gain and self.gain.is_real))

    def has_inline(self, tp: int) -> bool:
        """Returns whether SD inline on T ranks was measured."""
        return any(use.family == Family("sd", tp, 0) for use in self.others)

    @property
    def text(self) -> str:
        """The gain as text: a ratio only if a verdict holds.

        A loss to a measured use holds whatever other uses give.
        """
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
        """Returns the line that `compare` prints below a table of methods."""
        line = f"{self.ssd.method}, {self.ssd}: {self.ssd.tok_per_s:.1f} tok/s, "
        line += f"{self.ssd.per_gpu:.1f} a GPU"
        if self.other is None:
            line += "; no other use of its GPUs was measured"
        else:
            line += f"; strongest other use of {self.gpus} GPUs, {self.other}: "
            line += f"{self.other.tok_per_s:.1f} tok/s, SSD over it {self.text}"
        if self.copies is not None:
            count, use = self.copies
            line += f"; {count} copies of {use}: {count * use.tok_per_s:.1f} tok/s in all"
        if is_imposed(self.hit_law):
            line += "; its hits are imposed and cost no branches"
        return line

    def to_dict(self) -> dict[str, Any]:
        """Returns the claim as JSON; over_other is null if there is no verdict."""
        copied = None if self.copies is None else self.copies[0] * self.copies[1].tok_per_s
        return {
            "ssd": self.ssd.method,
            "gpus": self.gpus,
            "tok_per_s": self.ssd.tok_per_s,
            "strongest_measured": None if self.other is None else str(self.other.family),
            "not_known": [str(one.family) for one in self.unknown],
            "over_other": self.gain.to_dict() if self.gain and self.is_verdict else None,
            "copies_tok_per_s": copied,
        }


def is_imposed(hit_law: object) -> bool:
    """Returns whether a row's hit rate was imposed, so that no branches had to be grown for it."""
    return str(hit_law).startswith("p_hit:")


def is_short(row: Row) -> bool:
    """Returns whether a row has too few rounds for a verdict, or imposed hits."""
    return (row.num_rounds or 0) < HEADLINE_ROUNDS or is_imposed(row.hit_law)


def claims(rows: Iterable[Row]) -> list[Claim]:
    """Returns the claims of rows of 400 rounds without imposed hits, those with the LM head first.

    Raises ConfigError without an SSD of five seeds.
    """
    long = [row for row in rows if is_row(row) and not is_short(row)]
    settings = [one.setting for one in compare_methods(long)]
    every = [claim for setting in settings for claim in judged(setting, long, HEADLINE_SEEDS)]
    every = [claim for claim in every if claim.gain is not None]
    if not every:
        least = f"{HEADLINE_SEEDS} seeds of {HEADLINE_ROUNDS} rounds"
        raise ConfigError(f"claims: no SSD with another use of its GPUs: allowed: {least} or more")
    every.sort(key=lambda c: (not c.setting["lm_head"], str(c.setting["acceptance"])))
    return [claim for group in tables_of(every).values() for claim in _corrected(group)]


def tables_of(every: Iterable[Claim]) -> dict[tuple[Any, ...], list[Claim]]:
    """Groups claims by the common values of a table: pair, device, batch, GPUs and hit model."""
    names = "target draft device_name dtype forward batch_size context fuse".split()
    groups: dict[tuple[Any, ...], list[Claim]] = {}
    for claim in every:
        shared = (*(claim.setting.get(n) for n in names), claim.gpus, claim.hit_law)
        groups.setdefault(shared, []).append(claim)
    return groups


def _corrected(group: Sequence[Claim]) -> list[Claim]:
    adjusted = holm([claim.gain.p_value if claim.gain else 1.0 for claim in group])
    return [replace(claim, p_value=p) for claim, p in zip(group, adjusted, strict=True)]


def judged(setting: Mapping[str, Any], rows: Iterable[Row], seeds: int = 1) -> list[Claim]:
    """Returns a claim for each number of GPUs, hit model and schedule of SSD at a setting's T.

    rows: of any setting. Rows that differ only in T are compared too; rows whose drafts run on
    another kind of device are not. seeds: the seeds that a use needs on its visit.
    """
    here = [row for row in rows if is_row(row) and is_in(row, setting, _OF_T)]
    here = [row for row in here if row.other_draft_device is None]
    uses = measured_uses(here)
    cases: dict[tuple[int, str | None, str | None], list[Use]] = {}
    for use in uses:
        if use.mode == "ssd" and use.tp == setting["tp"] and len(use.seeds) >= seeds:
            first = use.rows[0]
            case = first.world_size, first.hit_law, first.schedule
            cases.setdefault(case, []).append(use)
    return [_claim(dict(setting), best_use(of), uses, seeds) for of in cases.values()]


def measured_uses(rows: Sequence[Row]) -> list[Use]:
    """Returns every method on every T and D at every K, one for each visit."""
    visits: dict[tuple[Any, ...], list[list[Row]]] = {}
    for row in rows:
        key = mode_of(row), row.tp, row.world_size, method_of(row), row.lookahead
        known = visits.setdefault(key, [])
        of = next((of for of in known if same_visit(of[0], row)), None)
        if of is None:
            known.append([row])
        else:
            of.append(row)
    return [Use(tuple(of)) for known in visits.values() for of in known]


def _claim(setting: dict[str, Any], ssd: Use, uses: Sequence[Use], seeds: int) -> Claim:
    gpus, first = ssd.family.gpus, ssd.rows[0]
    rivals = [
        u for u in uses if u.mode != "ssd" and u.family.gpus <= gpus and _may_assume(u, first)
    ]
    here = [u for u in rivals if same_visit(u.rows[0], first) and len(u.seeds) >= seeds]
    gains = [(gain, use) for use in here if (gain := ssd.over(use)) is not None]
    gain, other = min(gains, key=lambda one: one[0].low, default=(None, None))
    fastest: dict[Family, Use] = {}
    for use in sorted(rivals, key=lambda use: -use.tok_per_s):
        fastest.setdefault(use.family, use)
    best = max((use.tok_per_s for use in here), default=0.0)
    lookups = LOOKUPS if first.acceptance is None else LOOKUPS[:1]
    wanted = widest(gpus, tps_of(str(setting["target"]), gpus), lookups)
    missing = [f for f in wanted if f.mode != "ssd" and f not in {use.family for use in here}]
    times = Times(uses, first)
    unknown = [one for f in missing if (one := _open(f, rivals, times, best, seeds)) is not None]
    unknown.sort(key=lambda one: -(one.rate or 0.0))
    return Claim(
        setting, ssd, other, gain, tuple(fastest.values()), tuple(unknown), copies(gpus, rivals)
    )


def _may_assume(use: Use, ssd: Row) -> bool:
    """Returns whether a use assumes no more than SSD may: an imposed lookup the same rate."""
    row = use.rows[0]
    if not is_lookup(row) or ssd.acceptance is None:
        return True
    return fast_of(row) == fast_of(ssd)


def fast_of(row: Row) -> str:
    """Returns the acceptance model of a row's lookups; the default if it names none."""
    return str(row.acceptance_fast or RunConfig.acceptance_fast)


def _open(
    family: Family, rivals: Sequence[Use], times: Times, best: float, seeds: int
) -> Open | None:
    """Returns a use that was not measured on SSD's visit; None if it is shown to be slower than
    `best`, the fastest use of that visit."""
    elsewhere = [use for use in rivals if use.family == family]
    if elsewhere:
        rate = max(use.tok_per_s for use in elsewhere)
        if rate * (1 + DRIFT) < best:
            return None
        most = max(len(use.seeds) for use in elsewhere)
        few = f"has {most} of {seeds} seeds"
        return Open(
            family, few if most < seeds else "another visit", rate if most >= seeds else None
        )
    bound = times.bound(family)
    if bound is not None and bound < best:
        return None
    return Open(family, "not measured", times.rate(family))


class Times:
    """Median times of a setting's rows, and expectations from them for uses without rows.

    A forward on T ranks takes a + c/T seconds, by the measured T next below and above.
    """

    def __init__(self, uses: Sequence[Use], ssd: Row) -> None:
        rows = [row for use in uses for row in use.rows if not is_imposed(row.hit_law)]
        self.alpha, self.fast = _alpha(ssd.acceptance), _alpha(fast_of(ssd))
        self.usable = ssd.batch_size == 1 and self.alpha is not None and self.fast is not None
        self.verify = {
            tp: median(r.t_target_s for r in rows if r.tp == tp and r.t_target_s)
            for tp in {row.tp for row in rows if row.t_target_s}
        }
        drafted = [r for r in rows if r.mode == "sd" and r.t_draft_s and r.t_target_s]
        inline = [row for row in drafted if row.inline_draft]
        ars = [row for row in rows if row.mode == "ar"]
        self.ar = {tp: max(r.tok_per_s for r in ars if r.tp == tp) for tp in {r.tp for r in ars}}
        steps = [(row.t_draft_s or 0.0) / row.lookahead for row in drafted]
        self.step = median(steps) if steps else None
        device_s = [(row.t_draft_s or 0.0) + (row.t_target_s or 0.0) for row in inline]
        rounds = [row.round_us["p50"] / 1e6 for row in inline]
        hosts = [whole - part for whole, part in zip(rounds, device_s, strict=True)]
        self.host = median(hosts) if hosts else 0.0

    def forward_s(self, tp: int) -> float | None:
        """Returns the seconds of a verification on T ranks, or None.

        With no larger T measured, the largest smaller one is divided evenly, which is the best
        that the rival could do.
        """
        if tp in self.verify:
            return self.verify[tp]
        low = max((t for t in self.verify if t < tp), default=None)
        high = min((t for t in self.verify if t > tp), default=None)
        if low is None or high is None:
            return None if low is None else self.verify[low] * low / tp
        return between(tp, (low, self.verify[low]), (high, self.verify[high]))

    def rate(self, family: Family) -> float | None:
        """Returns the expected tok/s of a use without a draft GPU at its best K, or None."""
        forward = self.forward_s(family.tp)
        if not self.usable or forward is None or family.num_drafts:
            return None
        if family.mode == "ar":
            return 1 / (forward + self.host)
        if family.mode in LOOKUPS:
            return expected_tokens(self.fast or 0.0, 8) / (forward + self.host)
        if self.step is None:
            return None
        return max(
            expected_tokens(self.alpha or 0.0, k) / (forward + k * self.step + self.host)
            for k in range(1, MOST_K + 1)
        )

    def bound(self, family: Family) -> float | None:
        """Returns tok/s that AR, or a lookup under imposed acceptance, cannot exceed.

        AR on T ranks is no faster than on the next measured number of them; a lookup commits at
        most 1/(1 − a) tokens a forward of AR.
        """
        wider = [tp for tp in self.ar if tp >= family.tp]
        if not self.usable or not wider or family.mode not in ("ar", *LOOKUPS):
            return None
        most = 1.0 if family.mode == "ar" else 1 / (1 - (self.fast or 0.0))
        return self.ar[min(wider)] * (1 + DRIFT) * most


def _alpha(law: object) -> float | None:
    match = re.fullmatch(r"alpha:([0-9.eE+-]+)", str(law))
    return float(match[1]) if match else None


_COPIES = "independent copies", "tok/s in all"


def render(every: Sequence[Claim]) -> str:
    """Renders claims as Markdown, a table for each pair, machine, GPUs, hit model."""
    return "\n\n".join(_table(group) for group in tables_of(every).values())


def _table(group: Sequence[Claim]) -> str:
    setting, law, gpus = group[0].setting, group[0].hit_law, group[0].gpus
    gains = [claim.gain for claim in group if claim.gain is not None]
    rounds, seeds = min(g.num_rounds for g in gains), min(g.num_seeds for g in gains)
    issued = f"{setting['dtype']}{', fused' * bool(setting['fuse'])}, context {setting['context']}"
    hits = f"{law}, assumed" if law == ASSUMED_LAW else law
    about = f"{setting['target']}/{setting['draft']} on {gpus} × {setting['device_name']} "
    about += f"({issued}, batch {setting['batch_size']}), hits by {hits}. {seeds} seeds × {rounds} "
    about += "rounds, paired by seed within a visit; tok/s: medians; in brackets: a GPU."
    other = f"strongest other use of {gpus} GPUs"
    head = ("alpha", "LM head", "SSD", "tok/s", other, "tok/s", "SSD over it", *_COPIES)
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *map(_cells, group))]
    return "\n".join([about, "", lines[0], "|---" * len(head) + "|", *lines[1:]])


def _cells(claim: Claim) -> tuple[str, ...]:
    other = claim.other
    assert other is not None, claim
    copied, in_all = "–", "–"
    if claim.copies is not None:
        count, use = claim.copies
        least = "≥ " * (use.mode == "ar" and not claim.has_inline(use.tp))  # SD inline: unknown
        copied, in_all = f"{count} × {use}", f"{count * use.tok_per_s:,.0f} ({use.per_gpu:.0f})"
        in_all = least + in_all
    return (
        str(claim.setting["acceptance"]).removeprefix("alpha:"),
        "yes" if claim.setting["lm_head"] else "no",
        str(claim.ssd).removeprefix("SSD "),
        f"{claim.ssd.tok_per_s:,.0f} ({claim.ssd.per_gpu:.0f})",
        str(other),
        f"{other.tok_per_s:,.0f} ({other.per_gpu:.0f})",
        claim.text,
        copied,
        in_all,
    )
