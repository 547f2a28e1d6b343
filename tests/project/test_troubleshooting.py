"""docs/troubleshooting.md knows what mpissd may say: read off the code, compared by its words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
ERRORS = {"ConfigError", "FaultError", "ProtocolError", "GateError", "Refused", "Overdue"}
HOLE = "\0"  # a value in the text of a message


def words(node: ast.expr) -> str:
    """A message with holes; one that is computed elsewhere is a hole altogether."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(words, node.values))
    if isinstance(node, ast.BinOp):
        return words(node.left) + words(node.right)
    return HOLE


def messages(source: str) -> Iterator[tuple[int, str]]:
    """(line, words) of what is raised, and of what a wait is called."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in ERRORS and node.args:
            yield node.lineno, words(node.args[0])
        elif name == "until" and len(node.args) > 1:
            yield node.lineno, words(node.args[1])


def telling(message: str) -> list[str]:
    """Its runs of fixed words that tell it from others; none where it says what is allowed."""
    if "allowed" in message:
        return []
    parts = [" ".join(part.split()).strip(" :;,.'\"()[]") for part in message.split(HOLE)]
    longest = max(parts, key=len)
    return [part for part in parts if len(part) >= 10 or (part == longest and len(part) >= 4)]


def told() -> str:
    return plain(PAGE.read_text())


def plain(text: str) -> str:
    return " ".join(text.replace("`", "").replace("\\|", "|").split())


def test_every_message_is_there() -> None:
    page, missing = told(), list[str]()
    for path in sorted((ROOT / "mpissd").rglob("*.py")):
        for line, message in messages(path.read_text()):
            parts = telling(message)
            if parts and not any(plain(part) in page for part in parts):
                missing.append(f"{path.relative_to(ROOT)}:{line}: {' … '.join(parts)}")
    assert not missing, "say in docs/troubleshooting.md what to do:\n" + "\n".join(missing)


@pytest.mark.parametrize("script", ["env.sh", "local.sh", "setup.sh", "job.sh"])
def test_what_the_scripts_say_is_there(script: str) -> None:
    text = (ROOT / "launch" / script).read_text()
    said = re.findall(r'(?:echo|stop|say|refuse) "([^"]*)', text)
    page = told()
    for message in said:
        parts = re.split(r"\$\{[^}]*\}+|\$\([^)]*\)+|\$\*|\$\w+", message)
        longest = max(parts, key=len).strip(" :;,.'()[]…=")
        if len(longest) >= 12 and "install" not in message.partition(" ")[0]:
            assert longest.partition(" (")[0] in page, f"{script}: {message}"


def test_the_links_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in PAGE.read_text().splitlines()
        if line.startswith("#")
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE.read_text())) <= headings


def test_messages_are_read_off_the_code() -> None:
    source = (
        'raise ConfigError(f"x={x}: cannot be written: {e}")\n'
        'waiter.until(test, "draft: answer")\n'
        'raise ConfigError(f"y={y}: allowed: 1")\n'
        "raise ConfigError(str(error))\n"
    )
    found = [telling(message) for _, message in messages(source)]
    assert found == [["cannot be written"], ["draft: answer"], [], []]
