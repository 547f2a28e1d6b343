"""Whether a draft that distill wrote was made for the target that it stands beside.

Its config.json names the target by two digests. That of the files holds for one file alone; that of
the norms' weights holds for the model in each of its formats, because a .gguf of any quantisation
keeps vectors as they are in the Hugging Face folder. Norms are some 0.1% of the weights, so that
reading them costs next to nothing. A fine-tuned model that left the norms of its parent as they
were (most LoRA) counts as its parent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpissd.common import hf_config
from mpissd.common.presets import files_of
from mpissd.engine.model.transformer.checkpoint import Checkpoint
from mpissd.engine.model.transformer.sources import open_checkpoint
from mpissd.engine.model.transformer.tensors import tensors


@dataclass(frozen=True)
class Origin:
    """The target that a draft was made for: its name, its files' SHA-256, its norms' digest.

    sha256: None if it had random weights. norms: None in drafts of before it was written.
    """

    name: str
    sha256: str | None
    norms: str | None

    def to_dict(self) -> dict[str, str | None]:
        """Returns the keys that config.json has of it under "mpissd"."""
        names = {"target": self.name, "target_sha256": self.sha256}
        return {**names, "target_norms_sha256": self.norms}

    def is_of(self, target: Checkpoint) -> bool | None:
        """Returns whether it is this target; None if that cannot be told."""
        if self.norms is not None:
            return self.norms == norms_digest(target)
        return True if self.sha256 is not None and self.sha256 == target.sha256 else None


def origin_of(target: Checkpoint) -> Origin:
    """Returns what a draft says of the target that it is made for."""
    return Origin(target.name, target.sha256, norms_digest(target))


def norms_digest(model: Checkpoint) -> str:
    """Returns the SHA-256 of the weights of all norms, in the order of `tensors`, as float32."""
    found = hashlib.sha256()
    for name, size in tensors(model.config):
        if len(size) == 1 and name.endswith("norm.weight"):
            found.update(np.ascontiguousarray(model.vector(name), "<f4").tobytes())
    return found.hexdigest()


def recorded_origin(draft: str) -> Origin | None:
    """Returns the target that a draft was made for; None where its files do not say.

    draft: any name of presets.resolve_model. Raises ConfigError for an unreadable config.json.
    """
    path = files_of(draft)
    told = None if path is None or not path.is_dir() else path / "config.json"
    ours = hf_config.load(told).get("mpissd") if told is not None and told.is_file() else None
    if not isinstance(ours, Mapping) or not isinstance(ours.get("target"), str):
        return None
    return Origin(ours["target"], _text(ours, "target_sha256"), _text(ours, "target_norms_sha256"))


def _text(told: Mapping[str, Any], key: str) -> str | None:
    value = told.get(key)
    return value if isinstance(value, str) else None


def made_for(draft: str, target: str) -> bool | None:
    """Returns whether a draft was made for this target; None if that is not known.

    Both are names of presets.resolve_model.
    """
    origin = recorded_origin(draft)
    return None if origin is None else origin.is_of(open_checkpoint(target))


def doubt(draft: str, target: str) -> str:
    """Returns one line of doubt about a draft beside a target; "" where there is none.

    A draft that does not say what it was made for raises no doubt: any pair may be tried.
    """
    origin = recorded_origin(draft)
    if origin is None:
        return ""
    beside = open_checkpoint(target)
    is_of = origin.is_of(beside)
    if is_of:
        return ""
    why = f"not for {beside.name}, whose weights differ: few of its tokens may be accepted"
    if is_of is None:
        files = "no file" if origin.sha256 is None else f"files of sha256 {origin.sha256[:12]}"
        why = f"from {files}: whether {beside.name} is the same model is not known"
    return f"draft={draft} was made for {origin.name}, {why}"
