"""Result rows as one flat table, one line a row and one column a number, for any other tool.

Nested keys are joined by a dot (round_us.p50, provenance.commit); lists become JSON text, so that a
fan-out stays in one cell. Every column of every row is kept; values that a row lacks are empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from mpissd.common.errors import ConfigError

FORMATS = (".csv", ".parquet")


def write_tidy(rows: Iterable[Mapping[str, Any]], path: Path) -> tuple[int, int]:
    """Writes rows to a .csv or .parquet file; returns (rows, columns).

    Raises ConfigError for another suffix, for Parquet without pyarrow, and if the file cannot be
    written.
    """
    table = tidy(rows)
    try:
        if path.suffix == ".csv":
            table.to_csv(path, index=False, lineterminator="\n")
        elif path.suffix == ".parquet":
            table.to_parquet(path, index=False)
        else:
            raise ConfigError(f"to {str(path)!r}: allowed: {', '.join(FORMATS)}")
    except ImportError as error:
        raise ConfigError(f"{str(path)!r}: Parquet needs pyarrow: pip install pyarrow") from error
    # pyarrow raises these for a column of numbers and texts.
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r}: rows of unlike values: {error}; allowed: .csv"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    rows_columns: tuple[int, int] = table.shape
    return rows_columns


def tidy(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Returns a table [rows, columns]; columns are in the order of their first occurrence."""
    table: pd.DataFrame = pd.DataFrame([dict(_flat("", row)) for row in rows]).convert_dtypes()
    return table  # convert_dtypes keeps whole numbers whole where other rows have no value.


def _flat(prefix: str, value: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, Mapping):
            yield from _flat(f"{name}.", inner)
        else:
            yield name, json.dumps(inner) if isinstance(inner, list) else inner
