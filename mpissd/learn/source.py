"""Inputs of a distillation: the target, its tokenizer, exams, an earlier draft.

Everything that can be wrong with them is refused here, in one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpissd.common.errors import ConfigError
from mpissd.common.presets import files_of
from mpissd.engine.model.transformer.checkpoint import Checkpoint
from mpissd.engine.model.transformer.sources import open_checkpoint
from mpissd.engine.workload.text.tokenizer import Tokenizer, load_tokenizer
from mpissd.learn.config import DistillConfig
from mpissd.learn.exams import Exam, read_exams
from mpissd.learn.shape import draft_config, state_config
from mpissd.learn.template_parts import TemplateParts, template_parts


@dataclass(frozen=True)
class Source:
    """The target's weights and tokenizer, its template's parts, exams by name, an earlier draft.

    lessons: training texts instead of samples, by name; empty if the target writes samples.
    """

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    template: TemplateParts
    exams: dict[str, Exam]
    start: Checkpoint
    lessons: Mapping[str, Exam]

    @property
    def stop_ids(self) -> list[int]:
        """The tokens that end an answer."""
        return sorted(self.tokenizer.stop_ids)


def read(config: DistillConfig) -> Source:
    """Opens and judges everything; raises ConfigError."""
    path = files_of(config.target)
    if path is None:
        raise ConfigError(f"target={config.target}: allowed: a model with weights and a tokenizer")
    checkpoint, tokenizer = open_checkpoint(config.target, config.seed), load_tokenizer(str(path))
    vocab = checkpoint.config.shape.vocab_size
    if tokenizer.vocab_size > vocab:
        told = f"its tokenizer has {tokenizer.vocab_size} tokens, its weights {vocab}"
        raise ConfigError(f"target={config.target}: {told}: allowed: the tokenizer of the weights")
    _check_draft(config, checkpoint)
    exams = read_exams(config.prompts, tokenizer, vocab)
    lessons = read_exams(config.on, tokenizer, vocab, "on")
    start, template = _start(config, checkpoint), template_parts(tokenizer)
    return Source(checkpoint, tokenizer, template, exams, start, lessons)


def _check_draft(config: DistillConfig, target: Checkpoint) -> None:
    """Refuses layers and shapes of which no draft can be made, before time goes into samples."""
    for form in config.forms:
        draft_config(target.config, form, 0)
    for kind in config.kind_names:
        state_config(target.config, kind, config.heads, 0)
    last = target.config.shape.num_layers - 1
    beyond = [number for number in config.layer_numbers if number > last]
    if beyond and not (config.forms or config.start or config.kinds):
        raise ConfigError(f"layers={beyond[0]}: allowed: 0 to {last}")


def _start(config: DistillConfig, target: Checkpoint) -> Checkpoint:
    """Returns the earlier draft, or the target if there is none.

    Raises ConfigError for a draft of another target.
    """
    if not config.start:
        return target
    told = Path(config.start) / "config.json"
    try:
        own = json.loads(told.read_text("utf-8"))["mpissd"]
        name, sha256 = own["target"], own["target_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"start={config.start}: allowed: a draft that distill wrote") from error
    if sha256 != target.sha256:
        made, found = (str(each)[:12] for each in (sha256, target.sha256))
        raise ConfigError(
            f"start={config.start}: a draft of {name}, sha256 {made}; the target's is {found}: "
            "allowed: a draft of this very target"
        )
    return open_checkpoint(config.start, target=config.target)
