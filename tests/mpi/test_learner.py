"""A learner rank of a job: swaps change no token, and a faulty learner costs nothing."""

import sys
from pathlib import Path

import pytest

from mpissd.common.records import token_digest
from mpissd.engine.model.transformer.checkpoint import packed
from tests.loop.test_swaps import between, share_embedding
from tests.mpi.harness import Job, ended, needs_mpi, shim, start
from tests.text_config import finished, text_config
from tests.tiny_pair import TinyPair, tiny_pair

pytestmark = needs_mpi
PROMPTS = ";".join(f"{n % 7},{3 * n % 97},5" for n in range(12))
JOB = "run --backend=numpy --workload=text --warmup_rounds=2 --deadline_s=60 --progress=off "
JOB += "--context=128"
LONG = ["--num_tokens=60", "--lookahead=3"]
LEARNING = ["--learners=1", "--learn=publish_s=0", *LONG]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """A pair with one embedding, and three versions of its draft, the last of them the target."""
    made = tiny_pair(tmp_path_factory.mktemp("pair"), noise=0.4, scale=3, masks=0)
    share_embedding(made)
    for number, share in enumerate((0.3, 0.7, 1.0)):
        (made.target.parent / f"{number}.version").write_bytes(packed(between(made, share)))
    return made


def launched(pair: TinyPair, tmp_path: Path, num_ranks: int, *flags: str, trainer: str) -> Job:
    """A job; trainer: the kind of fake_trainer that replaces the learner's."""
    told = [sys.executable, "-m", "tests.mpi.fake_trainer", trainer, str(pair.target.parent)]
    is_trainer = "'mpissd.online.trainer' in sys.orig_argv"
    env = shim(tmp_path, f"{is_trainer} and os.execv(sys.executable, {told!r})")
    (tmp_path / "torch.py").touch()  # which only a trainer imports, and the fake one does not
    folder = tmp_path / "out"
    models = [f"--target={pair.target}", f"--draft={pair.draft}", f"--out={folder}"]
    told = [*JOB.split(), f"--prompt_ids={PROMPTS}", *models, *flags]
    return ended(start(num_ranks, "mpissd", *told, env=env), folder)


@pytest.fixture(scope="module")
def alone(pair: TinyPair) -> str:
    """The digest of the target's own tokens."""
    config = text_config(pair, mode="ar", prompt_ids=PROMPTS, num_tokens=60, context=128)
    return token_digest(finished(config).records.token_arrays(), 60)


def test_versions_arrive_and_tokens_stay(pair: TinyPair, alone: str, tmp_path: Path) -> None:
    flags = ["--mode=ssd", "--fan_out=uniform:2", "--learn=publish_s=0"]
    done = launched(pair, tmp_path, 4, *LEARNING, *flags, trainer="versions")
    row = done.row
    assert row["token_digest"] == alone
    assert (row["world_size"], row["learners"], row["learner_state"]) == (4, 1, "learning")
    assert "rank 3  learner  trains the draft" in done.out
    assert row["tok_per_s_per_gpu"] == pytest.approx(row["tok_per_s"] / 4, abs=1e-2)
    swaps = [swap["version"] for swap in row["learner"]["swaps"]]
    assert row["draft_versions"] == len(swaps) >= 2 and swaps == sorted(set(swaps))
    by_version = row["acceptance_by_version"]
    assert by_version[0]["version"] == 0
    assert {one["version"] for one in by_version} <= {0, *swaps}
    assert not row["learner"]["refused_versions"]
    cost = row["learner"]["cost"]
    assert 0 < cost["bytes_per_round"] < 97 * 4 + 400  # of rejected rows only


@pytest.mark.parametrize(("trainer", "state"), [("dying", "lost"), ("huge", "learning")])
def test_a_learner_that_fails_costs_nothing_but_learning(
    pair: TinyPair, alone: str, tmp_path: Path, trainer: str, state: str
) -> None:
    row = launched(pair, tmp_path, 3, "--mode=sd", *LEARNING, trainer=trainer).row
    assert row["token_digest"] == alone and row["learner_state"] == state
    if trainer == "dying":  # no reader: a few examples are sent, and no more are made
        assert row["learner"]["cost"]["dropped_rounds"] > 0
    if trainer == "huge":  # the learned weights overflow: the draft goes back to its own
        assert 1 <= row["draft_versions"] <= 3 and row["acceptance_by_version"][0]["accepted"] > 0
        assert "a logit is not finite" in row["learner"]["refused_versions"][0]
    else:
        assert row["draft_versions"] == 0 and len(row["acceptance_by_version"]) == 1


def test_a_job_that_is_refused_ends_its_learner(pair: TinyPair, tmp_path: Path) -> None:
    done = launched(pair, tmp_path, 3, "--mode=sd", *LEARNING, "--backend=cupy", trainer="dying")
    assert done.code != 0 and len(done.lines) == 1
