#!/usr/bin/env python3
"""What a study's cells are expected to give, written down first, and what they gave, beside it.

    results/beside.py expect results/two-gpus              # writes expected.jsonl, and its table
    results/beside.py table results/two-gpus/expected.jsonl OUT [more rows, for the comparisons]
    results/beside.py table results/two-gpus/expected.jsonl results/two-gpus   # of committed rows

Expected rates are the recurrence's mean: over the built-in `h200`, or, of whole transformers, over
the forwards that were measured (results/forwards.json) with the host's phases of such rows. A
grid's name ends with its ranks (NAME-T1D1.grid). Text has no expected rate: its tokens must be
equal instead.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mpissd.common.config import RunConfig  # noqa: E402
from mpissd.common.row import Row  # noqa: E402
from mpissd.engine.backend.profile import load_profile  # noqa: E402
from mpissd.engine.job import Job, resolve  # noqa: E402
from mpissd.lab.predict.costs import DeviceCosts, HostCosts  # noqa: E402
from mpissd.lab.predict.derive import with_derived  # noqa: E402
from mpissd.lab.predict.hosts import host_of  # noqa: E402
from mpissd.lab.predict.recorded import predict_replay  # noqa: E402
from mpissd.lab.predict.simulation import expected as mean_of  # noqa: E402
from mpissd.lab.sweep.grid import read_grid  # noqa: E402
from mpissd.lab.sweep.plan import make_plan  # noqa: E402
from mpissd.lab.tables import load_rows  # noqa: E402
from mpissd.lab.tables.best import compare_methods  # noqa: E402
from mpissd.lab.tables.claims import judged as claims_of  # noqa: E402

# Host work beside whole transformers: the medians of the phases of results/h200-real, SSD, K = 4.
HOST = HostCosts(
    lead_send=18e-6, lead_commit=35e-6, lead_upload=82e-6, lead_launch=22e-6, lead_sample=24e-6,
    lead_record=24e-6, link=5e-6, draft_read=5e-6, draft_commit=30e-6, draft_lookup=5e-6,
    draft_assemble=20e-6, draft_send=11e-6, draft_record=8e-6, glue=30e-6, keys=91e-6, wake=5e-6,
)  # fmt: skip
AFAR = 0.1  # of what was expected: a cell further off is marked


def key(tp: int, flags: dict[str, str]) -> str:
    """Returns a cell as text: T, and what its grid says of it but the seed."""
    return json.dumps([tp, sorted((name, flags[name]) for name in flags if name != "seed")])


def key_of(row: Row) -> str:
    """Returns the cell of a row that a sweep measured."""
    return key(int(row.tp or 0), (row.sweep or {}).get("flags", {}))


def ranks_of(grid: Path) -> tuple[int, int]:
    """Returns (T, D) of a grid by its name, NAME-T1D1.grid."""
    return int(grid.stem.rpartition("-T")[2].partition("D")[0])


def jobs(grid: Path) -> Iterator[tuple[dict[str, str], Job]]:
    """Yields (flags, job) of a grid's cells, of their first seed."""
    for point in make_plan(read_grid(str(grid)), RunConfig(backend="cupy"), 1, (1, 1)).points:
        assert point.config is not None, f"{grid}: {point.error}"
        if point.config.seed == 0 and point.config.workload != "text":
            job = resolve(point.config, ranks_of(grid), backend="cupy", memory_bytes=None)
            yield dict(point.flags), job


def costs_of(job: Job) -> tuple[DeviceCosts, HostCosts]:
    """Returns what forwards and host take: as measured of transformers, else the built-in's."""
    if not job.config.is_transformer:
        known = with_derived(load_profile("h200"), job.target_shard, 1, job.options)
        return DeviceCosts.from_profile(known, job), host_of(known, job)
    known = json.loads((ROOT / "results" / "forwards.json").read_text())

    def of(name: str, tp: int) -> dict[int, float]:
        table = known[name][str(tp)][str(job.config.context)]
        return {int(rows): seconds for rows, seconds in table.items()}

    drafts = None if job.draft is None else {1: 1e-6}  # a lookup has no forwards
    if job.draft is not None and job.draft.head is None:
        drafts = of(job.draft.name, 1)
    return DeviceCosts.from_points(of(job.target.name, job.tp), drafts), HOST


def expect(folder: Path) -> int:
    """Writes FOLDER/expected.jsonl and prints its table."""
    lines = []
    for grid in sorted(folder.glob("*.grid")):
        for flags, job in jobs(grid):
            lines.append({**described(job), "tok_per_s": rate_of(job), "flags": flags})
    (folder / "expected.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    print("\n".join(table(lines, {})))
    return 0


def rate_of(job: Job) -> float:
    """Returns the tok/s that are expected: the laws' mean, or those of the recording's rounds."""
    device, host = costs_of(job)
    if job.config.workload == "replay":
        return round(float(predict_replay(job, device, host)["tok_per_s"]), 1)
    return round(float(mean_of(job, device, host).tok_per_s[0]), 1)


def described(job: Job) -> dict[str, Any]:
    """Returns a cell in words: its setting, its use, and T."""
    config, drafts = job.config, job.config.drafts
    law = config.acceptance_text if config.recording is None else Path(config.recording).stem
    words = [job.target.name.rpartition("-")[2]]
    words += [law.replace("smollm2-", "")] if config.mode != "ar" else []
    words += ["whole"] if config.is_transformer else ["LM head"] if config.lm_head else []
    words += [f"context {config.context}"] if config.context else []
    words += [f"b={config.batch_size}"] if config.batch_size > 1 else []
    mode = config.mode.upper() + " inline" * job.inline
    mode = mode if config.schedule is None else config.schedule.upper()
    mode = "lookup" if job.draft is not None and job.draft.head is not None else mode
    use = [mode, f"T={job.tp}", *([f"D={drafts}"] if drafts else [])]
    use += [f"K={job.lookahead}"] if job.lookahead else []
    use += [f"F={sum(job.fan_out)} {config.backup}"] if job.fan_out else []
    return {"setting": ", ".join(words), "use": " ".join(use), "tp": job.tp}


def table(lines: Iterable[dict[str, Any]], measured: dict[str, list[Row]]) -> list[str]:
    """Returns a Markdown table of the cells; ! marks one that lies afar from what was expected."""
    text = ["| setting | use | expected tok/s | measured | over it | rows | hits |"]
    text.append("|---|---|---|---|---|---|---|")
    for line in lines:
        rows = measured.get(key(line["tp"], line["flags"]), [])
        rates = [float(row.tok_per_s) for row in rows if row.tok_per_s]
        shown = ["", "", f"{len(rows)}", ""]
        if rates:
            ratio = median(rates) / line["tok_per_s"]
            mark = " !" * (abs(ratio - 1) > AFAR)
            hits = [row.hit_rate for row in rows if row.hit_rate is not None]
            shown[:2] = f"{median(rates):.0f}", f"{ratio:.2f}{mark}"
            shown[3] = f"{median(hits):.2f}" if hits else ""
        cells = [line["setting"], line["use"], f"{line['tok_per_s']:.0f}", *shown]
        text.append(f"| {' | '.join(cells)} |")
    return text


def judged(rows: list[Row]) -> Iterator[str]:
    """Yields a line for each SSD beside the strongest other use of its GPUs.

    The line has no verdict where seeds are few, or a use that fits was not measured.
    """
    for comparison in compare_methods(rows):
        setting = comparison.setting
        law = str(setting.get("acceptance") or setting.get("recording")).split()[0]
        about = f"{setting['target']}, {law}, b={setting['batch_size']}"
        for claim in claims_of(setting, rows):
            yield f"{about}: {claim}"


def bars(rows: list[Row]) -> Iterator[str]:
    """Yields what no rate says: the share of the floor at one row, and whether texts are equal."""
    for row in rows:
        if row.mode == "ar" and row.floor_fraction and row.forward == "transformer":
            bar = {2: 0.88, 4: 0.85}.get(row.tp)
            share = f"{row.target} T={row.tp} context {row.context}: {row.floor_fraction:.3f}"
            yield f"{share} of the floor at M = 1" + f" (bar {bar})" * bool(bar)
    texts = {str(row.token_digest) for row in rows if row.workload == "text"}
    if texts:
        names = sorted(f"{r.mode} T={r.tp}" for r in rows if r.workload == "text")
        yield f"text, {', '.join(names)}: {'equal' if len(texts) == 1 else 'UNEQUAL'} tokens"


def show(expected: Path, out: Path, more: list[Path]) -> int:
    """Prints cells, comparisons and bars; 1 where texts differ or no row is there."""
    lines = [json.loads(text) for text in expected.read_text().splitlines()]
    found = sorted(
        [*out.glob("runs*.jsonl"), *out.glob("measured*.jsonl"), *out.glob("*/runs*.jsonl")]
    )
    rows = load_rows(found) if found else []
    measured = defaultdict(list)
    for row in rows:
        measured[key_of(row)].append(row)
    print("\n".join(table(lines, measured)))
    known = {key(line["tp"], line["flags"]) for line in lines}
    alien = sum(len(of) for name, of in measured.items() if name not in known)
    print(f"\n{len(rows)} rows, {alien} of them expected nowhere")
    told = [*bars(rows), *judged([*rows, *(load_rows(more) if more else [])])]
    print("\n".join(told))
    return int(not rows or any("UNEQUAL" in line for line in told))


def main(words: list[str]) -> int:
    """Returns 2 with the usage where the words are wrong."""
    if words[:1] == ["expect"] and len(words) == 2:
        return expect(Path(words[1]))
    if words[:1] == ["table"] and len(words) > 2:
        return show(Path(words[1]), Path(words[2]), [Path(word) for word in words[3:]])
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
