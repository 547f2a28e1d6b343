"""Selects the result rows of a figure and compares them. A figure shows rows of one machine, one
folder and one configuration; other rows are left out with a note, never mixed in. Speedups are
computed as by `mpissd compare` (mpissd/lab/tables/compare.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from mpissd.common.errors import unknown
from mpissd.lab.tables.compare import Comparison, claim_or_ratio, gain_of
from mpissd.lab.tables.uses import are_predicted

from .rows import Data, NothingLeft

# All rows of a figure have the same values in these columns.
CONDITIONS = "dtype fuse graph lm_head context num_layers all_reduce other_draft".split()
_OF_DRAFTS = ("all_reduce", "other_draft")  # AR rows may have other values in these columns.
SHAPE = ["lookahead", "fan_out", "tree_nodes", "backup", "backup_lookahead"]  # tunable settings
_POLICY = ("on_late", "backup", "backup_cut")


def machines(rows: pd.DataFrame) -> list[str]:
    """Returns the device names in `rows`, without the null device (whose forwards take no time):
    GPUs first, then emulated ones, then CPUs; in each group, those with most rows first."""
    real = rows[~rows["device_name"].str.startswith("null device")]
    counts = real["device_name"].value_counts()
    cpus = set(real.loc[real["backend"] == "numpy", "device_name"])
    return sorted(counts.index, key=lambda n: (n in cpus, "emulated" in n, -counts[n], n))


def left_out(notes: list[str], count: int, what: str, why: str) -> None:
    """Adds to `notes` that `count` rows of `what` were left out, and why; nothing if count is 0."""
    if count:
        notes.append(f"left out {count} row{'s' if count > 1 else ''} of {what}: {why}")


def on_machine(data: Data, device: str | None = None) -> Data:
    """Returns the rows and profiles of one device (None: the first by `machines`)."""
    names = machines(data.rows)
    if not names:
        raise NothingLeft("no row of a device is left (the null device measures mpissd itself)")
    if device is not None and device not in names:
        raise unknown("device", device, names)
    name = device or names[0]
    others = data.rows["device_name"][data.rows["device_name"] != name]
    for other, count in others.value_counts().items():
        left_out(data.notes, count, other, f"a figure shows one machine, here {name}")
    profiles = tuple(p for p in data.profiles if p.get("device_name") == name)
    cells = where(data.cells, device_name=name)
    return replace(data, rows=where(data.rows, device_name=name), profiles=profiles, cells=cells)


def plain(rows: pd.DataFrame) -> pd.Series:
    """Returns a mask of the ordinary rows: acceptance imposed by a model, all layers of the target,
    and a fan-out that is fixed during the run."""
    is_cut = rows["target"].str.contains("@", na=False)  # llama-3.1-70b@64L has fewer layers
    return (rows["workload"] == "gemm") & ~is_cut & rows["schedule"].isna() & rows["learned"].isna()


def key(rows: pd.DataFrame, columns: Sequence[str]) -> pd.Series:
    """Returns each row's values of `columns` as one tuple, for comparison."""
    values = rows[list(columns)].astype(object).where(rows[list(columns)].notna(), None)
    tuples = [tuple(tuple(v) if isinstance(v, list) else v for v in of) for of in values.to_numpy()]
    return pd.Series(tuples, rows.index, object)


def usual(rows: pd.DataFrame, columns: Sequence[str], notes: list[str], what: str) -> pd.DataFrame:
    """Returns the rows with the most common values in `columns`; adds a note on the others, which
    are called `what`."""
    kept = richest(rows, columns, [])
    if len(kept) < len(rows):
        values = zip(columns, key(kept, columns).iloc[0], strict=True)
        why = f"the figure is for {', '.join(f'{name}={value}' for name, value in values)}"
        left_out(notes, len(rows) - len(kept), what, why)
    return kept


def richest(rows: pd.DataFrame, fixed: Sequence[str], varies: Sequence[str]) -> pd.DataFrame:
    """Returns the rows with one combination of values in the columns `fixed`: the one with the most
    different values in the columns `varies`, and of equal ones the one with most rows."""
    if rows.empty:
        return rows
    keys = key(rows, fixed)
    counts = key(rows, varies).groupby(keys).nunique()
    sizes = keys.value_counts()
    best = min(counts.index, key=lambda value: (-counts[value], -sizes[value], str(value)))
    return rows[keys == best]


def points(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Merges the rows with equal values in the columns `by` into one line each, with medians, the
    number of rows `n`, and the range of tok/s (low, high)."""
    numbers = [c for c in rows.columns if pd.api.types.is_numeric_dtype(rows[c]) and c not in by]
    grouped = rows.groupby(list(by), dropna=False, sort=True)
    medians = grouped[numbers].median()
    ends = {"low": grouped["low"].min(), "high": grouped["high"].max()}
    return medians.assign(**ends, n=grouped.size()).reset_index()


def best_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows with the K and fan-out of the highest predicted tok/s, so that a lucky run
    cannot choose them; of the highest measured tok/s if predictions are missing or wrong."""
    is_predicted = are_predicted(rows["expected_tok_per_s"], rows["prediction_error"])
    merged = points(rows, ["lookahead", "policy"])
    best = merged.loc[merged["expected_tok_per_s" if is_predicted else "tok_per_s"].idxmax()]
    return where(rows, lookahead=best["lookahead"], policy=best["policy"])


def fastest(rows: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Returns, for each value of the columns `by`, the rows with the settings (K, fan-out, tree,
    backup) of the largest median tok/s."""
    parts = []
    for _, part in rows.groupby(list(by)):
        shapes = [shape for _, shape in part.groupby(key(part, SHAPE))]
        parts.append(max(shapes, key=lambda shape: shape["tok_per_s"].median()))
    return pd.concat(parts) if parts else rows


def best_points(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """Returns one line for each value of the column `by`: the medians of the rows with the fastest
    K, fan-out, tree and backup."""
    return points(fastest(rows, by), [by, "lookahead", "policy"])


@dataclass(frozen=True)
class Case:
    """The rows of one model pair on T target GPUs (tp), measured under the same conditions. rows:
    SD and SSD. ar: AR of the target. wide: SD of the pair at another T, on at most T + 1 GPUs."""

    target: str
    draft: str
    tp: int
    rows: pd.DataFrame
    ar: pd.DataFrame
    wide: pd.DataFrame

    @property
    def label(self) -> str:
        """The pair and T as text for a panel's title."""
        return f"{short(self.target)}/{short(self.draft)}, T={self.tp}"

    @property
    def own_ar(self) -> pd.DataFrame:
        """The rows of AR on the T target GPUs."""
        return self.ar[self.ar["gpus"] == self.tp]

    def only(self, **values: object) -> Case:
        """Returns this case with only those SD and SSD rows that have the given column values."""
        return replace(self, rows=where(self.rows, **values))

    def method(self, name: str, **values: object) -> pd.DataFrame:
        """Returns the rows of the method `name` (such as SSD) that have the given column values."""
        return where(self.rows, method=name, **values)

    def ar_on(self, gpus: int, batch_size: int = 1) -> pd.Series | None:
        """Returns the medians of AR's rows on `gpus` GPUs; None if there are none."""
        rows = where(self.ar, gpus=gpus, batch_size=batch_size)
        return None if rows.empty else points(rows, ["gpus"]).iloc[0]


def where(rows: pd.DataFrame, **values: object) -> pd.DataFrame:
    """Returns the rows that have the given values in the named columns."""
    for column, value in values.items():
        rows = rows[rows[column] == value]
    return rows


def cases(data: Data, wanted: pd.Series, varies: Sequence[str], limit: int = 9) -> list[Case]:
    """Returns the model pairs and T with most `wanted` rows (a mask), at most `limit`; a pair with
    less than a quarter of the first one's rows is left out. Pairs without SSD rows are returned
    only if no pair has any. The rows of a case come from one folder, because other folders are from
    other days and versions: the one with AR rows and most values in the columns `varies`. Only AR
    and SD inline on T + 1 GPUs may come from another folder."""
    rows = data.rows[wanted & (data.rows["mode"] != "ar") & (data.rows["num_drafts"] <= 1)]
    groups = rows.groupby(["target", "draft", "tp"], sort=True)
    pairs = [_case(data, rows, group, varies) for _, group in groups]
    pairs = [case for case in pairs if len(case.method("SSD"))] or pairs
    pairs.sort(key=lambda case: (-len(case.rows), case.label))
    pairs = [case for case in pairs if 4 * len(case.rows) >= len(pairs[0].rows)]
    return sorted(pairs[:limit], key=lambda case: (case.tp, case.target))


def _case(data: Data, rows: pd.DataFrame, group: pd.DataFrame, varies: Sequence[str]) -> Case:
    target, draft = group[["target", "draft"]].iloc[0]
    tp = int(group["tp"].iloc[0])
    label = f"{short(target)}/{short(draft)}, T={tp}"
    ar = where(data.rows, mode="ar", target=target)
    beside_ar = group[group["folder"].isin(ar["folder"])]
    here = richest(beside_ar if len(beside_ar) else group, ["folder"], varies)
    folder = here["folder"].iloc[0]
    left_out(data.notes, len(group) - len(here), label, f"another set than {folder}")
    kept = usual(here, CONDITIONS, data.notes, label)
    policy = [name for name in _POLICY if name not in varies]
    ssd = usual(where(kept, mode="ssd"), policy, data.notes, f"SSD, {label}")
    sd = usual(where(kept, mode="sd"), ["backup"], data.notes, f"SD, {label}")
    alike = [c for c in CONDITIONS if c not in _OF_DRAFTS]
    wanted = key(kept, alike).iloc[0]
    sd_of_pair = where(rows, mode="sd", target=target, draft=draft)
    wide = sd_of_pair[(sd_of_pair["tp"] != tp) & (sd_of_pair["gpus"] <= tp + 1)]
    ar, wide = (of[key(of, alike).isin([wanted]).to_numpy(dtype=bool)] for of in (ar, wide))
    ar = _of_folder(data, ar, folder, tp, ["batch_size"])
    wide = _of_folder(data, wide, folder, tp, ["alpha", "lookahead"])
    return Case(target, draft, tp, pd.concat([sd, ssd]), ar, wide)


def _of_folder(
    data: Data, rivals: pd.DataFrame, folder: str, tp: int, varies: list[str]
) -> pd.DataFrame:
    """Returns the rows of `rivals` (alternatives to SSD) from one folder. Only rows on T + 1 GPUs,
    which SSD must beat, are taken from another folder if this one has none."""
    here = where(rivals, folder=folder)
    wide = where(rivals, gpus=tp + 1)
    if len(where(here, gpus=tp + 1)) or wide.empty:
        return here
    other = richest(wide, ["folder"], varies)
    method, target, source = other[["method", "target", "folder"]].iloc[0]
    baseline = f"{method} of {short(target)} on {tp + 1} GPUs"
    data.notes.append(f"{baseline}: rows of {source}, as {folder} has none")
    return pd.concat([here, other])


def by_pair(data: Data) -> dict[str, Data]:
    """Returns the data of up to three model pairs by a name such as "8b-1b-t1": the pair's rows on
    T target GPUs, AR, and SD on at most T + 1 GPUs."""
    rows = data.rows
    parts = {}
    for case in cases(data, plain(rows), ["alpha", "lookahead", "method"], limit=3):
        is_rival = (rows["mode"] == "sd") & (rows["gpus"] <= case.tp + 1)
        is_pair = (rows["draft"] == case.draft) & ((rows["tp"] == case.tp) | is_rival)
        here = (rows["target"] == case.target) & (is_pair | (rows["mode"] == "ar"))
        name = f"{short(case.target)}-{short(case.draft)}-t{case.tp}".lower().replace("×", "x")
        parts[name] = replace(data, rows=rows[here])
    return parts


def short(name: str | None) -> str:
    """Shortens a model's name: llama-3.1-8b → 8B, gen:layers=24,hidden=1024,… → 24×1024."""
    if name is None:
        return "–"
    if name.startswith("gen:"):
        values = dict(item.split("=") for item in name[4:].split(","))
        return f"{values['layers']}×{values['hidden']}"
    tail = name.rsplit("-", 1)[-1]
    return tail.upper() if tail[:1].isdigit() and name.startswith("llama") else name


def prompts(rows: pd.DataFrame) -> pd.Series:
    """Returns the name of the prompts in each row's recording, such as "chat" or "code"; NaN for
    rows without a recording."""
    names = rows["recording"].astype(str).str.extract(r"^(?:.*/)?(?:smollm2-)?(.+)\.npz")[0]
    return names.replace("humaneval", "code")


def ratio(rows: pd.DataFrame, base: pd.DataFrame) -> Comparison:
    """Returns the speedup of `rows` over `base` if it may be claimed, else the ratio of the median
    tok/s without an interval."""
    return claim_or_ratio(list(rows["row"]), list(base["row"]))


def gains(
    rows: pd.DataFrame, base: pd.DataFrame, by: str, *, one_base: bool = False
) -> pd.DataFrame:
    """Returns the speedup of `rows` over `base` at each value of the column `by`, as a frame with
    the columns by, value, low, high, and headline (whether it may be claimed). one_base: whether
    all of `base` is compared, not only its rows with the same value."""
    lines = []
    for x, part in rows.groupby(by):
        other = base if one_base else base[base[by] == x]
        over = gain_of(list(part["row"]), list(other["row"]))
        if over is not None:
            lines.append((x, over.speedup, over.low, over.high, over.is_headline))
    return pd.DataFrame(lines, columns=[by, "value", "low", "high", "headline"])
