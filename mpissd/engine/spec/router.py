"""Chooses the task of a prompt from its tokens: multinomial naive Bayes.

Each task has a distribution over tokens; a prompt is of the task that gives its first tokens the
largest probability [McCallum and Nigam 1998, A comparison of event models for naive Bayes text
classification]. It needs NumPy alone and some 10 µs a prompt, on the rank that drafts.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.whole import whole_file

FILE = "router.npz"  # in the folder of a draft, beside the folders of its tasks' drafts
MOST = 256  # tokens of a prompt that are read
# What zipfile, zlib and NumPy raise for a file that is damaged, or no archive.
_BROKEN = (
    *(OSError, ValueError, KeyError, EOFError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)
SMOOTHING = 0.5  # added to the count of every token


@dataclass(frozen=True)
class Router:
    """tasks: their names. tokens: int32 [n], rising, those that the prompts of the fit had.
    weights: float32 [tasks, n + 1], the logarithm of each one's probability; the last column is
    that of any other token."""

    tasks: tuple[str, ...]
    tokens: NDArray[np.int32]
    weights: NDArray[np.float32]

    def choose(self, prompt: Sequence[int]) -> int:
        """Returns the number of the task that a prompt is likeliest of; of equal ones the first."""
        return int(self.scores(prompt).argmax())

    def scores(self, prompt: Sequence[int]) -> NDArray[np.float64]:
        """Returns the logarithm of the prompt's probability in each task, [tasks]."""
        given = np.asarray(prompt[:MOST], np.int32)
        places = np.searchsorted(self.tokens, given)
        found = self.tokens[np.minimum(places, len(self.tokens) - 1)] == given
        chosen = self.weights[:, np.where(found, places, len(self.tokens))]
        scores: NDArray[np.float64] = chosen.sum(axis=1, dtype=np.float64)
        return scores

    def save(self, folder: Path) -> None:
        """Writes the router into a draft's folder in place of an earlier one, completely or not at
        all."""
        new = folder / f".new-{FILE}"
        new.unlink(missing_ok=True)
        with whole_file(new) as file:
            np.savez_compressed(
                file, tasks=np.array(self.tasks), tokens=self.tokens, weights=self.weights
            )
        new.replace(folder / FILE)


def fit(prompts: Mapping[str, Sequence[Sequence[int]]]) -> Router:
    """Returns the router of these prompts by task; every task counts as equally likely.

    Raises ConfigError for fewer than two tasks, and for one without a prompt.
    """
    if len(prompts) < 2 or not all(prompts.values()):
        raise ConfigError("a router: allowed: two tasks or more, each with a prompt or more")
    read = {
        task: np.concatenate([np.asarray(prompt[:MOST], np.int32) for prompt in each])
        for task, each in prompts.items()
    }
    tokens = np.unique(np.concatenate(list(read.values())))
    counts = np.full((len(read), len(tokens) + 1), SMOOTHING)
    for row, each in enumerate(read.values()):
        np.add.at(counts[row], np.searchsorted(tokens, each), 1.0)
    weights = np.log(counts / counts.sum(axis=1, keepdims=True)).astype(np.float32)
    return Router(tuple(read), tokens, weights)


def load(folder: Path) -> Router | None:
    """Returns the router in a draft's folder; None without one. Raises ConfigError for a file that
    is none."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            tasks, tokens, weights = (file[name] for name in ("tasks", "tokens", "weights"))
            router = Router(tuple(tasks.tolist()), tokens.astype(np.int32), weights)
            ok = weights.shape == (len(tasks), len(tokens) + 1) and np.isfinite(weights).all()
    except _BROKEN as error:
        raise ConfigError(f"{path}: allowed: a router that `mpissd router` wrote") from error
    if not ok or not len(tokens):
        raise ConfigError(f"{path}: allowed: a router that `mpissd router` wrote")
    return router


def held_out(
    prompts: Mapping[str, Sequence[Sequence[int]]], folds: int
) -> dict[str, dict[str, int]]:
    """Returns, by true task, how many prompts were taken for each task by routers that were fitted
    without them: prompt n is of fold n % folds."""
    found = {task: dict.fromkeys(prompts, 0) for task in prompts}
    for fold in range(folds):
        rest = {
            task: [p for n, p in enumerate(each) if n % folds != fold]
            for task, each in prompts.items()
        }
        router = fit(rest)
        for task, each in prompts.items():
            for prompt in each[fold::folds]:
                found[task][router.tasks[router.choose(prompt)]] += 1
    return found
