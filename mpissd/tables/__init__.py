"""The milestone report's two tables from our own rows, its figures beside them.

load     rows and their jobs' profiles, from results/**/runs*.jsonl
compare  T_SD, r, theoretical and achieved speedup of each pair and setting
text     the tables, why the report's don't close, and what to run where a row is missing

    rows = load_rows(["results"])
    print(render(rows, load_profiles(["results"], rows)))

Pure: needs neither MPI nor a GPU. docs/milestone-tables.md has the formulas.
"""

from mpissd.tables.load import load_profiles, load_rows
from mpissd.tables.text import render

__all__ = ["load_profiles", "load_rows", "render"]
