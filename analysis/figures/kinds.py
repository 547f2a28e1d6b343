"""Figures that compare draft models, the shapes of distilled drafts, and Saguaro sampling."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from ..rows import Data
from ..select import CONDITIONS, points, short, usual, where
from ..style import GREY, MARKERS, RAMP, SERIES, Poster, caption, label_points, look, need

# All rows of one panel share these keys, so that every draft drafts the same text.
_SHARED = ("target", "tp", "prompts_sha256", "temperature", "token_limit", *CONDITIONS)
_SPEEDUPS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0)
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1}
_DISTILLED = r"^(\d+)x(\d+)x(\d+)x(\d+)$"  # LAYERSxHEADSxKV_HEADSxFFN
_MARKOV = (
    "target draft tp num_drafts lookahead batch_size vocab temperature divergence order"
).split()


def kinds(data: Data) -> Poster:
    """Tokens a round (y) by a round's time (x) of SD inline, a line over K for each kind of draft.

    The time is measured, in rounds of AR. On a dotted line all points are equally fast: speedup =
    tokens a round / time. Theorem 3.8 of Leviathan et al. 2023 takes 1 + T_SD for the time; it
    leaves out the host's work, and that verifying K + 1 rows takes longer than one forward of AR.
    """
    text = where(data.rows, workload="text", batch_size=1)
    used = where(text, method="SD inline")
    names = used[["draft", "lookup", "draft_lookup"]].to_numpy()
    used = used.assign(kind=[_kind_of(*of) for of in names])
    used = usual(used, _SHARED, data.notes, "drafts of other conditions")
    need(used["kind"].nunique() >= 2, "SD inline rows of text by two drafts")
    ar = where(text, mode="ar")
    for shared in ("prompts_sha256", "target", "temperature"):
        ar = ar[ar[shared].isin(used[shared])]
    need(len(ar), "AR rows of the same prompts")
    poster = Poster(6.6, 9.0)
    ((ax,),) = poster.panels(1, 1)
    ar_tok_per_s = float(ar["tok_per_s"].median())
    used = used.assign(cost=used["acceptance_length"] * ar_tok_per_s / used["tok_per_s"])
    merged = points(used, ["kind", "lookahead"])
    cheapest_first = merged.groupby("kind")["cost"].min().sort_values().index
    for kind, color, marker in zip(cheapest_first, SERIES * 3, MARKERS * 3, strict=False):
        line = where(merged, kind=kind).sort_values("lookahead")
        x = line["cost"]
        y = line["acceptance_length"]
        also = {"lookahead": line["lookahead"], "over_ar": y / x}
        poster.line(ax, kind, x, y, also=also, color=color, marker=marker)
    poster.line(ax, "AR", [1.0], [1.0], linestyle="none", **look("AR"))
    _equal_speedups(poster, ax)
    first = used.iloc[0]
    conditions = caption(
        [used],
        f"Target {short(first['target'])}, T=1, temperature {first['temperature']:g}, SD inline. "
        "Labels: K and tok/s over AR's. Dotted: equal speedup",
        vary=("lm_head", "context"),
        what="transformer forwards, the models' own acceptance",
    )
    return poster.finish("Which kind of draft pays for its time?", conditions)


def _kind_of(draft: str, lookup: str | None, beneath: str | None) -> str:
    """Returns the name of a row's draft for the legend. lookup: the kind of lookup that drafts, if
    any. beneath: what drafts for the draft model itself, which only older rows have."""
    if draft == "lookup":
        return "lookup" if not isinstance(lookup, str) else f"lookup: {lookup}"
    return f"{short(draft)} over {beneath}" if isinstance(beneath, str) else short(draft)


def _equal_speedups(poster: Poster, ax: Axes) -> None:
    """Draws a line through the origin, on which all points are equally fast, for each round number
    of speedup that is near the points."""
    numbers = poster.table()
    right = 1.15 * float(numbers["x"].max())
    top = 1.08 * float(numbers["y"].max())
    fastest = float((numbers["y"] / numbers["x"]).max())
    ax.set(xlabel="a round's time, in rounds of AR", ylabel="tokens a round")
    ax.set(xlim=(0, right), ylim=(0, top))
    for speedup in (s for s in _SPEEDUPS if s < 1.5 * fastest):
        x = np.array([0.0, min(right, top / speedup)])
        ax.plot(x, speedup * x, color=GREY, linestyle=":", linewidth=1.2, zorder=1)
        style = {"color": GREY, "fontsize": 9, "zorder": 2, "bbox": _WHITE, "ha": "center"}
        ax.annotate(f"{speedup:g}×", (0.31 * x[1], 0.31 * speedup * x[1]), **style)
    measured = numbers[numbers["series"] != "AR"]
    columns = (measured[name] for name in ("lookahead", "over_ar", "x", "y"))
    label_points(ax, [(f"K={k:g}: {of:.2f}×", x, y) for k, of, x, y in zip(*columns, strict=True)])


def drafts(data: Data) -> Poster:
    """Tokens a round, time of a draft step, and tok/s (y) by the number of layers (x) of distilled
    drafts with equal numbers of parameters, a line for each K."""
    sizes = data.rows["draft"].astype("string").str.extract(_DISTILLED).astype("float")
    rows = data.rows.assign(layers=sizes[0])
    rows = rows[rows["layers"].notna() & (rows["batch_size"] == 1)]
    need(len(rows), "distilled drafts, named LAYERSxHEADSxKV_HEADSxFFN")
    poster = Poster(5.4)
    axes = poster.panels(1, 3)[0]
    panels = {
        "tokens a round": rows["acceptance_length"],
        "one draft step, µs": rows["step_s"] * 1e6,
        "tok/s": rows["tok_per_s"],
    }
    for ax, (label, values) in zip(axes, panels.items(), strict=True):
        ax.set_label(label)
        table = rows.assign(value=values).groupby(["lookahead", "layers"])["value"].median()
        for color, marker, k in zip(RAMP, MARKERS, table.index.levels[0], strict=False):
            line = table.loc[k]
            poster.line(ax, f"K={k:g}", line.index, line, color=color, marker=marker)
        ax.set(xlabel="layers of the draft", ylabel=label, ylim=(0, None))
        ax.set_xticks(sorted(set(rows["layers"])))
        ax.set_ylim(top=1.08 * ax.get_ylim()[1])
    target = rows["target"].iloc[0]
    ar = where(data.rows, mode="ar", target=target)
    ar = ar[ar["folder"].isin(set(rows["folder"]))]
    if len(ar):
        rate = float(ar["tok_per_s"].median())
        axes[2].axhline(rate, color=GREY, label="AR")
        poster.keep(axes[2], "AR", y=rate)
    names = ", ".join(rows.sort_values("layers")["draft"].unique())
    text = caption(
        [rows],
        f"Target {short(target)}, T=1, SD inline. Drafts of equal parameters, distilled on equal "
        f"samples for equal times (layers x heads x KV heads x FFN): {names}",
        what="transformer forwards, temperature 0",
    )
    return poster.finish("Should a draft of a given size be wide or deep?", text)


def saguaro(data: Data) -> Poster:
    """Tokens a round (y) by cache-hit rate (x): the constant C of Saguaro sampling trades one for
    the other."""
    rows = where(data.rows, workload="markov", mode="ssd")
    rows = rows[(rows["temperature"] > 0) & rows["saguaro_c"].notna()]
    used = usual(rows, _MARKOV, data.notes, "markov rows")
    need(used["saguaro_c"].nunique() >= 3, "markov SSD rows at three or more --saguaro_c")
    poster = Poster(6.0, 9.0)
    ((ax,),) = poster.panels(1, 1)
    first = used.iloc[0]
    for place, (budget, group) in enumerate(used.groupby("branch_budget")):
        medians = points(group, ["saguaro_c"])
        style = {"color": RAMP[place % len(RAMP)], "marker": MARKERS[place % len(MARKERS)]}
        style["also"] = {"C": medians["saguaro_c"]}
        label = f"F = {budget / (first['lookahead'] + 1):g} a row"
        poster.line(ax, label, medians["hit_rate"], medians["acceptance_length"], **style)
    ax.set(xlabel="hit rate", ylabel="tokens a round", ylim=(0, None))
    shown = poster.table()
    columns = (shown[name] for name in "Cxy")
    label_points(ax, [(f"C={c:g}", at, up) for c, at, up in zip(*columns, strict=True)])
    n = int(first["num_rounds"] * first["batch_size"])
    half = 1.96 * 0.5 / n**0.5
    text = caption(
        [used],
        f"V={first['vocab']:g}, divergence {first['divergence']:g}, temperature "
        f"{first['temperature']:g}, K={first['lookahead']}. {n} verified sequences a point: 95% "
        f"interval of a hit rate at most ± {half:.3f}",
        what="a pair with known distributions, really sampled and verified",
        claims=False,
    )
    return poster.finish("How many tokens does Saguaro sampling pay for hits?", text)
