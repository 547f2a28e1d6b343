#!/usr/bin/env python3
"""Makes the built-in profile of a device from what probes of it measured.

    results/h200-probe/build_profile.py PROFILE.json … --to=mpissd/engine/backend/profiles/h200.json

    results/h200-probe/build_profile.py PROFILE.json … --base=OLD.json --hosts=PROFILE.json --to=…

Every probe adds its forwards, those that its jobs of other batches were measured by too, and its
host costs; where several measured the same, each number is their median. A probe from before
kernels were told apart (its forwards have no "kernel") adds its all-reduce alone. One that has no
"read_outs" read four candidates a row in all of its draft's forwards with LM head, if it grew
branches: these are left out. What no probe measured is derived, and says so in "from":

    forwards with LM head     as without it, and what the LM head adds to the largest model that was
                              measured with and without it, at the T next to this one, row by row
                              and kernel by kernel, times the bytes of both heads on a rank
    forwards without --fuse   as with it: the same weights are read
    host costs of T, D = 1    the lead's of T with SD inline, the link's and the draft's of T = 1;
                              a follower hears of a plan by a link and a nap later
    all-reduces of more ranks as --base, the profile before kernels were told apart, had them
    host costs of a method    as the profile --hosts has them, where no probe measured the method

A probe of whole transformers adds forwards, shares of T > 1 and host costs, and no numbers.

Rows of commits in OTHER_KERNELS ran cuBLAS alone, before the chained products (e3455b3): the
profile does not speak for them. Forwards at other T are derived when they are asked for
(mpissd/lab/predict/derive.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from math import log2
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpissd.common.presets import resolve_model
from mpissd.engine.backend.profile import Curve, load_profile
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.lab.predict.costs import HostCosts

Entry = dict[str, Any]
FORWARD = (
    *("model", "tp", "fuse", "lm_head", "kv_tokens", "sequences"),
    *("params", "kernel", "most_rows"),
)
LISTS = ("columns", "forward", "candidates")
HOST = (
    *("mode", "tp", "num_drafts", "batch_size", "lookahead", "lanes"),
    *("context", "forward"),
)
BEFORE = Path(__file__).with_name("before.json")
FEW_ROWS = 32  # of the largest forward of a job that runs the chain
OTHER_KERNELS = ("5fdeef53237c", "7f18aa139c59")
OTHER_LISTS = ("e7f9f3713f92",)  # it read lists of candidates in every draft forward
REMOTE = ("link", "nap", "patience", "glue", "keys", "keys_lane", "step")  # and draft_*


def merged(entries: Iterable[Entry], key: Sequence[str]) -> list[Entry]:
    """One entry for each identity: the medians of what was measured under it, and of how many."""
    alike: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        alike.setdefault(tuple(entry.get(name, 0) for name in key), []).append(entry)
    return [
        {**dict(zip(key, identity, strict=True)), **_median(group)}
        for identity, group in alike.items()
    ]


def is_whole(probe: Entry) -> bool:
    """Whether the probe measured whole transformers."""
    return any(entry.get("sequences") for entry in probe["tables"]["forwards"])


def single(probe: Entry) -> list[Entry]:
    """The probe's forwards that read one candidate a row, those of its own jobs among them."""
    if is_whole(probe):
        return list(probe["tables"]["forwards"])
    forwards = [*probe["tables"]["forwards"], *of_jobs(probe)]
    if probe["tables"].get("read_outs") or all(way["mode"] != "ssd" for way in probe["host"]):
        return forwards
    draft = min(probe["tables"]["forwards"], key=lambda entry: entry["params"])["model"]
    return [each for each in forwards if each["model"] != draft or not each["lm_head"]]


def _median(entries: Sequence[Entry]) -> Entry:
    points: dict[str, list[float]] = {}
    for entry in entries:
        for point, seconds in entry["seconds"].items():
            points.setdefault(point, []).append(seconds)
    number = all(point.isdigit() for point in points)
    order = sorted(points, key=int) if number else list(points)
    many = f", median of {len(entries)} measurements" if len(entries) > 1 else ""
    medians = {point: float(f"{median(points[point]):.6g}") for point in order}
    return {"from": entries[0]["from"] + many, "seconds": medians}


def of_jobs(probe: Entry) -> list[Entry]:
    """The forwards that the probe's own jobs measured while they found their host costs."""
    by_size = sorted(probe["tables"]["forwards"], key=lambda entry: entry["params"])
    entries = []
    for host in probe["host"]:
        for role, like in (("draft", by_size[0]), ("verify", by_size[-1])):
            seconds = (host.get("job_forwards") or {}).get(role)
            if seconds:
                chain = max(map(int, seconds)) <= FEW_ROWS
                kernel = ("chain", FEW_ROWS) if chain else ("cublas", None)
                of_kernel = dict(zip(("kernel", "most_rows"), kernel, strict=True))
                entries.append({**like, **of_kernel, "seconds": seconds})
    return entries


def with_heads(forwards: Sequence[Entry]) -> list[Entry]:
    """Forwards with the LM head where only those without it were measured."""
    known = {_identity(entry): entry for entry in forwards}
    plain = [entry for entry in forwards if not entry["lm_head"]]
    assert not any(entry["sequences"] for entry in plain), "a transformer without its LM head"
    pairs = [(e, known[key]) for e in plain if (key := _identity({**e, "lm_head": True})) in known]
    headed = []
    for entry in plain:
        alike = [pair for pair in pairs if pair[0]["kernel"] == entry["kernel"]]
        if _identity({**entry, "lm_head": True}) not in known and alike:
            headed.append(
                _with_head(entry, *max(alike, key=lambda pair: _likeness(pair[0], entry)))
            )
    return headed


def _identity(entry: Entry) -> tuple[Any, ...]:
    return tuple(entry[name] for name in FORWARD if name not in ("kernel", "params"))


def _likeness(known: Entry, wanted: Entry) -> tuple[int, float]:
    """The larger model first, then the T next to the wanted one."""
    return _shard(known, 1).num_params(ForwardOptions()), -abs(log2(known["tp"] / wanted["tp"]))


def _shard(entry: Entry, tp: int | None = None) -> Shard:
    return Shard(resolve_model(entry["model"]), tp or entry["tp"])


def _with_head(entry: Entry, plain: Entry, headed: Entry) -> Entry:
    options = ForwardOptions(fuse=entry["fuse"], lm_head=True)
    shard = _shard(entry)
    params = shard.num_params(options)
    share = (params - entry["params"]) / (headed["params"] - plain["params"])
    without, behind = (Curve.parse(known) for known in (plain, headed))
    seconds = {
        rows: float(f"{taken + share * max(0.0, behind(int(rows)) - without(int(rows))):.6g}")
        for rows, taken in entry["seconds"].items()
    }
    why = f"derived: LM head of {plain['model']} T={plain['tp']} by its bytes ({entry['from']})"
    return {**entry, "lm_head": True, "params": params, "from": why, "seconds": seconds}


def unfused(forwards: Sequence[Entry]) -> list[Entry]:
    """Forwards without --fuse where only those with it were measured."""
    known = {_identity(entry) for entry in forwards}
    fused = [entry for entry in forwards if entry["fuse"] and not entry["sequences"]]
    others = [{**entry, "fuse": False} for entry in fused]
    why = "derived: as with --fuse, which reads the same weights"
    return [
        {**entry, "from": f"{why} ({entry['from']})"}
        for entry in others
        if _identity(entry) not in known
    ]


def remote(hosts: Sequence[Entry]) -> list[Entry]:
    """Host costs of a draft rank beside T > 1 targets, where only T targets alone, and a draft rank
    beside one target, were measured."""
    hosts = [entry for entry in hosts if entry["forward"] != "transformer"]
    measured = {(e["mode"], e["tp"]) for e in hosts if e["num_drafts"]}
    leads = [e for e in hosts if e["tp"] > 1 and e["mode"] == "sd" and not e["num_drafts"]]
    return [
        _remote(lead, far)
        for lead in leads
        for far in hosts
        if far["tp"] == 1 and far["num_drafts"] and (far["mode"], lead["tp"]) not in measured
        if all(far[name] == lead[name] for name in ("batch_size", "lookahead"))
    ]


def _remote(lead: Entry, far: Entry) -> Entry:
    seconds = {
        name: far["seconds"][name] if name in REMOTE or name.startswith("draft_") else value
        for name, value in lead["seconds"].items()
    }
    costs = HostCosts.from_dict(seconds)
    seconds["follower"] = costs.follower + costs.link + costs.nap
    seconds["lead_send"] = far["seconds"]["lead_send"]  # to the draft: inline nothing is sent
    why = f"derived: lead of T={lead['tp']}, {lead['mode']} D=0; link and draft of T=1, D=1"
    values = {name: far.get(name, 0) for name in HOST}
    return {**values, "tp": lead["tp"], "from": why, "seconds": seconds}


def numbers(probes: Sequence[Entry], base: Entry) -> Entry:
    """Medians over the probes; memory is the device's, of the base."""
    merged_numbers = {}
    for name, known in base["numbers"].items():
        of = [p["numbers"][name] for p in probes if p["numbers"][name]["value"] is not None]
        if name == "memory_bytes" or not of:
            merged_numbers[name] = known
            continue
        source = f"{of[0]['from']}, median of {len(of)} probes"
        merged_numbers[name] = {"value": median(entry["value"] for entry in of), "from": source}
    return merged_numbers


def all_reduce(probes: Iterable[Entry], base: Entry) -> Entry:
    """Latency and rate by ranks: the probes', beyond them the base's."""
    latency, rate = dict(base["all_reduce"]["latency_s"]), dict(base["all_reduce"]["bytes_per_s"])
    measured: dict[str, str] = {}
    for probe in probes:
        own = probe["all_reduce"]
        for ranks, value in (own["latency_s"] or {}).items():
            latency[ranks], rate[ranks] = value, own["bytes_per_s"][ranks]
            measured[ranks] = own["from"]
    if not measured:
        return dict(base["all_reduce"])
    sources = [f"{source} ({ranks} ranks)" for ranks, source in sorted(measured.items())]
    if rest := [ranks for ranks in latency if ranks not in measured]:
        sources.append(f"{', '.join(rest)} ranks as before, {base['all_reduce']['from']}")
    return {"from": "; ".join(sources), "latency_s": latency, "bytes_per_s": rate}


def of_others(hosts: Sequence[Entry], other: Entry | None) -> list[Entry]:
    """Host costs of methods that no probe measured, as another machine's profile has them."""
    known = {(e["mode"], e["num_drafts"] > 0) for e in hosts}
    return [
        {**entry, "from": f"derived: as on {other['device_name']}: {entry['from']}"}
        for entry in (other or {}).get("host", ())
        if other is not None and (entry["mode"], entry["num_drafts"] > 0) not in known
    ]


def build(probes: Sequence[Entry], base: Entry, other: Entry | None = None) -> Entry:
    """The built-in profile. other: the profile whose host costs stand in for missing ones."""
    new = [p for p in probes if all("kernel" in e for e in p["tables"]["forwards"])]
    if not new:
        raise ValueError("no probe that tells kernels apart")
    forwards = merged((e for p in new for e in single(p)), FORWARD)
    forwards += with_heads(forwards)
    forwards += unfused(forwards)
    lists = merged((e for p in new for e in p["tables"].get("read_outs", ())), LISTS)
    shards = merged((e for p in new for e in p["tables"].get("shards", ())), FORWARD)
    every = ({**e, "forward": forward_of(e)} for p in new for e in p["host"])
    hosts = merged(every, HOST)
    made = [{k: (p["provenance"] or {}).get(k) for k in ("commit", "started_at")} for p in probes]
    return {
        "schema": base["schema"],
        "kind": "device",
        "name": base["name"],
        "device_name": base["device_name"],
        "numbers": numbers([p for p in new if not is_whole(p)], base),
        "all_reduce": all_reduce(probes, base),
        "others": "modelled: forwards of no table, by the numbers",
        "other_kernels": list(OTHER_KERNELS),
        "other_lists": list(OTHER_LISTS),
        "tables": {"forwards": forwards, "shards": shards, "read_outs": lists},
        "host": hosts + remote(hosts) + of_others(hosts, other),
        "made_of": [{"name": p["name"], **m} for p, m in zip(probes, made, strict=True)],
    }


def forward_of(host: Entry) -> str:
    """The kind of forward that host costs are of; only a transformer's have a context."""
    return str(host.get("forward") or ("transformer" if host.get("context") else "gemm"))


def text_of(value: Any) -> str:
    """JSON with one line for each entry of a list."""
    if isinstance(value, list):
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
    if isinstance(value, dict) and any(isinstance(v, (dict, list)) for v in value.values()):
        lines = [f"{json.dumps(name)}: {text_of(v)}" for name, v in value.items()]
        return "{\n" + ",\n".join(lines) + "\n}"
    return json.dumps(value)


def main() -> int:
    """Writes the profile, and loads it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profiles", type=Path, nargs="+")
    parser.add_argument("--base", type=Path, default=BEFORE, help="the profile that is replaced")
    parser.add_argument("--hosts", type=Path, help="a profile of another machine")
    parser.add_argument("--to", type=Path, required=True)
    given = parser.parse_args()
    base = json.loads(given.base.read_text())
    other = None if given.hosts is None else json.loads(given.hosts.read_text())
    data = build([json.loads(path.read_text()) for path in given.profiles], base, other)
    given.to.write_text(text_of(data) + "\n")
    profile = load_profile(str(given.to))
    entries = [e for rows in (*data["tables"].values(), data["host"]) for e in rows]
    derived = sum(entry["from"].startswith("derived") for entry in entries)
    print(f"{given.to}: {len(entries)} entries, {derived} derived, of {len(given.profiles)} probes")
    print(f"jobs of at most {profile.few_rows} rows run a kernel of their own")
    return 0


if __name__ == "__main__":
    sys.exit(main())
