"""A profile without measurements: the datasheet of an H100, under which committed rows ran."""

from pathlib import Path

DATASHEET = str(Path(__file__).parents[1] / "results/emulated-predictions/h100.json")
