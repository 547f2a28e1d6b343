"""Random valid command lines of `run` on DEVICE=null."""

import random
from collections.abc import Sequence

from mpissd.cli import arguments as cli
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.comm.topology import check_world
from mpissd.engine.job import resolve

Flags = dict[str, str]
MOST_TRIES = 60
ALWAYS = {"backend": "emulated", "device": "null", "progress": "off"}
PAIRS = ["toy", "toy", "8b/1b", "70b/1b", "toy-target/toy-target", "8b@2L/eagle:8b"]
LENGTHS = [
    *({"rounds": count} for count in ("1", "7", "30")),
    *({"num_tokens": count} for count in ("1", "40")),
    {"num_tokens": "60", "rounds": "25"},
]
# {flag: (chance, values)}; {K} is lookahead numbers, {F} one fan-out more.
Choices = dict[str, tuple[float, Sequence[str]]]
COMMON: Choices = {
    "fuse": (0.3, ["true"]),
    "lm_head": (0.3, ["true"]),
    "context": (0.2, ["1", "128", "4096"]),
    "batch_size": (0.8, ["1", "2", "3", "5", "8"]),
    "warmup_rounds": (1, ["1", "2", "10"]),
}
DRAFTED: Choices = {
    "backup": (0.6, ["jit", "fast"]),
    "backup_lookahead": (0.3, ["1", "2", "4"]),
    "groups": (0.2, ["2"]),
}
LAWS: Choices = {
    "alpha": (0.4, ["0", "1", "0.37", "0.9"]),
    "acceptance": (0.3, ["rates:{K}"]),
    "acceptance_fast": (0.3, ["alpha:0.62"]),
}
HITS: Choices = {
    "p_hit": (0.3, ["0", "0.5", "1"]),
    "hit_law": (0.3, ["power:A=0.78/0.32,r=0.2/0.3", "power:A=0.9/0.2,r=1/0.4"]),
}
MARKOV: Choices = {
    "vocab": (1, ["2", "5", "17", "64"]),
    "order": (0.8, ["1", "2", "3"]),
    "divergence": (0.8, ["0", "0.31", "1"]),
    "temperature": (1, ["0", "0.5", "1", "2"]),
    "prompt_tokens": (0.8, ["1", "5", "40"]),
    "stop_token": (0.3, ["0", "1"]),
}
GROWN: Choices = {
    "fan_out": (0.8, ["uniform:1", "uniform:6", "geometric:40", "list:{F}", "uniform:3/uniform:1"])
}


def arguments(flags: Flags) -> list[str]:
    """The command line of these flags."""
    return ["run", *(f"--{name}={value}" for name, value in flags.items())]


def judged(flags: Flags, world_size: int) -> RunConfig:
    """The configuration that `mpissd run` resolves from them before MPI starts, on so many ranks.

    Raises ConfigError.
    """
    config = cli.parse(arguments(flags)).config
    memory = load_profile(config.device).memory_bytes
    tp = check_world(world_size, config.drafts, config.groups)
    resolve(config, tp, backend=config.backend, memory_bytes=memory)
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
    drafts = min({"ar": 0, "sd": dice.randint(0, 1)}.get(mode, 1), world_size - 1)
    lookahead = dice.choice([1, 2, 3, 4, 5, 7, 11])
    flags = {**ALWAYS, "mode": mode, "num_drafts": str(drafts), "pair": dice.choice(PAIRS)}
    flags |= {"seed": str(dice.randint(0, 2**64 - 1)), "lookahead": str(lookahead)}
    flags |= dice.choice(LENGTHS)
    choices, is_markov, is_drafted = COMMON, dice.random() < 0.3, mode != "ar"
    if is_drafted:
        choices = choices | DRAFTED
    if mode == "ssd":
        choices = choices | GROWN
    if is_markov:
        flags["workload"] = "markov"
        choices = choices | MARKOV
        if mode == "ssd":
            choices = choices | {"saguaro_c": (0.3, ["0", "0.5", "1"])}
    elif is_drafted:
        choices = choices | LAWS | (HITS if mode == "ssd" else {})
    for name, (chance, values) in choices.items():
        if dice.random() < chance:
            rates = ",".join(f"{dice.random():.3f}" for _ in range(lookahead))
            lists = ",".join([*(str(dice.randint(0, 4)) for _ in range(lookahead)), "1"])
            flags[name] = dice.choice(values).replace("{K}", rates).replace("{F}", lists)
    return flags
