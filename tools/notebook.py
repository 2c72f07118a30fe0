"""Write examples/tutorial.ipynb from docs/tutorial.md, without outputs.

    python tools/notebook.py

A Python block becomes a code cell and the text between two blocks a Markdown cell.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/tutorial.md"
NOTEBOOK = ROOT / "examples/tutorial.ipynb"
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def code_blocks(text: str) -> list[str]:
    """The Python blocks of a page, in order."""
    return BLOCK.findall(text)


def notebook(text: str) -> str:
    """The page as a notebook. Links to other pages lead to docs/."""
    linked = re.sub(r"\]\((\w+\.md)", r"](../docs/\1", text)
    parts = BLOCK.split(linked)  # text, code, text, …
    cells = [_cell(part.strip("\n"), code=i % 2 == 1, number=i) for i, part in enumerate(parts)]
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"cells": cells, "metadata": {"kernelspec": python}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def _cell(source: str, code: bool, number: int) -> dict[str, Any]:
    cell: dict[str, Any] = {
        "cell_type": "code" if code else "markdown",
        "id": f"cell-{number}",
        "metadata": {},
    }
    if code:
        cell |= {"execution_count": None, "outputs": []}
    return cell | {"source": source.splitlines(keepends=True)}


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
