"""The figures of docs/study.md: what an extra GPU for the draft model is worth.

`measured` and `hidden` draw measured rows. The others draw predictions of `plan` for every mode
and division of up to five GPUs (results/extra-gpu/cells.jsonl).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from mpissd.common.theory import accept_probabilities, expected_tokens
from mpissd.engine.law.acceptance import named_hit_law

from ..rows import Data
from ..select import best_rows, fastest, plain, points, prompts, ratio, short, where
from ..style import BLACK, GREY, METHODS, SERIES, Poster, caption, look, need, note, parity

# Predicted speedups in this range decide nothing, as measured ones were 2 to 16% lower.
UNDECIDED = 1.0, 1.16
_NAMES = {"ar": "AR", "sd": "SD inline", "tree": "tree inline", "lookup": "lookup", "ssd": "SSD"}
_FOLDERS = "extra-gpu", "h200-parallel"  # folders of results with every kind of alternative
ONE_FORWARD = " in one forward"
_WARM = "code at temp. 0.7"
_GPUS = ("8b/1b", 2), ("70b/1b", 4)
_GREY = "Grey: undecided, as predictions flatter SSD by up to 16%"
_STYLES = {name: look(name) for name in ("AR", "SD inline", "tree inline", "lookup", "SSD")}
_STYLES["copies"] = {"color": GREY, "marker": "s", "markerfacecolor": "white"}
CELL = ["pair", "law", "batch_size", "host"]


def on_gpus(cells: pd.DataFrame, gpus: int) -> pd.DataFrame:
    """Returns the fastest prediction of each mode on at most `gpus` GPUs, for each pair, prompts,
    batch size and host. The mode "copies" stands for independent copies of the mode with most total
    tok/s. Lookups count only at temperature 0, where their acceptance was recorded."""
    cells = cells[(cells["mode"] != "lookup") | cells["law"].str.endswith("temp. 0")]
    apart = (cells["num_drafts"] > 0) & (cells["mode"] != "ssd")  # slower than inline SD
    single = cells.assign(use=cells["mode"].map(_NAMES))[~apart]
    count = gpus // (single["tp"] + single["num_drafts"])
    copies = single.assign(use="copies", tok_per_s=single["tok_per_s"] * count)
    both = pd.concat([single[count > 0], copies[count > 1]]).sort_values("tok_per_s")
    return both.groupby([*CELL, "use"]).last().reset_index()


def gains_of(cells: pd.DataFrame, gpus: int) -> pd.DataFrame:
    """Returns the predicted speedup of SSD over the fastest alternative on at most `gpus` GPUs, and
    the alternative's name, for each pair, prompts, batch size and host."""
    uses = on_gpus(cells, gpus)
    ssd = where(uses, use="SSD").set_index(CELL)
    rivals = uses[~uses["use"].isin(["SSD", "copies"])].sort_values("tok_per_s")
    others = rivals.groupby(CELL).last()
    gain = ssd["tok_per_s"] / others["tok_per_s"]
    also = {"other": others["use"], "hits": ssd["hit_rate"], "gpus": gpus}
    return pd.DataFrame({"gain": gain, **also}).dropna().reset_index()


def uses(data: Data) -> Poster:
    """Predicted tok/s (x) of each mode on all GPUs, by kind of prompts and temperature (y)."""
    cells = where(data.cells, batch_size=1, host=1.0)
    pairs = [of for of in _GPUS if of[0] in {*cells["pair"]}]
    need(pairs, "cells of results/extra-gpu")
    poster = Poster(6.4)
    for ax, (pair, gpus) in zip(poster.panels(1, len(pairs), sharey=True)[0], pairs, strict=True):
        ax.set_title(f"{pair.upper()} on {gpus} GPUs")
        laws = sorted({*cells["law"]}, reverse=True)
        here = on_gpus(where(cells, pair=pair), gpus)
        here = here.assign(y=[laws.index(law) for law in here["law"]])
        for use, style in _STYLES.items():
            part = where(here, use=use)
            if len(part):
                poster.line(ax, use, part["tok_per_s"], part["y"], linestyle="none", **style)
        ax.set_yticks(range(len(laws)), laws)
        ax.set(xlabel="tok/s", xlim=(0, 1.05 * here["tok_per_s"].max()))
    text = _text(cells, "Best K, tree, fan-out. Copies: tok/s in all, each sequence slower")
    return poster.finish("Which use of the GPUs is fastest?", text)


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


def over_gpus(data: Data) -> Poster:
    """Predicted speedup of SSD over the strongest alternative (y) by the number of GPUs (x), a line
    for each kind of prompts and temperature."""
    cells = where(data.cells, batch_size=1, host=1.0)
    need(len(cells), "cells of results/extra-gpu")
    gains = pd.concat([gains_of(cells, gpus) for gpus in range(2, 5)])
    label = "GPUs, one of them the draft's"
    return _lines(gains, "gpus", label, "How many GPUs does it take?", _text(cells, _GREY))


def over_batch(data: Data) -> Poster:
    """Predicted speedup of SSD over the strongest alternative on as many GPUs (y) by batch size
    (x), a line for each kind of prompts and temperature."""
    cells = where(data.cells, host=1.0)
    laws = cells.loc[cells["batch_size"] > 1, "law"].unique()
    need(len(laws), "cells of results/extra-gpu at several batch sizes")
    cells = cells[cells["law"].isin(laws)]
    gains = pd.concat([gains_of(where(cells, pair=pair), gpus) for pair, gpus in _GPUS])
    text = _text(cells, f"8B on two GPUs, 70B on four. {_GREY}")
    return _lines(gains, "batch_size", "sequences b", "Does it pay in a batch?", text)


def host_path(data: Data) -> Poster:
    """Predicted speedup of SSD over the strongest alternative on two GPUs (y), by the durations of
    host work as a multiple of the measured ones (x)."""
    cells = where(data.cells, batch_size=1)
    hosted = cells.loc[cells["host"] != 1, ["pair", "law"]].drop_duplicates()
    need(len(hosted), "cells of results/extra-gpu with several hosts")
    gains = gains_of(cells.merge(hosted), 2)
    text = _text(cells, "Two GPUs. Rounds without a draft GPU are chained: no host is in them.")
    label = "host's time in a round, × the measured one"
    return _lines(gains, "host", label, "What does the host cost SSD?", text)


def _lines(gains: pd.DataFrame, x: str, label: str, heading: str, text: str) -> Poster:
    pairs = sorted({*gains["pair"]}, key=len)
    poster = Poster(5.6)
    grid = poster.panels(1, len(pairs), sharey=True)[0]
    for ax, pair in zip(grid, pairs, strict=True):
        ax.set_title(pair.upper())
        ax.axhspan(*UNDECIDED, color="#e4e4e4", zorder=0)
        parity(ax)
        laws = where(gains, pair=pair).groupby("law", sort=False)
        for (law, part), colour in zip(laws, (*SERIES, GREY), strict=False):
            also = {"other": part["other"]}
            poster.line(ax, str(law), part[x], part["gain"], also=also, color=colour, marker="o")
        ticks = sorted({*gains[x]})
        ax.set_xlabel(label)
        if ticks[-1] > 8:
            ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(FixedLocator(ticks))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter("{x:g}")
    grid[0].set_ylabel("SSD's tok/s over the\nstrongest other use's")
    return poster.finish(heading, text)


def _text(cells: pd.DataFrame, conditions: str) -> str:
    return (
        f"{cells['device_name'].iloc[0]}, predicted by mpissd plan from its profile: whole "
        "transformers, 512 tokens of context, K draft forwards a round, laws of "
        f"SmolLM2-135M-Instruct and its earlier shipped draft. {conditions}"
    )


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
