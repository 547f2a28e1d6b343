"""The pages: links have targets, and commands parse."""

import json
import os
import re
import runpy
import shlex
from pathlib import Path

import pytest

from mpissd.cli import arguments
from mpissd.common.errors import ConfigError
from tests.needs import needs
from tests.scripts import ROOT, call

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "results").rglob("README.md")),
]
BLOCK = re.compile(r"```\w*\n(.*?)```|((?:^    .+\n)+)", re.DOTALL | re.MULTILINE)


def lines(page: Path, start: str) -> list[list[str]]:
    """Words that follow `start` in the lines of a page's code, without comments.

    Lines with an ellipsis, a choice or a pipe are no whole commands.
    """
    text = "\n".join(fenced or indented for fenced, indented in BLOCK.findall(page.read_text()))
    found = [line.partition(start)[2] for line in text.replace("\\\n", " ").splitlines()]
    whole = [line for line in found if line and not set("…[|>") & set(line.partition("#")[0])]
    return [shlex.split(line, comments=True) for line in whole]


def test_every_command_of_a_page_parses() -> None:
    for page in PAGES:
        for words in lines(page, "-m mpissd "):
            try:
                arguments.parse(words)
            except ConfigError as error:
                raise AssertionError(f"{page}: {' '.join(words)}: {error}") from error


def test_every_make_command_of_the_first_pages_is_known() -> None:
    for page in ("README.md", "docs/commands.md", "docs/pair.md", "docs/text.md"):
        for words in lines(ROOT / page, "make "):
            done = call(ROOT, "make", "-n", *words, "PYTHON=python")
            assert done.returncode == 0, done.stderr


@pytest.mark.long
@needs("LIBRARY, a Python with transformers, accelerate and gguf", "LIBRARY" in os.environ)
def test_a_hugging_face_folder_is_written_and_answers(tmp_path: Path) -> None:
    _, _, section = (ROOT / "docs/text.md").read_text().partition("## A Hugging Face folder")
    set_up, *commands = section.partition("```bash\n")[2].partition("```")[0].splitlines(True)
    assert set_up == "make venv PAIR=smollm2\n" and commands.pop().startswith("make pair ")
    clone = tmp_path / "clone"
    call(ROOT, "git", "clone", "-q", ".", str(clone))
    (clone / ".venv").symlink_to(ROOT / ".venv")
    path = f"{Path(os.environ['LIBRARY']).parent}:{os.environ['PATH']}"
    script = "".join(commands).replace("make ", "make PYTHON=.venv/bin/python ")
    done = call(clone, "bash", "-ec", script, PATH=path)
    assert json.loads(done.stdout.splitlines()[-1])["tokens"] > 20, done.stderr


@pytest.mark.long
def test_the_tables_of_the_pages_are_what_their_commands_print() -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    for page in PAGES:
        text = page.read_text()
        assert tables["rewritten"](text) == text, f"docs/tables.py {page}"


def headings(page: Path) -> set[str]:
    heads = (line.lstrip("# ") for line in page.read_text().splitlines() if line.startswith("#"))
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            file, _, heading = link.partition("#")
            path = (page.parent / file).resolve() if file else page
            assert "://" in link or path.exists(), (page, link)
            assert not heading or path.suffix != ".md" or heading in headings(path), (page, link)
