"""The pages: links lead somewhere, commands parse, and printed tables are what the rows say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mpissd.cli import arguments
from tests.scripts import ROOT, call, load

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "results").rglob("README.md")),
]
tables = load("docs/tables.py")
BLOCK = re.compile(r"```\w*\n(.*?)```|((?:^    .+\n)+)", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"(?<![\w./-])((?:docs|results|launch|tests|mpissd|analysis)/[\w./-]*\w)")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def lines(page: Path, start: str) -> list[list[str]]:
    """Words that follow `start` in the lines of a page's code, without comments.

    Lines with an ellipsis, a choice or a pipe are no whole commands.
    """
    text = "\n".join(fenced or indented for fenced, indented in BLOCK.findall(page.read_text()))
    found = [line.partition(start)[2] for line in text.replace("\\\n", " ").splitlines()]
    whole = [line for line in found if line and not set("…[|>") & set(line.partition("#")[0])]
    return [shlex.split(line, comments=True) for line in whole]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_of_a_page_parses(page: Path) -> None:
    for words in lines(page, "-m mpissd "):
        arguments.parse(words)


def test_every_make_command_of_the_first_pages_is_known() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "commands.md"):
        for words in lines(page, "make "):
            done = call(ROOT, "make", "-n", *words, "PYTHON=python")
            assert done.returncode == 0, done.stderr


def headings(page: Path) -> set[str]:
    heads = (line.lstrip("# ") for line in page.read_text().splitlines() if line.startswith("#"))
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def links(page: Path) -> list[tuple[Path, str]]:
    """(file, heading) of each link of a page that stays in the repository."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    parts = [link.partition("#")[::2] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    return [
        ((page.parent / path).resolve() if path else page, heading)
        for path, heading in parts
        if "://" not in path
    ]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    """A path may be the beginning of several files', as in results/emulated-*."""
    for path, heading in links(page):
        assert path.exists(), path
        assert not heading or path.suffix != ".md" or heading in headings(path), (path, heading)
    for path in map(ROOT.joinpath, NAMED.findall(page.read_text())):
        assert path.exists() or list(path.parent.glob(f"{path.name}*")), path


def test_every_page_is_reachable_from_readme() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        page = page / "README.md" if page.is_dir() else page
        if page not in seen and page.suffix == ".md" and page.is_file():
            seen.add(page)
            todo += [path for path, _ in links(page)]
    assert [name(page) for page in PAGES if page not in seen] == []


PRINTED = [page for page in PAGES if tables.commands(page.read_text())]


@pytest.mark.parametrize("page", PRINTED, ids=name)
def test_a_printed_table_is_what_its_command_prints(page: Path) -> None:
    assert tables.rewritten(page.read_text()) == page.read_text(), f"docs/tables.py {name(page)}"


def test_a_table_that_differs_is_rewritten() -> None:
    command = "results/study.py table results/h200-limit"
    text = f"before\n<!-- python {command} -->\nold\n<!-- end -->\nafter\n"
    fresh = tables.rewritten(text)
    assert fresh.startswith(f"before\n<!-- python {command} -->\n| setting |")
    assert "old" not in fresh and fresh.endswith("|\n<!-- end -->\nafter\n")
