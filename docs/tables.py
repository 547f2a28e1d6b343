#!/usr/bin/env python3
"""Rewrites the tables of the documentation that a command prints.

    docs/tables.py [FILE …]        (default: every .md file beside this one, and in results/)

A table stands between two comments, of which the first holds its command, of mpissd or of a script
in docs/ or results/:

    <!-- python -m mpissd compare results/h200-tables -->
    <!-- end -->
    <!-- python results/drafts/tables.py shipped -->
    <!-- end -->

The command runs in the repository's root; a last line of JSON is left out.

A table of SSD against the strongest other use of its GPUs is between two comments as well:

    <!-- claims results/h200-pairs,results/two-gpus/runs.jsonl lm_head real -->
    <!-- /claims -->

RESULTS are folders and files of rows. lm_head keeps only the lines of rows with the LM head, real
only those whose hits follow no assumed model; both may be left out.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpissd.lab.tables.claims import Claim

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGES = [
    ROOT / "README.md",
    *sorted(HERE.glob("*.md")),
    *sorted((ROOT / "results").rglob("README.md")),
]
_BLOCK = re.compile(
    r"<!-- python ((?:-m mpissd|results/|docs/).+?) -->\n(.*?)<!-- end -->", re.DOTALL
)

_CLAIMS = re.compile(
    r"(<!-- claims (\S+)( lm_head)?( real)? -->\n).*?(<!-- /claims -->)", re.DOTALL
)
sys.path.insert(0, str(ROOT))


def commands(text: str) -> list[str]:
    """The commands that a page holds tables of."""
    return [match[1] for match in _BLOCK.finditer(text)]


def rewritten(text: str) -> str:
    """A page with its tables as their commands print them now."""
    return with_claims(_BLOCK.sub(lambda match: _block(match[1]), text))


def with_claims(text: str) -> str:
    """A page with its tables of claims made anew from their rows."""
    from mpissd.lab.tables.claims import claims
    from mpissd.lab.tables.load import load_rows

    def table(block: re.Match[str]) -> str:
        start, results, with_head, real, end = block.groups()
        kept = claims(load_rows([ROOT / name for name in results.split(",")]))
        kept = [claim for claim in kept if claim.setting["lm_head"] or not with_head]
        kept = [claim for claim in kept if not (real and claim.is_assumed)]
        return f"{start}{rendered(kept)}\n{end}"

    return _CLAIMS.sub(table, text)


def rendered(every: Sequence[Claim]) -> str:
    """Claims as Markdown, a table for each pair, machine, GPUs and hit model."""
    from mpissd.common.rivals import Family
    from mpissd.lab.tables.claims import tables_of

    tables = []
    for group in tables_of(every).values():
        setting, law, gpus = group[0].setting, group[0].hit_law, group[0].gpus
        gains = [claim.gain for claim in group if claim.gain is not None]
        rounds, seeds = min(g.num_rounds for g in gains), min(g.num_seeds for g in gains)
        fused = ", fused" * bool(setting["fuse"])
        about = f"{setting['target']}/{setting['draft']} on {gpus} × {setting['device_name']} "
        about += f"({setting['dtype']}{fused}, context {setting['context']}, batch "
        about += f"{setting['batch_size']}), hits by {law}{', assumed' * group[0].is_assumed}. "
        about += f"{seeds} seeds × {rounds} rounds, paired by seed within a visit; tok/s: medians; "
        about += "in brackets: a GPU."
        head = ["alpha", "LM head", "SSD", "tok/s", f"strongest other use of {gpus} GPUs", "tok/s"]
        head += ["SSD over it", "independent copies", "tok/s in all"]
        lines = [head]
        for claim in group:
            other = claim.other
            if other is None:
                continue
            copied, in_all = "–", "–"
            if claim.copies is not None:
                count, use = claim.copies
                has_inline = Family("sd", use.family.tp, 0) in {u.family for u in claim.others}
                least = "≥ " * (use.family.mode == "ar" and not has_inline)  # SD inline: unknown
                copied = f"{count} × {use}"
                in_all = f"{least}{count * use.tok_per_s:,.0f} ({use.per_gpu:.0f})"
            lines.append(
                [
                    str(claim.setting["acceptance"]).removeprefix("alpha:"),
                    "yes" if claim.setting["lm_head"] else "no",
                    str(claim.ssd).removeprefix("SSD "),
                    f"{claim.ssd.tok_per_s:,.0f} ({claim.ssd.per_gpu:.0f})",
                    str(other),
                    f"{other.tok_per_s:,.0f} ({other.per_gpu:.0f})",
                    claim.text,
                    copied,
                    in_all,
                ]
            )
        rule = "|---" * len(head) + "|"
        texts = [f"| {' | '.join(cells)} |" for cells in lines]
        tables.append("\n".join([about, "", texts[0], rule, *texts[1:]]))
    return "\n\n".join(tables)


def _block(command: str) -> str:
    printed = subprocess.run(
        [sys.executable, *shlex.split(command)],
        cwd=ROOT,
        check=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.splitlines()
    table = printed[:-1] if printed[-1].startswith(("{", "[")) else printed
    return "\n".join([f"<!-- python {command} -->", *table, "<!-- end -->"])


def main() -> int:
    """0; the pages that changed are named."""
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else PAGES:
        before = path.read_text()
        after = rewritten(before)
        if after != before:
            path.write_text(after)
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
