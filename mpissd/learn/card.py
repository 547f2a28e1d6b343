"""The texts beside a draft's weights: model card, NOTICE and licence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CARD = """\
---
library_name: mpissd
license: {license}
base_model: {target}
---
# Draft of {target}

A draft model for speculative decoding with {target}:
{num_layers} layers that started as {origin},
the target's own input embedding (not stored here), and an LM head over the {head_vocab} most
frequent tokens of its answers{head_origin}: {parameters:.1f} million parameters are stored.
It proposes tokens that the target then checks; it is not meant to be used alone.

`python -m mpissd distill` made it on {processes} × {device}: the target {wrote_told}
({sequences} conversations, {answered:.3g} million answered tokens), and the draft was
trained on the target's distributions over them for {steps} steps of all processes:
Kullback-Leibler divergence first, then mostly total variation{on_policy_told}.
No other text was used; the prompts of the evaluation below were not trained on. curves.jsonl holds
the training's losses, some of them on conversations that were held out.

## Format
`int8-32`: a matrix `X.weight` is int8 [outputs, inputs] and `X.scale` float16
[outputs, inputs / 32]; a weight is its integer times its block's scale. `head_ids` (int32, rising)
names the token of each row of `lm_head.weight`. Norms are float32.

## Evaluation
Answers of at most {answer} tokens that the target gave at temperature 0. *hits*: the target's own
token behind the accepted ones is among the draft's F likeliest there, the proposed one left out.

{rows}
"""
_COLUMNS = (
    "prompts | answers | greedy agreement | overlap at T=1 | tokens a round, K=4 | K=7 | "
    "hits at K=4, F=4 | F=8 | F=16"
)
_STATE_CARD = """\
---
library_name: mpissd
license: {license}
base_model: {target}
---
# {kind} draft of {target}

A draft for speculative decoding that reads the last hidden state of {target} behind each of its
verifications ({kind}: see docs/drafts.md of mpissd). Its LM head is that of the target, for the
{head_vocab} most frequent tokens of its answers; the input embedding is the target's. Neither is
stored here: {parameters:.2f} million parameters are.

`python -m mpissd distill` made it on {processes} × {device}: the target wrote its own prompts and
answers ({sequences} conversations, {answered:.2f} million answered tokens), and the draft was
trained on the target's distributions over them, {steps_ahead} tokens ahead, for {steps} steps of
all processes. No other text was used.

## Format
`int8-32`: a matrix `X.weight` is int8 [outputs, inputs] and `X.scale` float16
[outputs, inputs / 32]; a weight is its integer times its block's scale. `head_ids` (int32, rising)
names the token of each row of the LM head. Norms are float32.

## Evaluation
Answers of at most {answer} tokens that the target gave at temperature 0. *agreement*: of the
token drafted t places ahead with the answer's.

{rows}
"""
_STATE_COLUMNS = "prompts | answers | agreement, t = 1 to 4 | overlap at T=1 | tokens a round, K=4"
_NOTICE = """\
Draft of {target}

This model is derived from {target} (sha256 {sha256}).
Changes: kept {origin}; reduced the LM head to {head_vocab} tokens; trained on
texts that {target} wrote; quantised the weights to 8 bits (see README.md).
"""


def write(folder: Path, report: Mapping[str, Any], license_name: str) -> None:
    """Writes README.md, NOTICE and, for apache-2.0, LICENSE into the draft's folder."""
    found = report.get("evaluation", {})
    reads_states = "kind" in report
    columns, row = (_STATE_COLUMNS, _state_row) if reads_states else (_COLUMNS, _row)
    heading = [f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]
    rows = "\n".join([*heading, *(row(name, told) for name, told in found.items())])
    told = {**report, "license": "other" if license_name == "target" else license_name}
    told["head_origin"] = ", whose rows are the target's" if report["head"] == "target" else ""
    told["wrote_told"] = "wrote its own prompts and\nanswers"
    if report["on"] is not None:
        told["wrote_told"] = f"answered the prompts of\n{report['on']}"
    share = report["on_policy"]
    told["on_policy_told"] = f", {share:.0%} of it\non the draft's own proposals" if share else ""
    card = _STATE_CARD if reads_states else _CARD
    (folder / "README.md").write_text(card.format(**told, rows=rows))
    notice = _NOTICE.format(**report)
    if license_name == "apache-2.0":
        notice += "Licensed under the Apache License, Version 2.0, as its target is: see LICENSE.\n"
        text = Path(__file__).with_name("apache-2.0.txt").read_text()
        (folder / "LICENSE").write_text(text)
    (folder / "NOTICE").write_text(notice)


def _row(name: str, told: Mapping[str, Any]) -> str:
    four, seven = (told["by_lookahead"][k] for k in ("4", "7"))
    hits = [four["hits"][fan_out] for fan_out in ("4", "8", "16")]
    rounds = [four["tokens_per_round"], seven["tokens_per_round"]]
    values = [told["greedy_agreement"], told["alpha"], *rounds, *hits]
    cells = " | ".join("–" if value is None else f"{value:.3f}" for value in values)
    return f"| {name} | {told['answers']} | {cells} |"


def _state_row(name: str, told: Mapping[str, Any]) -> str:
    agreed = ", ".join(f"{part:.3f}" for part in told["agreement_by_place"][:4])
    four = told["by_lookahead"].get("4", {}).get("tokens_per_round")
    rounds = "–" if four is None else f"{four:.3f}"
    return f"| {name} | {told['answers']} | {agreed} | {told['alpha']:.3f} | {rounds} |"
