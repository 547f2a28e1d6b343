"""Prints a document of laws, as `laws` writes it, at one K."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Lines = Iterator[str]


def text(document: Mapping[str, Any], lookahead: int) -> str:
    """Returns the laws at K as tables."""
    at = next(laws for laws in document["laws"] if laws["lookahead"] == lookahead)
    return "\n".join(
        [
            *_acceptance(at),
            *_ranks("bonus behind a rejection", at["rejected"]),
            *_ranks("bonus behind K accepted tokens", at["complete"]),
            *_fast(at),
            *_parts(document["parts"]),
            *_correlation(document["correlation"]),
        ]
    )


def _acceptance(at: Mapping[str, Any]) -> Lines:
    yield (
        f"K = {at['lookahead']}, {at['rounds']} rounds: {_with(at, 'tokens_a_round')} tokens a "
        f"round, alpha {_with(at, 'alpha')}   (in brackets: 95% intervals)"
    )
    yield f"   position        {_cells(range(1, at['lookahead'] + 1))}"
    yield f"   reached         {_cells(at['marginal'])}"
    yield f"   given the last  {_cells(at['conditional'])}"


def _ranks(title: str, ranks: Mapping[str, Any]) -> Lines:
    fit, misses = ranks["fit"], ranks.get("misses", {})
    if fit is None:
        yield f"{title}: {ranks['outcomes']} outcomes determine no law"
        return
    floor = "not known" if ranks["outside"] is None else f"{fit['floor']:.3f}"
    yield (
        f"{title}, {ranks['outcomes']} outcomes: A = {_with(fit, 'A')}, r = {_with(fit, 'r')}, "
        f"floor of the draft's vocabulary: {floor}"
    )
    yield f"   F       {_cells(misses)}"
    yield f"   miss    {_cells([one['miss'] for one in misses.values()])}"
    yield f"   law     {_cells([one['law'] for one in misses.values()])}"
    if fit["fails_at"]:
        yield f"   the law fails at F = {', '.join(map(str, fit['fails_at']))}: off by over 10%"


def _fast(at: Mapping[str, Any]) -> Lines:
    for kind, counts in at["fast"].items():
        tokens = 1 + sum(k * n for k, n in enumerate(counts)) / sum(counts)
        yield f"{kind} lookup alone: {tokens:.3f} tokens a round"


def _parts(parts: Sequence[Mapping[str, Any]]) -> Lines:
    yield f"{'part':42}  rounds  {'tokens a round':23}misses at F = 1, 4, 16"
    for part in parts:
        where = part["position"]
        name = f"{part['source']}, T = {part['temperature']:g}"
        name = f"   context {where[0]} to {where[1] - 1}" if where else name
        tokens = _with(part, "tokens_a_round")
        yield f"{name:42}{part['rounds']:8}  {tokens:22} {_two(part['misses'])}"


def _two(misses: Mapping[str, Mapping[str, float]] | None) -> str:
    if misses is None:
        return ""
    each = (" ".join(f"{miss:.3f}" for miss in of.values()) for of in misses.values())
    return " | ".join(each)


def _correlation(found: Mapping[str, Any]) -> Lines:
    for name, of in found.items():
        if of is not None:
            what = {"accepted": "accepted tokens", "missed": "misses"}[name]
            yield (
                f"correlation of {what}: with the round before {_with(of, 'lag1')}, of that within "
                f"a sequence {_with(of, 'lag1_within')}; between sequences {_with(of, 'between')}"
            )


def _with(of: Mapping[str, Any], name: str) -> str:
    low, high = of[f"{name}_95"]
    return f"{of[name]:.3f} [{low:.3f}, {high:.3f}]"


def _cells(values: Any) -> str:
    return " ".join(f"{v:>6}" if isinstance(v, (int, str)) else f"{v:6.3f}" for v in values)
