"""Prints the keys of docs/row.md from the fields of mpissd.common.row.

docs/tables.py writes them into the page.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpissd.common.row import FIELDS

_TYPES = {"str": "text", "int": "integer", "float": "number", "bool": "boolean"}


def lines() -> Iterator[str]:
    """Yields a Markdown line for each key, in the order of a row: key, type, unit, meaning."""
    for name, field in FIELDS.items():
        name = f"configuration.{name}" if field.metadata["is_set"] else name
        kind = ", ".join(filter(None, (_type(str(field.type)), field.metadata["unit"])))
        yield f"- `{name}` ({kind}): {field.metadata['meaning']}"


def _type(annotation: str) -> str:
    """Returns the type of a key; `?` marks one that may be null."""
    plain = annotation.removesuffix(" | None")
    kind = "list" if plain.startswith("list") else _TYPES.get(plain, "object")
    return kind + "?" * (plain != annotation)


if __name__ == "__main__":
    print("\n".join(lines()))
