"""The table of docs/row.md, from the fields of mpissd.common.row.

python -m mpissd.lab.tables.row_page      prints it; docs/tables.py writes it into the page
"""

from __future__ import annotations

from collections.abc import Iterator

from mpissd.common.row import FIELDS

_TYPES = {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}


def lines() -> Iterator[str]:
    """Yields the table of a row's keys as Markdown, a line for each key in the order of a row."""
    yield "| key | type | unit | meaning |"
    yield "|---|---|---|---|"
    for name, field in FIELDS.items():
        unit, meaning = field.metadata["unit"], field.metadata["meaning"]
        yield f"| `{name}` | {_type(str(field.type))} | {unit} | {meaning} |"


def _type(annotation: str) -> str:
    plain = annotation.removesuffix(" | None")
    kind = "list" if plain.startswith("list") else _TYPES.get(plain, "object")
    return kind if plain == annotation else f"{kind}, or null"


if __name__ == "__main__":
    print("\n".join(lines()))
