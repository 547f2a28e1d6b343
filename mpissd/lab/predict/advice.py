"""The text of `plan`'s advice, its JSON, and the choice of --tree=auto.

The screen has 23 lines of 100 columns: sentences with their intervals, the fastest uses, the
command that runs the best one, and the command that measures what is unknown. `details` has every
use, the assumptions, and the source of each derived time. If a use could not be judged, the first
sentence names it, and nothing is called best. Where acceptance is assumed, rows of the same pair
and machine decide about SSD, and the sentences say how the gains depend on it.
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.exclusions import BEST_TREES, refuse
from mpissd.common.flags import DRAFTING, said
from mpissd.common.presets import has_weights, resolve_model, split_pair
from mpissd.common.real_pairs import DEFAULT_SOURCE
from mpissd.common.rivals import LOOKUPS, TREE, WORTH, Family
from mpissd.common.rounds import Source
from mpissd.common.row import Row
from mpissd.engine.backend.profile import Profile, device_kind, known_profiles
from mpissd.engine.law.acceptance import hit_law_of, load_laws
from mpissd.lab.predict.advisor import Advice, firsts, most_in_all
from mpissd.lab.predict.derive import BY_LAYERS, DERIVED, shipped_profiles, with_hosts
from mpissd.lab.predict.search import (
    LOOKUP,
    Choice,
    Space,
    Survey,
    candidates,
    cut_law,
    job_of,
    placed,
    runnable,
    weigh,
)
from mpissd.lab.predict.verdict import Evidence, is_datasheet, name_of, number
from mpissd.lab.tables.best import Use as Measured
from mpissd.lab.tables.best import method_of, mode_of
from mpissd.lab.tables.load import of_one_group

COLUMNS, LINES = 100, 23  # a terminal of 24 lines shows the prompt as well
ALPHAS = 0.6, 0.9  # at which gains are shown beside those at an assumed one
CONTEXT = 512  # tokens of context, if neither a flag nor a file of laws gives them
FEW_HITS = "smollm2"  # the hit model if a pair's file has too few outcomes for its own
_ENGINES = (1, 2, 4, 8)  # T that common engines offer
_ROWS = 10
_GAIN = 1.03  # --tree=auto: a tree must promise so many times the best chain's rate
_FORWARD = ("batch_size", "forward", "fuse", "lm_head", "context")
_LEGEND = """\
T, D: GPUs of the target and of the draft; "inline" drafts on the target's own.
K: tokens drafted a round, or levels of a tree. Of SSD: --fan_out, the outcomes drafted for \
(uniform: so many a position; geometric: so many in all); on a miss: --backup, what drafts then \
(jit: the draft model; fast: a lookup), and its K if it differs.
times: measured on this device; derived, computed from measured ones; or of a datasheet. by rows: \
tok/s of measured rows of the same case. ≈: no slower than the best for sure."""


@dataclass(frozen=True)
class Screen:
    """An advice for at most `gpus` GPUs, with its evidence.

    device: the value of --profile. at: advice at other alphas than the assumed one. gains: see
    `measured_gains`.
    """

    survey: Survey
    advice: Advice
    evidence: Evidence
    gpus: int
    device: str = ""
    at: Mapping[float, Advice] = field(default_factory=dict)
    gains: Mapping[str, tuple[float, str]] = field(default_factory=dict)

    @property
    def best(self) -> Choice | None:
        """The use that is advised; None if one that would fit could not be judged."""
        return None if self.advice.missing else self.chosen

    @property
    def chosen(self) -> Choice:
        """The fastest use; without SSD, if by rows it does not pay and acceptance is assumed."""
        if is_assumed(self.evidence.run) and self.seen == "does not pay":
            return self.advice.other("ssd", self.gpus) or self.advice.best
        return self.advice.best

    @property
    def seen(self) -> str | None:
        """What measured gains say of SSD; None without any."""
        pays = [gain >= WORTH for gain, _ in self.gains.values()]
        some = "pays on some prompts" if any(pays) else "does not pay"
        return ("pays" if all(pays) else some) if pays else None

    @property
    def level(self) -> list[Choice]:
        """The uses that are no slower than the best one for sure."""
        return [] if self.best is None else level_with(self.best, self.advice, self.evidence)

    @property
    def unit(self) -> str:
        """What a rank is called."""
        is_gpu = re.search("NVIDIA|Tesla|Instinct|Radeon", self.evidence.profile.device_name)
        return "GPU" if is_gpu else "rank"

    def lines(self, *, details: bool = False) -> list[str]:
        """Returns the text. details: every use, the assumptions, the sources of derived times."""
        run, judged = self.evidence.run, self.advice.judged
        above = [heading(run, self.evidence.profile, self.gpus), *self._sentences()]
        device = f" (on another machine append --backend=emulated --device={self.device})"
        device *= "/" not in self.device
        below = [
            f"Run {name_of(self.chosen)}{device}:",
            f"    {_command(run, self.chosen)}",
            *self._surer(details),
        ]
        under = _lines(below)
        room = LINES - len(under) - 3 - 2 * (run.laws is not None)  # make pair prints two more
        while not details and len(_lines(above)) > room - 2:
            above.pop()
        screen = _lines(above)
        most = min(_ROWS, room - len(screen))
        if details:
            return [*screen, "", *self._table(judged), "", *_lines(self._notes()), "", *under]
        # The fastest use of each kind and place of the draft, then the fastest others.
        kinds = firsts(judged, lambda choice: Family.of(choice).name)
        shown = [*kinds, *(choice for choice in judged if choice not in kinds)][:most]
        more = f"{len(judged) - len(shown)} more uses, " * (len(judged) > len(shown))
        rest = f"   --details: {more}what the settings mean, where each time comes from"
        return [*screen, "", *self._table([c for c in judged if c in shown]), rest, *under]

    def numbers(self) -> dict[str, Any]:
        """Returns the JSON. `judged` is sorted, fastest first."""
        judged, missing = self.advice.judged, self.advice.missing
        measured = self.evidence.measured
        return {
            "best": None if self.best is None else asdict(self.best),
            "judged": [asdict(choice) for choice in judged],
            "unjudged": [{**asdict(f), "why": self.survey.unjudged[f]} for f in missing],
            "level": [asdict(Family.of(choice)) for choice in self.level],
            "measured": {str(family): use.tok_per_s for family, use in measured.items()},
            "too_large": [asdict(family) for family in self.survey.too_large],
            "probe_first": [asdict(Family.of(choice)) for choice in self.advice.to_probe],
            "verdicts": {what: self.evidence.answer(*uses) for what, *uses in self._questions()},
            "measured_gains": {name: gain for name, (gain, _) in self.gains.items()},
            "gains_at": {alpha: self._gains(advice) for alpha, advice in self.at.items()},
        }

    def _gains(self, advice: Advice) -> list[float]:
        """Returns how many times as fast the uses with what each question asks about are."""
        drafting, alone = advice.first(*DRAFTING, TREE), advice.first("ar", LOOKUP)
        pairs = (drafting, alone), (advice.first("ssd"), advice.other("ssd", self.gpus))
        rates = [use.tok_per_s / other.tok_per_s for use, other in pairs if use and other]
        return rates[: len(self._questions())]

    def _questions(self) -> list[tuple[str, Choice, Choice]]:
        """Returns (what may pay, the fastest use with it, the fastest use without it): the draft,
        and a GPU of its own for it. A question is left out if a use of it is not known."""
        drafting, ssd = self.advice.first(*DRAFTING, TREE), self.advice.first("ssd")
        alone = self.advice.first("ar", LOOKUP)
        if self.advice.missing or drafting is None or alone is None:
            return []
        other = None if ssd is None else self.advice.other("ssd", self.gpus)
        if ssd is None or other is None:
            return [("The draft", drafting, alone)]
        if (ssd, other) == (drafting, alone):
            return [(f"The draft, on a {self.unit} of its own,", ssd, other)]
        own = f"A {self.unit} of its own for the draft"
        return [("The draft", drafting, alone), (own, ssd, other)]

    def _sentences(self) -> Iterator[str]:
        """Yields the answers: the fastest use, its lead, what pays, and what all this rests on."""
        best, evidence, questions = self.chosen, self.evidence, self._questions()
        by_rows, is_led = self._by_rows(), is_assumed(evidence.run)
        if by_rows and is_led:
            yield by_rows
        rate = f"{name_of(best)} {self.unit}{'s' * (best.gpus > 1)}: {evidence.rate(best)} tok/s"
        if self.advice.missing:
            names = _some(map(str, self.advice.missing))
            reasons = _some(dict.fromkeys(self.survey.unjudged.values()), 1)
            yield f"Not judged: {names}, so nothing here is called best: {reasons}."
            yield f"The fastest of the others is {rate}."
        elif is_datasheet(evidence.profile):
            yield f"A datasheet cannot tell: probe first. The fastest by it is {rate}."
        else:
            if best != self.advice.best:
                yield f"The fastest predicted use without it is {rate}."
            elif self.level:
                yield f"The uses marked ≈ cannot be told apart; the first is {rate}."
            else:
                yield f"The fastest use is {rate}."
        kind = (best.mode, "sd" if best.mode == TREE else TREE if best.mode == "sd" else "")
        second = next((choice for choice in self.advice.judged if choice.mode not in kind), None)
        if second is not None and not any({best, second} == {*uses} for _, *uses in questions):
            gain = evidence.gain(best, second)
            yield f"That is {gain} times the fastest use of another kind, {name_of(second)}."
        for what, *uses in questions:
            is_seen = by_rows and is_led and "own" in what
            predicted = f"Predicted at an assumed alpha: {evidence.comparison(*uses)}."
            yield predicted if is_seen else evidence.sentence(what, *uses)
        if self.at and questions:
            texts = (
                f"at {number(alpha)} {' and '.join(map(number, self._gains(advice)))}"
                for alpha, advice in self.at.items()
            )
            gains = "these gains are" if len(questions) > 1 else "this gain is"
            yield f"Alpha is assumed: {gains} {', '.join(texts)}."
        if by_rows and not is_led:
            yield f"With other acceptance, {by_rows[0].lower()}{by_rows[1:]}"
        yield self._basis()
        ran = {use: row.tok_per_s for use, row in evidence.measured.items()}
        rates = {Family.of(use): evidence.rate(use).ends for use in self.advice.judged}
        off = [
            f"{use} {number(r)}"
            for use, r in ran.items()
            if not rates[use][0] <= r <= rates[use][1]
        ]
        if off:
            yield f"Measured rows are outside the predicted interval: {_some(off)}."
        yield self._limits()

    def _by_rows(self) -> str:
        """Returns what measured rows of other acceptance say of SSD; nothing without any."""
        if not self.gains:
            return ""
        low, high = (number(end(gain for gain, _ in self.gains.values())) for end in (min, max))
        others = ", ".join(dict.fromkeys(name for _, name in self.gains.values()))
        ends = low if low == high else f"{low} to {high}"
        return (
            f"A {self.unit} of its own for the draft {self.seen}, as measured with this pair on "
            f"{self.gpus} {self.unit}s: SSD makes {ends} times the strongest other use ({others}), "
            f"by rows of {_some(self.gains)}."
        )

    def _limits(self) -> str:
        """Returns which T the machine cannot use (memory, heads), and which T most engines lack,
        with what SSD gains among the others."""
        run, memory = self.evidence.run, self.evidence.profile.memory_bytes
        texts = []
        large = [str(family.tp) for family in self.survey.too_large if family.mode == "ar"]
        if large and memory is not None:
            texts.append(f"T={_some(large)} does not fit in {memory / 1e9:.0f} GB.")
        heads = resolve_model(run.target or split_pair(str(run.pair))[0]).num_kv_heads
        if self.gpus > heads:
            texts.append(f"No T above {heads}, the number of key-value heads.")
        deciding = [self.advice.best, *(use for _, *uses in self._questions() for use in uses)]
        if odd := sorted({use.tp for use in deciding if use.tp not in _ENGINES}):
            text = f"mpissd runs T={_some(map(str, odd))}; most engines only 1, 2, 4, 8"
            offered = [choice for choice in self.advice.judged if choice.tp in _ENGINES]
            ssd = [choice for choice in offered if choice.mode == "ssd"]
            others = [choice for choice in offered if choice.mode != "ssd"]
            if ssd and others:
                text += f": there {self.evidence.comparison(ssd[0], others[0])}"
            texts.append(f"{text}.")
        return " ".join(texts)

    def _basis(self) -> str:
        """Returns what the answers rest on: the origin of times, acceptance and hits."""
        run = self.evidence.run
        deciding = [*self.advice.judged[:2], *filter(None, [self.advice.first("ssd")])]
        error = f"(±{max(self.evidence.error(choice) for choice in deciding):.0%})"
        sources = " ".join(choice.derived or "" for choice in deciding)
        names = dict.fromkeys(re.findall(rf"(\S+) was not measured; it takes {BY_LAYERS}", sources))
        times = "measured times" + " of products alone, below a model's" * (not run.is_transformer)
        times += ", some derived from others" * bool(sources.strip())
        if busy := self.evidence.profile.busy:
            times += f" on a busy machine, where {max(busy, key=lambda text: busy[text])}"
        times += f" {error}"
        if is_datasheet(self.evidence.profile):
            times = f"a datasheet without host and link costs {error}"
        elif names:
            times = f"times of other models than {', '.join(names)} {error}"
        models = "assumed acceptance and hits"
        if run.laws is not None:
            files = ", ".join(str(of["file"]) for of in load_laws(run.laws).about["sources"])
            models = f"{self.evidence.prompts or 'unknown'} prompts of {files}"
            models += self.evidence.sampling_text(uses for _, *uses in self._questions())
        return f"It rests on {times}, and {models}."

    def _surer(self, details: bool) -> Iterator[str]:
        """Yields what is unknown, each with the command that measures it.

        `make pair` also probes, so a probe of its own is for details, datasheets and --laws.
        """
        run, use = self.evidence.run, next(iter(self.advice.to_probe), self.advice.best)
        is_derived = bool(use.derived) or is_datasheet(self.evidence.profile)
        if self.evidence.profile.busy:
            yield "Make it surer: probe again on a quieter machine; the profile names disturbances."
        unknown = ["acceptance", "hits"] * (run.laws is None) + ["times"] * is_derived
        name, also = f"T{use.tp}D{use.num_drafts}", "…" if "/" in self.device else self.device
        is_sheet = is_datasheet(self.evidence.profile)
        probes = is_derived and (details or is_sheet or run.laws is not None)
        if unknown:
            then = f" (then plan --profile=out/profiles/{name}.json,{also})" * probes
            yield f"Make it surer: measure {', '.join(unknown)}{then}:"
        if run.laws is None and (details or not is_sheet):
            models = (run.target, run.draft)
            target, draft = (
                "FOLDER" if name is None or name.startswith("gen:") else name for name in models
            )
            names = f"TARGET={shlex.quote(target)} DRAFT={shlex.quote(draft)}"
            if run.pair is not None and has_weights(split_pair(run.pair)[0]):
                names = f"PAIR={shlex.quote(run.pair)}"
            yield f"    make pair {names} PROMPTS=FILE.jsonl GPUS={self.gpus}"
        if probes:
            yield f"    {_probe(run, use)} --name={name}"

    def _table(self, choices: Iterable[Choice]) -> Iterator[str]:
        """Yields the rows of a table of uses, after its header."""
        level = self.level
        yield f"   {'use':14}{'tok/s':>7} {'interval':19}{'settings':39}{'times':10}by rows"
        for choice in choices:
            interval = f"({self.evidence.rate(choice).interval})"
            mark = "≈" if choice in level else "→" if choice == self.best else " "
            times = DERIVED if choice.derived else "measured"
            times = "datasheet" if is_datasheet(self.evidence.profile) else times
            use = self.evidence.measured.get(Family.of(choice))
            line = f" {mark} {Family.of(choice)!s:14}{number(choice.tok_per_s):>7} "
            line += f"{interval:18} {_how(choice):38} "
            yield f"{line}{times:10}{'' if use is None else number(use.tok_per_s)}".rstrip()

    def _notes(self) -> list[str]:
        """Returns the legend, the assumptions, and the source of each derived time."""
        notes = [*_LEGEND.splitlines(), f"Assumed: {_assumptions(self.evidence.run)}."]
        most, copies = most_in_all(self.advice.judged, self.gpus)
        if copies > 1:
            rates = f"{number(copies * most.tok_per_s)} tok/s in all, {number(most.tok_per_s)} each"
            every = f"all {self.gpus} {self.unit}s"
            notes.append(f"Most tok/s of {every}: {copies} × {Family.of(most)}, {rates}.")
        sources: dict[str, list[str]] = {}
        for choice in self.advice.judged:
            for source in filter(None, re.split(rf"; (?={DERIVED})", choice.derived or "")):
                sources.setdefault(source, []).append(str(Family.of(choice)))
        return notes + [f"{source}. In: {', '.join(uses)}." for source, uses in sources.items()]


def heading(run: RunConfig, profile: Profile, gpus: int) -> str:
    """Returns the first line: the pair, the devices, the work, and the assumed acceptance."""
    pair = run.pair or "/".join(Path(str(name)).name for name in (run.target, run.draft))
    accepted = run.acceptance_text
    if accepted.startswith("laws:"):
        counts = np.array(load_laws(str(run.laws)).at[-1].accepted)
        right = counts @ np.arange(len(counts))
        alpha = right / (right + counts[:-1].sum())
        accepted = f"alpha {number(alpha)} of {Path(str(run.laws)).name}"
    elif accepted.startswith("alpha:"):
        assumed = " assumed" * is_assumed(run)
        accepted = f"alpha {number(float(accepted[6:]))}{assumed}"
    else:
        accepted = f"acceptance {accepted.partition(':')[0]} as given"
    work = "whole transformers" if run.is_transformer else "matrix products only"
    sequences = f"{run.batch_size:,} sequence{'s' * (run.batch_size > 1)}"
    terms = [sequences, work, f"context {run.context}", accepted]
    return f"{pair} on {gpus} × {profile.device_name}: {', '.join(terms)}"


def is_assumed(run: RunConfig) -> bool:
    """Returns whether no flag gives the acceptance."""
    return run.alpha is None is run.acceptance and run.laws is None


def _assumptions(run: RunConfig) -> str:
    """Returns the models of acceptance, hits and lookups, and the parts of a forward."""
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


def _some(names: Iterable[str], most: int = 4) -> str:
    """Returns the first names, and how many are left out: --json has all."""
    texts = [*names]
    return ", ".join(texts[:most]) + f" and {len(texts) - most} more" * (len(texts) > most)


def _lines(texts: Iterable[str]) -> list[str]:
    return [line for text in texts for line in _wrapped(text)]


def _wrapped(text: str) -> list[str]:
    """Breaks a text into lines of at most COLUMNS; a command's lines end with a backslash."""
    if not text.startswith("    "):
        return textwrap.wrap(text, COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
    lines, indent = [""], " " * (len(text) - len(text.lstrip()) + 4)
    for word in re.findall(r"\s*\S+", text):
        if len(lines[-1] + word) > COLUMNS - 2 and lines[-1].strip():
            lines[-1] += " \\"
            word = indent + word.lstrip()
            lines.append("")
        while len(word) > COLUMNS - 2 and "'" not in word:  # the shell joins them again
            lines[-1:] = f"{word[: COLUMNS - 1]}\\", ""
            word = word[COLUMNS - 1 :]
        lines[-1] += word
    return lines


def with_laws(run: RunConfig, has_context: bool) -> RunConfig:
    """Returns a configuration with --laws at the context of its prompts, if it gives none, and with
    the default hit model if the prompts do not determine theirs."""
    laws, known = load_laws(str(run.laws)), dict[str, Any]()
    if run.is_transformer and not has_context:
        contexts = (int(of.get("context") or 0) for of in laws.about["sources"])
        known["context"] = max(contexts) or CONTEXT
    fits = [of for of in laws.at if of.lookahead <= laws.longest_fitted]
    if run.p_hit is None is run.hit_law and not all(of.rejected and of.complete for of in fits):
        known["hit_law"] = FEW_HITS
    return replace(run, **known)


def measured_uses(
    run: RunConfig, profile: Profile, advice: Advice, rows: Sequence[Row]
) -> dict[Family, Measured]:
    """Returns the fastest measured configuration of each use that was judged, in the planned case:
    on the same device, with the same models, acceptance and hits."""
    kept = _rows_here(run, profile, rows)
    names = ("batch_size", "context", *(() if run.is_transformer else ("fuse", "lm_head")))
    shared = {"workload": "gemm", "schedule": None, **{name: getattr(run, name) for name in names}}
    fastest = {}
    for choice in advice.judged:
        job, use = job_of(run, choice), Family.of(choice)
        case = {**shared, "target": job.target.name}
        if choice.mode == LOOKUP:
            case["acceptance_fast"] = job.acceptance[Source.FAST].label
        elif job.draft is not None:
            case |= {"draft": job.draft.name, "acceptance": job.acceptance[Source.CACHE].label}
        case |= {"hit_law": job.hit_law.label} if choice.mode == "ssd" else {}
        alike: dict[tuple[str, int], list[Row]] = {}
        for row in kept:
            family = Family(mode_of(row), int(row.tp), int(row.world_size - row.tp))
            is_alike = family == use and bool(row.tree_nodes) == (choice.tree is not None)
            if is_alike and all(row.get(k) == v for k, v in case.items()):
                alike.setdefault((method_of(row), int(row.lookahead)), []).append(row)
        if alike:
            fastest[use] = max(map(Measured.of, alike.values()), key=lambda one: one.tok_per_s)
    return fastest


def measured_gains(
    run: RunConfig, profile: Profile, gpus: int, rows: Sequence[Row]
) -> dict[str, tuple[float, str]]:
    """Returns {prompts: (SSD's tok/s over the strongest other use's, that use)} by measured rows.

    They are whole transformers of the pair on so many of these devices, whose acceptance was
    measured: in a recording, or by laws. Of each prompts the newest visit counts. Where no tree ran
    beside SSD, only a gain that does not pay counts: more uses could but lower it.
    """
    job = job_of(run, Choice("sd", 1, 0, run.batch_size, 1, backup_lookahead=1))
    case = job.target.name, gpus, run.batch_size, run.context
    visits: dict[tuple[str, str], dict[tuple[str, int], list[Row]]] = {}
    for row in sorted(_rows_here(run, profile, rows), key=_visit):
        source = row.recording or row.laws
        is_alike = (row.target, row.world_size, row.batch_size, row.context) == case
        is_pair = row.draft in (None, job.draft and job.draft.name) or mode_of(row) in LOOKUPS
        if source and is_alike and is_pair and run.is_transformer and row.schedule is None:
            visit = visits.setdefault((str(source), _visit(row)[1]), {})
            visit.setdefault((method_of(row), int(row.lookahead)), []).append(row)
    gains = {}
    for (source, _), alike in visits.items():
        uses = sorted(map(Measured.of, alike.values()), key=lambda use: -use.tok_per_s)
        ssd = [use for use in uses if use.family.mode == "ssd"][:1]
        others = [use for use in uses if use.family.mode != "ssd"]
        for use, other in zip(ssd, others, strict=False):
            over, gain = use.over(other), use.tok_per_s / other.tok_per_s
            gain = over.speedup if over is not None and over.is_headline else gain
            if gain < WORTH or TREE in (other.family.mode for other in others):
                gains[Path(source.split()[0]).stem] = gain, other.family.name
    return dict(sorted(gains.items()))


def _visit(row: Row) -> tuple[str, str]:
    """Returns when a row was measured, and on which devices."""
    about = row.provenance or {}
    devices = sorted(str(rank.get("uuid")) for rank in about.get("ranks") or ())
    return str(about.get("started_at")), " ".join(devices)


def _rows_here(run: RunConfig, profile: Profile, rows: Iterable[Row]) -> list[Row]:
    """Returns the rows of forwards as planned that were measured on such a device."""
    return [
        row
        for row in of_one_group(rows)
        if row.backend != "emulated" and row.other_draft_device is None
        if (row.forward == "transformer") == run.is_transformer
        if device_kind(row.device_name) == profile.kind
    ]


def level_with(best: Choice, advice: Advice, evidence: Evidence) -> list[Choice]:
    """Returns the uses that are no slower than the best one for sure, with it; none if it wins.

    The interval of its gain over them reaches 1, or they were measured no slower.
    """
    level = []
    for choice in advice.judged:
        seen = evidence.measured_gain(best, choice)
        contradicted = seen is not None and seen < 1
        if choice != best and (contradicted or evidence.gain(best, choice).ends[0] <= 1):
            level.append(choice)
    return [best, *level] if level else []


def _how(choice: Choice) -> str:
    """Returns K, and SSD's fan-out and backup."""
    text = "" if choice.mode == "ar" else f"K={choice.lookahead}"
    text += "" if choice.tree is None else f" tree={choice.tree}"
    if choice.fan_out is not None:
        text += f" {choice.fan_out}; on a miss {choice.backup}"
        fewer = choice.backup_lookahead != choice.lookahead
        text += f" K={choice.backup_lookahead}" * fewer
    return text


def _command(run: RunConfig, choice: Choice) -> str:
    """Returns the command line that runs a choice under the planned token models and options."""
    flags = {**_models(run), **choice.flags()}
    if choice.num_drafts == RunConfig(mode=flags["mode"]).drafts:
        del flags["num_drafts"]
    if choice.fan_out is not None and choice.backup_lookahead == choice.lookahead:
        del flags["backup_lookahead"]
    run = runnable(run, choice.tp)
    given = said(run)
    if choice.mode != "ar":
        if run.acceptance is not None or run.alpha is not None:
            flags["acceptance"] = cut_law(run.acceptance_text, choice.lookahead)
        if "acceptance_fast" in given:
            flags["acceptance_fast"] = cut_law(run.acceptance_fast, choice.lookahead)
        flags |= {name: given[name] for name in ("p_hit", "hit_law", "laws") if name in given}
    flags |= _forward(run)
    target = run.target or split_pair(str(run.pair))[0]
    if "forward" not in flags and has_weights(target):
        flags["workload"] = "gemm"  # with weights, imposed tokens need this flag
    return _mpirun(choice.gpus, "run", flags)


def _probe(run: RunConfig, choice: Choice) -> str:
    """Returns the command line that measures a choice's forwards and host costs."""
    flags = _models(run) | ({} if choice.num_drafts else {"num_drafts": "0"})
    if choice.tree is not None:  # then the probe measures lists of candidates as well
        flags |= {n: v for n, v in choice.flags().items() if n in ("mode", "tree", "lookahead")}
    flags |= _forward(runnable(run, choice.tp))
    return _mpirun(choice.gpus, "probe", flags)


def _forward(run: RunConfig) -> dict[str, str]:
    """Returns the flags of a run's forwards; a transformer has its LM head without a flag."""
    given = said(run)
    ignored = ("fuse", "lm_head") if run.is_transformer else ()
    return {name: given[name] for name in _FORWARD if name in given and name not in ignored}


def _models(run: RunConfig) -> dict[str, str]:
    return {n: v for n in ("pair", "target", "draft") if (v := getattr(run, n)) is not None}


def _mpirun(ranks: int, command: str, flags: dict[str, str]) -> str:
    """Returns a command line, of the launch script if it is here: that also starts as root."""
    text = " ".join(f"--{name}={shlex.quote(value)}" for name, value in flags.items())
    if Path("launch/local.sh").is_file():
        return f"{'COMMAND=probe ' * (command == 'probe')}launch/local.sh {ranks} {text}"
    root = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 " * (os.geteuid() == 0)
    return f"{root}mpirun -np {ranks} python -m mpi4py -m mpissd {command} {text}"


def profile_of(device_name: str) -> Profile:
    """Returns the shipped profile of a device; raises ConfigError if there is none."""
    kind = device_kind(device_name)
    if (profile := shipped_profiles().get(kind)) is not None:
        return profile
    known = ", ".join(known_profiles())
    raise ConfigError(f"tree=auto on {kind}: no profile of it: allowed: tree=1..256, or on {known}")


def with_best_tree(
    config: RunConfig, profile: Profile, tp: int, levels: int | None = None
) -> tuple[RunConfig, dict[str, Any]]:
    """Returns a configuration of --tree=auto with the fastest tree, or chain, and their rates.

    levels: K, if it is given (None: any). A chain stays unless the best tree is _GAIN as fast.
    Raises ConfigError if laws, forwards or host costs are not known, or for SSD.
    """
    if config.mode == "ar":
        return replace(config, tree=None), {}
    refuse(BEST_TREES, config=config)
    if config.workload != "gemm" and config.laws is None:
        raise ConfigError(
            f"tree=auto with workload={config.workload}: needs laws: a file of `mpissd pair`"
        )
    whole = "transformer" if config.is_transformer else config.forward
    imposed = replace(config, tree=None, workload="gemm", recording=None, forward=whole)
    if config.laws is not None:
        imposed = with_laws(imposed, config.context > 0)
    place = placed(imposed, with_hosts(profile), tp, tp + config.drafts)
    every = candidates(imposed, place, tp + config.drafts, Space((), ()), trees=True)
    choices = [
        choice
        for choice in every
        if choice.mode in ("sd", "tree") and choice.num_drafts == config.drafts
        if levels in (None, choice.lookahead)
    ]
    weighed = weigh(choices, imposed, [place])
    chains = [choice for choice in weighed if choice.tree is None]
    if not chains:
        raise ConfigError(
            f"tree=auto: profile {profile.name!r} has no host costs of SD, D={config.drafts}, or "
            "no forwards of so many rows: allowed: tree=1..256"
        )
    derived = place.label(chains[0]) or ""
    if imposed.is_transformer and (is_datasheet(profile) or BY_LAYERS in derived):
        raise ConfigError(
            f"tree=auto: profile {profile.name!r} has no whole forward of the pair: probe first: "
            "mpissd probe --forward=transformer"
        )
    chain, best = (max(those, key=lambda one: one.tok_per_s) for those in (chains, weighed))
    if best.tok_per_s < _GAIN * chain.tok_per_s:
        best = chain
    chosen = {
        "tree": best.tree,
        "lookahead": best.lookahead,
        "tok_per_s": best.tok_per_s,
        "chain": {"lookahead": chain.lookahead, "tok_per_s": chain.tok_per_s},
        "profile": profile.name,
        "acceptance": imposed.acceptance_text,
    }
    return replace(config, tree=best.tree, lookahead=best.lookahead), chosen
