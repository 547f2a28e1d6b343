"""Every page is reachable from README by links, and every path that a page names is there."""

from __future__ import annotations

import re
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"(?<![\w./-])((?:docs|results|launch|tests|mpissd|analysis)/[\w./-]*\w)")

# docs/architecture.md leaves out mpissd/.
IN_A_WING = re.compile(r"(?<![\w./-])((?:common|engine|lab|ops|cli)/[\w./-]*\w)")


def pages() -> list[Path]:
    """README, CONTRIBUTING, the documentation, and a README for each folder of rows."""
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "results").rglob("README.md")),
    ]


def anchors(page: Path) -> set[str]:
    heads = (line.lstrip("# ") for line in page.read_text().splitlines() if line.startswith("#"))
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def linked(page: Path) -> list[tuple[str, Path, str]]:
    """(as written, the file, the heading) of each link that stays in the repository."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = []
    for link in LINK.findall(text):
        name, _, anchor = link.partition("#")
        if "://" not in link:
            found.append((link, (page.parent / name).resolve() if name else page, anchor))
    return found


@lru_cache(maxsize=1)
def tracked() -> frozenset[str]:
    """Files and folders that a clone has; {} where this is none."""
    done = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    names = {Path(line) for line in done.stdout.splitlines()}
    return frozenset(str(path) for name in names for path in (name, *name.parents))


def test_every_page_is_reachable_from_readme() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        page = page / "README.md" if page.is_dir() else page  # as a folder is shown
        if page not in seen and page.suffix == ".md" and page.is_file():
            seen.add(page)
            todo += [path for _, path, _ in linked(page)]
    lost = [str(page.relative_to(ROOT)) for page in pages() if page not in seen]
    assert not lost, f"no link from README leads to {lost}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link, path, anchor in linked(page):
        assert path.exists(), f"{link}: no such file"
        assert not anchor or path.suffix != ".md" or anchor in anchors(path), f"{link}: no heading"
        if tracked():
            assert str(path.relative_to(ROOT)) in tracked(), f"{link}: not in the repository"


@pytest.mark.parametrize("page", pages()[1:], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_is_there(page: Path) -> None:
    """A name may be the beginning of several files', as in results/emulated-*."""
    for name in NAMED.findall(page.read_text()):
        path = ROOT / name
        assert path.exists() or list(path.parent.glob(path.name + "*")), f"{name}: no such path"


def test_every_path_of_the_architecture_is_there() -> None:
    named = IN_A_WING.findall((ROOT / "docs/architecture.md").read_text())
    lost = [name for name in named if not list((ROOT / "mpissd").glob(name + "*"))]
    assert len(named) > 40 and not lost


def test_paths_and_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A *Head*: 8B\n[a](b.md#c) [d](https://x/y.md)\n```\n[e](f)\n```\n`docs/g.md`"
    )
    assert linked(page) == [("b.md#c", (tmp_path / "b.md").resolve(), "c")]
    assert anchors(page) == {"a-head-8b"} and NAMED.findall(page.read_text()) == ["docs/g.md"]
