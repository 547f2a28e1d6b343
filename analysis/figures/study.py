"""The figures of docs/study.md and docs/map.md: what a GPU for the draft model is worth.

`measured` and `hidden` draw measured rows; `where_it_pays` predictions of `plan` for every use of
up to nine GPUs (results/extra-gpu/cells.jsonl), and the measured gains beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from mpissd.common.theory import accept_probabilities, expected_tokens
from mpissd.engine.law.acceptance import named_hit_law

from ..rows import Data
from ..select import SHAPE, best_rows, fastest, key, plain, points, prompts, ratio, short, where
from ..style import BLACK, GREY, METHODS, Poster, caption, look, need, note, parity

_NAMES = {"ar": "AR", "sd": "SD inline", "tree": "tree inline", "lookup": "lookup", "ssd": "SSD"}
_FOLDERS = "extra-gpu", "h200-parallel"  # folders of results with every kind of alternative
ONE_FORWARD = " in one forward"
_WARM = "code at temp. 0.7"
CHAT, CODE = "chat, temp. 0", "humaneval, temp. 0"
COLUMNS = {  # of the map: (law, whether drafts may take one forward)
    "chat": (CHAT, False),
    "code": (CODE, False),
    "chat, temp. 0.7": ("chat, temp. 0.7", False),
    "code, temp. 0.7": ("humaneval, temp. 0.7", False),
    "chat, temp. 1": ("chat, temp. 1", False),
    "code, temp. 1": ("humaneval, temp. 1", False),
    "chat, in one forward": (CHAT, True),
    "code, in one forward": (CODE, True),
}
_DRAFTED = ["mode", *SHAPE, "is_dynamic", "is_parallel", "recording"]


@dataclass(frozen=True)
class Place:
    """A line of the map. gpus: how many there are; degrees: the T that the target can have. also:
    other columns of cells.jsonl than the usual ones."""

    name: str
    pair: str
    gpus: int
    degrees: tuple[int, ...]
    also: Mapping[str, Any] = field(default_factory=dict)

    def uses(self, cells: pd.DataFrame, law: str, one_forward: bool) -> pd.DataFrame:
        """Returns the fastest predicted use of each mode, the fastest first, with the columns use
        (name) and ranks; no lines if nothing was predicted. Lookups count at temperature 0 only,
        where their acceptance was recorded."""
        usual = {"profile": "h200", "batch_size": 1, "host": 1.0, "draft": 1.0, "link": "shm"}
        asked = {"pair": self.pair, "law": law, "one_forward": one_forward, **usual, **self.also}
        lines = where(cells, **asked)
        if asked["link"] != "shm":
            lines = where(lines, gpus=self.gpus)
        ranks = lines["tp"] + lines["num_drafts"]
        is_known = (lines["mode"] != "lookup") | law.endswith("temp. 0")
        fits = is_known & (ranks <= self.gpus) & lines["tp"].isin(self.degrees)
        lines = lines.assign(ranks=ranks, use=lines["mode"].map(_NAMES))[fits]
        lines["use"] += lines["parallel"].map({True: ONE_FORWARD, False: ""})
        best = lines.sort_values("tok_per_s").groupby("mode").last().reset_index()
        return best.sort_values("tok_per_s", ascending=False, ignore_index=True)


_FEW, _MORE = (1, 2), (1, 2, 4)
_LAN, _FAR = {"link": "10g"}, {"link": "500us:1.25"}
PLACES = (
    Place("8B, 2 GPUs", "8b/1b", 2, _FEW),
    Place("8B, 3 GPUs, T ≤ 2", "8b/1b", 3, _FEW),
    Place("8B, 3 GPUs", "8b/1b", 3, (1, 2, 3)),
    Place("8B, 5 GPUs, T ≤ 4", "8b/1b", 5, _MORE),
    Place("8B, 9 GPUs, T ≤ 8", "8b/1b", 9, (*_MORE, 8)),
    Place("70B, 3 GPUs, T ≤ 2", "70b/1b", 3, _FEW),
    Place("70B, 4 GPUs", "70b/1b", 4, (*_MORE, 3)),
    Place("70B, 5 GPUs, T ≤ 4", "70b/1b", 5, _MORE),
    Place("70B, 8 GPUs", "70b/1b", 8, (*_MORE, 3, 7, 8)),
    Place("70B, 9 GPUs, T ≤ 8", "70b/1b", 9, (*_MORE, 8)),
    Place("8B, 3 GPUs, T ≤ 2, 4 sequences", "8b/1b", 3, _FEW, {"batch_size": 4}),
    Place("70B, 5 GPUs, T ≤ 4, 4 sequences", "70b/1b", 5, _MORE, {"batch_size": 4}),
    Place("8B, 2 hosts with a GPU, 10 Gbit/s", "8b/1b", 2, _FEW, _LAN),
    Place("8B, the same, 1 ms there and back", "8b/1b", 2, _FEW, _FAR),
    Place("8B, 2 GPUs, a third at 10 Gbit/s", "8b/1b", 3, _FEW, _LAN),
    Place("70B, 4 GPUs, a fifth at 10 Gbit/s", "70b/1b", 5, _MORE, _LAN),
    Place("70B, the same, 1 ms there and back", "70b/1b", 5, _MORE, _FAR),
    Place("8B, 3 GPUs, T ≤ 2, draft step × 2.8", "8b/1b", 3, _FEW, {"draft": 2.8}),
    Place("70B, 5 GPUs, T ≤ 4, draft step × 2.8", "70b/1b", 5, _MORE, {"draft": 2.8}),
    Place("8B, 2 GPUs, host's work × 0", "8b/1b", 2, _FEW, {"host": 0.0}),
    Place("8B, 2 GPUs, host's work × 4", "8b/1b", 2, _FEW, {"host": 4.0}),
)


def gain_of(best: pd.DataFrame) -> tuple[float, str]:
    """Returns SSD's tok/s over the strongest other use's, and that use's name. best: Place.uses."""
    ssd = where(best, mode="ssd").iloc[0]
    other = best[best["mode"] != "ssd"].iloc[0]
    return float(ssd["tok_per_s"] / other["tok_per_s"]), str(other["use"])


def where_it_pays(data: Data) -> Poster:
    """The best use in each cell of the map, its gain over the next, and SSD over the others."""
    need(len(data.cells), "cells of results/extra-gpu")
    seen = measured_gains(data)
    poster = Poster(13.0)
    ax = poster.panels(1, 1)[0, 0]
    gains = np.full((len(PLACES), len(COLUMNS)), np.nan)
    for (y, place), (x, (name, column)) in product(enumerate(PLACES), enumerate(COLUMNS.items())):
        best = place.uses(data.cells, *column)
        if best.empty:
            continue
        first, second = best.iloc[0], best.iloc[1]
        gains[y, x] = gain_of(best)[0]
        lead = first["tok_per_s"] / second["tok_per_s"]
        over = second["use"].removesuffix(ONE_FORWARD).removesuffix(" inline")
        at = f"{first['tp']:.0f}+1" if first["num_drafts"] else f"T={first['tp']:.0f}"
        use = first["use"].removesuffix(ONE_FORWARD).removesuffix(" inline")
        text = f"{use} {at}\n{lead:.2f} × {over}"
        known = seen.get((place.name, name))
        if known is not None:
            text += f"\nrows: SSD {known:.2f}"
        style = {"fontweight": "bold"} if known is not None else {}
        ax.text(x, y, text, ha="center", va="center", fontsize=8.6, **style)
        poster.keep(ax, name, place=place.name, use=first["use"], gain=gains[y, x], lead=lead)
    image = ax.imshow(gains, "PuOr", norm=LogNorm(1 / 1.5, 1.5), aspect="auto", alpha=0.7)
    image.set_clim(1 / 1.5, 1.5)
    ax.grid(visible=False)
    ax.set_yticks(range(len(PLACES)), [place.name for place in PLACES], fontsize=10)
    names = [name.replace(", ", "\n") for name in COLUMNS]
    ax.set_xticks(range(len(COLUMNS)), names, fontsize=9.5)
    ax.xaxis.tick_top()
    text = (
        f"{data.cells['device_name'].iloc[0]}, predicted by mpissd plan from its profile: whole "
        "transformers, 512 tokens of context, laws of SmolLM2-135M-Instruct and its shipped draft "
        "(above temp. 0: an earlier one); in one forward: where drafts may be. In a cell: the "
        "fastest use, and its tok/s over the next kind's; purple: SSD."
    )
    if seen:
        text += " Bold: measured, too, before one kernel ran the forward of each T > 1, which "
        text += "speeds the others up (rows: SSD over the strongest other use)"
    return poster.finish("Where does a GPU for the draft pay?", text, legend=False)


def used(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the measured rows of whole transformers on GPUs, with the columns use (mode), ranks,
    and setting (pair, prompts, ranks). Rows without a recording have acceptance imposed as on
    HumanEval at temperature 0.7. AR's rows are repeated for all prompts of their folder. Of each
    setting only the rows of the folder with the newest ones are returned."""
    rows = where(rows, forward="transformer", backend="cupy")
    rows = rows[rows["folder"].map(lambda folder: Path(folder).name).isin(_FOLDERS)]
    names = rows["method"].where(rows["backup"].ne("fast") | rows["method"].eq("SSD"), "lookup")
    trees = names.replace({"SD inline": "tree inline", "SSD": "SSD tree"})
    names = names.mask(rows["tree_nodes"].notna(), trees)
    is_parallel = rows["parallel_drafting"].eq(True)
    names = names.mask(is_parallel, names.str.removesuffix(" tree") + ONE_FORWARD)
    rows = rows.assign(use=names, ranks=rows["tp"] + rows["num_drafts"])
    rows = rows.assign(law=prompts(rows).fillna(_WARM), pair=rows["target"].map(short))
    parts = [rows[rows["method"] != "AR"]]
    for folder, pair, law in parts[0].groupby(["folder", "pair", "law"]).groups:
        parts.append(where(rows, method="AR", folder=folder, pair=pair).assign(law=law))
    rows = pd.concat(parts)
    setting = rows["pair"] + " " + rows["law"] + ", " + rows["ranks"].astype(str)
    began = rows["row"].map(lambda row: row.provenance["started_at"])
    newest = began.groupby([setting, rows["folder"]]).transform("max")
    rows = rows.assign(setting=setting)
    return rows[newest == newest.groupby(setting).transform("max")]


def with_ssd(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of `used` on several GPUs, for each pair and prompts with rows of SSD."""
    rows = used(rows)
    shared = rows["setting"].isin(where(rows, mode="ssd")["setting"])
    return rows[shared & rows["ranks"].gt(1)]


def best_shapes(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Returns {mode: its rows}, the fastest first; of each mode only the settings (K, fan-out, …)
    with the largest median tok/s."""
    best = {str(use): runs for use, runs in fastest(rows, "use").groupby("use")}
    return dict(sorted(best.items(), key=lambda item: -item[1]["tok_per_s"].median()))


def over_all_prompts(rows: pd.DataFrame, replays: pd.DataFrame) -> pd.DataFrame:
    """Returns the tokens a round over all prompts of each row's recording (tokens), and the tok/s
    there (rate); NaN if unknown. Tokens and hits are those of a replay of all prompts (all.jsonl),
    which has no times: a round takes the time measured, changed by the drafting after misses."""
    there = replays.set_index(drafted(replays)).reindex(drafted(rows)).set_axis(rows.index)
    tokens = (there["num_tokens"] / there["num_rounds"]).mask(rows["mode"] == "ar", 1.0)
    miss_s = rows["t_draft_s"] * rows["backup_lookahead"] / rows["lookahead"]
    more_s = miss_s * (rows["hit_rate"] - there["hit_rate"]) * (rows["backup"] != "fast")
    return pd.DataFrame({"tokens": tokens, "rate": tokens / (rows["round_s"] + more_s.fillna(0.0))})


def drafted(rows: pd.DataFrame) -> pd.Series:
    """Returns how each row drafted, and under which recording, as one tuple."""
    is_dynamic, is_parallel = rows["tree_shape"].eq("dynamic"), rows["parallel_drafting"].eq(True)
    return key(rows.assign(is_dynamic=is_dynamic, is_parallel=is_parallel), _DRAFTED)


def with_rates(data: Data) -> pd.DataFrame:
    """Returns the rows of `used` with the columns tokens (a round), rate (tok/s; both over all
    prompts, if they are known, else the run's own), known (whether they are), shape (see `drafted`)
    and is_one (whether drafts take one forward)."""
    rows = used(data.rows).reset_index(drop=True)
    there = over_all_prompts(rows, data.replays)
    own = {"tokens": rows["num_tokens"] / rows["num_rounds"], "rate": rows["tok_per_s"]}
    known = there["rate"].notna()
    rows = rows.assign(known=known, shape=drafted(rows), **there.fillna(pd.DataFrame(own)))
    return rows.assign(is_one=rows["use"].str.endswith(ONE_FORWARD))


def best_two(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """Returns the runs of SSD and of the other uses at those settings whose median rate (see
    `with_rates`) is the largest; None if one of the two was not run."""
    is_ssd = rows["mode"].eq("ssd")
    if is_ssd.nunique() < 2:
        return None
    both = (rows[is_ssd], rows[~is_ssd])
    best = (of.groupby("shape")["rate"].median().idxmax() for of in both)
    ssd, other = (of[of["shape"].map(shape.__eq__)] for of, shape in zip(both, best, strict=True))
    return ssd, other


def gain_between(ssd: pd.DataFrame, other: pd.DataFrame) -> float:
    """Returns the measured speedup of SSD's runs over the other use's, by `with_rates`."""
    if not ssd["known"].any():
        return ratio(ssd, other).speedup
    return float(ssd["rate"].median() / other["rate"].median())


def measured_gains(data: Data) -> dict[tuple[str, str], float]:
    """Returns {(place, column) of the map: measured speedup of SSD over the strongest other use},
    over all prompts of a recording; at temp. 0.7 in the runs themselves."""
    gains = {}
    rows = with_rates(data)
    named = {CHAT: "chat", CODE: "code", "humaneval, temp. 0.7": _WARM}
    places = [of for of in PLACES if not of.also and of.gpus in of.degrees]
    for place, (name, (law, one)) in product(places, COLUMNS.items()):
        here = where(rows, law=named.get(law), ranks=place.gpus, pair=place.pair[:-3].upper())
        found = best_two(here if one else here[~here["is_one"]])
        if found is not None and here["is_one"].any() >= one:
            gains[place.name, name] = gain_between(*found)
    return gains


def measured(data: Data) -> Poster:
    """Measured tok/s: a bar for the median of each mode's runs, a panel for each pair, prompts and
    number of GPUs."""
    rows = with_ssd(data.rows)
    need(len(rows), "runs of results/extra-gpu")
    pairs = sorted({*rows["pair"]}, key=lambda pair: int(pair[:-1]))
    poster = Poster(10.4)
    shown = []
    for column, pair in zip(poster.add_gridspec(1, len(pairs)), pairs, strict=True):
        here = where(rows, pair=pair)
        bests = {name: best_shapes(part) for name, part in here.groupby("setting")}
        grid = column.subgridspec(len(bests), 1, height_ratios=[*map(len, bests.values())])
        top = max(runs["tok_per_s"].median() for best in bests.values() for runs in best.values())
        for cell, (name, best) in zip(grid, bests.items(), strict=True):
            ax = poster.add_subplot(cell, xlim=(0, 1.9 * top))
            ssd = next(use for use in best if use.startswith("SSD"))
            other = next(use for use in best if not use.startswith("SSD"))
            over = ratio(best[ssd], best[other])
            interval = f" ({over.low:.2f}–{over.high:.2f})" * over.has_interval
            verdict = f"SSD {over.speedup:.2f}×{interval}"
            title = f"{pair}/1B {name.partition(' ')[2]} GPUs: {verdict}"
            ax.set_title(title, loc="left", x=-0.36, fontsize=12.5)
            _bars(poster, ax, best)
            ax.tick_params(axis="x", labelbottom=False)
            shown += best.values()
        ax.tick_params(axis="x", labelbottom=True)
        ax.set_xlabel("tok/s: median (range of n runs)")
    what = "whole transformers, first prompts of recordings (temp. 0.7: law) of SmolLM2"
    bars = (
        "Each use at its best K, tree and fan-out; bold: the strongest. Above: SSD over the others"
    )
    text = caption(shown, bars, vary=("context",), what=what, claims=False)
    return poster.finish("Does a GPU for the draft pay?", text, legend=False)


def _bars(poster: Poster, ax: Axes, best: dict[str, pd.DataFrame]) -> None:
    for place, (use, runs) in enumerate(best.items()):
        rates = runs["tok_per_s"]
        color = METHODS[use.removesuffix(ONE_FORWARD).removesuffix(" tree")][0]
        ax.barh(place, rates.median(), 0.72, zorder=2, color=color, alpha=0.5 if place else 1.0)
        ax.plot([rates.min(), rates.max()], [place] * 2, color=BLACK, linewidth=2, zorder=3)
        low, high = (f"{rate:.0f}" for rate in (rates.min(), rates.max()))
        span = f"{low}–{high}, " * (low != high)
        text = f"{rates.median():.0f} ({span}n={len(rates)})"
        style = {"va": "center", "fontsize": 11, "fontweight": "normal" if place else "bold"}
        note(ax, text, rates.max(), place, dx=5, dy=0, **style)
        ends = {"low": rates.min(), "high": rates.max(), "n": len(rates)}
        poster.keep(ax, use, y=rates.median(), **ends)
    names = [f"{use} K={runs['lookahead'].iloc[0]}" for use, runs in best.items()]
    names = [
        name.removesuffix(" K=0").replace(f" inline{ONE_FORWARD}", ONE_FORWARD) for name in names
    ]
    ax.set_yticks(range(len(names)), names, fontsize=11.5)
    ax.get_yticklabels()[0].set_fontweight("bold")
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)


HOST_S = 0.25e-3  # host work in a round of SSD, in s, measured in results/h200-pairs
INLINE_S = 0.15e-3  # host work in a round of SD inline on two GPUs, in s, measured there, too
FITTED = "h200-pairs"  # the only folder whose rows determined HOST_S and INLINE_S


@dataclass(frozen=True)
class Pays:
    """One measured speedup of SSD (T GPUs and one for the draft) over SD inline on T + 1 GPUs, and
    the numbers from which a closed form predicts it. folder: where SSD's rows are. is_whole:
    whether the rows are of whole transformers with a recording. tokens: tokens a round of SSD over
    those of SD inline. verify_s: seconds of a verification on T and on T + 1 GPUs. draft_s: seconds
    of drafting K tokens, in SSD and in SD inline. hit_rate: share of rounds that hit the cache."""

    name: str
    folder: str
    is_whole: bool
    tokens: float
    verify_s: tuple[float, float]
    draft_s: tuple[float, float]
    hit_rate: float
    measured: float

    @property
    def hidden_s(self) -> float:
        """The drafting time that cache hits hide in a mean round, hit_rate · draft_s of SSD."""
        return self.hit_rate * self.draft_s[0]

    @property
    def saved_s(self) -> float:
        """The seconds by which a round is shorter if the target has T + 1 instead of T GPUs."""
        return self.verify_s[0] - self.verify_s[1] + HOST_S - INLINE_S

    @property
    def predicted(self) -> float:
        """The speedup of SSD over SD inline by the closed form."""
        ssd_s = self.verify_s[0] + HOST_S + (1 - self.hit_rate) * self.draft_s[0]
        return self.tokens * (self.verify_s[1] + INLINE_S + self.draft_s[1]) / ssd_s


def pays(rows: pd.DataFrame) -> Iterator[Pays]:
    """Yields the measured and predicted speedup of SSD at its best K, for each pair and acceptance
    rate at batch size 1 with imposed acceptance and hits.

    The closed form of tokens/s is E(K)/(v_T + g + (1 − p)·K·d) for SSD, and E(K′)/(v_{T+1} + c +
    K′·d) for SD inline, with E: tokens a round, v: time of a verification and d: of a draft step
    (both from rows of SD inline), p: hit rate by the hit model, g and c: HOST_S and INLINE_S."""
    rows = rows[plain(rows) & (rows["batch_size"] == 1) & rows["tree_nodes"].isna()]
    inline = rows[(rows["method"] == "SD inline") & (rows["backup"] != "fast")]
    ssd = rows[(rows["method"] == "SSD") & (rows["backup"] == "jit") & rows["p_hit"].isna()]
    keys = ["target", "draft", "lm_head", "context", "fuse", "alpha"]
    wide = inline.groupby([*keys, "tp", "lookahead"])["tok_per_s"].median().reset_index()
    for (*shared, tp, law), group in ssd.groupby([*keys, "tp", "hit_law"]):
        part = best_rows(group)
        first = part.iloc[0]
        k = int(first["lookahead"])
        rivals = where(wide, tp=tp + 1, **dict(zip(keys, shared, strict=True)))
        alike = where(inline, **dict(zip(keys[:-1], shared[:-1], strict=True)))
        v = [alike.loc[alike["tp"] == t, "t_target_s"].median() for t in (tp, tp + 1)]
        v[0] = part["t_target_s"].median() if np.isnan(v[0]) else v[0]
        step = float(alike["step_s"].median())
        if rivals.empty or not np.isfinite([*v, step]).all() or not str(law).startswith("power"):
            continue
        best = rivals.loc[rivals["tok_per_s"].idxmax()]
        other_k = int(best["lookahead"])
        lists = first["fan_out"]
        ends = named_hit_law(str(law)).hit_probabilities(max(lists))
        chances = zip(accept_probabilities([shared[-1]] * k), lists, strict=True)
        yield Pays(
            name=f"{short(shared[0])} T={tp}, alpha {shared[-1]:g}, K={k}",
            folder=Path(first["folder"]).name,
            is_whole=False,
            tokens=expected_tokens(shared[-1], k) / expected_tokens(shared[-1], other_k),
            verify_s=(v[0], v[1]),
            draft_s=(k * step, other_k * step),
            hit_rate=sum(w * ends[-(n == k)][f] for n, (w, f) in enumerate(chances)),
            measured=float(part["tok_per_s"].median() / best["tok_per_s"]),
        )


def whole_pays(rows: pd.DataFrame) -> Iterator[Pays]:
    """Yields the measured and predicted speedup of each SSD run of whole transformers over SD
    inline at its best K, if both draft in one forward or neither. Acceptance, hits and times are
    those of the rows; HOST_S and INLINE_S were not fitted to these rows."""
    chains = used(rows)
    chains = chains[(chains["backup"] == "jit") & chains["tree_nodes"].isna()]
    chains = chains[chains["backup_lookahead"] == chains["lookahead"]]
    chains = chains.assign(parallel=chains["parallel_drafting"].eq(True))
    for (setting, folder, is_one), here in chains.groupby(["setting", "folder", "parallel"]):
        inline = points(where(here, method="SD inline"), ["lookahead"])
        for other in inline.nlargest(1, "tok_per_s").itertuples():
            for run in where(here, method="SSD").itertuples():
                yield Pays(
                    name=f"{setting} GPUs, K={run.lookahead:.0f}" + ONE_FORWARD * bool(is_one),
                    folder=Path(folder).name,
                    is_whole=True,
                    tokens=run.acceptance_length / other.acceptance_length,
                    verify_s=(run.t_target_s, other.t_target_s),
                    draft_s=(run.t_draft_s, other.t_draft_s),
                    hit_rate=run.hit_rate,
                    measured=run.tok_per_s / other.tok_per_s,
                )


def hidden(data: Data) -> Poster:
    """Measured speedup of SSD over SD inline (y), by the drafting time that cache hits hide less
    what another target GPU saves (x)."""
    gains = [*pays(data.rows), *whole_pays(data.rows)]
    need(len(gains) > 2, "SSD of T and SD inline of T + 1 GPUs at batch 1, jit, and hits of a law")
    poster = Poster(6.0)
    left, right = poster.panels(1, 2, sharey=True)[0]
    left.set_title("what decides, at the same K")
    right.set_title("the closed form")
    products = "products, inline rounds by the host", look("SSD")["color"]
    chained = "whole transformers, inline rounds chained; not fitted to", "white"
    for is_whole, (label, fill) in enumerate((products, chained)):
        some = [gain for gain in gains if gain.is_whole == is_whole]
        y = [gain.measured for gain in some]
        also = {"name": [gain.name for gain in some]}
        style = {**look("SSD"), "linestyle": "none", "markerfacecolor": fill, "also": also}
        x = [1e3 * (gain.hidden_s - gain.saved_s) for gain in some]
        poster.line(left, label, x, y, **style)
        poster.line(right, label, [gain.predicted for gain in some], y, **style)
    left.axvline(0, color=GREY)
    left.set(xlabel="p·K·d − (v(T) − v(T+1) + g − c), ms", ylabel="SSD's tok/s over SD inline's")
    ends = [end(gain.measured for gain in gains) for end in (min, max)]
    poster.line(right, "equal", ends, ends, color=GREY, linestyle="--")
    right.set(xlabel="predicted")
    parity(left)
    text = (
        f"{data.rows['device_name'].iloc[0]}, batch 1; {len(gains)} gains: of products each pair's "
        "best K at each alpha, of transformers each run of SSD that redrafts misses. K and K′ may "
        "differ, which the left omits"
    )
    return poster.finish("When does SSD beat SD inline?", text)
