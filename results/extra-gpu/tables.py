"""Prints the tables of docs/study.md, docs/map.md and pools.md: python -m results.extra-gpu.tables

measured   every measured use of as many GPUs
map        the map's lines for one sequence on one host
rows       the map's cells that were measured, too
closed     the closed form beside measured gains
paper      70B/1B on 4 + 1 H100s, beside the paper
pools      draft pools beside the other uses
answers    README's lines
alone      every measured use of one GPU
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.figures.study import (
    COLUMNS,
    FITTED,
    ONE_FORWARD,
    PLACES,
    Place,
    best_shapes,
    best_two,
    gain_between,
    gain_of,
    measured_gains,
    pays,
    whole_pays,
    with_rates,
)
from analysis.rows import Data, load
from analysis.select import ratio, where
from mpissd.lab.tables.compare import Comparison
from results.pages import Lines, head, line, printed, share

HERE = Path(__file__).resolve().parent
PAPER = {"AR": "54.7", "SD inline": "161.8", "SSD": "255.8"}
_NAMES = "AR", "SD inline", "tree inline", "lookup", "SSD"
_SPARE = "8B, 3 GPUs, T ≤ 2", "70B, 3 GPUs, T ≤ 2", "70B, 5 GPUs, T ≤ 4", "70B, 9 GPUs, T ≤ 8"
_DRAWS = 10_000  # resamples of the prompts for an interval


@dataclass(frozen=True)
class Answer:
    """What the rows of one pair, prompts and number of GPUs say. cells: {use: its tok/s as text}.
    strongest: the fastest use but SSD. gain: SSD over it. everywhere: the same over all prompts of
    the recording, as text with its interval over prompts; stepwise: there without drafts of one
    forward; "" if unknown. alone: the fastest use of one GPU over SSD there. gains: all of these as
    numbers."""

    pair: str
    prompts: str
    gpus: int
    cells: dict[str, str]
    strongest: str
    gain: Comparison
    everywhere: str
    stepwise: str
    alone: float
    gains: tuple[float, ...]

    @property
    def gain_text(self) -> str:
        return _share(self.gain.speedup) + _ends(self.gain.low, self.gain.high) * (
            self.gain.has_interval
        )


def _share(value: float) -> str:
    return share(value, 2) if value > 0 else "–"


def _ends(low: float, high: float) -> str:
    return f" ({share(low, 2)} to {share(high, 2)})"


@lru_cache(maxsize=1)
def data() -> Data:
    """Returns all result rows measured on H200s, and all predictions."""
    every = load([HERE.parent])
    return replace(every, rows=where(every.rows, device_name="NVIDIA H200"))


def measured() -> Lines:
    """Yields the table of measured tok/s of each use, in brackets over all prompts, a line for each
    model pair, prompts and number of GPUs."""
    ones = [f"{name}{ONE_FORWARD}" for name in ("SD inline", "tree inline", "SSD")]
    names = *_NAMES, *(name.replace(" inline", "") for name in ones)
    yield from head("pair, prompts, GPUs", *names, "SSD over the strongest", "over all prompts")
    for answer in _answers():
        cells = [answer.cells.get(use, "–") for use in (*_NAMES, *ones)]
        place = f"{answer.pair} {answer.prompts}, {answer.gpus}"
        yield line([place, *cells, answer.gain_text, answer.everywhere or "–"])


def _answers() -> Iterator[Answer]:
    every = with_rates(data())
    shared = every["setting"].isin(where(every, mode="ssd")["setting"]) & every["ranks"].gt(1)
    for (gpus, law, pair), here in every[shared].groupby(["ranks", "law", "pair"]):
        best = best_shapes(here)  # the fastest first
        ssd = next(runs for use, runs in best.items() if use.startswith("SSD"))
        strongest = next(use for use in best if not use.startswith("SSD"))
        all_prompts, steps = best_two(here), best_two(here[~here["is_one"]])
        assert all_prompts is not None and steps is not None, "rows of SSD and of another use"
        one = where(every, pair=pair, law=law, ranks=1).groupby("shape")["rate"].median().max()
        over = ratio(ssd, best[strongest])
        yield Answer(
            pair=pair,
            prompts=law,
            gpus=gpus,
            cells={use: _cell(runs) for use, runs in best.items()},
            strongest=strongest,
            gain=over,
            everywhere=_over_prompts(*all_prompts),
            stepwise=_over_prompts(*steps),
            alone=one / all_prompts[0]["rate"].median(),
            gains=(over.speedup, gain_between(*all_prompts), gain_between(*steps)),
        )


def _over_prompts(ssd: pd.DataFrame, other: pd.DataFrame) -> str:
    """Returns SSD over the other use over all prompts, with the interval of a bootstrap over them;
    "" if that is unknown."""
    if not ssd["known"].all() or not other["known"].all():
        return ""
    text = _share(gain_between(ssd, other))
    sums = [_by_prompt(runs) for runs in (ssd, other)]
    if any(of is None for of in sums):
        return text
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(sums[0][0]), size=(_DRAWS, len(sums[0][0])))
    rates = [tokens[drawn].sum(axis=1) / seconds[drawn].sum(axis=1) for tokens, seconds in sums]
    return text + _ends(*np.percentile(rates[0] / rates[1], (2.5, 97.5)))


def _by_prompt(runs: pd.DataFrame) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the tokens and the seconds of each prompt, [prompts], by the counts of a replay
    (prompts.jsonl) and the runs' median durations; None if there are no counts."""
    counts = _counts().get(runs["shape"].iloc[0])
    if counts is None:
        return None
    tokens, rounds, hits = (np.array(counts[name]) for name in ("tokens", "rounds", "hits"))
    run = runs[["round_s", "t_draft_s", "backup_lookahead", "lookahead", "hit_rate"]].median()
    seconds = rounds * run["round_s"]
    if runs["mode"].iloc[0] == "ssd" and runs["backup"].iloc[0] != "fast":
        miss_s = run["t_draft_s"] * run["backup_lookahead"] / run["lookahead"]
        seconds += miss_s * (run["hit_rate"] * rounds - hits * rounds.sum() / (rounds - 1).sum())
    return tokens, seconds


@lru_cache(maxsize=1)
def _counts() -> dict[tuple[object, ...], dict[str, list[int]]]:
    lines = map(json.loads, (HERE / "prompts.jsonl").read_text().splitlines())
    return {
        tuple(tuple(of) if isinstance(of, list) else of for of in counts["shape"]): counts
        for counts in lines
    }


def _cell(runs: pd.DataFrame) -> str:
    """Returns the median tok/s of a use's runs, and in brackets that over all prompts."""
    rate = f"{runs['tok_per_s'].median():,.0f}"
    is_shown = runs["mode"].iloc[0] != "ar" and runs["known"].all()
    return rate + f" ({runs['rate'].median():,.0f})" * bool(is_shown)


def map_of_one() -> Lines:
    """Yields the map's lines of one sequence on one host: SSD over the strongest other use, and
    that use's name."""
    names = "chat", "code", "chat, in one forward", "code, in one forward"
    yield from head("GPUs, T allowed", *names)
    for place in PLACES:
        if not place.also:
            best = (place.uses(data().cells, *COLUMNS[name]) for name in names)
            texts = (f"{share(gain, 2)} {_short(other)}" for gain, other in map(gain_of, best))
            yield line([place.name, *texts])


def _short(use: str) -> str:
    return use.removesuffix(ONE_FORWARD).removesuffix(" inline")


def rows_of_map() -> Lines:
    """Yields the cells of the map that were measured: the gain as measured and as predicted, and
    what is lost by taking the predicted use."""
    yield from head("cell", "SSD over the strongest other, measured", "predicted", "lost")
    for name, seen, told in _told():
        lost = 1 - min(seen, 1 / seen) if (told > 1) != (seen > 1) else 0.0
        yield line([name, share(seen, 2), share(told, 2), f"{lost:.0%}"])


def _told() -> Iterator[tuple[str, float, float]]:
    """Yields the map's measured cells: name, SSD's gain as measured, and predicted for what ran."""
    before = pd.read_json(HERE / "cells_before.jsonl", lines=True)
    for (place, column), seen in measured_gains(data()).items():
        of = next(one for one in PLACES if one.name == place)
        told, _ = gain_of(of.uses(before, *COLUMNS[column]))
        yield f"{place}, {column}", seen, told


def closed() -> Lines:
    """Yields the table of how far the closed form's speedups are from measured ones."""
    measured_rows = data().rows
    products = [*pays(measured_rows)]
    groups = {
        f"products, {FITTED}, whose host gaps were taken": [
            gain for gain in products if gain.folder == FITTED
        ],
        "products, other visits": [gain for gain in products if gain.folder != FITTED],
        "whole transformers, chained inline rounds": [*whole_pays(measured_rows)],
    }
    yield from head("rows", "gains", "error, median", "largest", "right side of 1", "by the rule")
    for name, gains in groups.items():
        errors = np.array([abs(gain.predicted / gain.measured - 1) for gain in gains])
        same = sum((gain.predicted > 1) == (gain.measured > 1) for gain in gains)
        rule = sum((gain.hidden_s > gain.saved_s) == (gain.measured > 1) for gain in gains)
        sizes = f"{np.median(errors):.1%}", f"{errors.max():.1%}"
        yield line([name, len(gains), *sizes, same, rule])


def paper() -> Lines:
    """Yields the table of predicted tok/s on 4 + 1 H100s (products) and, in brackets, with draft
    steps as slow as the paper's. The last line has the paper's figures, of other prompts."""
    names = "AR", "SD inline", "tree inline", "lookup", "SSD"
    yield from head("prompts", *(f"{name}, T=4" for name in names))
    lines = {"alpha .8": ("alpha .8", False), **COLUMNS}
    for name, column in lines.items():
        here, slow = (
            Place("", "70b/1b", 5, (4,), {"profile": "h100", "draft": draft}).uses(
                data().cells, *column
            )
            for draft in (1.0, 2.8)
        )
        if len(here):
            yield line([name, *(_both(here, slow, use) for use in names)])
    yield line(["the paper", *(PAPER.get(name, "–") for name in names)])


def _both(here: pd.DataFrame, slow: pd.DataFrame, use: str) -> str:
    """Returns a use's tok/s, and those with slow draft steps in brackets if they differ."""
    rates = [
        where(of.assign(use=of["use"].str.removesuffix(ONE_FORWARD)), use=use)["tok_per_s"]
        for of in (here, slow)
    ]
    if not len(rates[0]):
        return "–"
    texts = [f"{rate.iloc[0]:.0f}" for rate in rates]
    return texts[0] + f" ({texts[1]})" * (texts[0] != texts[1])


def pools() -> Lines:
    """Yields, for pools of G targets and a draft, tok/s a sequence and tok/s a GPU, each over those
    of the strongest other use of T GPUs; bold if no other use at T up to 4 has both. What G
    targets lose to one is that of products at alpha .8 (results/pools)."""
    simulated = pd.read_json(HERE.parent / "pools/pools.jsonl", lines=True)
    simulated = simulated[simulated["device_name"].str.startswith("NVIDIA H200")]
    alike = {"acceptance": "alpha:0.8", "hit_law": "smollm2", "mode": "ssd", "batch_size": 1}
    simulated = where(simulated, **alike)
    counts = 1, 2, 3, 4, 8
    yield from head("pair, T, prompts", *(f"G = {count}" for count in counts))
    places = ("8b/1b", 1), ("70b/1b", 2), ("70b/1b", 4)
    names = "chat", "code", "code, in one forward"
    for (pair, tp), name in product(places, names):
        pool = where(simulated, pair=pair, tp=tp).set_index("targets")
        best = Place("", pair, tp + 1, (tp,)).uses(data().cells, *COLUMNS[name])
        rates = best.groupby(best["mode"] == "ssd")["tok_per_s"].max()
        others = _every_other(pair, *COLUMNS[name])
        texts = []
        for count in counts:
            slower = pool.loc[count, "tok_per_s"] / count / pool.loc[1, "tok_per_s"]
            speed = rates[True] * slower
            per_gpu = speed * count / (count * tp + 1)
            beaten = ((others["speed"] >= speed) & (others["per_gpu"] >= per_gpu)).any()
            text = f"{share(speed / rates[False], 2)}, {share(per_gpu * tp / rates[False], 2)}"
            texts.append(text if beaten else f"**{text}**")
        yield line([f"{pair.partition('/')[0].upper()}, {tp}, {name}", *texts])


def _every_other(pair: str, law: str, one_forward: bool) -> pd.DataFrame:
    """Returns tok/s a sequence (speed) and a GPU (per_gpu) of all uses but SSD, with T = 1, 2, 4 of
    1 and 4 sequences."""
    parts = []
    for batch, tp in product((1, 4), (1, 2, 4)):
        best = Place("", pair, tp, (tp,), {"batch_size": batch}).uses(
            data().cells, law, one_forward
        )
        parts.append(best[best["mode"] != "ssd"])
    every = pd.concat(parts)
    speed = every["tok_per_s"] / every["batch_size"]
    return every.assign(speed=speed, per_gpu=every["tok_per_s"] / every["tp"])


def answers() -> Lines:
    """Yields the answers that README gives: on GPUs that the target cannot use, then on the
    measured ones."""
    parts = []
    for pair, names in product(("70b/1b", "8b/1b"), ([*COLUMNS][:2], [*COLUMNS][-2:])):
        spare = [of for of in PLACES if of.name in _SPARE and of.pair == pair]
        gains = [gain_of(of.uses(data().cells, *COLUMNS[n]))[0] for of in spare for n in names]
        parts.append(f"{share(min(gains), 2)} to {share(max(gains), 2)}")
    high = [max(told / seen for name, seen, told in _told() if (ONE_FORWARD in name) == one) - 1
            for one in (False, True)]  # fmt: skip
    yield (
        "- **A GPU that the target cannot use** (engines offer T = 1, 2, 4, 8): **predicted to "
        "pay for 70B/1B, hardly for 8B/1B, and hardly measured.** On 2 + 1, 4 + 1 and 8 + 1 H200s "
        f"70B's SSD makes {parts[0]} of the strongest other use by drafts of K forwards, "
        f"{parts[1]} if they may take one, 8B's on 2 + 1 {parts[2]} and {parts[3]} (elsewhere up "
        f"to {high[0]:.0%} and {high[1]:.0%} too high): small gains are open: [map](docs/map.md)."
    )
    places: dict[str, list[Answer]] = {}
    for answer in _answers():
        places.setdefault(f"{answer.pair}/1B on {answer.gpus} H200s", []).append(answer)
    for place, found in places.items():
        verdict = "no" if max(one.gains[1] for one in found) < 1 else "undecided"
        parts = [
            f"{one.gain_text} of a {one.strongest.replace(' inline', '')} on {one.prompts}"
            for one in found
        ]
        yield f"- **{place}, measured: {verdict}.** SSD makes {', '.join(parts)}. {_rest(found)}"


def _rest(found: Sequence[Answer]) -> str:
    """Returns the sentences of an answer on all prompts, drafts of one forward and one GPU."""
    known = [one for one in found if one.everywhere]
    everywhere = " and ".join(one.everywhere for one in known)
    text = f"Over all prompts, derived: {everywhere}"
    if not any(ONE_FORWARD in use for one in found for use in one.cells):
        return f"{text}. Drafts of one forward were not measured."
    steps = " and ".join(one.stepwise for one in known)
    alone = " and ".join(_share(one.alone) for one in known)
    rest = f"One GPU without SSD makes {alone} times as much."
    return f"{text}; by drafts of K forwards: {steps}. {rest}"


def alone() -> Lines:
    """Yields the table of each use of one GPU but AR, at its fastest settings over all prompts."""
    here = where(with_rates(data()), ranks=1, mode="sd")
    here = here.assign(seen=here["num_tokens"] / here["num_rounds"])
    here = here.rename(columns={"tok_per_s": "measured", "rate": "tok_per_s"})
    names = "K", "ms a round", "tokens a round", "of all", "tok/s", "of all"
    yield from head("prompts", "use", *names)
    for law, runs in here.groupby("law"):
        for use, part in best_shapes(runs).items():
            middle = part[["round_s", "seen", "tokens", "measured", "tok_per_s"]].median()
            ms, *tokens = 1e3 * middle["round_s"], middle["seen"], middle["tokens"]
            rates = f"{middle['measured']:.0f}", f"{middle['tok_per_s']:.0f}"
            k = part["lookahead"].iloc[0]
            texts = [f"{ms:.2f}", *(f"{number:.2f}" for number in tokens), *rates]
            yield line([law, use.replace(f" inline{ONE_FORWARD}", ONE_FORWARD), k, *texts])


TABLES = {of.__name__: of for of in (measured, closed, paper, pools, answers, alone)}
TABLES |= {"map": map_of_one, "rows": rows_of_map}

if __name__ == "__main__":
    sys.exit(printed(TABLES, __doc__))
