"""The tutorial runs as it stands, and its notebook is the same page."""

import json
import re

import pytest

from test_docs import DOCS, ROOT, tool

PAGE = (DOCS / "tutorial.md").read_text(encoding="utf-8")
NOTEBOOK = ROOT / "examples/tutorial.ipynb"


@pytest.fixture(scope="module")
def shown() -> str:
    """What the blocks of the page print when they run one after another."""
    from contextlib import redirect_stdout
    from io import StringIO

    out, names = StringIO(), {"__name__": "tutorial"}
    with redirect_stdout(out):
        for block in tool("notebook").code_blocks(PAGE):
            exec(compile(block, "docs/tutorial.md", "exec"), names)
    return out.getvalue()


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in the output:\n{text}"
    return float(found[1])


def test_the_page_runs_and_shows_what_it_says(shown: str):
    assert number(r"full computation: (\S+)", shown) < 1e-5
    assert number(r"logits changed by (\S+)", shown) < 1e-5
    assert number(r"rope +loss (\S+),", shown) < 3.5 and number(r"fox +loss (\S+),", shown) < 3.5
    assert number(r"-> (\S+)", shown) < number(r"loss (\S+) ->", shown)
    assert "b'def " in shown


def test_the_notebook_is_the_page():
    assert NOTEBOOK.read_text(encoding="utf-8") == tool("notebook").notebook(PAGE), (
        "run python tools/notebook.py"
    )


def test_the_notebook_is_well_formed():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code"]
    assert code == tool("notebook").code_blocks(PAGE)
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code")
    for link in re.findall(
        r"\]\((\.\./docs/[^)#]+)", "".join(line for cell in cells for line in cell["source"])
    ):
        assert (NOTEBOOK.parent / link).exists(), link
