"""Selects the rows of one figure, and compares them: one machine, one folder, one configuration.

Rows that do not match are left out and noted, never mixed in. Gains are computed as by `mpissd
compare` (mpissd/lab/tables/compare.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from analysis.rows import Data, NothingLeft
from mpissd.common.errors import unknown
from mpissd.lab.tables.compare import Comparison, claim_or_ratio, gain_of
from mpissd.lab.tables.uses import are_predicted

# The conditions that a figure's rows share besides the machine.
CONDITIONS = "dtype fuse graph lm_head context num_layers all_reduce other_draft".split()
_OF_DRAFTS = ("all_reduce", "other_draft")  # AR rows may have another value of these, or none.
SHAPE = ["lookahead", "fan_out", "tree_nodes", "backup", "backup_lookahead"]  # chosen for a use
_POLICY = ("on_late", "backup", "backup_cut")


def machines(rows: pd.DataFrame) -> list[str]:
    """Returns device names without the null device.

    Measured GPUs come first, then emulated ones, then CPUs; in each group those with most rows
    first.
    """
    real = rows[~rows["device_name"].str.startswith("null device")]
    counts = real["device_name"].value_counts()
    cpus = set(real.loc[real["backend"] == "numpy", "device_name"])
    return sorted(counts.index, key=lambda n: (n in cpus, "emulated" in n, -counts[n], n))


def left_out(notes: list[str], count: int, what: str, why: str) -> None:
    """Notes that rows were left out, if there are any."""
    if count:
        notes.append(f"left out {count} row{'s' if count > 1 else ''} of {what}: {why}")


def on_machine(data: Data, device: str | None = None) -> Data:
    """Returns the rows and profiles of one machine (None: the first of `machines`)."""
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
    return Data(where(data.rows, device_name=name), profiles, data.notes, cells)


def plain(rows: pd.DataFrame) -> pd.Series:
    """Marks the rows of imposed outcomes, whole targets, no named schedule and fixed lists."""
    is_cut = rows["target"].str.contains("@", na=False)  # llama-3.1-70b@64L has fewer layers
    return (rows["workload"] == "gemm") & ~is_cut & rows["schedule"].isna() & rows["learned"].isna()


def key(rows: pd.DataFrame, columns: Sequence[str]) -> pd.Series:
    """Returns each row's values of `columns` as one tuple, for comparison."""
    values = rows[list(columns)].astype(object).where(rows[list(columns)].notna(), None)
    tuples = [tuple(tuple(v) if isinstance(v, list) else v for v in of) for of in values.to_numpy()]
    return pd.Series(tuples, rows.index, object)


def usual(rows: pd.DataFrame, columns: Sequence[str], notes: list[str], what: str) -> pd.DataFrame:
    """Returns the rows with the most common combination of `columns`, and notes the others."""
    kept = richest(rows, columns, [])
    if len(kept) < len(rows):
        values = zip(columns, key(kept, columns).iloc[0], strict=True)
        why = f"the figure is for {', '.join(f'{name}={value}' for name, value in values)}"
        left_out(notes, len(rows) - len(kept), what, why)
    return kept


def richest(rows: pd.DataFrame, fixed: Sequence[str], varies: Sequence[str]) -> pd.DataFrame:
    """Returns the rows of the combination of `fixed` under which `varies` has the most values.

    Of equal ones, the combination with most rows is taken.
    """
    if rows.empty:
        return rows
    keys = key(rows, fixed)
    counts = key(rows, varies).groupby(keys).nunique()
    sizes = keys.value_counts()
    best = min(counts.index, key=lambda value: (-counts[value], -sizes[value], str(value)))
    return rows[keys == best]


def points(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Merges repeats into one point: medians, `n`, and low … high, the runs' range."""
    numbers = [c for c in rows.columns if pd.api.types.is_numeric_dtype(rows[c]) and c not in by]
    grouped = rows.groupby(list(by), dropna=False, sort=True)
    medians = grouped[numbers].median()
    ends = {"low": grouped["low"].min(), "high": grouped["high"].max()}
    return medians.assign(**ends, n=grouped.size()).reset_index()


def best_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of the fastest K and policy, chosen as by `uses.best_use`: by predictions,
    which no lucky run enters."""
    is_predicted = are_predicted(rows["expected_tok_per_s"], rows["prediction_error"])
    merged = points(rows, ["lookahead", "policy"])
    best = merged.loc[merged["expected_tok_per_s" if is_predicted else "tok_per_s"].idxmax()]
    return where(rows, lookahead=best["lookahead"], policy=best["policy"])


def fastest(rows: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Returns the rows of the shape with the largest median tok/s at each value of `by`."""
    parts = []
    for _, part in rows.groupby(list(by)):
        shapes = [shape for _, shape in part.groupby(key(part, SHAPE))]
        parts.append(max(shapes, key=lambda shape: shape["tok_per_s"].median()))
    return pd.concat(parts) if parts else rows


def best_points(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """Returns the fastest K and policy at each value of `by`, repeats merged into one point."""
    return points(fastest(rows, by), [by, "lookahead", "policy"])


@dataclass(frozen=True)
class Case:
    """A pair on T target GPUs: its SD and SSD rows under the same conditions, and its target's AR
    rows.

    wide: SD rows of the pair with other T, on at most T + 1 GPUs.
    """

    target: str
    draft: str
    tp: int
    rows: pd.DataFrame
    ar: pd.DataFrame
    wide: pd.DataFrame

    @property
    def label(self) -> str:
        """The name in a panel's title."""
        return f"{short(self.target)}/{short(self.draft)}, T={self.tp}"

    @property
    def own_ar(self) -> pd.DataFrame:
        """AR on the T target GPUs."""
        return self.ar[self.ar["gpus"] == self.tp]

    def only(self, **values: object) -> Case:
        """Returns the case with the rows of drafting methods that have these values in columns."""
        return replace(self, rows=where(self.rows, **values))

    def method(self, name: str, **values: object) -> pd.DataFrame:
        """Returns the rows of a method with these values in columns."""
        return where(self.rows, method=name, **values)

    def ar_on(self, gpus: int, batch_size: int = 1) -> pd.Series | None:
        """Returns AR on so many GPUs, with repeats merged into one point; None if not measured."""
        rows = where(self.ar, gpus=gpus, batch_size=batch_size)
        return None if rows.empty else points(rows, ["gpus"]).iloc[0]


def where(rows: pd.DataFrame, **values: object) -> pd.DataFrame:
    """Returns the rows that have these values in columns."""
    for column, value in values.items():
        rows = rows[rows[column] == value]
    return rows


def cases(data: Data, wanted: pd.Series, varies: Sequence[str], limit: int = 9) -> list[Case]:
    """Returns the pairs and T with most `wanted` rows; none with less than a quarter of the
    first's.

    Pairs without SSD rows are returned only if no pair has any. Each case's rows come from one
    folder, as other folders are from other days and versions: of those with its target's AR, the
    one in which `varies` takes most values. Only AR and SD inline on T + 1 GPUs may come from
    another folder.
    """
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
    """Returns the rivals of a folder; those on T + 1 GPUs, which a draft GPU must beat, may come
    from another one if that has none."""
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
    """Returns {"8b-1b-t1": rows of that pair on T targets, with its rivals on T + 1 GPUs}, up to
    three."""
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
    """Returns the prompts of each row's recording, such as chat or code; NaN without one."""
    names = rows["recording"].astype(str).str.extract(r"^(?:.*/)?(?:smollm2-)?(.+)\.npz")[0]
    return names.replace("humaneval", "code")


def ratio(rows: pd.DataFrame, base: pd.DataFrame) -> Comparison:
    """Returns the gain of a use's rows over another's if it may be claimed, else the ratio of their
    medians alone."""
    return claim_or_ratio(list(rows["row"]), list(base["row"]))


def gains(
    rows: pd.DataFrame, base: pd.DataFrame, by: str, *, one_base: bool = False
) -> pd.DataFrame:
    """Returns the gain at every value of `by` that both have: by, value, low, high, headline.

    one_base: whether all of `base` is compared with each value.
    """
    lines = []
    for x, part in rows.groupby(by):
        other = base if one_base else base[base[by] == x]
        over = gain_of(list(part["row"]), list(other["row"]))
        if over is not None:
            lines.append((x, over.speedup, over.low, over.high, over.is_headline))
    return pd.DataFrame(lines, columns=[by, "value", "low", "high", "headline"])
