"""The error messages quoted by docs/faq.md are those of the source."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^### `(.+)`$", re.MULTILINE)
QUOTED = HEADING.findall((ROOT / "docs/faq.md").read_text(encoding="utf-8"))
VALUE = "…"  # stands for a value in the page, and here for an expression in an f-string


def message(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
    return None


@pytest.fixture(scope="module")
def messages() -> list[str]:
    files = (ROOT / "src").rglob("*.py")
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    return [text for node in nodes if (text := message(node))]


def occurs(quoted: str, messages: list[str]) -> bool:
    """The words between the values stand in one message, in this order."""
    pattern = re.compile(".*".join(re.escape(part) for part in quoted.split(VALUE)), re.DOTALL)
    return any(pattern.search(text) for text in messages)


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_message_is_in_the_source(quoted: str, messages: list[str]):
    assert occurs(quoted, messages), f"docs/faq.md quotes {quoted!r}: quote the message as it is now"


def test_the_check_can_fail(messages: list[str]):
    assert not occurs("query heads must divide the key heads", messages)
    assert len(QUOTED) >= 20
