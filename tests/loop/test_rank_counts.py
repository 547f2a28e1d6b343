"""The ranks that a draft counts are the ranks of its target's emitted tokens."""

from collections import Counter
from itertools import pairwise

import pytest

from mpissd.common.rounds import Source
from mpissd.engine import Decoder, RunConfig
from mpissd.engine.decode import draft as drafting
from mpissd.engine.decode.draft import RankCounts

MODEL = {"workload": "markov", "vocab": 9, "order": 1, "divergence": 0.4, "temperature": 1.0}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("backup", ["jit", "fast"])
def test_ranks_are_counted_by_what_was_kept_and_where_the_tokens_end(
    batch: int, backup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hits have a rank and misses none; candidates after tokens from a lookup are not counted."""
    flags = {"fan_out": "list:3,1,2/list:2,4,1", "lookahead": 2}
    config = RunConfig(
        mode="ssd", pair="toy", backend="emulated", device="null", batch_size=batch,
        backup=backup, rounds=60, **flags, **MODEL,
    )  # fmt: skip
    counts = RankCounts()
    monkeypatch.setattr(drafting, "RankCounts", lambda: counts)
    with Decoder(config) as decoder:
        for _ in range(60):
            decoder.step()
        rows = decoder.records.sequences().tolist()
    found = counts.to_dict()
    lists = {Source.CACHE: (3, 1, 2), Source.JIT: (2, 4, 1)}
    wanted: Counter[tuple[bool, int, bool]] = Counter()
    by_sequence: dict[int, list[list[int]]] = {}
    for row in rows:
        by_sequence.setdefault(row[1], []).append(row)
    for each in by_sequence.values():
        for (_, _, _, k, _, source, _, drafted), after in pairwise(each):
            if source != Source.FAST:
                wanted[k == drafted, lists[Source(source)][k], bool(after[6])] += 1
    got: Counter[tuple[bool, int, bool]] = Counter()
    for end, name in ((False, "ranks_rejected"), (True, "ranks_all_accepted")):
        for limit, rank, count in found[name]:
            assert 0 <= rank <= limit
            got[end, limit, rank > 0] += count
    assert got == wanted and found["outcomes"] == sum(wanted.values())
