"""Encodings from outside the package: --import, entry points, notebooks, worker processes."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import grape_pe as grape
from grape_pe import cli, testing
from grape_pe.encodings import own, registry
from grape_pe.encodings.base import Encoded, Encoding
from grape_pe.lab.compare import worker
from grape_pe.lab.compare.comparison import jobs, load_comparison
from grape_pe.lab.compare.run import compare
from grape_pe.lab.errors import LabError

ROOT = Path(__file__).parent.parent
EXAMPLE = (ROOT / "examples" / "own_encoding.py").read_text()
TINY = {
    "model.width": 16, "model.layers": 1, "model.heads": 2, "data.sequence": 16, "train.steps": 3, "train.warmup": 1,
    "train.batch": 2, "log.tensorboard": False,
}  # fmt: skip
SETTINGS = [part for name, value in TINY.items() for part in (f"--{name}", str(value))]


class Plain(Encoding):
    def encode(self, tokens, state):
        return Encoded(tokens.q, tokens.k, grape.NoBias())


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Names, modules and paths are as before after each test."""
    before = set(sys.modules)
    monkeypatch.setattr(registry, "ENTRIES", dict(registry.ENTRIES))
    monkeypatch.setattr(own, "IMPORTED", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    own.offered.cache_clear()
    yield
    own.offered.cache_clear()
    for name in set(sys.modules) - before:
        if not name.startswith(("grape_pe", "torch")):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with mine_own.py in it."""
    (tmp_path / "mine_own.py").write_text(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys, *words: str, code: int = 0) -> str:
    assert cli.main(list(words)) == code
    out = capsys.readouterr()
    return out.out if code == 0 else out.err


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_the_flag_stands_before_or_after_the_command(folder, capsys, first):
    flag, command = ["--import", "mine_own"], ["encodings", "log-distance", "--json"]
    found = json.loads(said(capsys, *(flag + command if first else command + flag)))
    assert found["options"] == {"rate": 0.5} and "streaming" in found["laws"]
    assert "composition" not in found["laws"]


def test_the_flag_is_repeated_on_both_sides(folder, capsys):
    (folder / "other_own.py").write_text(EXAMPLE.replace("log-distance", "other"))
    listed = said(capsys, "--import", "mine_own", "encodings", "--import", "other_own")
    assert "log-distance" in listed and "\nother " in listed
    assert own.IMPORTED == ["mine_own", "other_own"]


def test_without_the_flag_the_error_names_it(folder, capsys):
    for words in (["inspect", "log-distance"], ["train", "demo", "--encoding", "log-distance", "--dry-run"]):
        message = said(capsys, *words, code=2)
        assert "unknown encoding 'log-distance'. For your own encodings pass --import your_module" in message
        assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("mine_own.py", None, "takes the name of a module, got 'mine_own.py'"),
        ("a/b", None, "takes the name of a module"),
        ("no_such", None, "there is no module 'no_such'"),
        ("broken_own", "x = (", "failed with SyntaxError"),
        ("broken_own", "def f():\n    return nothing\nf()", "NameError: name 'nothing' is not defined ("),
        ("broken_own", "raise SystemExit(1)", "failed with SystemExit"),
        ("broken_own", "import no_such", "ModuleNotFoundError: No module named 'no_such'"),
        ("json", "", "rename your module"),
    ],
)
def test_what_cannot_be_imported_is_one_line(folder, capsys, name, text, message):
    if text is not None:
        (folder / f"{name}.py").write_text(text)
    error = said(capsys, "--import", name, "encodings", "rope", code=2)
    assert error.startswith("grape: ") and message in error and len(error.splitlines()) == 1


def test_the_folder_cannot_replace_a_library(folder):
    """A file named as a library does not replace it, also with the flag."""
    (folder / "yaml.py").write_text("raise SystemExit('wrong yaml')")
    code = "import sys; from grape_pe import cli; sys.exit(cli.main(sys.argv[1:]))"
    start = [sys.executable, "-P", "-c", code]
    done = subprocess.run([*start, "--import", "mine_own", "recipes"], capture_output=True, text=True)
    assert done.returncode == 0 and "paper-medium" in done.stdout, done.stderr


def test_the_example_runs_as_a_script_and_twice_in_a_notebook(folder, monkeypatch):
    done = subprocess.run([sys.executable, "mine_own.py"], capture_output=True, text=True)
    assert done.returncode == 0 and "keeps the relative law" in done.stdout, done.stderr
    cell = {"__name__": "__main__"}
    for _ in range(2):
        exec(EXAMPLE, cell)
    assert grape.build("log-distance", heads=2, head_dim=4).rate.tolist() == [0.5, 0.5]
    assert type(grape.build("log-distance", heads=2, head_dim=4)) is cell["LogDistance"]


def test_the_docs_show_the_example():
    page = (ROOT / "docs" / "own.md").read_text()
    assert f"```python\n{EXAMPLE}```" in page


def test_another_class_under_a_taken_name_is_refused():
    grape.register("plain", Plain)
    grape.register("plain", Plain)
    with pytest.raises(ValueError, match="'plain' is taken by Plain"):
        grape.register("plain", type("Other", (Plain,), {}))
    for name in ("a+b", "a@w", "a,b", "a[b]", ""):
        with pytest.raises(ValueError, match="not a valid encoding name"):
            grape.register(name, Plain)


class FakeEntry:
    def __init__(self, name: str, value: str, found: object) -> None:
        self.name, self.value, self.found, self.dist = name, value, found, None
        self.loads = 0

    def load(self):
        self.loads += 1
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def offer(monkeypatch, *entries: FakeEntry) -> None:
    def listed(*, group: str):
        return list(entries) if group == "grape_pe.encodings" else []

    monkeypatch.setattr(importlib.metadata, "entry_points", listed)
    own.offered.cache_clear()


def test_installed_packages_offer_encodings(monkeypatch):
    theirs = FakeEntry("theirs", "package:Plain", Plain)
    offer(monkeypatch, theirs, FakeEntry("rope", "package:Rope", Plain))
    assert "theirs" in grape.names() and grape.names().count("rope") == 1 and theirs.loads == 0
    assert isinstance(grape.build("theirs+alibi", heads=2, head_dim=4).parts["theirs"], Plain)
    assert type(grape.build("rope", heads=2, head_dim=4)) is not Plain and theirs.loads == 1


def test_a_broken_package_is_named(monkeypatch, capsys):
    offer(monkeypatch, FakeEntry("theirs", "package:Plain", RuntimeError("out of order")))
    error = said(capsys, "inspect", "theirs", code=2)
    assert "offers the encoding 'theirs' as package:Plain" in error and "out of order" in error


def test_two_packages_with_one_name_warn(monkeypatch):
    offer(monkeypatch, FakeEntry("theirs", "one:Plain", Plain), FakeEntry("theirs", "two:Plain", Plain))
    with pytest.warns(UserWarning, match="two packages offer an encoding 'theirs'"):
        assert type(grape.build("theirs", heads=2, head_dim=4)) is Plain


def test_a_class_of_a_session_is_refused_before_workers_start(tmp_path, monkeypatch):
    monkeypatch.setattr(Plain, "__module__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", type(sys)("__main__"))
    grape.register("plain", Plain)
    with pytest.raises(LabError, match="'plain' is defined in this session"):
        compare(load_comparison("demo", arms=["rope", "nope+plain"]), tmp_path / "out", quiet=True)


def test_a_run_needs_the_flag_again(folder, capsys, monkeypatch):
    shipped = {name: each for name, each in registry.ENTRIES.items() if name in registry.SHIPPED}
    run = [
        "train",
        "demo",
        "--encoding",
        "rope+log-distance",
        "--data.source",
        "task:copy",
        *SETTINGS,
        "--quiet",
    ]
    assert cli.main(["--import", "mine_own", *run, "--out", "run"]) == 0
    assert cli.main(["--import", "mine_own", "inspect", "run", "--json"]) == 0
    assert '"encoding": "rope+log-distance"' in capsys.readouterr().out
    monkeypatch.setattr(registry, "ENTRIES", shipped)
    for words in (["inspect", "run"], ["inspect", "run/final"], ["train", "run/config.yaml", "--dry-run"]):
        message = said(capsys, *words, code=2)
        assert "pass --import your_module" in message and len(message.splitlines()) == 1


def test_the_command_of_a_run_imports_the_modules(folder, monkeypatch):
    own.import_modules(["mine_own"])
    comparison = load_comparison("probes", arms=["log-distance[rate=1]"], tasks=["copy"])
    _, _, *words = worker.command(next(iter(jobs(comparison))), folder)
    assert words[2:] == ["--import", "mine_own"]
    monkeypatch.setattr(registry, "ENTRIES", {name: registry.ENTRIES[name] for name in registry.SHIPPED})
    monkeypatch.setattr(own, "IMPORTED", [])
    del sys.modules["mine_own"]
    built = []
    monkeypatch.setattr(worker, "end_with_input", lambda: None)
    monkeypatch.setattr(
        worker, "run_named", lambda *_: built.append(grape.build("log-distance", heads=2, head_dim=4)) or 0
    )
    assert worker.main(words) == 0 and built[0].rate.shape == (2,)


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import grape_pe as grape
from test_own_encodings import TINY, Plain as Base
from grape_pe.lab.compare.comparison import load_comparison
from grape_pe.lab.compare.run import compare

class Plain(Base):
    pass

grape.register("plain", Plain)
if __name__ == "__main__":
    settings = {{**TINY}}
    compare(load_comparison("probes", arms=["plain"], tasks=["copy"], overrides=settings), "out", quiet=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [["mine_script.py"], ["-m", "mine_script"]], ids=" ".join)
def test_a_comparison_in_the_script_that_defines_the_encoding(folder, how):
    (folder / "mine_script.py").write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    done = subprocess.run([sys.executable, *how], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert '"label": "plain"' in (folder / "out" / "results.jsonl").read_text()


@pytest.mark.slow
def test_a_comparison_with_the_flag(folder):
    words = [
        "compare",
        "probes",
        "--tasks",
        "copy",
        "--encodings",
        "rope,log-distance[rate=1]",
        "--jobs",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "grape_pe.cli", "--import", "mine_own", *words, "--out", "out", *SETTINGS],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    labels = [
        json.loads(line)["label"] for line in (folder / "out" / "results.jsonl").read_text().splitlines()
    ]
    assert labels == ["rope", "log-distance[rate=1]"]


def test_facts_of_an_own_encoding_are_measured_true(folder):
    own.import_modules(["mine_own"])
    laws = testing.law_errors(testing.moved(grape.build("log-distance", heads=2, head_dim=4)))
    assert laws.relative == 0 and laws.largest_bias == 0 and laws.composition > 0.1
    assert laws.streaming < testing.TOL[torch.float32]
