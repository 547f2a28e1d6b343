"""Prints the result of the command `plan`, as text or as JSON.

The text has at most 23 lines of 100 columns: sentences on what pays, with intervals; a table of the
fastest configurations; the command that runs the best one; and the command that measures what is
unknown. With --details the text also lists all configurations, assumptions, and how durations were
derived. If the speed of a configuration that would fit is unknown, none is called the best. If
acceptance rates are only assumed, measured rows of the model pair decide whether SSD pays.
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpissd.common.config import RunConfig
from mpissd.common.flags import DRAFTING, said
from mpissd.common.presets import has_weights, resolve_model, split_pair
from mpissd.common.real_pairs import DEFAULT_SOURCE
from mpissd.engine.backend.profile import Profile
from mpissd.engine.law.acceptance import PARALLEL, hit_law_of, load_laws
from mpissd.lab.plan.candidates import (
    FEW_HITS,
    LOOKUP,
    Choice,
    Survey,
    cut_law,
    runnable_at,
    survey,
    weigh,
)
from mpissd.lab.plan.plan import Plan, Question, firsts, name_of, number, plan
from mpissd.lab.predict.derive import BY_LAYERS, DERIVED, is_datasheet
from mpissd.lab.tables.load import LeftOut, load_rows, row_files
from mpissd.lab.tables.uses import TREE, WORTH, Family

COLUMNS, LINES = 100, 23  # most columns and lines of the text, to fit on a terminal with its prompt
ALPHAS = 0.6, 0.9  # further acceptance rates to show speedups at, if no flag gives the rate
_ENGINES = (1, 2, 4, 8)  # tensor-parallel degrees of common inference engines, and of docs/map.md
_ROWS = 10
_LEGEND = """\
T, D: GPUs of the target and of the draft; "inline" drafts on the target's own.
K: tokens drafted a round, or levels of a tree. Of SSD: --fan_out, the outcomes drafted for \
(uniform: so many a position; geometric: so many in all); on a miss: --backup, what drafts then \
(jit: the draft model; fast: a lookup), and its K if it differs. In one forward: \
--parallel_drafting, which the same draft also does on a miss.
times: measured on this device; derived, computed from measured ones; or of a datasheet. by rows: \
tok/s of measured rows of the same case. ≈: no slower than the best for sure."""


@dataclass(frozen=True)
class Screen:
    """Formats a plan as text (method `lines`) and as JSON (method `numbers`). device: the value of
    the flag --profile. at: {acceptance rate: the plan at that rate}, filled if no flag gives the
    acceptance rate; the text then shows how the speedups depend on it. one_host: {use that
    spans a link: its tokens/s on one host}."""

    plan: Plan
    device: str = ""
    at: Mapping[float, Plan] = field(default_factory=dict)
    one_host: Mapping[Family, float] = field(default_factory=dict)

    @classmethod
    def of(cls, surveyed: Survey, device: str, folders: str, *, trees: bool) -> Screen:
        """Runs the command `plan` on a survey: simulates configurations, reads measured rows, and
        returns the result. device: the value of the flag --profile. folders: the folders with
        measured rows, separated by commas. trees: whether draft trees are considered, too."""
        run = surveyed.run
        best = plan(surveyed, trees=trees)
        files = [path for folder in folders.split(",") for path in row_files(Path(folder))]
        with LeftOut() as left_out:
            rows = load_rows(files, left_out)
        best = best.with_evidence(rows)
        at = {}
        for alpha in ALPHAS if is_assumed(run) and not is_datasheet(surveyed.profile) else ():
            at[alpha] = plan(replace(surveyed, run=replace(run, alpha=alpha)), trees=trees)
        far = [choice for choice in best.judged if surveyed.link_of(choice) is not None]
        near = weigh(far, survey(run, surveyed.profile, surveyed.gpus)) if far else ()
        return cls(best, device, at, {choice.family: choice.tok_per_s for choice in near})

    @property
    def survey(self) -> Survey:
        return self.plan.survey

    @property
    def best(self) -> Choice | None:
        """The recommended configuration; None if another that would fit has unknown durations."""
        return None if self.plan.missing else self.chosen

    @property
    def chosen(self) -> Choice:
        """The fastest configuration. SSD is left out if the acceptance rate is only assumed and
        measured rows of the same model pair say that SSD does not pay."""
        if is_assumed(self.survey.run) and self._measured_verdict == "does not pay":
            return self.plan.other("ssd", self.survey.gpus) or self.plan.best
        return self.plan.best

    @property
    def _measured_verdict(self) -> str | None:
        """What measured rows of the same model pair say about SSD: it "pays", "does not pay" or
        "pays on some prompts". None if there are no such rows."""
        pays = [gain >= WORTH for gain, _ in self.plan.ssd_gains.values()]
        if not any(pays):
            return "does not pay" if pays else None
        return "pays" if all(pays) else "pays on some prompts"

    @property
    def level(self) -> list[Choice]:
        """The best configuration and those that may be as fast; [] if the best is surely faster."""
        return [] if self.best is None else self.plan.level(self.best)

    @property
    def unit(self) -> str:
        is_gpu = re.search("NVIDIA|Tesla|Instinct|Radeon", self.survey.profile.device_name)
        return "GPU" if is_gpu else "rank"

    def lines(self, *, details: bool = False) -> list[str]:
        """Returns the text as lines. details: whether to list all configurations, the assumptions,
        and how durations were derived, without the limit of 23 lines."""
        run = self.survey.run
        judged = self.plan.judged
        told = run
        if self.chosen.parallel:
            told = replace(run, parallel_drafting=True, lookahead=self.chosen.lookahead)
        above = [heading(told, self.survey.profile, self.survey.gpus), *self._sentences()]
        device = f" (on another machine append --backend=emulated --device={self.device})"
        device *= "/" not in self.device
        below = [
            f"Run {name_of(self.chosen)}{device}:",
            f"    {_command('run', self.survey, self.chosen, _run_flags(run, self.chosen))}",
            *self._surer(details),
        ]
        under = _lines(below)
        room = LINES - len(under) - 3 - 2 * (run.laws is not None)  # Leave 2 for `make pair`.
        while not details and len(_lines(above)) > room - 2:
            above.pop()
        screen = _lines(above)
        num_rows = min(_ROWS, room - len(screen))
        if details:
            return [*screen, "", *self._table(judged), "", *_lines(self._notes()), "", *under]
        # The fastest configuration of each mode (SD with and without a draft GPU) is always shown.
        kinds = firsts(judged, lambda choice: choice.family.name)
        shown = [*kinds, *(choice for choice in judged if choice not in kinds)][:num_rows]
        count = len(judged) - len(shown)
        hidden = f"{count} more uses, " if count else ""
        rest = f"   --details: {hidden}what the settings mean, where each time comes from"
        return [*screen, "", *self._table([c for c in judged if c in shown]), rest, *under]

    def numbers(self) -> dict[str, Any]:
        """Returns the plan as a JSON object; its list `judged` begins with the fastest one."""
        measured = self.plan.measured
        reasons = self.survey.unjudged
        return {
            "best": None if self.best is None else asdict(self.best),
            "judged": [asdict(choice) for choice in self.plan.judged],
            "unjudged": [{**asdict(use), "why": reasons[use]} for use in self.plan.missing],
            "level": [asdict(choice.family) for choice in self.level],
            "measured": {str(family): use.tok_per_s for family, use in measured.items()},
            "too_large": [asdict(family) for family in self.survey.too_large],
            "probe_first": [asdict(choice.family) for choice in self.plan.to_probe],
            "verdicts": {q.what: self.plan.answer(q.use, q.other) for q in self._questions},
            "measured_gains": {name: gain for name, (gain, _) in self.plan.ssd_gains.items()},
            "gains_at": {alpha: self._gains(plan) for alpha, plan in self.at.items()},
            "link": None if self.survey.link is None else asdict(self.survey.link),
            "one_host": {str(family): rate for family, rate in self.one_host.items()},
        }

    def _pairs(self, plan: Plan) -> list[tuple[Choice, Choice]]:
        """Returns up to two pairs of configurations whose speeds are compared: first (the fastest
        with a draft model, the fastest without one), then (SSD, the fastest of other modes). If one
        member of a pair is unknown, that pair and later ones are left out."""
        pairs = []
        for use, other in (
            (plan.first(*DRAFTING, TREE), plan.first("ar", LOOKUP)),
            (plan.first("ssd"), plan.other("ssd", self.survey.gpus)),
        ):
            if use is None or other is None:
                break
            pairs.append((use, other))
        return pairs

    @property
    def _questions(self) -> list[Question]:
        """The questions that the text answers: does a draft model pay, and does a GPU of its own
        for it pay? Empty if a configuration that would fit has unknown durations."""
        if self.plan.missing:
            return []
        pairs = self._pairs(self.plan)
        if len(pairs) == 2 and pairs[0] == pairs[1]:
            return [Question(f"The draft, on a {self.unit} of its own,", *pairs[0])]
        names = ("The draft", f"A {self.unit} of its own for the draft")
        return [Question(what, *pair) for what, pair in zip(names, pairs, strict=False)]

    def _gains(self, plan: Plan) -> list[float]:
        """Returns the speedups that `plan` predicts for a draft model and for a GPU of its own."""
        pairs = self._pairs(plan)[: len(self._questions)]
        return [use.tok_per_s / other.tok_per_s for use, other in pairs]

    def _sentences(self) -> Iterator[str]:
        """Yields the sentences of the text: the fastest configuration and its lead; whether a draft
        model and a GPU of its own pay; what predictions rest on; why target ranks are limited."""
        best = self.chosen
        questions = self._questions
        by_rows = self._by_rows()
        is_led = is_assumed(self.survey.run)
        if by_rows and is_led:
            yield by_rows
        rate = f"{name_of(best)} {self.unit}{'s' * (best.gpus > 1)}: {self.plan.rate(best)} tok/s"
        if self.plan.missing:
            names = _some(map(str, self.plan.missing))
            reasons = _some(dict.fromkeys(self.survey.unjudged.values()), 1)
            yield f"Not judged: {names}, so nothing here is called best: {reasons}."
            yield f"The fastest of the others is {rate}."
        elif is_datasheet(self.survey.profile):
            yield f"A datasheet cannot tell: probe first. The fastest by it is {rate}."
        elif best != self.plan.best:
            yield f"The fastest predicted use without it is {rate}."
        elif self.level:
            yield f"The uses marked ≈ cannot be told apart; the first is {rate}."
        else:
            yield f"The fastest use is {rate}."
        if self.one_host:
            far = [choice for choice in self.plan.judged if choice.family in self.one_host]
            texts = (
                f"{name_of(use)} {number(use.tok_per_s)} or "
                f"{number(self.one_host[use.family])} tok/s"
                for use in firsts(far, lambda use: use.num_drafts)
            )
            yield f"Over {self.survey.link} or on one host: {', '.join(texts)}."
        kinds = {"sd", TREE} if best.mode in ("sd", TREE) else {best.mode}
        second = next((choice for choice in self.plan.judged if choice.mode not in kinds), None)
        is_asked = any({best, second} == {question.use, question.other} for question in questions)
        if second is not None and not is_asked:
            gain = self.plan.gain(best, second)
            yield f"That is {gain} times the fastest use of another kind, {name_of(second)}."
        for what, use, other in questions:
            if by_rows and is_led and "own" in what:
                yield f"Predicted at an assumed alpha: {self.plan.comparison(use, other)}."
            else:
                yield self.plan.sentence(what, use, other)
        if self.at and questions:
            texts = (
                f"at {number(alpha)} {' and '.join(map(number, self._gains(plan)))}"
                for alpha, plan in self.at.items()
            )
            gains = "these gains are" if len(questions) > 1 else "this gain is"
            yield f"Alpha is assumed: {gains} {', '.join(texts)}."
        if by_rows and not is_led:
            yield f"With other acceptance, {by_rows[0].lower()}{by_rows[1:]}"
        offered = [choice for choice in self.plan.judged if choice.tp in _ENGINES]
        leaders = firsts(offered, lambda choice: choice.mode)[:2]
        is_told = any(set(leaders) == {use, other} for _, use, other in questions)
        is_sheet = is_datasheet(self.survey.profile)
        if questions and len(leaders) > 1 and not is_told and not is_sheet:
            cell = self.plan.comparison(*leaders)
            yield f"Your cell of docs/map.md (T = 1, 2, 4 or 8): {cell}."
        yield self._basis()
        outside = []
        for choice in self.plan.judged:
            measured = self.plan.measured.get(choice.family)
            low, high = self.plan.rate(choice).ends
            if measured is not None and not low <= measured.tok_per_s <= high:
                outside.append(f"{choice.family} {number(measured.tok_per_s)} tok/s")
        if outside:
            yield f"Rows, by the kernels of their time, are outside the interval: {_some(outside)}."
        yield self._limits()

    def _by_rows(self) -> str:
        """Returns a sentence on what measured rows of the pair say about SSD; "" without rows."""
        gains = self.plan.ssd_gains
        if not gains:
            return ""
        low, high = (number(end(gain for gain, _ in gains.values())) for end in (min, max))
        ends = low if low == high else f"{low} to {high}"
        others = ", ".join(dict.fromkeys(name for _, name in gains.values()))
        gpus = f"{self.survey.gpus} {self.unit}s"
        return (
            f"A {self.unit} of its own for the draft {self._measured_verdict}, as measured with "
            f"this pair on {gpus}: SSD makes {ends} times the strongest other use ({others}), by "
            f"rows of {_some(gains)}."
        )

    def _limits(self) -> str:
        """Returns sentences on tensor-parallel degrees for which memory or KV heads are too few."""
        run = self.survey.run
        memory = self.survey.profile.memory_bytes
        texts = []
        large = [str(family.tp) for family in self.survey.too_large if family.mode == "ar"]
        if large and memory is not None:
            texts.append(f"T={_some(large)} does not fit in {memory / 1e9:.0f} GB.")
        heads = resolve_model(run.target or split_pair(str(run.pair))[0]).num_kv_heads
        if self.survey.gpus > heads:
            texts.append(f"No T above {heads}, the number of key-value heads.")
        return " ".join(texts)

    def _basis(self) -> str:
        """Returns a sentence on where durations, acceptance and cache-hit rates come from."""
        run = self.survey.run
        deciding = [*self.plan.judged[:2], *filter(None, [self.plan.first("ssd")])]
        error = f"(±{max(self.plan.error(choice) for choice in deciding):.0%})"
        sources = " ".join(choice.derived or "" for choice in deciding)
        names = dict.fromkeys(re.findall(rf"(\S+) was not measured; it takes {BY_LAYERS}", sources))
        times = "measured times" + " of products alone, below a model's" * (not run.is_transformer)
        times += ", some derived from others" * bool(sources.strip())
        if busy := self.survey.profile.busy:
            times += f" on a busy machine, where {max(busy, key=lambda text: busy[text])}"
        times += f" {error}"
        if is_datasheet(self.survey.profile):
            times = f"a datasheet without host and link costs {error}"
        elif names:
            times = f"times of other models than {', '.join(names)} {error}"
        models = "assumed acceptance and hits"
        if run.laws is not None:
            sources_of = load_laws(run.laws).about["sources"]
            files = ", ".join(str(source["file"]) for source in sources_of)
            models = f"{self.plan.prompts or 'unknown'} prompts of {files}"
            models += self.plan.sampling_text((q.use, q.other) for q in self._questions)
        return f"It rests on {times}, and {models}."

    def _surer(self, details: bool) -> Iterator[str]:
        """Yields lines that name what is only assumed or derived, with the commands that measure
        it. `make pair` measures acceptance and also runs `probe`; so `probe` is printed alone only
        with --details or --laws, or if the profile is a datasheet."""
        run = self.survey.run
        use = next(iter(self.plan.to_probe), self.plan.best)
        is_sheet = is_datasheet(self.survey.profile)
        is_derived = bool(use.derived) or is_sheet
        if self.survey.profile.busy:
            yield "Make it surer: probe again on a quieter machine; the profile names disturbances."
        unknown = ["acceptance", "hits"] * (run.laws is None) + ["times"] * is_derived
        name = f"T{use.tp}D{use.num_drafts}"
        probes = is_derived and (details or is_sheet or run.laws is not None)
        if unknown:
            device = "…" if "/" in self.device else self.device
            then = f" (then plan --profile=out/profiles/{name}.json,{device})" * probes
            yield f"Make it surer: measure {', '.join(unknown)}{then}:"
        if run.laws is None and (details or not is_sheet):
            target, draft = (
                "FOLDER" if model is None or model.startswith("gen:") else model
                for model in (run.target, run.draft)
            )
            names = f"TARGET={shlex.quote(target)} DRAFT={shlex.quote(draft)}"
            if run.pair is not None and has_weights(split_pair(run.pair)[0]):
                names = f"PAIR={shlex.quote(run.pair)}"
            yield f"    make pair {names} PROMPTS=FILE.jsonl GPUS={self.survey.gpus}"
        if probes:
            yield f"    {_command('probe', self.survey, use, _probe_flags(use))} --name={name}"

    def _table(self, choices: Iterable[Choice]) -> Iterator[str]:
        """Yields the lines of the table of configurations, beginning with its header."""
        level = self.level
        yield f"   {'use':14}{'tok/s':>7} {'interval':19}{'settings':39}{'times':10}by rows"
        for choice in choices:
            interval = f"({self.plan.rate(choice).interval})"
            mark = "≈" if choice in level else "→" if choice == self.best else " "
            times = DERIVED if choice.derived else "measured"
            times = "datasheet" if is_datasheet(self.survey.profile) else times
            use = self.plan.measured.get(choice.family)
            line = f" {mark} {choice.family!s:14}{number(choice.tok_per_s):>7} "
            line += f"{interval:18} {choice!s:38} "
            yield f"{line}{times:10}{'' if use is None else number(use.tok_per_s)}".rstrip()

    def _notes(self) -> list[str]:
        """Returns the lines that only --details prints: the legend, the assumptions, how durations
        were derived, and the configuration whose copies on all GPUs make the most tokens/s."""
        notes = [*_LEGEND.splitlines(), f"Assumed: {_assumptions(self.survey.run)}."]
        # Independent copies of a configuration, each with its own batch, may fill all GPUs.
        copied = max(
            self.plan.judged,
            key=lambda choice: (
                self.survey.gpus // choice.gpus * choice.tok_per_s,
                choice.tok_per_s / choice.batch_size,
                -(self.survey.gpus // choice.gpus) * choice.gpus,
            ),
        )
        copies = self.survey.gpus // copied.gpus
        if copies > 1:
            total = number(copies * copied.tok_per_s)
            notes.append(
                f"Most tok/s of all {self.survey.gpus} {self.unit}s: {copies} × {copied.family}, "
                f"{total} tok/s in all, {number(copied.tok_per_s)} each."
            )
        sources: dict[str, list[str]] = {}
        for choice in self.plan.judged:
            for source in filter(None, re.split(rf"; (?={DERIVED})", choice.derived or "")):
                sources.setdefault(source, []).append(str(choice.family))
        return notes + [f"{source}. In: {', '.join(uses)}." for source, uses in sources.items()]


def heading(run: RunConfig, profile: Profile, gpus: int) -> str:
    """Returns the text's first line: models, GPUs, batch size, context length, acceptance rate."""
    pair = run.pair or "/".join(Path(str(name)).name for name in (run.target, run.draft))
    accepted = run.acceptance_text
    kind, _, path = accepted.partition(":")
    if kind == "laws":
        laws = load_laws(path)
        way = "in one forward " if run.parallel_drafting else ""
        of = laws.behind(run.lookahead).fast[PARALLEL] if way else laws.at[-1].accepted
        counts = np.array(of)
        right = counts @ np.arange(len(counts))
        alpha = right / (right + counts[:-1].sum())
        accepted = f"alpha {number(alpha)} {way}of {Path(path).name}"
    elif kind == "alpha":
        assumed = " assumed" * is_assumed(run)
        accepted = f"alpha {number(float(accepted[6:]))}{assumed}"
    else:
        accepted = f"acceptance {kind} as given"
    work = "whole transformers" if run.is_transformer else "matrix products only"
    sequences = f"{run.batch_size:,} sequence{'s' * (run.batch_size > 1)}"
    terms = [sequences, work, f"context {run.context}", accepted]
    return f"{pair} on {gpus} × {profile.device_name}: {', '.join(terms)}"


def is_assumed(run: RunConfig) -> bool:
    """Returns whether no flag gives an acceptance model, so that its rate is only assumed."""
    return run.alpha is None is run.acceptance and run.laws is None


def _assumptions(run: RunConfig) -> str:
    """Returns a text on what the predictions assume: the models of acceptance, of cache hits and of
    lookups, and the options of forwards."""
    law = hit_law_of(run, 1).label
    if run.laws is not None and run.hit_law == FEW_HITS:
        hits = f"as {DEFAULT_SOURCE}, for want of outcomes ({law})"
    elif any(v is not None for v in (run.p_hit, run.hit_law)):
        hits = f"given {law}"
    else:
        hits = "of the same file" if run.laws else f"as {DEFAULT_SOURCE} ({law})"
    terms = [run.acceptance_text, f"hits {hits}", f"lookups {run.acceptance_fast_text}"]
    if not run.is_transformer:
        terms += [*(["fused"] if run.fuse else []), "LM head" if run.lm_head else "no LM head"]
    return ", ".join(terms)


def _some(names: Iterable[str], limit: int = 4) -> str:
    """Returns the first `limit` names, joined by commas, and the number of the others."""
    texts = [*names]
    rest = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + rest


def _lines(texts: Iterable[str]) -> list[str]:
    return [line for text in texts for line in _wrapped(text)]


def _wrapped(text: str) -> list[str]:
    """Breaks a text into lines of at most COLUMNS characters. If the text is indented by four
    spaces, it is a shell command, and backslashes continue its lines."""
    if not text.startswith("    "):
        return textwrap.wrap(text, COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
    lines = [""]
    indent = " " * (len(text) - len(text.lstrip()) + 4)
    for word in re.findall(r"\s*\S+", text):
        if len(lines[-1] + word) > COLUMNS - 2 and lines[-1].strip():
            lines[-1] += " \\"
            word = indent + word.lstrip()
            lines.append("")
        while len(word) > COLUMNS - 2 and "'" not in word:  # The shell joins lines that end in \.
            lines[-1:] = f"{word[: COLUMNS - 1]}\\", ""
            word = word[COLUMNS - 1 :]
        lines[-1] += word
    return lines


def _run_flags(run: RunConfig, choice: Choice) -> dict[str, str]:
    """Returns {flag: value} with which `run` runs a configuration, with its acceptance model."""
    flags = choice.flags()
    if choice.num_drafts == RunConfig(mode=flags["mode"]).drafts:
        del flags["num_drafts"]
    if choice.fan_out is not None and choice.backup_lookahead == choice.lookahead:
        del flags["backup_lookahead"]
    given = said(run)
    if choice.mode != "ar":
        if run.acceptance is not None or run.alpha is not None:
            flags["acceptance"] = cut_law(run.acceptance_text, choice.lookahead)
        if "acceptance_fast" in given:
            flags["acceptance_fast"] = cut_law(run.acceptance_fast, choice.lookahead)
        flags |= {name: given[name] for name in ("p_hit", "hit_law", "laws") if name in given}
    return flags


def _probe_flags(choice: Choice) -> dict[str, str]:
    """Returns {flag: value} with which `probe` measures a configuration, without its models."""
    flags = {} if choice.num_drafts else {"num_drafts": "0"}
    if choice.tree is not None:  # With a draft tree, `probe` must also time the top-k selection.
        settings = choice.flags()
        flags |= {name: settings[name] for name in ("mode", "tree", "lookahead")}
    return flags


def _command(command: str, survey: Survey, choice: Choice, flags: dict[str, str]) -> str:
    """Returns the shell command that starts `run` or `probe` for a configuration: by
    launch/local.sh if that script is in the current folder, else, or on two hosts, by mpirun.
    flags: further flags."""
    run = survey.run
    link = survey.link_of(choice)
    is_far = link is not None and link.is_network
    models = {name: getattr(run, name) for name in ("pair", "target", "draft")}
    flags = {name: value for name, value in models.items() if value is not None} | flags
    runnable = runnable_at(run, choice.tp)
    given = said(runnable)
    products = () if runnable.is_transformer else ("fuse", "lm_head")
    for name in ("batch_size", "forward", *products, "context"):
        if name in given:
            flags[name] = given[name]
    target = run.target or split_pair(str(run.pair))[0]
    if command == "run" and "forward" not in given and has_weights(target):
        flags["workload"] = "gemm"  # For models with weights, `run` would otherwise decode text.
    text = " ".join(f"--{name}={shlex.quote(value)}" for name, value in flags.items())
    if Path("launch/local.sh").is_file() and not is_far:
        return f"{'COMMAND=probe ' * (command == 'probe')}launch/local.sh {choice.gpus} {text}"
    root = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 " * (os.geteuid() == 0)
    hosts = f" --host FIRST:{choice.gpus - 1},SECOND:1" * is_far
    return f"{root}mpirun -np {choice.gpus}{hosts} python -m mpi4py -m mpissd {command} {text}"
