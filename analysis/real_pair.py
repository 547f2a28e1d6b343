"""What an SSD row would have given with the hits of a real pair, from the row's own waits.

A round is what it takes without waiting for the draft, plus the wait: short where all b sequences
hit, K draft steps where one misses. The row tells its mean wait, its hit rate h and the K steps, so
P(all hit) = h^b leaves the wait behind hits; another hit law changes h alone. Tokens a round stay,
as a miss is drafted by the same model (backup jit of all K tokens).
"""

from __future__ import annotations

import re
from typing import Any

import pandas as pd

from mpissd.real_pairs import ASSUMED, REAL_PAIRS, SOURCE, PairHits
from mpissd.theory import accept_probabilities, miss_probability

DEFAULT_LAW = f"power:A={ASSUMED.hit_a[0]},r={ASSUMED.hit_r[0]}"
REAL = tuple(f"real_{name}" for name in REAL_PAIRS)  # a frame's columns
_BESIDE = "The default hit law is assumed: predicted with hits as"


def under_real_pairs(row: dict[str, Any]) -> dict[str, float | None]:
    """{"real_<name>": tok/s, predicted}, None for a row that is not SSD under the default law."""
    return {f"real_{name}": _under(row, pair) for name, pair in REAL_PAIRS.items()}


def _under(row: dict[str, Any], pair: PairHits) -> float | None:
    found = re.fullmatch(r"alpha:([0-9.eE+-]+)", row["acceptance"] or "")
    drafted, rate, batch = row["t_draft_s"], row["hit_rate"], row["batch_size"]
    mean, wait = row["round_us"].get("mean"), _wait_us(row)
    whole = row["backup"] == "jit" and row["backup_lookahead"] in (None, row["lookahead"])
    lists = row["fan_out"]
    if row["mode"] != "ssd" or row["hit_law"] != DEFAULT_LAW or not (found and whole and lists):
        return None
    if row["on_late"] != "finish" or None in (drafted, rate, mean, wait):
        return None
    if not 0 < drafted * 1e6 > wait or not 0 <= rate <= 1:  # what a miss adds can't be told
        return None
    missed = 1 - rate**batch  # P(some sequence misses)
    behind_miss = drafted * 1e6
    behind_hits = max(0.0, (wait - missed * behind_miss) / max(1 - missed, 1e-9))
    alpha = float(found[1])

    def round_us(law: PairHits) -> float:
        all_hit = hit_rate(alpha, lists, law) ** batch
        return float(mean - wait + (1 - all_hit) * behind_miss + all_hit * behind_hits)

    return float(row["tok_per_s"] * round_us(ASSUMED) / round_us(pair))


def hit_rate(alpha: float, fan_out: list[int], pair: PairHits) -> float:
    """Of a trunk of K tokens with these F_0 … F_K."""
    lookahead = len(fan_out) - 1
    hit_a, hit_r = ([each[0]] * lookahead + [each[1]] for each in (pair.hit_a, pair.hit_r))
    weights = accept_probabilities([alpha] * lookahead)
    return 1 - miss_probability(weights, fan_out, hit_a, hit_r)


def sentence(rows: pd.DataFrame) -> str:
    """What these rows' SSD would give with the real pair's hits, over what it gives; "" where no
    row rests on the default law, or none can tell."""
    parts = []
    for name, pair in REAL_PAIRS.items():
        share = (rows[f"real_{name}"] / rows["tok_per_s"]).dropna()
        if len(share):
            low, high = f"{share.min():.2f}", f"{share.max():.2f}"
            span = low if low == high else f"{low} to {high}"
            parts.append(f"{span}× ({pair.prompts})")
    return f"{_BESIDE} {SOURCE}, SSD's tok/s are {', '.join(parts)} of these" if parts else ""


def beside(caption: str) -> str:
    """That sentence of a caption, for the finding beside the figure."""
    found = [part for part in caption.split(". ") if part.startswith(_BESIDE)]
    return f" {found[0].rstrip('.')}." if found else ""


def _wait_us(row: dict[str, Any]) -> float | None:
    lead = (row.get("phases_us") or {}).get("lead") or {}
    return lead.get("draft_wait")
