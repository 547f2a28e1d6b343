"""Lists the configurations that the command `plan` may recommend, and simulates their tokens/s.

The modes are autoregressive decoding (AR), speculative decoding (SD) and SSD, in which a draft
model on its own GPU drafts for several possible results of the running verification. `survey` finds
over how many target ranks T a model can be divided, and how long forwards and host work then take.
`candidates` yields the configurations to try: every mode, K (tokens drafted a round) and, for SSD,
fan-out (candidates for the next token at each position). `weigh` simulates them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Source
from mpissd.engine.backend.profile import Profile
from mpissd.engine.job import Job, resolve
from mpissd.engine.law.acceptance import LAW_FILES, PARALLEL, HitLaw, hit_law_of, load_laws
from mpissd.engine.law.fanout import resolve_fan_out
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stacks import AnyShard
from mpissd.lab.predict.costs import EMULATED_ITEMSIZE, DeviceCosts, HostCosts, RowTable, forwards
from mpissd.lab.predict.derive import (
    DERIVED,
    METHODS,
    check_device,
    derived_from,
    entry_of,
    host_of,
    with_hosts,
    with_models,
)
from mpissd.lab.predict.link import Link
from mpissd.lab.predict.simulation import Grid, expect
from mpissd.lab.tables.uses import TREE, Family, tps_of

MOST_LOOKAHEAD = 16
LOOKUP = "lookup"  # name of SD that copies its drafts from the sequence, without a draft model
CONTEXT = 512  # context length in tokens, if neither a flag nor a --laws file gives one
FEW_HITS = "smollm2"  # The cache-hit model of this pair is used where data are too few to fit one.
_MOST_READ = 63  # most candidates at a position, because the host reads 64 logits of a row
_CANDIDATES = (1, 2, 4, 8, 16, 32, 64)  # values of k for which the top-k selection was timed
_MOST_BRANCHES = 10 * (MOST_LOOKAHEAD + 1)  # most branches of a sequence to look up times for
# These numbers of nodes, of levels, and of candidates are tried in SSD with draft trees.
_TREES = (3, 4, 5, 6, 7, 8, 10, 12), (2, 3, 4), (1, 2, 3, 4, 6)
Hosts = Mapping[tuple[str, int], HostCosts | None]


def longest_lookahead(config: RunConfig) -> int:
    """Returns the largest K (number of tokens drafted a round) to try: MOST_LOOKAHEAD or, if
    smaller, the number of positions for which the configuration's acceptance rates are known."""
    longest = MOST_LOOKAHEAD
    for text in (config.acceptance_text, config.acceptance_fast_text):
        kind, _, values = text.strip().partition(":")
        if kind in LAW_FILES:
            longest = min(longest, load_laws(values).longest_fitted)
        elif kind in ("rates", "marginal"):
            longest = min(longest, values.count(",") + 1)
    return longest


def ways(run: RunConfig, lookahead: int, *, trees: bool = False) -> tuple[bool, ...]:
    """Returns in which ways K = lookahead tokens may be drafted: one after the other (False), or
    all in one forward of the draft model (True). True is included only if the --laws file has
    acceptance rates of such drafts. trees: whether draft trees of K levels are meant."""
    kind, _, path = run.acceptance_text.strip().partition(":")
    if lookahead == 1 or kind != "laws":
        return (False,)
    laws = load_laws(path).behind(lookahead)
    known = bool(laws.levels) if trees else PARALLEL in laws.fast
    return (False, True) if known else (False,)


def cut_law(text: str, length: int) -> str:
    """Cuts an acceptance model given as text ("rates:…" or "marginal:…", one rate per draft
    position) to its first `length` rates; returns other kinds of acceptance model unchanged."""
    kind, _, values = text.strip().partition(":")
    if kind not in ("rates", "marginal"):
        return text
    return f"{kind}:{','.join(values.split(',')[:length])}"


def with_laws(run: RunConfig, has_context: bool) -> RunConfig:
    """Completes a configuration that names a --laws file (acceptance and cache-hit models fitted to
    prompts). Unless the user gave a context length (has_context), that of the prompts is taken. If
    the file has too little data for a cache-hit model, another model pair's is taken."""
    laws = load_laws(str(run.laws))
    if run.is_transformer and not has_context:
        contexts = (int(source.get("context") or 0) for source in laws.about["sources"])
        run = replace(run, context=max(contexts) or CONTEXT)
    if run.p_hit is None is run.hit_law:
        fitted = [part for part in laws.at if part.lookahead <= laws.longest_fitted]
        if not all(part.rejected and part.complete for part in fitted):
            run = replace(run, hit_law=FEW_HITS)
    return run


@dataclass(frozen=True)
class Choice:
    """One configuration that the command `plan` considers, with its simulated speed. Most fields
    are flags of `run`: tp is T, num_drafts is D, lookahead is K. backup: what drafts after a miss
    of the speculation cache ("jit": the draft model, "fast": a lookup in the sequence).
    backup_lookahead: how many tokens that drafts. tok_per_s, round_us, hit_rate: simulated results.
    derived: text that says which durations were computed from others (None: all were measured).
    tree: number of nodes of a draft tree (None: a chain of tokens). parallel: whether one forward
    of the draft model drafts all K tokens."""

    mode: str
    tp: int
    num_drafts: int
    batch_size: int
    lookahead: int = 0
    fan_out: str | None = None
    backup: str = "jit"
    backup_lookahead: int = 0
    tok_per_s: float = 0.0
    round_us: float = 0.0
    hit_rate: float | None = None
    derived: str | None = None
    tree: int | None = None
    parallel: bool = False

    @property
    def gpus(self) -> int:
        return self.tp + self.num_drafts

    @property
    def family(self) -> Family:
        return Family(self.mode, self.tp, self.num_drafts)

    @property
    def run_mode(self) -> str:
        """The value of the flag --mode that runs this configuration. It is "sd" also for SD by
        lookup and SD with draft trees, which have mode names of their own here."""
        return "sd" if self.mode in (LOOKUP, TREE) else self.mode

    def flags(self) -> dict[str, str]:
        """Returns {flag: value} with which `mpissd run` runs this configuration. Flags that name
        the models, the acceptance rates and the cache-hit rates are not included."""
        flags = {"mode": self.run_mode, "num_drafts": str(self.num_drafts)}
        if self.mode == LOOKUP:
            flags["backup"] = "fast"
        if self.tree is not None:
            flags["tree"] = str(self.tree)
        if self.mode != "ar":
            flags["lookahead"] = str(self.lookahead)
        if self.parallel:
            flags["parallel_drafting"] = "true"
        if self.fan_out is not None:
            flags |= {"fan_out": self.fan_out, "backup": self.backup}
            flags["backup_lookahead"] = str(self.backup_lookahead)
        return flags

    def __str__(self) -> str:
        """Returns the settings as text, such as "K=4 uniform:3; on a miss jit K=2" (SSD)."""
        text = f"K={self.lookahead}" if self.mode != "ar" else ""
        if self.tree is not None:
            text += f" tree={self.tree}"
        if self.parallel:
            return f"{text} {self.fan_out or ''}".rstrip() + ", in one forward"
        if self.fan_out is not None:
            text += f" {self.fan_out}; on a miss {self.backup}"
            if self.backup_lookahead != self.lookahead:
                text += f" K={self.backup_lookahead}"
        return text


def job_of(config: RunConfig, choice: Choice) -> Job:
    """Resolves a configuration to a Job, from which the simulation takes rows, fan-out and
    acceptance. config: the flags that all share. Raises ConfigError for an impossible fan-out."""
    if choice.mode == "ar":
        return replace(pair_job(config, Family("ar", 1, 0)), tp=choice.tp)
    fans = None if choice.tree is None else choice.fan_out
    shared = Choice(choice.mode, 1, choice.num_drafts, 1, choice.lookahead, fans, choice.backup)
    shared = replace(shared, tree=choice.tree, parallel=choice.parallel)
    job = replace(_job_of(config, shared), tp=choice.tp)
    if choice.tree is not None:
        return job
    served = choice.backup_lookahead
    job = replace(job, backup_lookahead=served)
    if choice.fan_out is None:
        return job
    hazards = tuple(job.acceptance[Source.CACHE].hazards)
    backup = tuple(job.acceptance[Source[choice.backup.upper()]].hazards)[:served]
    backup += (0.0,) * (choice.lookahead - served)
    after_hit = _fan_out(choice.fan_out, hazards, choice.lookahead, job.hit_law)
    after_miss = _fan_out(choice.fan_out, backup, served, job.hit_law)
    has_head = config.lm_head or config.is_transformer
    if has_head and max(*after_hit, *after_miss) > _MOST_READ:
        raise ConfigError(f"fan_out={choice.fan_out}: allowed: at most {_MOST_READ} a row")
    return replace(job, fan_out=after_hit, fan_out_miss=after_miss)


@lru_cache(maxsize=512)
def _job_of(config: RunConfig, choice: Choice, memory_bytes: int | None = None) -> Job:
    """Resolves a considered configuration to a Job; if the configuration has no fan-out,
    "uniform:1" (one candidate per position) is used. memory_bytes: memory of each rank, into which
    the job must fit (None: no limit). Raises ConfigError if the job is impossible."""
    if config.pair is None and (config.target is None or config.draft is None):
        raise ConfigError("plan: needs a pair, or a target and a draft")
    config = replace(
        config,
        mode=choice.run_mode,
        tree=choice.tree,
        parallel_drafting=choice.parallel,
        backup=choice.backup,
        backup_lookahead=None,
        num_drafts=choice.num_drafts,
        lookahead=choice.lookahead,
        fan_out=choice.fan_out or "uniform:1",
        alpha=None,
        acceptance=cut_law(config.acceptance_text, choice.lookahead),
        acceptance_fast=cut_law(config.acceptance_fast_text, choice.lookahead),
    )
    return resolve(config, choice.tp, backend="emulated", memory_bytes=memory_bytes)


def pair_job(config: RunConfig, family: Family, memory_bytes: int | None = None) -> Job:
    """Returns a job with the model pair of `config` and with the mode and numbers of ranks of
    `family`; its K = 1 and its acceptance are placeholders. memory_bytes: memory of each rank
    (None: no limit). Raises ConfigError if it does not fit, or the ranks cannot share it."""
    config = replace(config, alpha=0.5, acceptance=None, acceptance_fast="alpha:0.3", laws=None)
    choice = Choice(family.mode, family.tp, family.num_drafts, 1, 1, config.fan_out)
    return _job_of(config, choice, memory_bytes)


def fits(config: RunConfig, family: Family, memory_bytes: int | None = None) -> bool:
    """Returns whether the model pair can be divided over the T target and D draft ranks that
    `family` names, and fits in their memory. memory_bytes: memory of each rank (None: no limit)."""
    try:
        pair_job(config, family, memory_bytes)
    except ConfigError:
        return False
    return True


@lru_cache(maxsize=4096)
def _fan_out(text: str, hazards: tuple[float, ...], served: int, hit: HitLaw) -> tuple[int, ...]:
    """Parses a value of the flag --fan_out; returns F_0 … F_K, where F_k is the number of
    candidates for the next token of the target after k accepted draft tokens. hazards: acceptance
    rate of each draft position, given that the positions before it were accepted, [K]. served: the
    number of tokens that were drafted in the round. hit: the model of cache hits."""
    reached = len(hazards)
    if text.startswith("geometric") and not hit.p_hit:
        # Last positions with an acceptance rate of 0 are never reached, so they get no candidates.
        while reached and not hazards[reached - 1]:
            reached -= 1
    powers = hit.powers(reached, min(served, reached + 1))
    minimum = 1 if hit.p_hit else 0
    fans = resolve_fan_out(text, reached, hazards[:reached], *powers, minimum=minimum)
    return (*fans, *(0,) * (len(hazards) - reached))


@dataclass(frozen=True)
class Sharding:
    """The target model divided over T = tp ranks, with all durations that a simulation needs.
    device: of forwards. num_drafts: numbers of draft ranks D that fit in memory. hosts: {(mode, D):
    durations of host work}; None means unknown, a missing key that host work takes no time. label:
    function that returns how a configuration's durations were derived (None: all were measured).
    most_rows: configurations with a forward of more rows are not recommended, because its duration
    is uncertain (None: no limit)."""

    tp: int
    device: DeviceCosts
    num_drafts: tuple[int, ...]
    hosts: Hosts
    label: Callable[[Choice], str | None]
    most_rows: int | None = None

    def host(self, mode: str, num_drafts: int) -> HostCosts | None:
        """Returns the durations of host work in a mode with D = num_drafts draft ranks; None if
        they are unknown. SD by lookup and SD with trees have the durations of SD."""
        key = (mode if mode in ("ar", "ssd") else "sd"), num_drafts
        return self.hosts.get(key, HostCosts())

    @property
    def has_ssd(self) -> bool:
        """Whether SSD with one draft rank fits in memory and its host work's times are known."""
        return 1 in self.num_drafts and self.host("ssd", 1) is not None


@dataclass(frozen=True)
class Survey:
    """The result of `survey`: how a model pair can run on a machine with `gpus` GPUs. shardings:
    the divisions of the target that can be simulated. unjudged: {mode and numbers of ranks that fit
    in memory: why the durations are unknown}. too_large: those that do not fit in memory. link:
    leads to the last GPU, which only uses of all GPUs have; their draft rank or else last target
    rank is there (None: all GPUs are of one host)."""

    run: RunConfig
    profile: Profile
    gpus: int
    shardings: tuple[Sharding, ...]
    unjudged: Mapping[Family, str]
    too_large: tuple[Family, ...] = ()
    link: Link | None = None

    def link_of(self, use: Family | Choice) -> Link | None:
        """Returns the link between a use's ranks; None if they are on one host."""
        return self.link if use.tp + use.num_drafts == self.gpus else None

    def label(self, choice: Choice) -> str | None:
        """Returns how a choice's durations were derived; None if all were measured."""
        sharding = next(of for of in self.shardings if of.tp == choice.tp)
        link = self.link_of(choice)
        crossing = None if link is None else f"{DERIVED}: the link {link} was not measured"
        return "; ".join(filter(None, (sharding.label(choice), crossing))) or None


def survey(run: RunConfig, profile: Profile, gpus: int, link: Link | None = None) -> Survey:
    """Finds every number of target ranks T up to `gpus` over which the target can be divided and
    fits in memory, with its durations from `profile`. link: Survey.link. Raises ConfigError if
    there is none, or if no durations are known."""
    shardings: list[Sharding] = []
    unjudged: dict[Family, str] = {}
    too_large: list[Family] = []
    reason = ConfigError(f"plan: gpus={gpus}: allowed: 1 or more")
    hosted = with_hosts(profile)
    for tp in range(1, gpus + 1):
        runnable = runnable_at(run, tp)
        families = [Family("ar", tp, 0), Family("sd", tp, 0)]
        if tp < gpus and runnable == run:
            families += [Family("sd", tp, 1), Family("ssd", tp, 1)]
        possible = [family for family in families if fits(runnable, family)]
        too_large += [use for use in possible if not fits(runnable, use, hosted.memory_bytes)]
        try:
            pair_job(runnable, families[0], hosted.memory_bytes)
        except ConfigError as error:
            reason = error
            continue
        try:
            sharding = (sharded if runnable == run else _uneven)(run, hosted, tp, gpus)
            if link is not None and tp == gpus:
                sharding = _linked(sharding, pair_job(runnable, families[0]), hosted, link)
        except ConfigError as error:
            unjudged |= dict.fromkeys((*families, Family(LOOKUP, tp, 0)), str(error))
            continue
        shardings.append(sharding)
        for family in families:
            has_room = not family.num_drafts or 1 in sharding.num_drafts
            if has_room and sharding.host(family.mode, family.num_drafts) is None:
                mode = family.mode.upper()
                unjudged[family] = f"profile {profile.name} has no host costs of {mode}"
    if all(sharding.host(*method) is None for sharding in shardings for method in METHODS):
        raise ConfigError(next(iter(unjudged.values()), str(reason)))
    return Survey(run, profile, gpus, tuple(shardings), unjudged, tuple(too_large), link)


def _linked(sharding: Sharding, job: Job, profile: Profile, link: Link) -> Sharding:
    """Returns the sharding of `job` with its last target rank beyond the link, which all-reduces
    and the message that starts a round cross."""
    verify = link.across(sharding.device.verify, job, profile)
    hosts = {method: sharding.host(*method) for method in METHODS}
    hosts = {method: host and link.followed(host) for method, host in hosts.items()}
    return replace(sharding, device=replace(sharding.device, verify=verify), hosts=hosts)


def runnable_at(run: RunConfig, tp: int) -> RunConfig:
    """Returns the configuration with which a model can be divided over T = tp ranks: `run` itself,
    or `run` with whole transformers in place of bare matrix products. Bare matrix products can only
    be divided into equal shares; a transformer may be divided unevenly."""
    use = Family("ar", tp, 0)
    transformer = replace(run, forward="transformer", fuse=False)
    return transformer if not fits(run, use) and fits(transformer, use) else run


def sharded(run: RunConfig, profile: Profile, tp: int, gpus: int) -> Sharding:
    """Returns the target model divided over T = tp of the machine's `gpus` GPUs, with durations
    from `profile`. Raises ConfigError if the profile lacks a forward that is needed."""
    device = _device_costs(run, profile, tp)
    drafts = tuple(
        count
        for count in range(1 + min(1, gpus - tp))
        if fits(run, Family("sd", tp, count), profile.memory_bytes)
    )

    def label(choice: Choice) -> str | None:
        job = job_of(run, choice)
        modelled = with_models(profile, job)
        return derived_from(modelled, modelled, job)

    most_rows = None
    if run.is_transformer:
        # Beyond the measured row counts, modelled forwards of transformers were 20 to 42% too fast.
        job = pair_job(run, Family("sd", tp, 1))
        modelled = with_models(profile, job)
        costs = [
            need.shard.cost(1, run.batch_size, EMULATED_ITEMSIZE, need.options)
            for need in job.needs
        ]
        curves = filter(None, map(modelled.measured, costs))
        most_rows = min((curve.points[-1] for curve in curves), default=None)
    return Sharding(tp, device, drafts, _hosts(run, profile, tp), label, most_rows)


def _uneven(run: RunConfig, profile: Profile, tp: int, gpus: int) -> Sharding:
    """Returns bare matrix products divided over T = tp ranks that they cannot be divided over
    evenly. The durations are interpolated between the nearest lower and higher T that divide them
    evenly; there is no draft rank. Raises ConfigError if the profile lacks one of these two."""
    target = pair_job(run, Family("ar", 1, 0)).target.name
    evens = [even for even in tps_of(target, 8 * tp) if fits(run, Family("ar", even, 0))]
    low = max(even for even in evens if even < tp)
    high = min((even for even in evens if even > tp), default=0)
    if not high:
        raise ConfigError(f"profile {profile.name} has no forwards of T above {tp}: probe first")

    def verify(slow: RowTable, fast: RowTable) -> RowTable:
        # A forward is taken to last a + c/T, with a and c from the two neighbouring T.
        part = (1 / tp - 1 / high) / (1 / low - 1 / high)
        pairs = zip(slow.seconds, fast(slow.rows).tolist(), strict=True)
        seconds = tuple(shorter + part * (longer - shorter) for longer, shorter in pairs)
        few = verify(slow.few, fast.few) if slow.few is not None and fast.few is not None else None
        return replace(slow, seconds=seconds, few=few)

    below = _device_costs(run, profile, low)
    above = _device_costs(run, profile, high)
    device = replace(below, verify=verify(below.verify, above.verify))
    source = (
        f"{DERIVED}: a forward of T={tp} takes a + c/T, by those of T={low} and T={high}; "
        "its shares are of unequal size, which only --forward=transformer runs"
    )
    return Sharding(tp, device, (0,), _hosts(run, profile, tp), lambda _: source)


def _device_costs(run: RunConfig, profile: Profile, tp: int) -> DeviceCosts:
    """Returns the durations of forwards on T = tp target ranks, at every row count that the search
    needs. The KV bytes that a draft forward reads depend on K; those of one middle K are used for
    all K, an error of less than 2% for 8b/1b with 24 branches. Raises ConfigError if a measured
    profile lacks the forwards, or if the duration of all-reduces over T ranks is unknown."""
    job = replace(pair_job(run, Family("sd", tp, 1)), lookahead=MOST_LOOKAHEAD // 2)
    draft = job.draft_shard
    assert draft is not None, "a pair without a draft"
    profile = with_models(profile, job)
    check_device(profile, job)

    def table(shard: AnyShard, per_sequence: int, options: ForwardOptions) -> RowTable:
        # The table has all multiples of the batch size, and the powers of two up to the largest.
        batch = run.batch_size
        rows = {batch * n for n in range(1, per_sequence + 1)}
        rows |= {1 << n for n in range((batch * per_sequence).bit_length())}
        return forwards(profile, shard, rows, batch, options, any_job=True)

    verify = table(job.target_shard, MOST_LOOKAHEAD + 1, job.options)
    has_head = job.config.lm_head or job.drafts_by_transformer
    lists = {
        count: table(draft, _MOST_BRANCHES, replace(job.draft_options, top_k=count))
        for count in (_CANDIDATES if has_head else (1,))
    }
    return DeviceCosts(verify, lists[1], tuple(lists.items()) if has_head else ())


def _hosts(run: RunConfig, profile: Profile, tp: int) -> Hosts:
    """Returns {(mode, number of draft ranks): durations of host work} on T = tp target ranks (None:
    unknown); {} if the profile has no such durations at all, so that host work takes no time."""
    costs: dict[tuple[str, int], HostCosts | None] = {}
    for mode, drafts in METHODS if profile.hosts else ():
        job = replace(pair_job(run, Family(mode, 1, drafts)), tp=tp, lookahead=run.lookahead)
        is_known = entry_of(profile, job) is not None
        costs[mode, drafts] = host_of(profile, job) if is_known else None
    return costs


@dataclass(frozen=True)
class Space:
    """Values of SSD's parameters that a search tries. lookaheads: values of K. fan_outs: values of
    the flag --fan_out. backup_shares: values of K_b / K, where K_b tokens are drafted after a cache
    miss (None: every K_b). fast: whether a lookup, not the draft model, drafts then."""

    lookaheads: tuple[int, ...] = ()
    fan_outs: tuple[str, ...] = ()
    backup_shares: tuple[float, ...] | None = None
    fast: tuple[bool, ...] = (False, True)

    def backups(self, lookahead: int) -> Sequence[int]:
        if self.backup_shares is None:
            return range(1, lookahead + 1)
        shares = (math.ceil(share * lookahead - 1e-9) for share in self.backup_shares)
        return sorted({max(1, tokens) for tokens in shares})


def _fan_outs(uniform: Iterable[int], budgets: Iterable[int]) -> tuple[str, ...]:
    """Returns values of --fan_out: "uniform:F" (F candidates at each position) for each F in
    `uniform`, and "geometric:B" (B in all, more at likelier positions) for each B in `budgets`."""
    return (*(f"uniform:{count}" for count in uniform), *(f"geometric:{b}" for b in budgets))


_BUDGETS = (4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)
FULL = Space(tuple(range(1, 1 + MOST_LOOKAHEAD)), _fan_outs(range(1, 11), _BUDGETS))
COARSE = Space(
    (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16),
    _fan_outs((1, 2, 3, 5, 9), (8, 16, 32, 64)),
    (0.0, 0.25, 0.5, 1.0),
)
ROUGH = Space(  # The simulation of large batches takes longer, so fewer values are tried.
    (1, 2, 3, 4, 6, 8, 12, 16), _fan_outs((1, 3, 9), (8, 24, 64)), (0.25, 1.0)
)


def candidates(
    run: RunConfig, sharding: Sharding, space: Space, *, trees: bool = False
) -> Iterator[Choice]:
    """Yields the configurations to simulate at one number of target ranks T: AR; SD and SD by
    lookup at every K; SSD with the parameters in `space`. Lookups are left out if their drafts are
    never accepted. trees: whether draft trees are tried, too, in SD and SSD."""
    tp = sharding.tp
    batch = run.batch_size
    longest = longest_lookahead(run)
    if sharding.host("ar", 0) is not None:
        yield Choice("ar", tp, 0, batch)
    for k in range(1, longest + 1):
        for drafts in sharding.num_drafts:
            if sharding.host("sd", drafts) is not None:
                chain = Choice("sd", tp, drafts, batch, k, backup_lookahead=k)
                for parallel in ways(run, k):
                    yield replace(chain, parallel=parallel)
                sizes = range(k + 1, MOST_LOOKAHEAD + 1) if trees else ()
                for nodes, parallel in product(sizes, ways(run, k, trees=True)):
                    yield replace(chain, mode=TREE, tree=nodes, parallel=parallel)
        lookup = Choice(LOOKUP, tp, 0, batch, k, backup="fast", backup_lookahead=k)
        has_costs = sharding.host(LOOKUP, 0) is not None
        if has_costs and job_of(run, lookup).acceptance[Source.FAST].hazards[0]:
            yield lookup
    yield from ssd_choices(run, sharding, space)
    for nodes, k, fans in product(*_TREES) if trees and sharding.has_ssd else ():
        # In one forward their hits are not known: measured ones exceed the hit model's by a fifth.
        if k < nodes and k <= longest:
            yield Choice("ssd", tp, 1, batch, k, f"uniform:{fans}", "jit", k, tree=nodes)


def ssd_choices(run: RunConfig, sharding: Sharding, space: Space) -> Iterator[Choice]:
    """Yields configurations of SSD on T target GPUs and one draft GPU, with the parameters in
    `space`. With a given hit rate only fan-out 1 is tried: more candidates bring no more hits."""
    if not sharding.has_ssd:
        return
    fan_outs = space.fan_outs if hit_law_of(run, 1).p_hit is None else ("uniform:1",)
    longest = longest_lookahead(run)
    for k in (k for k in space.lookaheads if k <= longest):
        for fan_out, served, is_fast in product(fan_outs, space.backups(k), space.fast):
            backup = "fast" if is_fast else "jit"
            yield Choice("ssd", sharding.tp, 1, run.batch_size, k, fan_out, backup, served)
        for fan_out in fan_outs if True in ways(run, k) else ():
            ahead = Choice("ssd", sharding.tp, 1, run.batch_size, k, fan_out, backup_lookahead=k)
            yield replace(ahead, parallel=True)


def weigh(choices: Iterable[Choice], survey: Survey, *, quick: bool = False) -> list[Choice]:
    """Simulates configurations; returns those that are possible, with tokens/s, round time and hit
    rate. quick: whether to simulate fewer rounds, which suffices to rank many configurations."""
    by_tp = {sharding.tp: sharding for sharding in survey.shardings}
    alike: dict[Family, list[tuple[Choice, Job]]] = {}
    for choice in choices:
        try:
            job = job_of(survey.run, choice)
        except ConfigError:
            if choice.fan_out is None and not choice.parallel:
                raise
            continue  # The fan-out is impossible, or the draft has too few mask tokens.
        most_rows = by_tp[choice.tp].most_rows
        if most_rows is None or job.draft_buckets()[-1] <= most_rows:
            alike.setdefault(choice.family, []).append((choice, job))
    weighed = []
    for use, members in alike.items():
        sharding = by_tp[use.tp]
        host = sharding.host(use.mode, use.num_drafts)
        assert host is not None, use
        jobs = [job for _, job in members]
        means = expect(Grid.of(jobs, sharding.device, host, survey.link_of(use)), quick=quick)
        columns = means.tok_per_s.tolist(), means.round_s.tolist(), means.hit_rate.tolist()
        for (choice, _), rate, round_s, hits in zip(members, *columns, strict=True):
            hit_rate = hits if choice.fan_out is not None else None
            weighed.append(
                replace(choice, tok_per_s=rate, round_us=round_s * 1e6, hit_rate=hit_rate)
            )
    return weighed
