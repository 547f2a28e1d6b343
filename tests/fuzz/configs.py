"""Random valid command lines of `run` on DEVICE=null."""

from __future__ import annotations

import random

from mpissd.cli import arguments as cli
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.comm.topology import check_world
from mpissd.engine.job import resolve

Flags = dict[str, str]
MOST_TRIES = 40
ALWAYS = {"backend": "emulated", "device": "null", "progress": "off"}


def arguments(flags: Flags) -> list[str]:
    """The command line of these flags."""
    return ["run", *(f"--{name}={value}" for name, value in flags.items())]


def judged(flags: Flags, world_size: int) -> RunConfig:
    """The configuration that `mpissd run` resolves from them before MPI starts, on so many ranks.

    Raises ConfigError.
    """
    command = cli.parse(arguments(flags))
    config = command.config
    memory = load_profile(config.device).memory_bytes
    tp = check_world(world_size, config.drafts, config.groups)
    resolve(config, tp, backend=config.backend, memory_bytes=memory)
    assert isinstance(config, RunConfig)
    return config


def valid(seed: int, world_size: int) -> Flags:
    """Flags that a world of so many ranks runs; the same for the same seed."""
    dice = random.Random(f"{seed} {world_size}")
    for _ in range(MOST_TRIES):
        flags = drawn(dice, world_size)
        try:
            judged(flags, world_size)
        except ConfigError:
            continue
        return flags
    raise AssertionError(f"seed {seed}: {MOST_TRIES} draws, and none is valid")


def drawn(dice: random.Random, world_size: int) -> Flags:
    """Flags that fit each other most of the time."""
    mode = dice.choice(["ar", "sd", "sd", "ssd", "ssd", "ssd", "ssd"])
    drafts = {"ar": 0, "sd": dice.randint(0, 1)}.get(mode, 1)
    drafts = min(drafts, world_size - 1)
    flags = {**ALWAYS, "mode": mode, "num_drafts": str(drafts), "pair": dice.choice(PAIRS)}
    flags["seed"] = str(dice.randint(0, 2**64 - 1))
    flags["batch_size"] = str(dice.choice([1, 1, 2, 3, 5, 8]))
    flags |= dice.choice(LENGTHS)
    flags["lookahead"] = str(dice.choice([1, 2, 3, 4, 5, 7, 11]))
    lookahead = int(flags["lookahead"])
    if dice.random() < 0.3:
        flags |= markov(dice, mode)
    else:
        flags |= laws(dice, mode, lookahead)
    if mode == "ssd":
        flags |= growth(dice, lookahead)
    if mode != "ar":
        flags["backup"] = dice.choice(["jit", "jit", "fast"])
        if dice.random() < 0.3:
            flags["backup_lookahead"] = str(dice.randint(1, lookahead))
    for name, chance in (("fuse", 0.3), ("lm_head", 0.3)):
        if dice.random() < chance:
            flags[name] = "true"
    if dice.random() < 0.2:
        flags["context"] = str(dice.choice([1, 128, 4096]))
    flags["warmup_rounds"] = str(dice.choice([1, 2, 10]))
    if drafts and dice.random() < 0.25:
        flags["groups"] = "2"
    return flags


PAIRS = ["toy", "toy", "8b/1b", "70b/1b", "toy-target/toy-target", "8b@2L/eagle:8b"]
LENGTHS = [
    {"rounds": "1"},
    {"rounds": "7"},
    {"rounds": "30"},
    {"num_tokens": "1"},
    {"num_tokens": "40"},
    {"num_tokens": "60", "rounds": "25"},
]


def laws(dice: random.Random, mode: str, lookahead: int) -> Flags:
    """Acceptance and hits of the gemm workload."""
    rates = ",".join(f"{dice.random():.3f}" for _ in range(lookahead))
    flags = dice.choice(
        [{}, {"alpha": dice.choice(["0", "1", "0.37", "0.9"])}, {"acceptance": f"rates:{rates}"}]
    )
    if mode == "ar":
        return {}
    if mode == "ssd":
        flags = flags | dice.choice(
            [
                {},
                {"p_hit": dice.choice(["0", "0.5", "1"])},
                {"hit_law": dice.choice(["smollm2-chat", "power:A=0.9/0.2,r=1/0.4"])},
            ]
        )
    if dice.random() < 0.3:
        flags = flags | {"acceptance_fast": f"alpha:{dice.random():.2f}"}
    return flags


def markov(dice: random.Random, mode: str) -> Flags:
    """Two language models."""
    vocab = dice.choice([2, 5, 17, 64])
    flags = {"workload": "markov", "vocab": str(vocab), "order": str(dice.randint(1, 3))}
    flags["divergence"] = f"{dice.random():.2f}"
    flags["temperature"] = dice.choice(["0", "0.5", "1", "2"])
    flags["prompt_tokens"] = str(dice.choice([1, 5, 40]))
    if dice.random() < 0.3:
        flags["stop_token"] = str(dice.randrange(vocab))
    if mode == "ssd" and flags["temperature"] != "0" and dice.random() < 0.4:
        flags["saguaro_c"] = dice.choice(["0", "0.5", "1"])
    return flags


def growth(dice: random.Random, lookahead: int) -> Flags:
    """Fan-outs after a hit and after a miss."""
    lists = ",".join(str(dice.randint(0, 4)) for _ in range(lookahead)) + ",1"
    flags = {
        "fan_out": dice.choice(
            [
                f"uniform:{dice.randint(1, 6)}",
                f"geometric:{dice.randint(lookahead + 1, 40)}",
                f"list:{lists}",
            ]
        ),
    }
    if dice.random() < 0.2:
        flags["fan_out"] += f"/uniform:{dice.randint(1, 3)}"
    return flags
