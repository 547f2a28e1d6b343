"""The cost of a draft's shape: depth against width at ~350M parameters, and NoFT against
NoFT-Wide."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.common import caption, need, no_claim
from analysis.figures.distilled import distilled, rows_of
from analysis.gain import gain
from analysis.load import Data
from analysis.select import CONDITIONS, plain, points, short, usual
from analysis.style import BLUE, GREEN, ORANGE, PURPLE, RED, Poster
from mpissd.common.errors import ConfigError
from mpissd.common.presets import resolve_model

_SIZE, _WITHIN = 350e6, 0.06
_NOFT = ("noft-1.3b", "noft-wide-1.3b")


def drafts(data: Data) -> Poster:
    """Left: a draft step over its layers at one size. Right: NoFT-1.3B and its wide twin.

    Where there are drafts that were distilled to be compared, they are drawn instead.
    """
    if len(made := rows_of(data)):
        return distilled(data, made)
    rows = data.rows
    wanted = rows[plain(rows) & (rows["num_drafts"] == 1) & (rows["batch_size"] == 1)]
    wanted = wanted[wanted["draft"].notna() & wanted["step_s"].notna()]
    shaped = wanted.assign(**_shapes(wanted["draft"]))
    sized = (shaped["params"] / _SIZE - 1).abs() <= _WITHIN
    named = shaped["draft"].isin(_NOFT)
    columns = ["target", "tp", *CONDITIONS]
    used = usual(shaped[sized | named], columns, data.notes, "drafts of other shapes")
    need(len(used), "rows with drafts of ~350M parameters, or noft-1.3b and noft-wide-1.3b")
    deep, twins = used[used.index.isin(shaped[sized].index)], used[used["draft"].isin(_NOFT)]
    need(deep["draft"].nunique() >= 3 or twins["draft"].nunique() == 2, "three drafts of one size")
    poster = Poster(7.8)
    axes = poster.panels(1, 4, width_ratios=(1.9, 1, 1, 1))[0]
    _depth(poster, axes[0], deep)
    _twins(poster, list(axes[1:]), twins)
    first = used.iloc[0]
    what = f"target {short(first['target'])}, T={first['tp']}, K={first['lookahead']}"
    text = caption(
        data,
        [used],
        f"{what}, α={first['alpha']:g} imposed on all: shape changes time here, never acceptance. "
        "Parameters: products of the layers, LM head and embedding not counted. KV: 16-bit keys "
        "and values of one token, all layers (by the shapes)",
        no_claim([used]),
    )
    return poster.finish("What a draft's shape costs", text)


def _shapes(names: pd.Series) -> dict[str, pd.Series]:
    """Returns layers, parameters and KV bytes a token of each draft; NaN if the name is no
    shape."""
    shapes = {}
    for name in names.unique():
        try:
            shape = resolve_model(name)
            values = (shape.num_layers, shape.gemm_params, shape.kv_bytes_per_token)
        except ConfigError:
            values = (float("nan"),) * 3  # type: ignore[assignment]
        shapes[name] = values
    keys = ("layers", "params", "kv_bytes")
    return {key: names.map({n: v[i] for n, v in shapes.items()}) for i, key in enumerate(keys)}


def _depth(poster: Poster, ax: Axes, rows: pd.DataFrame) -> None:
    ax.set_title("~350M parameters, from wide to deep")
    medians = points(rows, ["draft"]).sort_values("layers")
    poster.line(ax, "draft step", medians["layers"], medians["step_s"] * 1e6, color=RED, marker="^")
    for _, p in medians.iterrows():
        right = p["layers"] > 0.75 * medians["layers"].max()
        ax.annotate(
            short(p["draft"]),
            (p["layers"], p["step_s"] * 1e6),
            fontsize=10.5,
            xytext=(-8, 2) if right else (8, -9),
            textcoords="offset points",
            ha="right" if right else "left",
        )
    ax.set(xlabel="layers of the draft", ylabel="one draft step, µs")
    ax.set_ylim(bottom=0)
    twin = ax.twinx()
    twin.set_label(ax.get_title())
    poster.line(
        twin,
        "KV bytes a token (right)",
        medians["layers"],
        medians["kv_bytes"] / 1024,
        color=BLUE,
        marker="s",
        linestyle="--",
        linewidth=1.6,
    )
    twin.set_ylabel("KV, KB a token")
    twin.set_ylim(bottom=0)
    twin.grid(False)


def _twins(poster: Poster, axes: list[Axes], rows: pd.DataFrame) -> None:
    twins = rows[rows["method"] == "SD"], rows[rows["method"] == "SSD"]
    _bars(
        poster,
        axes[0],
        "draft step, µs",
        {
            short(name): [("draft step", float(group["step_s"].median() * 1e6), RED)]
            for name, group in rows.groupby("draft")
        },
    )
    rates: dict[str, list[tuple[str, float, str]]] = {}
    for method, color, group in zip(("SD", "SSD"), (GREEN, PURPLE), twins, strict=True):
        for name, part in group.groupby("draft"):
            rates.setdefault(short(name), []).append((method, part["tok_per_s"].median(), color))
    _bars(poster, axes[1], "tok/s, all GPUs", rates)
    for method, group in zip(("SD", "SSD"), twins, strict=True):
        _keep_gain(poster, axes[1], method, group)
    for name, bars in rates.items():
        share = rows["gpus"].iloc[0]
        for i, (_, value, _) in enumerate(bars):
            x = list(rates).index(name) + (i - (len(bars) - 1) / 2) * 0.4
            axes[1].annotate(
                f"{value / share:.0f} a GPU",
                (x, value * 0.04),
                ha="center",
                fontsize=11,
                color="white",
                va="bottom",
                rotation=90,
                zorder=5,
            )
    _bars(
        poster,
        axes[2],
        "KV, KB a token",
        {
            short(name): [("KV", group["kv_bytes"].iloc[0] / 1024, ORANGE)]
            for name, group in rows.groupby("draft")
        },
    )


def _keep_gain(poster: Poster, ax: Axes, method: str, rows: pd.DataFrame) -> None:
    """Keeps the ratio of the wide draft's tok/s to the narrow one's, with its interval, for the
    finding."""
    narrow, wide = (rows[rows["draft"] == name] for name in _NOFT)
    if len(narrow) and len(wide):
        over = gain(wide, narrow)
        ends = {"y": over.speedup, "low": over.low, "high": over.high}
        poster.keep(ax, f"{method}, wide over narrow", **ends, headline=over.is_headline)


def _bars(
    poster: Poster, ax: Axes, title: str, groups: dict[str, list[tuple[str, float, str]]]
) -> None:
    ax.set_title(title)
    for place, (name, bars) in enumerate(groups.items()):
        for i, (label, value, color) in enumerate(bars):
            x = place + (i - (len(bars) - 1) / 2) * 0.4
            named = label if len(bars) > 1 else None
            ax.bar(x, value, 0.38 if len(bars) > 1 else 0.6, color=color, label=named, zorder=3)
            ax.annotate(f"{value:.0f}", (x, value), ha="center", va="bottom", fontsize=11)
            poster.keep(ax, label, draft=name, value=value)
    ax.set_xticks(range(len(groups)), [_named(name) for name in groups])
    ax.margins(y=0.1)


def _named(draft: str) -> str:
    return {"noft-1.3b": "NoFT\n1.3B", "noft-wide-1.3b": "NoFT-Wide\n1.3B"}.get(draft, draft)
