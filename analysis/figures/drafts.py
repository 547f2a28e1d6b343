"""The cost of a draft's shape: distilled drafts of equal parameters from wide to deep; without
them untrained ones of ~350M parameters, and NoFT against NoFT-Wide."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis.rows import Data
from analysis.select import CONDITIONS, gain, plain, points, short, usual, where
from analysis.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    Poster,
    caption,
    need,
    note,
)
from mpissd.common.errors import ConfigError
from mpissd.common.presets import resolve_model

_DISTILLED = r"^(\d+)x(\d+)x(\d+)x(\d+)$"  # LAYERSxHEADSxKV_HEADSxFFN
_SIZE, _WITHIN = 350e6, 0.06
_NOFT = {"noft-1.3b": "NoFT\n1.3B", "noft-wide-1.3b": "NoFT-Wide\n1.3B"}
Bars = dict[str, list[tuple[str, float, str]]]


def drafts(data: Data) -> Poster:
    """Left: a draft step over its layers at one size. Right: NoFT-1.3B and its wide variant.

    If there are distilled drafts, three panels over their layers, by K: tokens a round, time of a
    draft step, tok/s.
    """
    sizes = data.rows["draft"].astype("string").str.extract(_DISTILLED).astype("float")
    made = data.rows.assign(layers=sizes[0], kv_heads=sizes[0] * sizes[2])
    made = made[made["layers"].notna() & (made["batch_size"] == 1)]
    return _distilled(data, made) if len(made) else _untrained(data)


def _distilled(data: Data, rows: pd.DataFrame) -> Poster:
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


def _untrained(data: Data) -> Poster:
    rows = data.rows[plain(data.rows)]
    rows = where(rows, num_drafts=1, batch_size=1).dropna(subset=["draft", "step_s"])
    shaped = rows.assign(**_shapes(rows["draft"]))
    is_sized = (shaped["params"] / _SIZE - 1).abs() <= _WITHIN
    columns = ["target", "tp", *CONDITIONS]
    wanted = shaped[is_sized | shaped["draft"].isin(_NOFT)]
    used = usual(wanted, columns, data.notes, "drafts of other shapes")
    deep, noft = used[is_sized.reindex(used.index)], used[used["draft"].isin(_NOFT)]
    need(
        deep["draft"].nunique() >= 3 or noft["draft"].nunique() == 2,
        "rows with three drafts of ~350M parameters, or noft-1.3b and noft-wide-1.3b",
    )
    poster = Poster(7.8)
    axes = poster.panels(1, 4, width_ratios=(1.9, 1, 1, 1))[0]
    _depth(poster, axes[0], deep)
    by_draft = dict(list(noft.groupby("draft")))
    steps = {
        name: [("draft step", of["step_s"].median() * 1e6, RED)] for name, of in by_draft.items()
    }
    kv = {name: [("KV", of["kv_bytes"].iloc[0] / 1024, ORANGE)] for name, of in by_draft.items()}
    rates = {
        name: [
            (m, where(of, method=m)["tok_per_s"].median(), c)
            for m, c in (("SD", GREEN), ("SSD", PURPLE))
        ]
        for name, of in by_draft.items()
    }
    _bars(poster, axes[1], "draft step, µs", steps)
    _bars(poster, axes[2], "tok/s, all GPUs", rates, gpus=int(used["gpus"].iloc[0]))
    _bars(poster, axes[3], "KV, KB a token", kv)
    for method in ("SD", "SSD"):  # the ratio of the wide draft's tok/s to the narrow one's
        narrow, wide = (where(noft, draft=name, method=method) for name in _NOFT)
        over = gain(wide, narrow) if len(narrow) and len(wide) else None
        if over is not None:
            ends = {"y": over.speedup, "low": over.low, "high": over.high}
            poster.keep(axes[2], f"{method}, wide over narrow", **ends, headline=over.is_headline)
    first = used.iloc[0]
    text = caption(
        [used],
        f"target {short(first['target'])}, T={first['tp']}, K={first['lookahead']}, "
        f"α={first['alpha']:g} imposed on all: shape changes time here, never acceptance. "
        "Parameters: products of the layers, LM head and embedding not counted. KV: 16-bit keys "
        "and values of one token, all layers (by the shapes)",
    )
    return poster.finish("What a draft's shape costs", text)


def _shapes(names: pd.Series) -> dict[str, pd.Series]:
    """Returns layers, parameters and KV bytes a token of each draft; NaN if the name is no
    shape."""
    shapes: dict[str, tuple[float, ...]] = {}
    for name in names.unique():
        try:
            shape = resolve_model(name)
            shapes[name] = shape.num_layers, shape.gemm_params, shape.kv_bytes_per_token
        except ConfigError:
            shapes[name] = (float("nan"),) * 3
    keys = ("layers", "params", "kv_bytes")
    return {key: names.map({n: v[i] for n, v in shapes.items()}) for i, key in enumerate(keys)}


def _depth(poster: Poster, ax: Axes, rows: pd.DataFrame) -> None:
    ax.set_title("~350M parameters, from wide to deep")
    medians = points(rows, ["draft"]).sort_values("layers")
    layers, steps = medians["layers"], medians["step_s"] * 1e6
    poster.line(ax, "draft step", layers, steps, color=RED, marker="^")
    for name, x, y in zip(medians["draft"], layers, steps, strict=True):
        is_right = x > 0.75 * layers.max()
        place = {"dx": -8, "dy": 2, "ha": "right"} if is_right else {"dx": 8, "dy": -9}
        note(ax, short(name), x, y, fontsize=10.5, **place)
    ax.set(xlabel="layers of the draft", ylabel="one draft step, µs")
    ax.set_ylim(bottom=0)
    kv = ax.twinx()
    kv.set_label(ax.get_title())
    look = {"color": BLUE, "marker": "s", "linestyle": "--", "linewidth": 1.6}
    poster.line(kv, "KV bytes a token (right)", layers, medians["kv_bytes"] / 1024, **look)
    kv.set_ylabel("KV, KB a token")
    kv.set_ylim(bottom=0)
    kv.grid(False)


def _bars(poster: Poster, ax: Axes, title: str, groups: Bars, gpus: int = 0) -> None:
    """Draws a group of bars for each draft; gpus: writes the rate of one of so many into a bar."""
    ax.set_title(title)
    for place, (name, bars) in enumerate(groups.items()):
        for i, (label, value, color) in enumerate(bars):
            x, is_one = place + (i - (len(bars) - 1) / 2) * 0.4, len(bars) == 1
            width, named = (0.6, None) if is_one else (0.38, label)
            ax.bar(x, value, width, color=color, label=named, zorder=3)
            note(ax, f"{value:.0f}", x, value, dx=0, dy=0, ha="center", va="bottom", fontsize=11)
            poster.keep(ax, label, draft=name, value=value)
            if gpus:
                look = {"ha": "center", "va": "bottom", "color": "white", "rotation": 90}
                text = f"{value / gpus:.0f} a GPU"
                note(ax, text, x, value * 0.04, dx=0, dy=0, fontsize=11, zorder=5, **look)
    ax.set_xticks(range(len(groups)), [_NOFT.get(name, name) for name in groups])
    ax.margins(y=0.1)
