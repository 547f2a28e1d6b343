"""Finds the sentences of a page that claim a speedup without an interval that rows have."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable

from mpissd.common.row import Row
from mpissd.lab.sweep.best import compare_methods
from mpissd.lab.sweep.claims import BLOCK, enough
from mpissd.lab.sweep.uses import ways_of

_CODE = re.compile(r"```.*?```|<!--.*?-->", re.DOTALL)
_RATIO = re.compile(
    r"(?<![\w.])(?:\d*\.?\d+(?:×|x\b)|\d*\.\d+ times\b)(?! \(\d*\.\d+[–-]\d*\.\d+\))"
)
_INTERVAL = re.compile(r"(?<![\w.])\d\.\d{2,6}–\d\.\d{2,6}(?!\w)")
_SHARE = re.compile(r"\d\s?%(?! interval)|(?<![\w.])\d+ times\b")
_TWICE = re.compile(r"\b(?:doubl|halv|tripl)(?:es?|ed|ing)\b|\b(?:twice|half) (?:as|the)\b")
_FASTER = re.compile(
    r"\b(?:faster|slower|quicker|beats?|gains? (?:over|of|\d)|(?:ahead|behind) (?:of )?S?S?D\b"
    r"|throughput|tok/s|speed-?up of)\b"
)
_LABEL = re.compile(r"predict|forecast|formula|[Ee]mulated|[Ss]imulated|few seeds|one seed|one run")


def intervals(rows: Iterable[Row]) -> set[str]:
    """Returns the interval ("1.03–1.10") of each use's gain over each other use, at each K.

    Only rows with enough seeds and rounds count. These are all the intervals that a sentence may
    show as measured.
    """
    kept, headlines = enough(rows), set()
    for comparison in compare_methods(kept):
        ways = ways_of(dict(comparison.setting), kept)
        gains = (a.cell.over(b.cell) for a, b in itertools.permutations(ways, 2))
        headlines |= {gain.interval for gain in gains if gain is not None and gain.is_headline}
    return headlines


def unbacked(text: str, known: Collection[str] | None = None) -> list[str]:
    """Returns the sentences outside claims blocks that claim a gain without a known interval.

    A gain is a factor, or a percentage or "twice" beside a word such as faster or slower. It is
    backed by an interval beside it, as in "1.3× (1.2–1.4)", that is among `known` (None: any
    interval). A sentence that calls its gain predicted, emulated or of few seeds makes no claim.
    """
    plain = _CODE.sub("", BLOCK.sub("", text))
    sentences = (" ".join(s.split()) for s in re.split(r"(?<=[.:;])\s|\n\n|\n\|", plain))
    return [s for s in sentences if not _LABEL.search(s) and _claims(s, known)]


def _claims(sentence: str, known: Collection[str] | None) -> bool:
    about = _FASTER.search(sentence) and (_SHARE.search(sentence) or _TWICE.search(sentence))
    if _RATIO.search(sentence) or about:
        return True
    return known is not None and any(of not in known for of in _INTERVAL.findall(sentence))
