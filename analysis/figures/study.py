"""The figures of docs/study.md: what an extra GPU for the draft is worth.

`measured` and `hidden` draw measured rows; the others draw cells (results/extra-gpu): every use of
up to five GPUs as `plan` predicts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from analysis.rows import Data
from analysis.select import best_rows, fastest, plain, points, prompts, ratio, short, where
from analysis.style import BLACK, GREY, METHODS, SERIES, Poster, caption, look, need, note, parity
from mpissd.common.theory import accept_probabilities, expected_tokens
from mpissd.engine.law.acceptance import named_hit_law

# A predicted gain that decides nothing: measured ones are 2 to 16% lower (tables.py measured).
UNDECIDED = 1.0, 1.16
_NAMES = {"ar": "AR", "sd": "SD inline", "tree": "tree inline", "lookup": "lookup", "ssd": "SSD"}
_FOLDERS = ("extra-gpu",)  # of measured rows in which all uses were run
_WARM = "code at temp. 0.7"
_GPUS = ("8b/1b", 2), ("70b/1b", 4)
_GREY = "Grey: undecided, as predictions flatter SSD by up to 16%"
_STYLES = {name: look(name) for name in ("AR", "SD inline", "tree inline", "lookup", "SSD")}
_STYLES["copies"] = {"color": GREY, "marker": "s", "markerfacecolor": "white"}
CELL = ["pair", "law", "batch_size", "host"]


def on_gpus(cells: pd.DataFrame, gpus: int) -> pd.DataFrame:
    """Returns each use's fastest line on at most so many GPUs, by cell.

    copies: independent ones of the use that makes most tok/s in all; none is SSD's rival. Lookups
    count where their acceptance was recorded, at temperature 0.
    """
    cells = cells[(cells["mode"] != "lookup") | cells["law"].str.endswith("temp. 0")]
    apart = (cells["num_drafts"] > 0) & (cells["mode"] != "ssd")  # never faster than inline
    single = cells.assign(use=cells["mode"].map(_NAMES))[~apart]
    count = gpus // (single["tp"] + single["num_drafts"])
    copies = single.assign(use="copies", tok_per_s=single["tok_per_s"] * count)
    both = pd.concat([single[count > 0], copies[count > 1]]).sort_values("tok_per_s")
    return both.groupby([*CELL, "use"]).last().reset_index()


def gains_of(cells: pd.DataFrame, gpus: int) -> pd.DataFrame:
    """Returns SSD's tok/s over the fastest other use's, by cell, and that use's name."""
    uses = on_gpus(cells, gpus)
    ssd = where(uses, use="SSD").set_index(CELL)
    rivals = uses[~uses["use"].isin(["SSD", "copies"])].sort_values("tok_per_s")
    others = rivals.groupby(CELL).last()
    gain = ssd["tok_per_s"] / others["tok_per_s"]
    also = {"other": others["use"], "hits": ssd["hit_rate"], "gpus": gpus}
    return pd.DataFrame({"gain": gain, **also}).dropna().reset_index()


def uses(data: Data) -> Poster:
    """x = tok/s; y = laws; a mark is a use of all GPUs."""
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
    """Returns the whole transformers, with `use`, `ranks` and `setting`.

    Those without a recording follow a law, of HumanEval at temperature 0.7. AR is the same on all
    prompts of its folder.
    """
    rows = where(rows, forward="transformer", backend="cupy")
    rows = rows[rows["folder"].map(lambda folder: Path(folder).name).isin(_FOLDERS)]
    names = rows["method"].where(rows["backup"].ne("fast") | rows["method"].eq("SSD"), "lookup")
    trees = names.replace({"SD inline": "tree inline", "SSD": "SSD tree"})
    names = names.mask(rows["tree_nodes"].notna(), trees)
    rows = rows.assign(use=names, ranks=rows["tp"] + rows["num_drafts"])
    rows = rows.assign(law=prompts(rows).fillna(_WARM), pair=rows["target"].map(short))
    parts = [rows[rows["method"] != "AR"]]
    for folder, pair, law in parts[0].groupby(["folder", "pair", "law"]).groups:
        parts.append(where(rows, method="AR", folder=folder, pair=pair).assign(law=law))
    rows = pd.concat(parts)
    return rows.assign(setting=rows["pair"] + " " + rows["law"] + ", " + rows["ranks"].astype(str))


def with_ssd(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of `used` on several GPUs whose setting has rows of SSD."""
    rows = used(rows)
    shared = rows["setting"].isin(where(rows, mode="ssd")["setting"])
    return rows[shared & rows["ranks"].gt(1)]


def best_shapes(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Returns {use: its runs}, the fastest first; of several shapes that of the largest median."""
    best = {str(use): runs for use, runs in fastest(rows, "use").groupby("use")}
    return dict(sorted(best.items(), key=lambda item: -item[1]["tok_per_s"].median()))


def measured(data: Data) -> Poster:
    """A bar is the median of a use's runs; a panel is a pair, prompts and GPUs."""
    rows = with_ssd(data.rows)
    need(len(rows), "runs of results/extra-gpu")
    pairs = sorted({*rows["pair"]}, key=lambda pair: int(pair[:-1]))
    poster = Poster(8.4)
    shown = []
    for column, pair in zip(poster.add_gridspec(1, len(pairs)), pairs, strict=True):
        here = where(rows, pair=pair)
        bests = {name: best_shapes(part) for name, part in here.groupby("setting")}
        grid = column.subgridspec(len(bests), 1, height_ratios=[*map(len, bests.values())])
        top = max(runs["tok_per_s"].median() for best in bests.values() for runs in best.values())
        for cell, (name, best) in zip(grid, bests.items(), strict=True):
            ax = poster.add_subplot(cell, xlim=(0, 1.6 * top))
            ssd = next(use for use in best if use.startswith("SSD"))
            other = next(use for use in best if not use.startswith("SSD"))
            over = ratio(best[ssd], best[other])
            interval = f" ({over.low:.2f}–{over.high:.2f})" * over.has_interval
            verdict = f"SSD {over.speedup:.2f}×{interval} of {other}"
            title = f"{pair}/1B {name.partition(' ')[2]} GPUs: {verdict}"
            ax.set_title(title, loc="left", x=-0.36, fontsize=12.5)
            _bars(poster, ax, best)
            ax.tick_params(axis="x", labelbottom=False)
            shown += best.values()
        ax.tick_params(axis="x", labelbottom=True)
        ax.set_xlabel("tok/s: median (range of n runs)")
    what = "whole transformers, recordings and laws of SmolLM2 and its draft"
    bars = "Each use at its best K, tree and fan-out; bold: the strongest"
    text = caption(shown, bars, vary=("context",), what=what, claims=False)
    return poster.finish("Does a GPU for the draft pay?", text, legend=False)


def _bars(poster: Poster, ax: Axes, best: dict[str, pd.DataFrame]) -> None:
    for place, (use, runs) in enumerate(best.items()):
        rates = runs["tok_per_s"]
        color = METHODS[use.removesuffix(" tree")][0]
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
    names = [name.removesuffix(" K=0") for name in names]
    ax.set_yticks(range(len(names)), names, fontsize=11.5)
    ax.get_yticklabels()[0].set_fontweight("bold")
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)


def over_gpus(data: Data) -> Poster:
    """x = GPUs; y = SSD over the strongest other use; a line is a law."""
    cells = where(data.cells, batch_size=1, host=1.0)
    need(len(cells), "cells of results/extra-gpu")
    gains = pd.concat([gains_of(cells, gpus) for gpus in range(2, 5)])
    label = "GPUs, one of them the draft's"
    return _lines(gains, "gpus", label, "How many GPUs does it take?", _text(cells, _GREY))


def over_batch(data: Data) -> Poster:
    """x = sequences; y = SSD over the strongest other use of as many GPUs; a line is a law."""
    cells = where(data.cells, host=1.0)
    laws = cells.loc[cells["batch_size"] > 1, "law"].unique()
    need(len(laws), "cells of results/extra-gpu at several batch sizes")
    cells = cells[cells["law"].isin(laws)]
    gains = pd.concat([gains_of(where(cells, pair=pair), gpus) for pair, gpus in _GPUS])
    text = _text(cells, f"8B on two GPUs, 70B on four. {_GREY}")
    return _lines(gains, "batch_size", "sequences b", "Does it pay in a batch?", text)


def host_path(data: Data) -> Poster:
    """x = the host's costs over the measured ones; y = SSD over the strongest other use of two."""
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
        "transformers, 512 tokens of context, laws of SmolLM2-135M-Instruct and its shipped draft. "
        f"{conditions}"
    )


HOST_S = 0.25e-3  # the host's share of a round of SSD, measured: results/h200-pairs
INLINE_S = 0.15e-3  # that of a round of SD inline over two GPUs whose rounds the host issues
FITTED = "h200-pairs"  # the folder of whose rows these two are; no other row entered


@dataclass(frozen=True)
class Pays:
    """One measured gain of SSD (T) over SD inline (T + 1), and what the closed form says of it.

    folder: of SSD's row. is_whole: whether of whole transformers under a recording, whose inline
    rounds the device issues. tokens: those of SSD's round over SD inline's. verify_s: the time of a
    verification on T and on T + 1 GPUs. draft_s: drafting, K·d, of SSD and of SD inline. hit_rate:
    p.
    """

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
        """Drafting that hits hide, p·K·d."""
        return self.hit_rate * self.draft_s[0]

    @property
    def saved_s(self) -> float:
        """What T + 1 GPUs in place of T save of a round."""
        return self.verify_s[0] - self.verify_s[1] + HOST_S - INLINE_S

    @property
    def predicted(self) -> float:
        """The closed form's gain."""
        ssd_s = self.verify_s[0] + HOST_S + (1 - self.hit_rate) * self.draft_s[0]
        return self.tokens * (self.verify_s[1] + INLINE_S + self.draft_s[1]) / ssd_s


def pays(rows: pd.DataFrame) -> Iterator[Pays]:
    """Yields the closed form beside SSD's best K of each alpha of each pair at batch 1.

    Per round: SSD E(K)/(v_T + g + (1 − p)·K·d), SD inline E(K′)/(v_{T+1} + c + K′·d), with the
    times of verifications v and draft steps d of rows of SD inline, p of the hit law.
    """
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
    """Yields the same of runs of whole transformers, whose rows no constant was chosen by.

    Acceptance, hits and times are those of the rows; each run of SSD, over the best K of SD inline.
    """
    chains = used(rows)
    chains = chains[(chains["backup"] == "jit") & chains["tree_nodes"].isna()]
    chains = chains[chains["backup_lookahead"] == chains["lookahead"]]
    for (setting, folder), here in chains.groupby(["setting", "folder"]):
        inline = points(where(here, method="SD inline"), ["lookahead"])
        for other in inline.nlargest(1, "tok_per_s").itertuples():
            for run in where(here, method="SSD").itertuples():
                yield Pays(
                    name=f"{setting} GPUs, K={run.lookahead:.0f}",
                    folder=Path(folder).name,
                    is_whole=True,
                    tokens=run.acceptance_length / other.acceptance_length,
                    verify_s=(run.t_target_s, other.t_target_s),
                    draft_s=(run.t_draft_s, other.t_draft_s),
                    hit_rate=run.hit_rate,
                    measured=run.tok_per_s / other.tok_per_s,
                )


def hidden(data: Data) -> Poster:
    """x = drafting that hits hide, less what another target GPU saves; y = SSD over SD inline."""
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
