"""Random command lines of `run` on DEVICE=null: valid ones, and others with one thing broken."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from mpissd.cli import arguments as cli
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.comm.topology import check_world
from mpissd.engine.job import resolve
from tests.common.refusals import CHOICES, NUMBERS, REFUSED

Flags = dict[str, str]
MOST_TRIES = 40
ALWAYS = {"backend": "emulated", "device": "null", "progress": "off"}


def arguments(flags: Flags) -> list[str]:
    """As they are typed."""
    return ["run", *(f"--{name}={value}" for name, value in flags.items())]


def judged(flags: Flags, world_size: int) -> RunConfig:
    """What `mpissd run` makes of them before MPI starts, in a world of so many ranks.

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
                {"hit_a": "1.2", "hit_r": dice.choice(["0.3", "1", "2.5"])},
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
    """What is kept, and what is done with what is late."""
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
        flags["fan_out_miss"] = f"uniform:{dice.randint(1, 3)}"
    return flags


@dataclass(frozen=True)
class Broken:
    """A command line that has to be refused, and what the refusal has to name."""

    flags: Flags
    named: str


Breaker = Callable[[random.Random, Flags], Broken]


def invalid(seed: int, world_size: int) -> Broken:
    """A valid command line with one thing broken."""
    dice = random.Random(f"broken {seed}")
    return dice.choice(BREAKERS)(dice, valid(seed, world_size))


TEXTS = {
    "device": ["h1000", "nul", "/nowhere/profile.json"],
    "pair": ["toyy", "8b", "8b/", "/1b", "8b/1c", "gen:layers=0/1b", "eagle:8b/eagle:8b"],
    "fan_out": [
        "uniform",
        "uniform:-1",
        "uniform:x",
        "geometric:0",
        "list:",
        "list:1,2,x",
        "all:3",
    ],
    "acceptance": [
        "beta:1",
        "alpha:2",
        "rates:",
        "rates:0.5,x",
        "histogram:/nowhere",
        "marginal:1.5",
    ],
    "acceptance_fast": ["alpha:-1", "rates:1,2"],
    "alpha": ["-0.1", "1.1", "nan"],
    "p_hit": ["1.5", "-1", "often"],
    "hit_a": ["-1", "nan"],
    "hit_r": ["-0.5", "inf"],
    "hit_law": ["smollm3", "power:A=1"],
}


def bad_value(table: dict[str, list[str]]) -> Breaker:
    def broken(dice: random.Random, flags: Flags) -> Broken:
        name = dice.choice(sorted(table))
        value = dice.choice(table[name])
        alone = BASE if name in OF_ONE_WORKLOAD else flags
        return Broken({**alone, name: value}, NAMED.get(value, value))

    return broken


OF_ONE_WORKLOAD = ("acceptance", "acceptance_fast", "alpha", "p_hit", "hit_a", "hit_r", "hit_law")
NAMED = {
    "all:3": "'all'",
    "beta:1": "'beta'",
    "eagle:8b/eagle:8b": "eagle-llama",
    "8b/": "'8b/'",
    "histogram:/nowhere": "/nowhere",
}


def misspelt(dice: random.Random, flags: Flags) -> Broken:
    """A flag that is none."""
    name = dice.choice(["lookahed", "fanout", "batch", "drafts", "device_name", "k", "modes", "ot"])
    return Broken({**flags, name: dice.choice(["1", "x"])}, name)


def contradiction(dice: random.Random, flags: Flags) -> Broken:
    """Flags that are good alone."""
    told, named = dice.choice([case for case in REFUSED if "world_size" not in case[0]])
    return Broken({**ALWAYS, **{name: str(value) for name, value in told.items()}}, named)


BASE = {**ALWAYS, "pair": "toy"}


def lists(dice: random.Random, flags: Flags) -> Broken:
    """Lists and laws that do not fit K, or the vocabulary."""
    told, named = dice.choice(
        [
            ({"lookahead": "3", "fan_out": "list:1,2,3"}, "1,2,3"),
            ({"lookahead": "3", "acceptance": "rates:0.5,0.5"}, "0.5,0.5"),
            ({"fan_out": "uniform:5000"}, "5000"),
            ({"fan_out": "uniform:0", "p_hit": "0.9"}, "0"),
            ({"lookahead": "4", "fan_out": "geometric:0"}, "geometric"),
            ({"num_drafts": "2"}, "num_drafts=2"),
            ({"pair": "8b/medusa:8b", "lookahead": "3"}, "lookahead=3"),
            ({"pair": "eagle:8b/1b"}, "eagle"),
        ]
    )
    return Broken({**BASE, "mode": "ssd", **told}, named)


BREAKERS: list[Breaker] = [
    bad_value(NUMBERS),
    bad_value(NUMBERS),
    bad_value(CHOICES),
    bad_value(TEXTS),
    bad_value(TEXTS),
    misspelt,
    contradiction,
    lists,
]
