"""The effect of an LM head and of context on T_SD and on SSD's gain."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.common import GAINS, caption, draw_gains, need, no_claim
from analysis.gain import gains
from analysis.load import Data
from analysis.select import Case, cases, key, plain, points, richest
from analysis.style import BLUE, RED, SKY, Poster, parity


def lm_head_context(data: Data) -> Poster:
    """x = what a forward includes; y = T_SD of a draft token, and SSD's gain over SD and per
    GPU."""
    rows = data.rows
    wanted = plain(rows) & (rows["batch_size"] == 1)
    candidates = cases(data, wanted, ["lm_head", "context"], vary=("lm_head", "context"))
    shown = [(case, _sweep(case)) for case in candidates]
    shown = [(c, r) for c, r in shown if key(r, ["lm_head", "context"]).nunique() >= 2]
    shown = shown[:2]
    need(shown, "SD and SSD with and without --lm_head, or at several --context")
    poster = Poster(9.2)
    grid = poster.panels(2, len(shown), sharex="col")
    for column, (case, rows_) in zip(grid.T, shown, strict=True):
        _panel(poster, column, case, rows_)
    grid[0, 0].set_ylabel("one draft step, in\nverifications (T_SD / K)")
    grid[1, 0].set_ylabel("SSD's gain, ×")
    used = [r for _, r in shown]
    text = caption(
        data,
        used,
        "LM head: the vocabulary product with top-k in target and draft. Context: bytes of keys "
        "and values that attention would read, of both models",
        GAINS,
        no_claim(used),
        vary=("lm_head", "context"),
    )
    return poster.finish("LM head and context: what they do to T_SD and to the verdict", text)


def _sweep(case: Case) -> pd.DataFrame:
    """Returns SD, SD inline and SSD of the alpha, K, law and fan-out with most heads and
    contexts."""
    rows = case.rows[case.rows["batch_size"] == 1]
    ssd = richest(
        rows[rows["method"] == "SSD"],
        ["alpha", "lookahead", "hit_law", "policy"],
        ["lm_head", "context"],
    )
    if not len(ssd):
        return ssd
    first = ssd.iloc[0]
    here = (rows["alpha"] == first["alpha"]) & (rows["lookahead"] == first["lookahead"])
    return pd.concat([rows[here & (rows["method"] != "SSD")], ssd])


def _panel(poster: Poster, column: list[Axes], case: Case, rows: pd.DataFrame) -> None:
    above, below = column
    first = rows[rows["method"] == "SSD"].iloc[0]
    above.set_title(f"{case.label}+1, K={first['lookahead']}, α={first['alpha']:g}")
    for ax, what in ((above, "T_SD"), (below, "gain")):
        ax.set_label(f"{case.label}+1: {what}")
    kinds = sorted(key(rows, ["lm_head", "context"]).unique())
    place = {kind: i for i, kind in enumerate(kinds)}
    rows = rows.assign(place=key(rows, ["lm_head", "context"]).map(place))
    sd = rows[rows["method"] == "SD"]
    steps = points(sd.assign(share=sd["T_SD"] / sd["lookahead"]), ["place"])
    poster.line(above, "T_SD / K", steps["place"], steps["share"], color=RED, marker="^")
    for _, p in steps.iterrows():
        above.annotate(
            f"{p['share']:.3f}",
            (p["place"], p["share"]),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            fontsize=11,
        )
    above.set_ylim(0, 1.25 * max(steps["share"], default=1.0))
    share = case.tp / (case.tp + 1)
    for name, method, factor, color, marker in (
        ("SSD over SD on the same GPUs", "SD", 1.0, RED, "^"),
        ("SSD over SD inline, raw", "SD inline", 1.0, BLUE, "s"),
        ("SSD over SD inline, per GPU", "SD inline", share, SKY, "D"),
    ):
        sides = [rows[rows["method"] == m] for m in ("SSD", method)]
        gained = gains(sides[0], sides[1], "place", factor)
        draw_gains(poster, below, name, gained, color=color, marker=marker)
    parity(below)
    below.set_xticks(range(len(kinds)), [_name(*kind) for kind in kinds])


def _name(lm_head: bool, context: int) -> str:
    size = f"{context // 1024}k" if context >= 1024 else str(context)
    return f"{'LM head' if lm_head else 'no LM head'}\ncontext {size}"
