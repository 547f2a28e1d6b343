"""Do T ranks chain rounds to the outcomes of rounds that the host issues? Greedy and imposed ones.

    mpirun -np 2 python -m mpi4py tests/gpu/mpi_chained_check.py cupy       one rank a GPU
    mpirun -np 2 python -m mpi4py tests/gpu/mpi_chained_check.py numpy      no GPU at all

The last line is "passed". With a second argument the last rank's LM head is infinite.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mpi4py import MPI

from mpissd.common.config import RunConfig
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.model.transformer.device_rounds import DeviceRounds
from tests.gpu.test_chained import PROMPTS, decode
from tests.text.test_chained import PARALLEL, REPLAYS, counting
from tests.text_config import finished
from tests.tiny_pair import config, masked_pair, tiny_pair

COMM = MPI.COMM_WORLD
UNEQUAL = {"heads": 10, "kv_heads": 5, "head_dim": 32}  # shares of two ranks
SD = {"mode": "sd", "num_drafts": 0}
TEXTS = [{}, {"lookahead": 2, "batch_size": 3}, {"tree": 12}, {"tree": 15, "batch_size": 3}]
TEXTS.insert(0, {"backup": "fast", "lookahead": 7, "batch_size": 2})
SHARED = {"shard_draft": True, "lookahead": 3}
DYNAMIC = {"tree": 12, "tree_shape": "dynamic", "batch_size": 2}
REPLAY = {"workload": "replay", "recording": REPLAYS, "num_tokens": 60}
LAWS = {"workload": "gemm", "num_tokens": 50, "alpha": 0.6, "tree": 9, "batch_size": 2}
SSD = [{}, {"lookahead": 4, "fan_out": "geometric:9"}, {"batch_size": 3, "lookahead": 2}]
IMPOSED = [{**REPLAY, "batch_size": 4}, {**REPLAY, "mode": "ar"}, LAWS]
IMPOSED += [{**LAWS, "parallel_drafting": True}]


def check(counts: Counter[str], name: str, **flags: Any) -> dict[int, list[int]]:
    """Compares a run with the host's; returns its tokens."""
    by_host = decode(chains=False, **flags)
    counts.clear()
    found = decode(**flags)
    if COMM.rank == 0:
        assert found.sequences().tolist() == by_host.sequences().tolist(), name
        assert found.tokens() == by_host.tokens(), name
        is_chained = 0.3 * counts["rounds"] < counts["ahead"] < counts["rounds"]
        assert is_chained or flags["mode"] == "ssd", (name, counts)
        print(f"pass  {name}: {counts['ahead']} of {counts['rounds']} rounds ahead", flush=True)
    return found.tokens()


def check_texts(
    counts: Counter[str], text: dict[str, Any], pair: dict[str, Path], every: list[dict[str, Any]]
) -> None:
    """Compares a pair's runs with the host's, and their tokens with AR's."""
    alone = {**text, "mode": "ar", "parallel_drafting": False, "target": pair["target"]}
    answers = check(counts, f"AR of {pair['target'].parent.name}", **alone, batch_size=2)
    for flags in every:
        told = {**text, **SD, **pair, **flags}
        # The host issues chains where the device decides dynamic trees.
        tokens = decode(**told).tokens() if flags is DYNAMIC else check(counts, str(flags), **told)
        for n, answer in answers.items():
            assert tokens[n][:40] == answer[:40], f"{flags}: not AR's"


def main(backend: str, folder: Path) -> None:
    """Checks texts, then imposed outcomes, then the growth of a draft rank."""
    if COMM.rank == 0:
        tiny_pair(folder, noise=0.1, **UNEQUAL)
        masked_pair(folder / "masked", **UNEQUAL)
        shape = config(1, vocab=49152, heads=6, kv_heads=3, hidden=64, head_dim=32)
        (folder / "shape.json").write_text(json.dumps(shape | {"mpissd": {"masks": 9}}))
    COMM.Barrier()
    counts, pair = Counter[str](), {name: folder / name for name in ("target", "draft")}
    DeviceRounds.launch = counting(counts)  # type: ignore[method-assign]
    masked = {name: folder / "masked" / name for name in pair}
    every = {"backend": backend, "deadline_s": 40}
    text = {**every, "workload": "text", "prompt_ids": PROMPTS, "num_tokens": 40}
    check_texts(counts, text, pair, [SHARED, *TEXTS, DYNAMIC])
    check_texts(
        counts, text | PARALLEL, masked, [{}, {**SHARED, "batch_size": 3}, TEXTS[-1], DYNAMIC]
    )
    models = dict.fromkeys(pair, folder / "shape.json")
    told = {**every, **models, **SD, "forward": "transformer", "context": 20, "rounds": 24}
    for flags in IMPOSED:
        check(counts, str(flags), **{**told, **flags})
    tree = {**REPLAY, **SD, **DYNAMIC, "parallel_drafting": True, "lookahead": 8}
    found = decode(**{**told, **tree})
    if COMM.rank == 0:
        device = {"backend": "emulated", "device": "null", "pair": "toy"}
        by_host = finished(RunConfig(**{**tree, **device, "recording": str(REPLAYS)}), 24)
        assert found.sequences().tolist() == by_host.records.sequences().tolist()
        print("pass  replayed dynamic trees", flush=True)
    for flags in SSD if COMM.size == 2 else ():
        for kind in (text | pair, {**told, **REPLAY, "batch_size": 2, "num_drafts": 1}):
            check(counts, f"growth {flags}", **{**kind, "mode": "ssd", **flags})
    if COMM.rank == 0:
        print("passed")


def spoil(self: DeviceRounds, *_: object) -> None:
    """Makes the LM head infinite, in bfloat16, before the first chained round."""
    self._target.weights.head.pieces[0][2].fill(0x7F807F80)


if __name__ == "__main__":
    NumpyBackend.chains = True
    if len(sys.argv) > 2 and COMM.rank == COMM.size - 1:
        DeviceRounds.begin = spoil  # type: ignore[method-assign]
    with TemporaryDirectory() as own:
        main(sys.argv[1], Path(COMM.bcast(own)))
        COMM.Barrier()
