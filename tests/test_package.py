"""The package as a newcomer meets it: imports, examples, and a README that tells the truth."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import grape_pe as grape
from grape_pe import testing

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TABLE = {m[1]: m[2].split("|") for m in re.finditer(r"^\| `([a-z-]+)` \|(.*)\|$", README, re.M)}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_needs_torch_only():
    heavy = "('transformers', 'triton', 'numpy.testing', 'rich', 'datasets', 'safetensors')"
    assert run(f"import sys, grape_pe; print([m for m in {heavy} if m in sys.modules])").strip() == "[]"


def test_import_is_fast():
    """At most 0.2 s of processor time beyond torch, the best of five."""
    code = "import torch, time; t = time.process_time(); import grape_pe; print(time.process_time() - t)"
    assert min(float(run(code)) for _ in range(5)) < 0.2


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path: Path):
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_readme_snippet_runs():
    snippet = re.search(r"```python\n(import torch.*?)```", README, re.S)
    space: dict = {}
    exec(snippet[1], space)
    assert space["y"].shape == (2, 8, 128, 64)


def test_readme_table_lists_every_encoding():
    assert list(TABLE) == ["nope", *[name for name in TABLE if name != "nope"]]
    assert set(TABLE) == set(grape.names())


@pytest.mark.parametrize("name", sorted(TABLE))
def test_readme_table_tells_the_truth(name: str):
    _, bias, _, learned, relative = (cell.strip() for cell in TABLE[name])
    enc = grape.build(name, heads=2, head_dim=8, width=8)
    data = testing.sample(enc)
    kind = type(enc(data.q, data.k, x=data.x).bias).__name__
    assert {"none": "NoBias", "slope": "SlopeBias", "path": "PathBias", "tile": "TileBias"}[bias] == kind
    assert (learned == "–") == (not list(enc.parameters()))
    assert relative.startswith("yes") == (enc.breaks_relative_law is None)


def test_version_is_a_release_number():
    assert re.fullmatch(r"\d+\.\d+\.\d+", grape.__version__)


def test_code_cites_only_equations_that_the_docs_number():
    numbered = set(re.findall(r"\b([A-Z]\d+)\b", (ROOT / "docs" / "math.md").read_text()))
    for path in (ROOT / "src").rglob("*.py"):
        for cited in re.findall(r"Eq\. ([A-Z]\d+(?:[-,] ?[A-Z]\d+)*)", path.read_text()):
            for label in re.findall(r"[A-Z]\d+", cited):
                assert label in numbered, f"{path.name} cites Eq. {label}"


@pytest.mark.parametrize("name", ["rope", "grape-m-ctx", "fox", "grape-a-qk", "grape-ap"])
def test_an_encoding_compiles_without_breaks(name: str):
    enc = grape.build(name, heads=2, head_dim=8, width=8)
    data = testing.sample(enc)

    def step(q, k, x):
        code = enc(q, k, x=x)
        return code.q, code.k

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    for got, want in zip(compiled(data.q, data.k, data.x), step(data.q, data.k, data.x), strict=True):
        assert torch.equal(got, want)
