"""The package as a user installs it: the wheel, in an environment that holds torch and nothing else.

No network is needed: the environment borrows torch and what torch requires from the one that runs the tests.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = {ROOT / "README.md": (2, 1, 512), ROOT / "docs" / "index.md": (2, 8, 128, 64)}  # shape of the last y
IN_WHEEL = ("py.typed", "attention/cpu/tiles.cpp", "attention/cpu/simd.h", "lab/report/page.js", "cli.py")


#: what an example imports, and the extra it then names
NEEDS = {"transformers": "hf", "grape_pe.lab": "lab,eval"}


def clean() -> dict[str, str]:
    """This environment without what would let the new one see more than it holds."""
    names = ("PIP_", "PYTHON", "VIRTUAL_ENV", "MYPY")
    return {name: value for name, value in os.environ.items() if not name.startswith(names)}


def run(command: list[str | Path], cwd: Path, **more: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**clean(), **more},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", out], ROOT)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def required(need: Requirement, seen: set[str]) -> Iterator[Distribution]:
    """An installed distribution and those it requires here, each once."""
    key = f"{canonicalize_name(need.name)} {sorted(need.extras)}"
    if key in seen:
        return
    seen.add(key)
    try:
        found = distribution(need.name)
    except PackageNotFoundError:  # not needed on this machine
        return
    yield found
    extras = need.extras or {""}
    for each in map(Requirement, found.requires or []):
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras):
            yield from required(each, seen)


def borrow(site: Path, *names: str) -> None:
    """Link the named distributions, and what they require, into a folder of packages."""
    seen: set[str] = set()
    for each in (found for name in names for found in required(Requirement(name), seen)):
        for top in {path.parts[0] for path in each.files or []} - {"..", "__pycache__"}:
            source, link = Path(str(each.locate_file(top))), site / top
            if source.exists() and not link.exists():
                link.symlink_to(source)


def environment(folder: Path, wheel: Path, *names: str) -> Path:
    """The Python of a new environment that holds the wheel and the named distributions."""
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    python = folder / "bin" / "python"
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    borrow(site, *names)
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        "-q",
        wheel,
    ]
    run(install, folder)
    return python


@pytest.fixture(scope="module")
def python(built, tmp_path_factory) -> Path:
    """Python with torch and the wheel only."""
    return environment(tmp_path_factory.mktemp("fresh") / "venv", built[0], "torch")


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


def needs_transformers(code: str) -> bool:
    return "transformers" in code


def packaged() -> list[str]:
    """Every file of the package that git would keep."""
    found = (
        path.relative_to(ROOT / "src") for path in (ROOT / "src" / "grape_pe").rglob("*") if path.is_file()
    )
    return sorted(str(path) for path in found if "__pycache__" not in path.parts)


def test_the_wheel_holds_the_package_and_nothing_else(built):
    names = [name for name in zipfile.ZipFile(built[0]).namelist() if ".dist-info/" not in name]
    assert sorted(names) == packaged()
    assert {f"grape_pe/{name}" for name in IN_WHEEL} <= set(names)
    assert any(name.startswith("grape_pe/lab/recipes/") and name.endswith(".yaml") for name in names)


def test_the_sdist_holds_the_sources_and_no_results(built):
    with tarfile.open(built[1]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {f"src/{name}" for name in packaged()} <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "constraints.txt"} <= names
    assert not [
        name for name in names if name.startswith((".ci", ".git/", ".venv", "bench-", "runs", "results"))
    ]


def test_the_metadata_asks_users_for_torch_only(built):
    wheel = zipfile.ZipFile(built[0])
    (name,) = (each for each in wheel.namelist() if each.endswith(".dist-info/METADATA"))
    needs = re.findall(r"^Requires-Dist: (.*)$", wheel.read(name).decode(), re.M)
    assert [need for need in needs if "extra ==" not in need and not need.startswith("torch")] == []
    users = [need for need in needs if not re.search(r"extra == ['\"]dev['\"]", need)]
    assert not [need for need in users if need.startswith(("triton", "psutil", "pytest"))]


def test_the_environment_holds_torch_only(python: Path):
    code = (
        "import importlib.util as u\n"
        "names = ('torch', 'grape_pe', 'transformers', 'yaml', 'pytest', 'datasets')\n"
        "print([name for name in names if u.find_spec(name)])"
    )
    assert run([python, "-c", code], python.parent).strip() == "['torch', 'grape_pe']"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run_as_printed_with_torch_only(page: Path, python: Path, tmp_path: Path):
    code = "\n".join(each for each in snippets(page) if not needs_transformers(each))
    (tmp_path / "page.py").write_text(f"{code}\nassert y.shape == {PAGES[page]}, y.shape\n")
    run([python, "page.py"], tmp_path)


def test_readme_snippets_run_as_printed_with_hugging_face(built, tmp_path: Path):
    """All of them in order; a small random model lies where the name of the real one leads."""
    transformers = pytest.importorskip("transformers")
    code = "\n".join(snippets(ROOT / "README.md"))
    (name,) = re.findall(r'from_pretrained\("(.*?)"\)', code)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    python = environment(tmp_path / "venv", built[0], "torch", "accelerate", "transformers")
    (tmp_path / "page.py").write_text(code)
    run([python, "page.py"], tmp_path, HF_HUB_OFFLINE="1")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_with_torch_only_or_names_its_extra(path: Path, python: Path, tmp_path: Path):
    code = path.read_text(encoding="utf-8")
    extra = next((extra for word, extra in NEEDS.items() if word in code), None)
    if extra:  # tests/test_model_examples.py and tests/test_paper_loop.py run these
        assert f"pip install 'grape-pe[{extra}]'" in str(ast.get_docstring(ast.parse(code)))
    else:
        assert run([python, path], tmp_path)


def test_the_command_says_which_extra_it_needs(python: Path, tmp_path: Path):
    grape = python.parent / "grape"
    assert "compare" in run([grape, "--help"], tmp_path)
    done = subprocess.run(
        [grape, "compare", "demo"], cwd=tmp_path, env=clean(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode and "pip install 'grape-pe[lab]'" in done.stderr and "Traceback" not in done.stderr


USER = """
from torch import Tensor, nn

import grape_pe as grape


def attention(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    enc = grape.build("grape-ap", heads=8, head_dim=64, width=512)
    code = enc(q, k, x=x)
    reveal_type(code.q)
    reveal_type(code.bias)
    return grape.attend(code.q, code.k, v, bias=code.bias)


def layer(x: Tensor) -> Tensor:
    attention = grape.Attention(512, heads=8, encoding="rope+fox")
    return attention.forward(x, cache=attention.cache())


def decode(enc: grape.Encoding, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    cache = grape.StreamingCache(enc)
    return cache.attend(q, k, v, x=x)


def with_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = grape.attend(q, k, v, window=8, return_lse=True)
    print(grape.attend.explain(q, k, v, return_lse=True).impl)
    return out * lse.exp().unsqueeze(-1)


class Mine(nn.Module): ...


def move(model: Mine) -> Mine:
    return grape.adapt(model, "rope+grape-ap")
"""


def test_a_users_code_passes_strict_mypy(python: Path, tmp_path: Path):
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "user.py"]
    said = run([*command, "--config-file", os.devnull, "--cache-dir", tmp_path / "cache"], tmp_path)
    assert re.findall(r'Revealed type is "(.*?)"', said) == [
        "torch._tensor.Tensor",
        "grape_pe.bias.base.Bias",
    ]
