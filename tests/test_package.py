"""The package as a newcomer meets it: imports, and a README that tells the truth."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import grape_pe as grape
from grape_pe import testing

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TABLE = {m[1]: m[2].split("|") for m in re.finditer(r"^\| `([a-z0-9-]+)` \|(.*)\|$", README, re.M)}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_needs_torch_only():
    heavy = "('transformers', 'triton', 'numpy.testing', 'rich', 'datasets', 'safetensors')"
    assert run(f"import sys, grape_pe; print([m for m in {heavy} if m in sys.modules])").strip() == "[]"


def test_import_brings_in_little():
    """Beyond what `import torch` loads: this package, the standard library, and no compiler of torch's."""
    code = "import sys, torch; before = set(sys.modules); import grape_pe; print(*set(sys.modules) - before)"
    new = run(code).split()
    own = {"grape_pe", "torch"} | set(sys.stdlib_module_names)
    assert {name.split(".")[0] for name in new} <= own
    assert not [name for name in new if name.startswith(("torch._dynamo", "torch._inductor"))]


DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def offered(extra: str) -> set[str]:
    """The modules that `pip install grape-pe[extra]` brings directly, with those of torch."""
    names = {"torch", "triton"}  # whoever has a torch for GPUs has its triton
    for line in DECLARED["optional-dependencies"][extra]:
        name, inner = re.match(r"([\w-]+)(?:\[(.*?)\])?", line).groups()
        for each in inner.split(",") if inner and name == "grape-pe" else ():
            names |= offered(each)
        names.add({"pyyaml": "yaml"}.get(name.lower(), name.lower().replace("-", "_")))
    return names


def imported(path: Path) -> Iterator[tuple[str, str | None]]:
    """Top-level modules that a file imports, with the extra it names for those it requires by `require`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((each.name.split(".")[0], None) for each in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).split(".")[0], None
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) == "require":
            module, extra = node.args
            if isinstance(module, ast.Constant) and isinstance(extra, ast.Constant):
                yield module.value.split(".")[0], extra.value


def test_what_is_imported_is_declared():
    free = {"grape_pe", *sys.stdlib_module_names}
    extras = {name: free | offered(name) for name in DECLARED["optional-dependencies"] if name != "dev"}
    for path in (ROOT / "src").rglob("*.py"):
        for module, extra in imported(path):
            allowed = extras[extra] if extra else set().union(*extras.values())
            assert module in allowed, (
                f"{path.name} imports {module}: which extra of pyproject.toml brings it?"
            )


def test_readme_table_lists_every_encoding():
    assert list(TABLE) == ["nope", *[name for name in TABLE if name != "nope"]]
    assert set(TABLE) == set(grape.names())


@pytest.mark.parametrize("name", sorted(TABLE))
def test_readme_table_tells_the_truth(name: str):
    _, bias, _, learned, relative = (cell.strip() for cell in TABLE[name])
    enc = grape.build(name, heads=2, head_dim=8, width=8)
    data = testing.sample(enc)
    kind = getattr(grape, bias.replace("none", "no").title() + "Bias")
    assert isinstance(enc(data.q, data.k, x=data.x).bias, kind)
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
