"""The flags of `laws`: the recordings and rows to read, and the file to write."""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.flags import Checked, flag, integer, words


@dataclass(frozen=True)
class LawsConfig(Checked):
    """Flags of `laws`."""

    sources: str | None = flag(
        None,
        words,
        "recordings (.npz) of one pair, and folders of its text rows, separated by commas",
    )
    to: str | None = flag(None, words, "file of laws to write: a new .json (default: only print)")
    lookahead: int = flag(4, integer(1, 256), "K of the rounds whose laws are printed")
