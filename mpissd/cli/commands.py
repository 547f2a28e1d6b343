"""The commands `plan` (advice or a prediction) and `compare` (tables of results)."""

import dataclasses
import sys
from collections.abc import Set as AbstractSet
from pathlib import Path
from threading import Timer

from mpissd.cli.arguments import PLANNED, CompareConfig, PlanConfig
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.output import print_json
from mpissd.engine.backend.profile import Profile, known_profiles, load_profile, role_profiles
from mpissd.engine.job import resolve
from mpissd.lab.plan.candidates import CONTEXT, survey, with_laws
from mpissd.lab.plan.screen import Screen, heading
from mpissd.lab.predict.costs import DeviceCosts
from mpissd.lab.predict.derive import check_device, covered, host_of, with_derived
from mpissd.lab.predict.link import parse_link
from mpissd.lab.predict.simulation import predict_row
from mpissd.lab.tables import best, claims
from mpissd.lab.tables.load import LeftOut, find_pair, load_rows, of_one_group
from mpissd.lab.tables.pair import Pair


def plan(config: PlanConfig, given: AbstractSet[str] = frozenset()) -> int:
    """Prints the best configuration for at most --gpus GPUs. given: names of the flags that were
    given; with `mode`, predicts only that configuration. A pipe's last line is JSON."""
    for name in (config.profile or "").split(","):
        if name not in known_profiles() and name.endswith(".json") and not Path(name).exists():
            raise ConfigError(
                f"profile {name!r}: no such file: allowed: what `probe` saved, or "
                f"{', '.join(known_profiles())}"
            )
    if "mode" in given:
        return _predict(config, given)
    if extra := sorted(
        given - set(PLANNED) - {"profile", "gpus", "link", "measured", "trees", "details", "json"}
    ):
        value = getattr(config, extra[0], None) or getattr(config.run, extra[0])
        raise ConfigError(f"{extra[0]}={value} without mode: allowed: with mode, for a prediction")
    return _advise(config, given)


def _predict(config: PlanConfig, given: AbstractSet[str]) -> int:
    """Prints the predicted speed of a run with these flags."""
    profile, drafts = role_profiles(config.device, config.run.draft_device)
    run = _planned(config, profile, given)
    job = resolve(
        run,
        config.tp or 1,
        backend="emulated",
        memory_bytes=profile.memory_bytes,
        draft_memory_bytes=drafts.memory_bytes,
    )
    link = parse_link(config.link, job.world_size)
    batch = job.config.batch_size
    profile = with_derived(profile, job.target_shard, batch, job.options)
    if job.draft_shard is not None:
        drafts = with_derived(drafts, job.draft_shard, batch, job.draft_options)
    check_device(profile, job, drafts)
    device = DeviceCosts.from_profile(profile, job, drafts)
    host = host_of(profile, job)
    rows = {"long-run mean": predict_row(job, device, host)}
    if link is not None:
        if job.world_size == job.tp:
            device = dataclasses.replace(device, verify=link.across(device.verify, job, profile))
            host = link.followed(host)
        near = rows["long-run mean"]
        told = {"link": dataclasses.asdict(link), "one_host": near["expected_tok_per_s"]}
        far = predict_row(job, device, host, link) | told
        rows = {"on one host": near, f"over {link}": far}
    print(heading(run, profile, job.world_size))
    for what, row in rows.items():
        rate = row["expected_tok_per_s"]
        print(f"   tok/s  {'unknown' if rate is None else f'{rate:.1f}'}   ({what})")
    print(f"   round  {row['round_us']['mean']:.1f} µs")
    print_json(row)
    return 0


def _advise(config: PlanConfig, given: AbstractSet[str]) -> int:
    """Prints the advice. If that takes over 5 s, a terminal first gets a line that says to wait."""
    profile = load_profile(config.device)
    link = parse_link(config.link, config.gpus)
    news = Timer(5, sys.stderr.write, ["plan: still weighing the uses\n"])
    news.daemon = True
    if sys.stderr.isatty():
        news.start()
    run = _planned(config, profile, given, is_advice=True)
    surveyed = survey(run, profile, config.gpus, link)
    screen = Screen.of(surveyed, config.device, config.measured, trees=config.trees)
    lines = screen.lines(details=config.details)
    news.cancel()
    print("\n".join(lines))
    print_json(screen.numbers(), always=config.run.json)
    return 0


def _planned(
    config: PlanConfig, profile: Profile, given: AbstractSet[str], *, is_advice: bool = False
) -> RunConfig:
    """Returns the configuration of a run. Flags not in `given` get the values with which the device
    profile was measured. is_advice: whether to assume whole transformers by default."""
    flags = covered(profile, config.run.forward)
    is_whole = not profile.forwards or profile.models_others
    is_whole |= any(key.sequences for key in profile.forwards)
    if is_advice and not given & {"forward", "fuse", "lm_head"} and is_whole:
        flags = {**covered(profile, "transformer"), "forward": "transformer"}
    probed = {k: v for k, v in flags.items() if k not in given}
    if given & {"target", "draft"}:
        probed.pop("pair", None)
    elif "pair" not in given:
        probed = {"pair": "8b/1b", **probed}
    run = dataclasses.replace(config.run, **probed)
    if run.laws is not None:
        return with_laws(run, "context" in given)
    if is_advice and run.is_transformer and "context" not in given:
        run = dataclasses.replace(run, context=CONTEXT)
    return run


def compare(config: CompareConfig) -> int:
    """Prints one result relative to another, or a table of the fastest methods. Raises ConfigError
    for results that are missing or cannot be compared."""
    places_of = config.a or config.out
    is_one = config.b is not None or (config.a is not None and "," not in config.a)
    with LeftOut() as left_out:
        pair = find_pair(places_of, config.b, config.out, left_out) if is_one else None
        if pair is None:
            left_out.clear()  # forgets rows that find_pair left out
            rows = load_rows([name for name in places_of.split(",") if name], left_out)
    if pair is not None:
        print(Pair.of(*pair))
        return 0
    rows = of_one_group(rows)
    comparisons = best.compare_methods(rows)
    if not comparisons:
        raise ConfigError(f"results {places_of!r}: no rows there")
    settings = [comparison.setting for comparison in comparisons]
    print(best.render(comparisons, claims.claims(settings, rows)))
    if any("turn" in (row.sweep or {}) for row in rows):
        print("rows of OUT/beside count whole passes; `run` prints them without prefill and luck")
    return 0
