"""What test_markov starts under mpirun: many short sequences, and nothing but their tokens.

python -m mpi4py -m tests.mpi.markov_job COUNT LENGTH BIAS FLAGS…      flags as of a run

COUNT sequences are decoded until each has LENGTH tokens; a sequence that ends makes room for the
next. BIAS, unless it is "none", names a mistake to make, or "uneven": forwards last anything up to
twice what they should, so that growth is interrupted anywhere. Prints a JSON line: tokens, COUNT
lists of LENGTH; hit rate; how often each (source, num_draft) was served.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable

from mpissd.common.config import parse_flags
from mpissd.common.wait import sharpen_sleep
from mpissd.engine.backend.emulated_backend import ModelledProgram
from mpissd.engine.decode.target import TargetLoop
from mpissd.engine.session.rank import Rank
from mpissd.engine.session.session import open_session
from mpissd.engine.spec import sampling


def residual_of_p(p: sampling.Floats, q: sampling.Floats) -> sampling.Floats:
    """A rejected token is replaced from p itself."""
    return p


def lenient(judge: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    """Coins count for seven tenths."""

    def found(p, tokens, q, q_row, coins, *others):  # type: ignore[no-untyped-def]
        return judge(p, tokens, q, q_row, [0.7 * coin for coin in coins], *others)

    return found


def make_uneven() -> None:
    """Emulated forwards of random durations."""
    draw = random.Random(1)
    launch = ModelledProgram.launch

    def stretched(program: ModelledProgram) -> None:
        before = program._duration_s
        program._duration_s = before * draw.uniform(0, 2)
        launch(program)
        program._duration_s = before

    ModelledProgram.launch = stretched  # type: ignore[method-assign]


def make_mistake(name: str) -> None:
    """Changes this process."""
    if name == "uneven":
        make_uneven()
    elif name == "residual":
        sampling.residual = residual_of_p
    elif name == "lenient":
        sampling.judge = lenient(sampling.judge)
    else:
        assert name == "none", name


class Waves:
    """Keeps the batch full until enough sequences are done."""

    def __init__(self, rank: Rank, count: int, length: int) -> None:
        self._rank, self._count, self._length = rank, count, length
        self.tokens: dict[int, list[int]] = {}
        self.hits: list[int] = []
        self.served: Counter[str] = Counter()

    def __call__(self, loop: TargetLoop) -> Waves:
        left = self._admit(loop, self._rank.session.job.config.batch_size)
        while left:
            result = loop.step()
            speculation, outcome = result.speculation, result.outcome
            heads = speculation.rows[:, :3].tolist()
            drafts, rows = speculation.tokens.tolist(), outcome.rows.tolist()
            ended = []
            for (source, hit, num_draft), row, draft in zip(heads, rows, drafts, strict=True):
                emitted = self.tokens[row[0]]
                if emitted:
                    self.hits.append(hit)
                self.served[f"{source} {num_draft}"] += 1
                emitted += [*draft[: row[3]], row[4]]
                if len(emitted) >= self._length:
                    ended.append(row[0])
            loop.finish(ended)
            left += self._admit(loop, len(ended)) - len(ended)
        return self

    def _admit(self, loop: TargetLoop, count: int) -> int:
        first = len(self.tokens)
        count = min(count, self._count - first)
        loop.admit(self._rank.session.requests(first, count))
        self.tokens |= {n: [] for n in range(first, first + count)}
        return count


def main(count: int, length: int, bias: str, flags: list[str]) -> None:
    sharpen_sleep()
    make_mistake(bias)
    session = open_session(parse_flags(dict(flag[2:].split("=", 1) for flag in flags)))
    rank = Rank(session)
    drafter = None if rank.draft is None else rank.drafter(rank.draft)
    done = rank.run_pass(rank.target, drafter, Waves(rank, count, length))
    rank.close()
    session.resources.close()
    if done is not None:
        tokens = [done.tokens[n][:length] for n in range(count)]
        rate = sum(done.hits) / max(1, len(done.hits))
        print(json.dumps({"tokens": tokens, "hit_rate": rate, "served": done.served}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
