"""Drafts: their kinds on one plane, their shape, and Saguaro sampling."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.text import Annotation

from analysis.rows import Data
from analysis.select import CONDITIONS, points, short, usual, where
from analysis.style import (
    BLUE,
    GREEN,
    GREY,
    MARKERS,
    ORANGE,
    RED,
    SERIES,
    Poster,
    caption,
    need,
    note,
)

# Keys that all rows of one plane share besides the device: every draft drafts the same text.
_SHARED = ("target", "tp", "prompts_sha256", "temperature", "token_limit", *CONDITIONS)
_SAME = 0.02  # distance of two points, in tokens and forwards, whose labels would overlap
_NEAR = 0.1  # forwards up to which a label left of its point would leave the panel
_SPEEDUPS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1}
_DISTILLED = r"^(\d+)x(\d+)x(\d+)x(\d+)$"  # LAYERSxHEADSxKV_HEADSxFFN
_MARKOV = (
    "target draft tp num_drafts lookahead batch_size vocab temperature divergence order"
).split()


def kinds(data: Data) -> Poster:
    """Tokens a round over T_SD of SD inline, a line for each kind of draft over K.

    On a dotted line all points are equally fast, if a verification takes as long as a forward of
    AR: speedup = tokens a round / (1 + T_SD) [Leviathan et al. 2023, theorem 3.8].
    """
    text = where(data.rows, workload="text", batch_size=1)
    used = _with_cost(where(text, method="SD inline"))
    used = usual(used, _SHARED, data.notes, "drafts of other conditions")
    need(used["kind"].nunique() >= 2, "SD inline rows of text by two drafts")
    ar = where(text, mode="ar")
    for shared in ("prompts_sha256", "target", "temperature"):
        ar = ar[ar[shared].isin(used[shared])]
    poster = Poster(7.8)
    ax = poster.panels(1, 1)[0][0]
    ax.set_title("T_SD against acceptance")
    merged = points(used, ["kind", "lookahead"])
    cheapest_first = merged.groupby("kind")["T_SD"].min().sort_values().index
    for kind, color, marker in zip(cheapest_first, SERIES * 3, MARKERS * 3, strict=False):
        line = where(merged, kind=kind).sort_values("lookahead")
        look = {"color": color, "marker": marker}
        _kind(poster, ax, kind, line, float(ar["tok_per_s"].median()), look)
    _equal_speedups(poster, ax)
    first = used.iloc[0]
    on_cpu = ", as it does not on a CPU" if set(used["backend"]) == {"numpy"} else ""
    conditions = caption(
        [used],
        f"target {short(first['target'])}, T=1, temperature {first['temperature']:g}, SD inline, "
        "a point for each K, with its measured speed over AR's. T_SD: drafting K tokens, in "
        "forwards of the target. Dotted: equal speedup over AR without the host's part of a round, "
        f"if verifying K+1 rows takes one forward of AR{on_cpu}",
        vary=("lm_head", "context"),
        what="transformer forwards, the models' own acceptance",
    )
    return poster.finish("Kinds of draft on one plane", conditions)


def _with_cost(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows whose drafting time is known, with their kind; a lookup has no forward."""
    cost = rows["T_SD"].where(rows["draft"] != "lookup", 0.0)
    kind = [_kind_of(*names) for names in rows[["draft", "lookup", "draft_lookup"]].to_numpy()]
    return rows.assign(T_SD=cost, kind=kind)[cost.notna()]


def _kind_of(draft: str, lookup: str | None, beneath: str | None) -> str:
    """Returns a draft's name; older rows add the draft or lookup that drafts for it."""
    if draft == "lookup":
        return "lookup" if not isinstance(lookup, str) else f"lookup: {lookup}"
    return f"{short(draft)} over {beneath}" if isinstance(beneath, str) else short(draft)


def _kind(
    poster: Poster, ax: Axes, kind: str, line: pd.DataFrame, ar: float, look: dict[str, str]
) -> None:
    x, y, over = line["T_SD"], line["acceptance_length"], line["tok_per_s"] / ar
    poster.line(ax, kind, x, y, also={"lookahead": line["lookahead"], "over_ar": over}, **look)
    for at, up, k, speed in zip(x, y, line["lookahead"], over, strict=True):
        taken = (text.xy for text in ax.texts if isinstance(text, Annotation))
        is_taken = any(np.hypot(*np.subtract(xy, (at, up))) < _SAME for xy in taken)
        text = f"K={k:g}" + (f" · {speed:.2f}×" if np.isfinite(speed) else "")
        place = {"dx": 8, "dy": -20 if is_taken else 8, "ha": "left" if at < _NEAR else "right"}
        note(ax, text, at, up, color=look["color"], fontsize=11, bbox=_WHITE, **place)


def _equal_speedups(poster: Poster, ax: Axes) -> None:
    """Draws a line for each speedup that the points are near."""
    numbers = poster.table()
    right, top = 1.12 * max(0.1, float(numbers["x"].max())), 1.08 * float(numbers["y"].max())
    bottom = min(1.0, float(numbers["y"].min())) - 0.05
    ax.set(xlabel="T_SD: drafting K tokens, in target forwards", ylabel="tokens a round")
    ax.set(xlim=(-0.02 * right, right), ylim=(bottom, top))
    for speedup in _SPEEDUPS:
        if bottom < speedup < top:
            x = np.array([0.0, right])
            ax.plot(x, speedup * (1 + x), color=GREY, linestyle=":", linewidth=1.2, zorder=1)
            at = min(0.97 * right, (0.97 * top) / speedup - 1)
            look = {"color": GREY, "fontsize": 11, "zorder": 2, "bbox": _WHITE, "ha": "center"}
            ax.annotate(f"{speedup:g}×", (at, speedup * (1 + at)), **look)


def drafts(data: Data) -> Poster:
    """Distilled drafts of equal parameters over their layers, by K: tokens a round, time of a draft
    step, tok/s."""
    sizes = data.rows["draft"].astype("string").str.extract(_DISTILLED).astype("float")
    rows = data.rows.assign(layers=sizes[0], kv_heads=sizes[0] * sizes[2])
    rows = rows[rows["layers"].notna() & (rows["batch_size"] == 1)]
    need(len(rows), "distilled drafts, named LAYERSxHEADSxKV_HEADSxFFN")
    poster = Poster(7.2)
    axes = poster.panels(1, 3)[0]
    for ax, title, values in zip(
        axes,
        ("tokens a round", "one draft step, µs", "tok/s"),
        (rows["acceptance_length"], rows["step_s"] * 1e6, rows["tok_per_s"]),
        strict=True,
    ):
        ax.set_title(title)
        table = rows.assign(value=values).groupby(["lookahead", "layers"])["value"].median()
        for color, lookahead in zip(
            (BLUE, GREEN, ORANGE, RED), table.index.levels[0], strict=False
        ):
            line = table.loc[lookahead]
            poster.line(ax, f"K={lookahead:g}", line.index, line, color=color, marker="o")
        ax.set(xlabel="layers of the draft", ylim=(0, None))
        ax.set_xticks(sorted(set(rows["layers"])))
    axes[2].set_ylim(top=1.12 * axes[2].get_ylim()[1])
    target = rows["target"].iloc[0]
    ar = where(data.rows, mode="ar", target=target)
    ar = ar[ar["folder"].isin(set(rows["folder"]))]
    if len(ar):
        rate = float(ar["tok_per_s"].median())
        axes[2].axhline(rate, color=GREY, linestyle=":", label="AR")
        poster.keep(axes[2], "AR", y=rate)
    kv = rows.sort_values("layers").groupby("draft", sort=False)["kv_heads"].first()
    heads = ", ".join(f"{name}: {count:.0f}" for name, count in kv.items())
    text = caption(
        [rows],
        f"target {short(target)}, T=1, SD inline. Drafts (layers x heads x KV heads x FFN) of "
        "equal parameters, distilled on the same samples for equal times; KV heads in all layers "
        f"{heads}",
        what="transformer forwards, SmolLM2's answers at temperature 0",
    )
    return poster.finish("Drafts of equal parameters, from wide to deep", text)


def saguaro(data: Data) -> Poster:
    """x = hit rate, y = tokens a round, which C trades for each other. Right: both over C."""
    rows = where(data.rows, workload="markov", mode="ssd")
    rows = rows[(rows["temperature"] > 0) & rows["saguaro_c"].notna()]
    used = usual(rows, _MARKOV, data.notes, "markov rows")
    need(used["saguaro_c"].nunique() >= 3, "markov SSD rows at three or more --saguaro_c")
    poster = Poster(7.6)
    left, middle, right = poster.panels(1, 3, width_ratios=(1.5, 1, 1))[0]
    first = used.iloc[0]
    for ax, title in ((left, "the trade"), (middle, "hit rate"), (right, "tokens a round")):
        ax.set_title(title)
    for place, (budget, group) in enumerate(used.groupby("branch_budget")):
        medians = points(group, ["saguaro_c"])
        c, hits, tokens = (medians[n] for n in ("saguaro_c", "hit_rate", "acceptance_length"))
        look = {"color": SERIES[place % 7], "marker": MARKERS[place % 7]}
        label = f"F = {budget / (first['lookahead'] + 1):g} a row"
        for ax, x, y in ((left, hits, tokens), (middle, c, hits), (right, c, tokens)):
            poster.line(ax, label, x, y, **look)
        for text, x, y in zip(c, hits, tokens, strict=True):
            note(left, f"{text:g}", x, y)
    left.set(xlabel="hit rate", ylabel="tokens a round and sequence")
    for ax in (middle, right):
        ax.set_xlabel("C (1: plain sampling)")
        ax.invert_xaxis()
    n = int(first["num_rounds"] * first["batch_size"])
    half = 1.96 * 0.5 / n**0.5
    text = caption(
        [used],
        f"V={first['vocab']:g}, divergence {first['divergence']:g}, temperature "
        f"{first['temperature']:g}, K={first['lookahead']}. {n} verified sequences a point: 95% "
        f"interval of a hit rate at most ± {half:.3f}. Decisions only: such a job's models run on "
        "the host, so its times say nothing",
        what="a language-model pair with known distributions, really sampled and verified",
        claims=False,
    )
    return poster.finish("Saguaro sampling: hits against acceptance", text)
