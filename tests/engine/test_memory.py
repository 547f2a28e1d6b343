"""A job that does not fit into memory is refused with the batch and the context that would."""

import re
from typing import Any

import pytest

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.engine.job import Room, Serving, resolve

GB = 10**9
INLINE = {"mode": "sd", "num_drafts": 0, "pair": "8b/1b", "forward": "transformer"}


def job_of(memory: int | None, serving: Serving | None = None, **flags: Any) -> Any:
    config = RunConfig(**{**INLINE, **flags})
    return resolve(config, 1, backend="cupy", memory_bytes=memory, serving=serving)


@pytest.mark.parametrize("flags", [
    {"batch_size": 64, "context": 4096}, {"batch_size": 3, "context": 200_000},
    {"batch_size": 500, "context": 1000, "mode": "ar"},
    {"batch_size": 90, "context": 3000, "num_drafts": 1},
], ids=str)  # fmt: skip
def test_the_numbers_it_names_fit_and_one_more_does_not(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="another pair") as refused:
        job_of(40 * GB, **flags)
    found = re.findall(r"--(batch_size|context)=(\d+)", str(refused.value))
    assert found
    for name, value in found:
        assert job_of(40 * GB, **{**flags, name: int(value)})
        with pytest.raises(ConfigError):
            job_of(40 * GB, **{**flags, name: int(value) + 1})


def test_a_default_context_of_text_is_as_long_as_memory_allows() -> None:
    text = {"target": "8b", "draft": "1b", "pair": None, "workload": "text", "prompt_ids": "1,2,3"}
    wide, batch = job_of(None, **text, batch_size=64), 64
    need = sum(wide.rank_bytes(2))
    tight = job_of(need - 5 * GB, **text, batch_size=batch)
    assert 256 <= tight.longest < wide.longest and Room(2, need - 5 * GB, None).fits(tight)
    with pytest.raises(ConfigError):
        job_of(need - 5 * GB, **text, batch_size=batch, context=wide.longest)


def test_a_gpu_that_draws_tokens_needs_room_for_their_distributions() -> None:
    """Of K drafted tokens of each sequence, and one of each for the target that rejects."""
    text = {"target": "8b", "draft": "1b", "pair": None, "workload": "text", "prompt_ids": "1,2,3"}
    flags = {**text, "batch_size": 4, "lookahead": 5, "context": 512}
    greedy, drawn = job_of(None, **flags), job_of(None, **flags, temperature=0.7)
    more = sum(drawn.rank_bytes(2)) - sum(greedy.rank_bytes(2))
    assert more == (4 + 4 * 5) * 128_256 * 4
    assert drawn.rank_bytes(4) == greedy.rank_bytes(4)
    drawn, greedy = (job_of(None, Serving(samples=samples), **flags) for samples in (True, False))
    assert sum(drawn.rank_bytes(2)) - sum(greedy.rank_bytes(2)) == more, "a server, by default"
