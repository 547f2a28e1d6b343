"""Compares a model's greedy tokens with a reference file's tokens: greedy.py FILE…

tests/parity/library.py writes the file. The model is the folder of the file's name, or SmolLM2.
Tokens are equal, or at the first difference the library's token and ours differ by a relative
margin of our logits that float32 rounds away (1e-4). Exit code 1 if neither holds.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpissd.common.wait import Waiter
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.model.shard import ForwardOptions, TransformerShard
from mpissd.engine.model.stepper import ModelSource, Stepper
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.sources import config_of

MARGIN = 1e-4
CHUNK = 32


@dataclass(frozen=True)
class Difference:
    """The first token that differs: of which prompt, at which place, and by how much."""

    prompt: int
    place: int
    theirs: int
    ours: int
    margin: float  # (our token's logit − their token's) / |our token's logit|


class Model:
    """A model on the CPU, with a cache for one sequence."""

    def __init__(self, where: str, capacity: int) -> None:
        self._stepper = Stepper(
            NumpyBackend(),
            SoloGroup(),
            TransformerShard(config_of(where)),
            ForwardOptions(lm_head=True, values=True, capacity=capacity),
            buckets=[CHUNK],
            num_sequences=1,
            seed=0,
            model=ModelSource(where),
        )
        self._waiter = Waiter(120.0, spin=False)

    def chunks(self, tokens: Sequence[int], first: int) -> Iterator[tuple[int, Any]]:
        """Yields (place, logits) of each token from place `first` on, given all tokens before it.

        A row has equal bits in any forward, so one forward of many rows gives the logits of a
        forward for each token.
        """
        ids = np.array(tokens, np.int32)
        for start in range(0, len(ids), CHUNK):
            stop = min(start + CHUNK, len(ids))
            places = replace(trunk_rows(0, start, stop), reads=stop > first)
            self._stepper.upload(stop - start, ids[start:stop], places)
            self._stepper.launch()
            self._stepper.wait(self._waiter)
            for row in range(max(first - start, 0), stop - start):
                yield start + row, self._stepper.logits([row])[0]
        self._stepper.release([0])

    def difference(self, number: int, prompt: list[int], wanted: list[int]) -> Difference | None:
        """Returns the first place where our greedy token is not the wanted one; None: nowhere."""
        for place, logits in self.chunks([*prompt, *wanted[:-1]], len(prompt) - 1):
            at = place - len(prompt) + 1
            ours, theirs = int(logits.argmax()), wanted[at]
            if ours != theirs:
                margin = (logits[ours] - logits[theirs]) / abs(logits[ours])
                self._stepper.release([0])
                return Difference(number, at, theirs, ours, float(margin))
        return None


def differences(said: dict[str, Any], where: str, prompts: Sequence[int]) -> list[Difference]:
    """Returns the first difference of each of these prompts that has one."""
    longest = max(map(len, said["prompts"])) + len(said["tokens"][0])
    model = Model(where, longest)
    told = ((n, said["prompts"][n], said["tokens"][n]) for n in prompts)
    return [found for one in told if (found := model.difference(*one)) is not None]


def main() -> None:
    failed = False
    for name in sys.argv[1:]:
        file = Path(name)
        said = json.loads(file.read_text())
        folder = file.with_suffix("")
        where = str(folder) if folder.is_dir() else "smollm2"
        found = differences(said, where, range(len(said["prompts"])))
        count, length = len(said["prompts"]), len(said["tokens"][0])
        print(f"{said['model']}: {count - len(found)} of {count} x {length} tokens equal")
        for one in found:
            print(f"  {one}{'' if one.margin <= MARGIN else ': NOT EQUAL'}")
            failed |= one.margin > MARGIN
    sys.exit(failed)


if __name__ == "__main__":
    main()
