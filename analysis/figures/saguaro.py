"""Saguaro sampling: hit rate against acceptance as C goes from 1 to 0, a line for each fan-out."""

from __future__ import annotations

from analysis.rows import Data
from analysis.select import points, usual, where
from analysis.style import MARKERS, SERIES, Poster, caption, need, note

_SHARED = ("target", "draft", "tp", "num_drafts", "lookahead", "batch_size", "vocab", "temperature")
_SHARED += ("divergence", "order")


def saguaro(data: Data) -> Poster:
    """x = hit rate, y = tokens a round, which C trades for each other. Right: both over C."""
    rows = where(data.rows, workload="markov", mode="ssd")
    rows = rows[(rows["temperature"] > 0) & rows["saguaro_c"].notna()]
    used = usual(rows, _SHARED, data.notes, "markov rows")
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
