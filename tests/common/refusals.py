"""What a run's flags refuse: contradictions of good values, and values that no flag takes."""

from __future__ import annotations

from typing import Any

# (flags, a part of the one line that refuses them)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"alpha": 0.5, "acceptance": "alpha:0.6"}, "alpha and acceptance say the same thing"),
    ({"num_drafts": 2}, "num_drafts=2: allowed: a whole number in [0, 1]"),
    ({"batch_size": 5000}, "batch_size=5000: allowed: a whole number in [1, 4096]"),
    ({"mode": "both"}, "unknown mode 'both'"),
    ({"mode": "ar", "num_drafts": 1}, "num_drafts=1 with mode=ar"),
    ({"mode": "sd", "lookahead": 0}, "lookahead=0 with mode=sd"),
    ({"num_drafts": 0}, "num_drafts=0 with mode=ssd"),
    ({"pair": "toy", "draft": "1b"}, "pair and target/draft say the same thing"),
    ({"draft": "1b", "mode": "ar"}, "target: needed beside draft"),
    ({"target": "8b"}, "draft: needed beside target with mode=ssd"),
    ({"backup_lookahead": 5}, "backup_lookahead=5: allowed: 1..4"),
    ({"backup_lookahead": 0}, "backup_lookahead=0: allowed: a whole number >= 1"),
    ({"temperature": 0.7}, "temperature=0.7 with workload=gemm"),
    ({"workload": "markov", "acceptance_fast": "alpha:.9"}, "acceptance_fast=alpha:.9"),
    ({"workload": "markov", "saguaro_c": 0.5}, "saguaro_c=0.5 with mode=ssd, temperature=0"),
    ({"workload": "markov", "stop_token": 64}, "stop_token=64: allowed"),
    ({"world_size": 3}, "world_size: only with dry_run"),
    ({"mode": "ssd", "lookahead": 0}, "lookahead=0 with mode=ssd: allowed: a whole number >= 1"),
    ({"draft": "8b", "mode": "sd"}, "target: needed beside draft with mode=sd"),
    ({"pair": "toy", "target": "8b"}, "pair and target/draft"),
    ({"workload": "markov", "alpha": 0.8}, "alpha=0.8 with workload=markov"),
    ({"workload": "markov", "p_hit": 0.5}, "p_hit=0.5 with workload=markov"),
    ({"vocab": 16}, "vocab=16 with workload=gemm"),
    ({"groups": 2, "mode": "ar"}, "groups=2 with mode=ar, num_drafts=0: allowed: 1, or a draft"),
    ({"groups": 2, "on_draft_loss": "ar"}, "groups=2 with on_draft_loss=ar: allowed: abort"),
    ({"groups": 2, "mode": "sd", "num_drafts": 0}, "groups=2 with mode=sd, num_drafts=0"),
    ({"groups": 2, "trace": "x.json"}, "trace with groups=2: allowed: groups=1"),
]

NUMBERS = {  # flag: values that are none of its
    "lookahead": ["-1", "257", "three", "1.5", "1e2", "٣.", "0x10"],
    "batch_size": ["0", "-4", "4097", "nan", "2.0"],
    "rounds": ["0", "-1", "ten", "1e3"],
    "num_tokens": ["0", "-7", "many"],
    "seed": ["-1", str(2**64), "0.5"],
    "num_drafts": ["-1", "2", "one"],
    "groups": ["0", "65", "two"],
    "context": ["-1", "1.5", "inf"],
    "num_layers": ["0", "-2", "all"],
    "warmup_rounds": ["0", "-1", "x"],
    "deadline_s": ["0", "-5", "nan", "inf", "soon"],
    "order": ["0", "4", "-1"],
    "vocab": ["1", "0", "50001"],
    "divergence": ["-0.1", "1.01", "nan"],
    "temperature": ["-1", "inf", "hot"],
    "backup_lookahead": ["-1", "4000", "half"],
}
CHOICES = {
    "mode": ["ssdd", "SSD", "speculative", "0"],
    "backend": ["cuda", "nump", "null"],
    "workload": ["gemms", "llama"],
    "backup": ["slow", "jitt"],
    "all_reduce": ["ring", "ncl"],
    "schedule": ["pearls", "sagaro"],
    "fuse": ["maybe", "2"],
    "graph": ["perhaps"],
}
