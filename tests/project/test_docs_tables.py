"""The tables in the documentation are what their commands print of the committed rows."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.output import read_rows
from tests.scripts import ROOT, load

tables = load("docs/tables.py")

PAGES = [page for page in tables.PAGES if tables.commands(page.read_text())]
OF_ROWS = ["docs/drafts.md", "docs/laws.md", "results/README.md", "results/real-pair/README.md"]
BLOCK = re.compile(r"<!-- python .+? -->\n(.*?)<!-- end -->", re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_pages_of_rows_have_their_tables() -> None:
    assert {"docs/predictions.md", *OF_ROWS} <= set(map(name, PAGES))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_committed_table_is_what_its_command_prints(page: Path) -> None:
    assert tables.rewritten(page.read_text()) == page.read_text(), f"docs/tables.py {name(page)}"


@pytest.mark.parametrize("page", OF_ROWS)
def test_a_wrong_cell_is_found(page: str) -> None:
    """In the last line of each block one digit is another, or a study has no rows."""
    text = (ROOT / page).read_text()
    wrong, blocks = text, 0
    for match in BLOCK.finditer(text):
        lines = match[1].splitlines()
        place, last = [(n, line) for n, line in enumerate(lines) if line.startswith(("|", "- "))][
            -1
        ]
        changed = re.sub(r"\d(?=\D*$)", lambda d: str((int(d[0]) + 1) % 10), last)
        changed = f"{last}; no rows yet" if page == "results/README.md" else changed
        assert changed != last
        lines[place] = changed
        wrong = wrong.replace(match[1], "\n".join(lines) + "\n")
        blocks += 1
    assert blocks and wrong != text
    assert tables.rewritten(wrong) == tables.rewritten(text) != wrong


def test_the_drafts_page_has_no_table_beside_them() -> None:
    left = BLOCK.sub("", (ROOT / "docs/drafts.md").read_text())
    assert [line for line in left.splitlines() if line.lstrip().startswith("|")] == []


def test_the_laws_page_has_numbers_in_them_alone() -> None:
    left = BLOCK.sub("", (ROOT / "docs/laws.md").read_text())
    found = [line for line in left.splitlines() if line.startswith("|")]
    assert found and not any(re.match(r"\| (HumanEval|chat|editing|summarising)", s) for s in found)


def test_a_table_that_is_not_its_command_s_is_rewritten() -> None:
    command = "-m mpissd predict --rows=results/h200-tables"
    text = f"before\n<!-- python {command} -->\nold\n<!-- end -->\nafter\n"
    found = tables.rewritten(text)
    assert found.startswith(f"before\n<!-- python {command} -->\n| machine | T |")
    assert "old" not in found and found.endswith("<!-- end -->\nafter\n") and "{" not in found


def study(folder: Path, *files: str) -> str:
    """The line of a study with these files."""
    path = folder / "one"
    path.mkdir()
    (path / "README.md").write_text("# What it is\n\nMore.\n")
    for file in files:
        (path / file).parent.mkdir(exist_ok=True)
        (path / file).write_text("{}\n")
    (line,) = load("results/index.py").index(folder)
    return str(line)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), "; no rows yet"),
        (("measure.sh", "t1.grid"), "; no rows yet"),
        (("runs.jsonl",), ""),
        (("expected.jsonl", "predicted_t2.jsonl"), "; expected rows, none measured yet"),
        (("expected.jsonl", "runs.jsonl"), ""),
        (("profiles/a.json",), ""),
    ],
)
def test_the_index_says_which_study_has_no_rows(
    tmp_path: Path, files: tuple[str, ...], said: str
) -> None:
    assert study(tmp_path, *files) == f"- [one](one): What it is{said}"


def test_the_index_has_every_study_once() -> None:
    listed = re.findall(r"^- \[(.+?)\]", (ROOT / "results/README.md").read_text(), re.M)
    assert listed == sorted(p.parent.name for p in ROOT.glob("results/*/README.md"))


def test_longer_answers_are_counted_on_the_recording() -> None:
    longer, recordings = load("results/recordings/longer.py"), ROOT / "results/recordings"
    found = [*longer.rows(longer.load(str(recordings / "smollm2-chat-350.npz")))]
    assert found == read_rows(recordings / "longer.jsonl")
    whole, *parts = found[:4]
    assert whole["rounds"] == sum(part["rounds"] for part in parts)


def test_what_is_said_of_longer_answers_is_of_their_rows() -> None:
    at = {
        (row["lookahead"], row["from"], row["to"]): row["tokens_a_round"]
        for row in read_rows(ROOT / "results/recordings/longer.jsonl")
    }
    more = [round(100 * (at[k, 0, None] / at[k, 0, 128] - 1)) for k in (4, 7)]
    said = (
        f"emits {more[0]}% more tokens than one of its first 128 at K = 4, {more[1]}% more at K = 7"
    )
    assert said in " ".join((ROOT / "docs/drafts.md").read_text().split())


def test_acceptance_of_drawn_text_is_that_of_the_rows() -> None:
    """Alpha at T = 1, F = 4, C = 1: of the 24 chat prompts, then of HumanEval's."""
    rows = read_rows(ROOT / "results/real-pair/saguaro.jsonl")
    (row,) = (r for r in rows if (r["temperature"], r["fan_out"], r["saguaro_c"]) == (1, 4, 1))
    page = (ROOT / "docs/drafts.md").read_text()
    for prompts, name in ((row["prompts"][:24], "chat"), (row["prompts"][24:], "HumanEval")):
        counts = [sum(column) for column in zip(*prompts, strict=True)][:5]
        accepted = sum(k * count for k, count in enumerate(counts))
        alpha = f"{accepted / (accepted + sum(counts[:4])):.3f}".removeprefix("0")
        assert re.search(rf"{re.escape(alpha)} \([.\d]+ to [.\d]+\)\s+on {name}", page), alpha


def test_what_steps_make_on_a_core_follows_from_them() -> None:
    drafts: dict[str, Any] = {
        row["draft"]: row for row in read_rows(ROOT / "results/drafts/distilled.jsonl")
    }
    rows = read_rows(ROOT / "results/drafts/steps.jsonl")
    assert [row["shape"] for row in rows] == [*drafts]
    for row in rows:
        for k, told in row["predicted"].items():
            verify, steps = row["verify_ms"][str(int(k) + 1)], int(k) * row["step_ms"]
            assert told["T_SD"] == pytest.approx(steps / verify, rel=1e-3)
            for kind in told.keys() - {"T_SD"}:
                evaluated = drafts[row["shape"]]["evaluation"][kind]["by_lookahead"][k]
                rate = 1e3 * evaluated["tokens_per_round"] / (steps + verify)
                assert told[kind] == pytest.approx(rate, rel=1e-3)


def test_spearman_by_hand() -> None:
    """Ranks 1 2 3 4 5 against 1 3 2 5 4: 1 − 6·4 / (5·24) = .8; ties share a rank."""
    spearman = load("results/drafts/tables.py").spearman
    r, low, high = spearman([10, 20, 30, 40, 50], [1, 3, 2, 5, 4])
    assert r == pytest.approx(0.8)
    wide = 1.96 * math.sqrt((1 + 0.32) / 2)
    assert low == pytest.approx(math.tanh(math.atanh(0.8) - wide))
    assert high == pytest.approx(math.tanh(math.atanh(0.8) + wide))
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4])[0] == pytest.approx(0.9486833)
    assert spearman([1, 2, 3, 4], [2, 3, 5, 9])[0] == 1.0
