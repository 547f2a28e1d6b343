"""Selects the rows of one figure: one machine, one set of rows, one way of issuing forwards.

Rows that do not match are left out and noted, never mixed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from analysis.load import Data, Notes, NothingLeft
from mpissd.common.choice import are_predicted
from mpissd.common.errors import unknown

# The conditions that a figure's rows share besides the machine, unless the figure varies one.
CONDITIONS = (
    "dtype",
    "fuse",
    "graph",
    "lm_head",
    "context",
    "num_layers",
    "all_reduce",
    "other_draft",
)
_OF_DRAFTS = ("all_reduce", "other_draft")  # AR rows may have another value of these, or none.
POLICY = ("on_late", "backup", "backup_cut")


def machines(rows: pd.DataFrame) -> list[str]:
    """Returns device names without the null device.

    Measured GPUs come first, then emulated ones, then CPUs; in each group those with most rows
    first.
    """
    real = rows[~rows["device_name"].str.startswith("null device")]
    counts = real["device_name"].value_counts()
    cpus = set(real.loc[real["backend"] == "numpy", "device_name"])
    return sorted(counts.index, key=lambda n: (n in cpus, "emulated" in n, -counts[n], n))


def on_machine(data: Data, device: str | None = None, *, of: str = "rows") -> Data:
    """Returns the rows, loads, pools and profiles of one machine (None: the first of `machines`).

    of: the frame that is drawn, whose machines are those that can be named.
    """
    asked = getattr(data, of)
    names = machines(asked)
    if not names:
        raise NothingLeft("no row of a device is left (the null device measures mpissd itself)")
    if device is not None and device not in names:
        raise unknown("device", device, names)
    name = device or names[0]
    others = asked.loc[asked["device_name"] != name, "device_name"]
    for other, count in others.value_counts().items():
        data.notes.left_out(count, f"of {other}", f"a figure shows one machine, here {name}")
    profiles = tuple(p for p in data.profiles if p.get("device_name") == name)
    frames = (data.rows, data.loads, data.pools)
    rows, loads, pools = (frame[frame["device_name"] == name] for frame in frames)
    return Data(rows, profiles, data.notes, loads, pools)


def usual(rows: pd.DataFrame, columns: Sequence[str], notes: Notes, what: str) -> pd.DataFrame:
    """Returns the rows with the most common combination of `columns`."""
    if rows.empty:
        return rows
    keys = key(rows, columns)
    counts = keys.value_counts()
    best = min(counts.index, key=lambda value: (-counts[value], str(value)))
    values = ", ".join(f"{c}={v}" for c, v in zip(columns, best, strict=True))
    notes.left_out(int((keys != best).sum()), f"of {what}", f"the figure is for {values}")
    return rows[keys == best]


def key(rows: pd.DataFrame, columns: Sequence[str]) -> pd.Series:
    """Returns each row's values of `columns` as one tuple, for comparison."""
    texts = rows[list(columns)].astype(object).where(rows[list(columns)].notna(), None)
    return pd.Series([tuple(map(_plain, v)) for v in texts.to_numpy()], rows.index, object)


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def richest(rows: pd.DataFrame, fixed: Sequence[str], varies: Sequence[str]) -> pd.DataFrame:
    """Returns the rows of the combination of `fixed` under which `varies` has the most values.

    Of equal ones, the combination with most rows is taken.
    """
    if rows.empty:
        return rows
    keys, values = key(rows, fixed), key(rows, varies)
    counts, sizes = values.groupby(keys).nunique(), keys.value_counts()
    best = min(counts.index, key=lambda value: (-counts[value], -sizes[value], str(value)))
    return rows[keys == best]


def points(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Merges repeats into one point: medians, `n`, and low … high, the runs' widest interval."""
    numbers = [c for c in rows.columns if pd.api.types.is_numeric_dtype(rows[c]) and c not in by]
    grouped = rows.groupby(list(by), dropna=False, sort=True)
    medians = grouped[numbers].median()
    medians["low"], medians["high"] = grouped["low"].min(), grouped["high"].max()
    medians["n"] = grouped.size()
    return medians.reset_index()


def ranked_by(rows: pd.DataFrame) -> str:
    """Returns the column that chooses among rows, as `compare` does (common/choice.py)."""
    is_predicted = are_predicted(rows["expected_tok_per_s"], rows["prediction_error"])
    return "expected_tok_per_s" if is_predicted else "tok_per_s"


def best_point(rows: pd.DataFrame, by: Sequence[str]) -> pd.Series:
    """Returns the fastest of the rows' `points`, by their predictions if those hold."""
    medians = points(rows, by)
    return medians.loc[medians[ranked_by(rows)].idxmax()]


@dataclass(frozen=True)
class Case:
    """A pair on T target GPUs: its SD and SSD rows under the same conditions, and its target's AR
    rows.

    wide: SD rows of the pair with other T, on at most T + 1 GPUs. beyond: AR and SD inline on more.
    """

    target: str
    draft: str
    tp: int
    rows: pd.DataFrame
    ar: pd.DataFrame
    wide: pd.DataFrame
    beyond: pd.DataFrame

    @property
    def label(self) -> str:
        """The name in a panel's title."""
        return f"{short(self.target)}/{short(self.draft)}, T={self.tp}"

    def method(self, name: str, **values: object) -> pd.DataFrame:
        """Returns the rows of a method with these values in columns."""
        chosen = self.rows[self.rows["method"] == name]
        for column, value in values.items():
            chosen = chosen[chosen[column] == value]
        return chosen

    def ar_on(self, gpus: int, batch_size: int = 1) -> pd.Series | None:
        """Returns AR on so many GPUs, with repeats merged into one point; None if not measured."""
        rows = self.ar[(self.ar["gpus"] == gpus) & (self.ar["batch_size"] == batch_size)]
        return None if rows.empty else points(rows, ["gpus"]).iloc[0]


def cases(
    data: Data,
    wanted: pd.Series,
    varies: Sequence[str],
    vary: Sequence[str] = (),
    most: int = 9,
) -> list[Case]:
    """Returns the pairs and T with most `wanted` rows; none with less than a quarter of the
    first's.

    Pairs without SSD rows are returned only if no pair has any. Each case's rows come from one
    folder, as other folders are from other days and versions: of those with its target's AR, the
    one in which `varies` takes most values. Only AR and SD inline on T + 1 GPUs may come from
    another folder. vary: conditions that the figure is about.
    """
    rows = data.rows[wanted & (data.rows["mode"] != "ar") & (data.rows["num_drafts"] <= 1)]
    columns = [c for c in CONDITIONS if c not in vary]
    groups = rows.groupby(["target", "draft", "tp"], sort=True)
    selected = [_case(data, rows, group, varies, columns) for _, group in groups]
    selected = [case for case in selected if len(case.method("SSD"))] or selected
    selected.sort(key=lambda case: (-len(case.rows), case.label))
    selected = [case for case in selected if 4 * len(case.rows) >= len(selected[0].rows)]
    return sorted(selected[:most], key=lambda case: (case.tp, case.target))


def _case(
    data: Data, rows: pd.DataFrame, group: pd.DataFrame, varies: Sequence[str], columns: list[str]
) -> Case:
    first = group.iloc[0]
    target, draft, tp = str(first["target"]), str(first["draft"]), int(first["tp"])
    what = f"{short(target)}/{short(draft)}, T={tp}"
    ar = data.rows[(data.rows["mode"] == "ar") & (data.rows["target"] == target)]
    beside_ar = group[group["folder"].isin(ar["folder"])]
    here = richest(beside_ar if len(beside_ar) else group, ["folder"], varies)
    data.notes.left_out(
        len(group) - len(here), f"of {what}", f"another set than {here['folder'].iloc[0]}"
    )
    kept = usual(here, columns, data.notes, what)
    is_ssd = kept["mode"] == "ssd"
    ssd = usual(kept[is_ssd], POLICY, data.notes, f"SSD, {what}")
    sd = usual(kept[~is_ssd], ["backup"], data.notes, f"SD, {what}")
    alike = [c for c in columns if c not in _OF_DRAFTS]
    is_wide = (rows["mode"] == "sd") & (rows["tp"] != tp) & (rows["gpus"] <= tp + 1)
    of_pair = rows[is_wide & (rows["target"] == target) & (rows["draft"] == draft)]
    wide = _baselines(data, of_pair, kept, tp, alike, ["alpha", "lookahead"])
    baselines = _baselines(data, ar, kept, tp, alike, ["batch_size"])
    far = (rows["mode"] == "sd") & (rows["num_drafts"] == 0) & (rows["gpus"] > tp + 1)
    far = pd.concat([rows[far & (rows["target"] == target) & (rows["draft"] == draft)], ar])
    far = far[(far["gpus"] > tp + 1) & (key(far, alike) == key(kept, alike).iloc[0])]
    return Case(target, draft, tp, pd.concat([sd, ssd]), baselines, wide, far)


def _baselines(
    data: Data,
    rivals: pd.DataFrame,
    kept: pd.DataFrame,
    tp: int,
    columns: list[str],
    varies: list[str],
) -> pd.DataFrame:
    """Returns the rivals that were measured like `kept`, from its folder.

    Rivals on T + 1 GPUs, which a draft GPU must beat, may come from another folder if that has
    none.
    """
    if rivals.empty:
        return rivals
    alike = rivals[(key(rivals, columns) == key(kept, columns).iloc[0]).to_numpy(dtype=bool)]
    here = alike["folder"] == kept["folder"].iloc[0]
    wide = alike[~here & (alike["gpus"] == tp + 1)]
    if len(wide) and not (alike.loc[here, "gpus"] == tp + 1).any():
        wide = richest(wide, ["folder"], varies)
        first = wide.iloc[0]
        baseline = f"{first['method']} of {short(str(first['target']))} on {tp + 1} GPUs"
        own, other = kept["folder"].iloc[0], first["folder"]
        data.notes.add(f"{baseline}: rows of {other}, as {own} has none")
        return pd.concat([alike[here], wide])
    return alike[here]


def by_pair(data: Data) -> dict[str, Data]:
    """Returns {"8b-1b-t1": rows of that pair on T targets, with its rivals on T + 1 GPUs}, up to
    three."""
    rows = data.rows
    parts = {}
    for case in cases(data, plain(rows), ["alpha", "lookahead", "method"], most=3):
        is_rival = (rows["mode"] == "sd") & (rows["gpus"] <= case.tp + 1)
        is_pair = (rows["draft"] == case.draft) & ((rows["tp"] == case.tp) | is_rival)
        here = (rows["target"] == case.target) & (is_pair | (rows["mode"] == "ar"))
        name = f"{short(case.target)}-{short(case.draft)}-t{case.tp}".lower().replace("×", "x")
        parts[name] = data.with_rows(rows[here])
    return parts


def plain(rows: pd.DataFrame) -> pd.Series:
    """Marks the rows of imposed laws, whole targets, no named schedule and fixed lists."""
    whole = rows["num_layers"].fillna(0) == rows["full_num_layers"].fillna(0)
    return (rows["workload"] == "gemm") & whole & rows["schedule"].isna() & rows["learned"].isna()


def short(name: str | None) -> str:
    """Shortens a model's name: llama-3.1-8b → 8B, gen:layers=24,hidden=1024,… → 24×1024."""
    if name is None:
        return "–"
    if name.startswith("gen:"):
        values = dict(item.split("=") for item in name[4:].split(","))
        return f"{values['layers']}×{values['hidden']}"
    tail = name.rsplit("-", 1)[-1]
    return tail.upper() if tail[:1].isdigit() and name.startswith("llama") else name
