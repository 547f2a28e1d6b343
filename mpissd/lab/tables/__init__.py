"""Tables made from rows alone: the milestone report's tables, and two results side by side.

load     rows, their jobs' profiles and their rounds, from results/**/runs*.jsonl
compare  T_SD, r, theoretical and achieved speedup of each pair and setting
text     the tables, why the report's don't close, and what to run where a row is missing
pair     one result over another
find     the rows that a run id, a file or a folder names

    rows = load_rows(["results"])
    print(render(rows, load_profiles(["results"], rows), load_rounds(["results"], rows)))

This needs neither MPI nor a GPU. docs/milestone-tables.md has the formulas.
"""

from mpissd.lab.tables.compare import is_usable
from mpissd.lab.tables.load import load_profiles, load_rounds, load_rows, of_one_group
from mpissd.lab.tables.pair import Pair
from mpissd.lab.tables.text import render

__all__ = [
    "Pair",
    "is_usable",
    "load_profiles",
    "load_rounds",
    "load_rows",
    "of_one_group",
    "render",
]
