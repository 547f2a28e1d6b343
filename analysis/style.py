"""Defines the common style of all figures, writes their captions, and saves them.

A Poster is a matplotlib Figure that remembers the numbers it draws, for csv files. Saved files are
byte-identical on a second run: they have no dates, fixed ids, and embedded TrueType fonts.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, NullFormatter
from PIL import Image

from mpissd.common.errors import ConfigError
from mpissd.common.output import whole_file
from mpissd.common.real_pairs import ASSUMED_LAW
from mpissd.lab.tables.compare import HEADLINE_ROUNDS, HEADLINE_SEEDS

from .rows import NothingLeft

# The colours are Okabe and Ito's, which are distinct for any colour vision.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#000000 #E69F00 #56B4E9 #009E73 #F0E442 #0072B2 #D55E00 #CC79A7".split()
)
GREY = "#6b6b6b"
METHODS = {
    "AR": (GREY, "o"),
    "SD": (BLUE, "s"),
    "SD inline": (SKY, "D"),
    "SSD": (RED, "^"),
    "SSD, hits imposed": (ORANGE, "v"),
    "tree inline": (BLACK, "h"),
    "lookup": (GREEN, "P"),
    "suffix": (PURPLE, "X"),
}
# Colours for series other than methods: SERIES for kinds of things, RAMP for increasing numbers.
SERIES = (GREEN, PURPLE, "#8C564B", "#B8A000", BLACK, "#4C9A9A", "#6A6FB5")
RAMP = ("#C0A6D6", "#8A5FB0", "#4B1D78", "#1A0033")
MARKERS = "PXoD^vs"
WIDTH, DPI = 11.0, 140
FORMATS = ("png", "pdf", "svg", "csv")
_FIXED = {
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "mpissd",
    "font.family": "DejaVu Sans",
    "path.simplify": True,
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
}
_LOOK = {
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.8,
    "axes.linewidth": 1.0,
    "axes.xmargin": 0.07,
    "xtick.major.width": 1.0,
    "ytick.major.width": 1.0,
    "axes.edgecolor": "#444444",
    "axes.titlesize": 14,
    "axes.labelsize": 14,
    "axes.labelpad": 6.0,
    "xtick.labelsize": 12.5,
    "ytick.labelsize": 12.5,
    "legend.fontsize": 12.5,
    "lines.linewidth": 2.4,
    "lines.markersize": 8,
}


class Poster(Figure):
    """A matplotlib figure with a heading and a caption, which remembers the numbers it shows."""

    def __init__(self, height: float = 7.2, width: float = WIDTH) -> None:
        super().__init__(figsize=(width, height))
        FigureCanvasAgg(self)
        self.numbers: list[dict[str, Any]] = []
        self.heading = ""
        self.caption = ""

    def panels(self, rows: int, columns: int, **options: Any) -> np.ndarray[Any, Any]:
        """Adds rows × columns panels to the figure; returns their axes, [rows, columns]."""
        grid: np.ndarray[Any, Any] = self.subplots(rows, columns, squeeze=False, **options)
        return grid

    def line(
        self,
        ax: Axes,
        label: str,
        x: Iterable[float],
        y: Iterable[float],
        *,
        low: Iterable[float] | None = None,
        high: Iterable[float] | None = None,
        also: Mapping[str, Iterable[float]] | None = None,
        **options: Any,
    ) -> None:
        """Draws a labelled line through (x, y), with error bars from low to high, and remembers the
        numbers. also: further columns of numbers to remember."""
        xs, ys = (np.asarray(list(values), float) for values in (x, y))
        ends = [ys if v is None else np.asarray(list(v), float) for v in (low, high)]
        options = {"label": label, "zorder": 3, **options}
        if low is None or not len(xs):
            ax.plot(xs, ys, **options)
        else:
            bars = [np.maximum(ys - ends[0], 0), np.maximum(ends[1] - ys, 0)]
            ax.errorbar(xs, ys, yerr=bars, capsize=3, elinewidth=1.4, **options)
        names = ("x", "y", "low", "high", *(also or {}))
        for values in zip(xs, ys, *ends, *(also or {}).values(), strict=True):
            self.keep(ax, label, **dict(zip(names, values, strict=True)))

    def gains(self, ax: Axes, label: str, gained: pd.DataFrame, **options: Any) -> None:
        """Draws a line of speedups with intervals. gained: a frame from select.gains; nothing is
        drawn if that is empty."""
        if len(gained):
            options |= {name: gained[name] for name in ("low", "high")}
            options["also"] = {"headline": gained["headline"]}
            self.line(ax, label, gained.iloc[:, 0], gained["value"], **options)

    def keep(self, ax: Axes, series: str, **values: Any) -> None:
        """Remembers the numbers (values) of one drawn point of a series in the panel `ax`."""
        panel = str(ax.get_label()) or ax.get_title() or ax.get_title(loc="left")
        self.numbers.append({"panel": panel, "series": series, **values})

    def finish(self, heading: str, caption: str, *, legend: bool = True) -> Poster:
        """Adds the heading, one legend for all panels below it, and the caption at the bottom."""
        self.heading = heading
        self.caption = caption
        for ax in self.axes:
            sns.despine(ax=ax)
        tall = self.get_figheight()
        lines = textwrap.wrap(caption, int(13.8 * self.get_figwidth()))
        self.text(0.01, 1 - 0.1 / tall, heading, fontsize=18, fontweight="bold", va="top")
        self.text(0.01, 0.08 / tall, "\n".join(lines), fontsize=9.6, color="#333333", va="bottom")
        above = 0.55 + (self._legend(tall) if legend else 0.0)
        below = 0.15 + 0.2 * len(lines)
        rect = (0.0, below / tall, 1.0, 1 - (above + below) / tall)
        ConstrainedLayoutEngine(rect=rect).execute(self)
        # The layout is fixed now, so that all file formats get the same layout.
        self.set_layout_engine("none")
        return self

    def _legend(self, tall: float) -> float:
        """Draws one legend for all panels at the bottom; returns its height in inches."""
        handles: dict[str, Any] = {}
        for ax in self.axes:
            for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        if not handles:
            return 0.0
        columns = len(handles)
        room = 10.5 * self.get_figwidth()  # width in characters; a line's symbol counts as 10
        while columns > 1 and room < sum(
            10 + max(map(len, part)) for part in np.array_split(list(handles), columns)
        ):
            columns -= 1
        columns = -(-len(handles) // -(-len(handles) // columns))  # no row is nearly empty
        self.legend(
            handles.values(),
            handles.keys(),
            loc="upper left",
            ncols=columns,
            frameon=False,
            bbox_to_anchor=(0.002, 1 - 0.5 / tall),
            borderaxespad=0,
        )
        return 0.1 + 0.27 * -(-len(handles) // columns)

    def table(self) -> pd.DataFrame:
        """Returns all numbers that the figure shows as one frame, for csv."""
        frame = pd.DataFrame(self.numbers)
        return frame.loc[:, frame.notna().any()] if len(frame) else frame


@contextmanager
def themed() -> Iterator[None]:
    """Applies the figures' style within a `with` block, whatever a user's matplotlibrc sets."""
    with mpl.rc_context():
        mpl.rcdefaults()
        for style in (sns.axes_style("ticks"), sns.plotting_context("talk"), _LOOK, _FIXED):
            mpl.rcParams.update(style)
        yield


def rendered(figure: Figure, kind: str) -> bytes:
    """Returns the figure as the bytes of a file of format `kind`, the same on every run."""
    metadata: dict[str, Any] = {
        "png": {"Software": None},
        "pdf": {"CreationDate": None, "ModDate": None, "Creator": "mpissd", "Producer": None},
        "svg": {"Date": None, "Creator": "mpissd"},
    }
    buffer = io.BytesIO()
    with themed():
        figure.savefig(buffer, format=kind, metadata=metadata[kind])
    shaded = any(isinstance(c, QuadMesh) for ax in figure.axes for c in ax.collections)
    return _small(buffer) if kind == "png" and not shaded else buffer.getvalue()


def _small(png: io.BytesIO) -> bytes:
    """Returns a PNG picture reduced to 256 colours, which takes a third of the bytes."""
    with Image.open(png) as picture:
        few = picture.convert("RGB").quantize(
            256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE
        )
    buffer = io.BytesIO()
    few.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def save(figure: Poster, stem: Path, kinds: Sequence[str]) -> list[Path]:
    """Writes a figure to STEM.KIND for each format in `kinds` ("csv": the numbers that it shows);
    returns the paths. Raises ConfigError if a file cannot be written."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    for path, kind in zip(paths, kinds, strict=True):
        numbers = figure.table().to_csv(index=False, float_format="%.6g")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as file:
                file.write(numbers.encode() if kind == "csv" else rendered(figure, kind))
        except OSError as error:
            raise ConfigError(f"out: cannot write {str(path)!r}: {error.strerror}") from error
    return paths


def plain_ticks(axis: Axis) -> None:
    """Labels a logarithmic axis with plain numbers (300, not 3·10²), at 1, or at 1, 2 and 5."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high > 200 * low else (1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def note(ax: Axes, text: str, x: float, y: float, **options: Any) -> None:
    """Writes a small text next to the point (x, y). The options dx and dy are its distance in
    typographic points (default 6 and 5)."""
    options = {"fontsize": 9.5, "color": "#333333", **options}
    place = options.pop("dx", 6), options.pop("dy", 5)
    ax.annotate(text, (x, y), place, textcoords="offset points", **options)


_PLACES = ((8, 5, 0), (-8, 5, -2), (8, -13, 0), (-8, -13, -2), (0, 10, -1), (0, -19, -1))


def label_points(ax: Axes, points: Sequence[tuple[str, float, float]], size: float = 10.5) -> None:
    """Writes a text next to each point (text, x, y), where it covers no line or other text. Of
    equal texts at points that lie together, one is written. size: font size in points."""
    at, *tracks = (
        ax.transData.transform(xy) * 72 / ax.figure.dpi
        for xy in ([xy for _, *xy in points], *(line.get_xydata() for line in ax.get_lines()))
    )
    steps = np.linspace(0, 1, 15)[:, None]
    taken = np.concatenate([at, *(a + (b - a) * steps for of in tracks for a, b in pairwise(of))])
    written: dict[str, list[Any]] = {}
    for (text, *xy), here in zip(points, at, strict=True):
        if any(np.hypot(*(here - other)) < 24 for other in written.get(text, ())):
            continue
        half = 0.31 * size * len(text)
        middles = [np.add(here, (dx + half + ha * half, dy + 4)) for dx, dy, ha in _PLACES]
        gaps = [(np.abs(taken - middle) - (half, size / 2)).max(axis=1).min() for middle in middles]
        best = int(np.argmax(np.minimum(gaps, 4.0)))
        dx, dy, ha = _PLACES[best]
        note(ax, text, *xy, dx=dx, dy=dy, ha=("left", "center", "right")[-ha], fontsize=size)
        written.setdefault(text, []).append(here)
        taken = np.concatenate([taken, middles[best] + np.outer(np.linspace(-1, 1, 5), (half, 0))])


def parity(ax: Axes, value: float = 1.0, text: str = "") -> None:
    """Draws a horizontal line at `value`, such as 1 for "no speedup", with an optional text."""
    ax.axhline(value, color=BLACK, linewidth=1.2, zorder=1)
    if text:
        options = {"ha": "right", "va": "bottom", "annotation_clip": True, "fontsize": 11}
        note(ax, text, 1, value, dx=-2, dy=2, xycoords=("axes fraction", "data"), **options)
        ax.texts[-1].set_in_layout(False)


_USE = "target draft method tp lookahead tree_nodes policy backup batch_size".split()
_USE += "alpha hit_law recording saguaro_c".split()
BARS = "Bars: tok/s, the range of the runs; gains, 95%"
NO_ROWS = "no rows for it: it needs "
NO_CLAIM = "FEW SEEDS: no speedup claimed"


def caption(
    parts: Iterable[pd.DataFrame],
    *extra: str,
    vary: Sequence[str] = (),
    what: str = "GEMM-only, imposed acceptance and hits",
    claims: bool = True,
) -> str:
    """Returns a figure's caption: hardware, what is measured or imposed, forwards, context, number
    of rows, and commits. parts: the drawn rows. extra: further sentences. vary: which of lm_head
    and context the figure varies. claims: whether the figure shows speedups; then the caption says
    if there are few seeds."""
    used = pd.concat([part for part in parts if len(part)])
    used = used[~used.index.duplicated()]
    words = [machine(used), what, several(used["dtype"])]
    if "lm_head" not in vary:
        words.append(f"LM head: {several(used['lm_head'].map({True: 'yes', False: 'no'}))}")
    if "context" not in vary:
        words.append(f"context: {several(used['context'])}")
    if used["fuse"].any():
        words.append("fused" if used["fuse"].all() else "partly fused")
    if len(backup := used.loc[used["mode"] == "ssd", "backup"].dropna()):
        words.append(f"backup: {several(backup)}")
    if len(apart := used["other_draft"].dropna()):
        also = "also " if len(apart) < (used["num_drafts"] > 0).sum() else ""
        words.append(f"drafts {also}on other devices")
    seeds = used.groupby(_USE, dropna=False)["seed"].nunique()
    counts = " to ".join(map(str, sorted({seeds.min(), seeds.max()})))
    folders = several(used["folder"].map(lambda folder: Path(folder).name))
    rows = f"{len(used)} rows of {folders}, {counts} seed{'s' * (counts != '1')} a use"
    if commits := sorted({commit[:8] for commit in used["commit"] if commit}):
        rows += f", mpissd {commits[0]}" + f" +{len(commits) - 1}" * (len(commits) > 1)
    long = used["seed"].where(pd.to_numeric(used["num_rounds"]) >= HEADLINE_ROUNDS)
    seeds = long[used["mode"] == "ssd"].groupby(used["batch_size"]).nunique()
    few = NO_CLAIM if claims and min(seeds, default=0) < HEADLINE_SEEDS else ""
    laws = used.loc[used["mode"] == "ssd", "hit_law"].dropna().astype(str)
    assumed = "Hits assumed" if (laws == ASSUMED_LAW).any() else ""
    imposed = "Hits imposed cost no branches" if laws.str.startswith("p_hit:").any() else ""
    sentences = [" · ".join(words), *extra, few, assumed, imposed, rows]
    return ". ".join(sentence.rstrip(".") for sentence in sentences if sentence) + "."


def machine(rows: pd.DataFrame) -> str:
    """Returns the names of the rows' devices as text, marked if they are emulated."""
    names = sorted(rows["device_name"].unique())
    state = "EMULATED" if all("emulated" in name for name in names) else "measured"
    state = "CPU" if unit(rows) == "core" else state
    return f"{', '.join(names)} ({state})".replace(" (emulated)", "")


def unit(rows: pd.DataFrame) -> str:
    """Returns "core" if the rows' ranks computed with NumPy on CPU cores, else "GPU"."""
    return "core" if set(rows["backend"]) == {"numpy"} else "GPU"


def several(values: pd.Series) -> str:
    """Returns the distinct values as text, such as "a, b and c"."""
    names = sorted(values.astype(str).unique(), key=lambda v: (len(v), v))
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def need(condition: object, what: str) -> None:
    """Raises NothingLeft unless the condition is true. what: names the rows that are missing."""
    if not condition:
        raise NothingLeft(f"{NO_ROWS}{what}")


def look(method: str) -> dict[str, Any]:
    """Returns matplotlib's colour and marker options for a method, such as "SSD"."""
    color, marker = METHODS[method]
    return {"color": color, "marker": marker}
