"""The texts with a draft's weights: model card, NOTICE and licence."""

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
# {title} of {target}

A draft model for speculative decoding with {target}.
{what}
It proposes tokens that the target then checks; it is not meant to be used without it.

`python -m mpissd distill` made it on {processes} × {device}: the target {source}
({sequences} conversations, {answered:.3g} million answered tokens), and the draft was trained on
the target's distributions over them for {steps} steps of all processes. No other text was used;
the prompts of the evaluation below were not trained on. curves.jsonl has the training's losses,
some of them on conversations that were held out.

## Format
`int8-32`: a matrix `X.weight` is int8 [outputs, inputs] and `X.scale` float16
[outputs, inputs / 32]; a weight is its integer times its block's scale. `head_ids` (int32, rising)
names the token of each row of the LM head. Norms are float32.

## Evaluation
Answers of at most {answer} tokens that the target gave at temperature 0. {legend}

{rows}
"""
_MODEL = """\
It has {num_layers} layers that started as {origin}, the target's own input embedding (not stored
here), and an LM head over the {head_vocab} most frequent tokens of its answers{head_origin}:
{parameters:.1f} million parameters are stored."""
_STATES = """\
It reads the last hidden state of {target} after each of its verifications (docs/heads.md of
mpissd) and is trained {steps_ahead} tokens ahead. Its LM head is that of the target, for the
{head_vocab} most frequent tokens of its answers; the input embedding is the target's. Neither is
stored here: {parameters:.2f} million parameters are."""
_HITS = (
    "*hits*: the target's own token after the accepted ones is among the draft's F likeliest "
    "there, the proposed one left out."
)
_PLACES = "*agreement*: of the token drafted t places ahead with the answer's."
_COLUMNS = (
    "prompts | answers | greedy agreement | overlap at T=1 | tokens a round, K=4 | K=7 | "
    "hits at K=4, F=4 | F=8 | F=16"
)
_STATE_COLUMNS = "prompts | answers | agreement, t = 1 to 4 | overlap at T=1 | tokens a round, K=4"
_NOTICE = """\
Draft of {target}

This model is derived from {target} (sha256 {sha256}).
Changes: kept {origin}; reduced the LM head to {head_vocab} tokens; trained on
texts that {target} wrote; quantised the weights to 8 bits (see README.md).
"""


def write(folder: Path, report: Mapping[str, Any], license_name: str) -> None:
    """Writes README.md, NOTICE and, for apache-2.0, LICENSE into the draft's folder."""
    on_states = "kind" in report
    columns, row = (_STATE_COLUMNS, _state_row) if on_states else (_COLUMNS, _row)
    figures = report.get("evaluation", {})
    heading = [f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]
    texts = {**report, "license": "other" if license_name == "target" else license_name}
    texts["head_origin"] = ", whose rows are the target's" if report["head"] == "target" else ""
    texts["title"] = f"{report['kind']} draft" if on_states else "Draft"
    texts["what"] = (_STATES if on_states else _MODEL).format(**texts)
    texts["legend"] = _PLACES if on_states else _HITS
    texts["source"] = "wrote its own prompts and answers"
    if report["on"] is not None:
        texts["source"] = f"answered the prompts of\n{report['on']}"
    texts["rows"] = "\n".join([*heading, *(row(name, told) for name, told in figures.items())])
    (folder / "README.md").write_text(_CARD.format(**texts))
    notice = _NOTICE.format(**report)
    if license_name == "apache-2.0":
        notice += "Licensed under the Apache License, Version 2.0, as its target is: see LICENSE.\n"
        text = Path(__file__).with_name("apache-2.0.txt").read_text()
        (folder / "LICENSE").write_text(text)
    (folder / "NOTICE").write_text(notice)


def _row(name: str, figures: Mapping[str, Any]) -> str:
    four, seven = (figures["by_lookahead"][k] for k in ("4", "7"))
    hits = [four["hits"][fan_out] for fan_out in ("4", "8", "16")]
    values = [figures["greedy_agreement"], figures["alpha"]]
    values += [four["tokens_per_round"], seven["tokens_per_round"], *hits]
    return f"| {name} | {figures['answers']} | {' | '.join(map(_number, values))} |"


def _state_row(name: str, figures: Mapping[str, Any]) -> str:
    agreed = ", ".join(map(_number, figures["agreement_by_place"][:4]))
    rounds = figures["by_lookahead"].get("4", {}).get("tokens_per_round")
    cells = [name, figures["answers"], agreed, _number(figures["alpha"]), _number(rounds)]
    return f"| {' | '.join(map(str, cells))} |"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
