"""Drafts by task of prompt: a draft's folder with a router and the folders of its tasks' drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpissd.common.errors import ConfigError
from mpissd.common.presets import files_of
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.sources import config_of, open_checkpoint
from mpissd.engine.model.transformer.vocabulary import known_ids
from mpissd.engine.spec.router import Router, load


@dataclass(frozen=True)
class Tasks:
    """router: chooses a prompt's task. folders: of drafts 1 …; draft 0 is the folder's own, which
    drafts for tasks that have no folder. drafts: by task, the number of its draft."""

    router: Router
    folders: tuple[str, ...]
    drafts: tuple[int, ...]

    def draft_of(self, prompt: Sequence[int]) -> int:
        """Returns the number of the draft of a prompt."""
        return self.drafts[self.router.choose(prompt)]

    def counted(self, prompts: Iterable[Sequence[int]]) -> dict[str, int]:
        """Returns how many of these prompts are of each task."""
        found = Counter(self.router.tasks[self.router.choose(prompt)] for prompt in prompts)
        return {task: found[task] for task in self.router.tasks}


def tasks_of(where: str) -> Tasks | None:
    """Returns what a draft's folder holds beside its own draft; None without a router.

    Raises ConfigError for a damaged one.
    """
    path = files_of(where)
    router = None if path is None or not path.is_dir() else load(path)
    if path is None or router is None:
        return None
    own = [path / task for task in router.tasks]
    folders = [str(folder) for folder in own if (folder / "config.json").is_file()]
    drafts = (folders.index(str(each)) + 1 if str(each) in folders else 0 for each in own)
    return Tasks(router, tuple(folders), tuple(drafts))


def check_alike(where: str, tasks: Tasks, target: str, vocab: int) -> None:
    """Refuses drafts of other shapes, or of other tokens, than the folder's own."""
    first, shape = open_checkpoint(where, target=target), _form(config_of(where, target))
    ids = known_ids(first, vocab)
    for folder in tasks.folders:
        mine = known_ids(open_checkpoint(folder, target=target), vocab)
        same = ids is None if mine is None else ids is not None and np.array_equal(ids, mine)
        if _form(config_of(folder, target)) != shape or not same:
            told = "another shape, or other tokens, than the draft of the folder above"
            raise ConfigError(f"draft={folder}: {told}: allowed: `distill --start` of that one")


def _form(config: TransformerConfig) -> TransformerConfig:
    return replace(config, shape=replace(config.shape, name=""))
