"""Every file a command reads, damaged in five ways: exit code 2, one sentence, and nothing else changed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("plotly")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from grape_pe.cli import main
from grape_pe.lab.compare.worker import run_named
from grape_pe.lab.data import open_source, prepare
from lab_runs import TINY, tiny_data

TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: ["yes", "no"]
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def _settings() -> str:
    """TINY as a recipe file over a base, with a run short enough for a test."""
    sections: dict[str, dict[str, object]] = {"data": {"source": "data"}}
    for name, value in {**TINY, "train.steps": 4, "train.eval_every": 0}.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return json.dumps(sections)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything commands read: texts, datasets, recipes, a run, a comparison."""
    home = tmp_path_factory.mktemp("home")
    before, tick = Path.cwd(), pytest.MonkeyPatch()
    os.chdir(home)
    try:
        tiny_data(home)
        _write_sources(home, tick)
        (home / "base.yaml").write_text(_settings())
        (home / "recipe.yaml").write_text("base: base.yaml\nname: mine\n")
        (home / "comparison.yaml").write_text(
            "name: mine\nrecipe: recipe.yaml\narms: [rope, fox]\nevaluation_tokens: 64\n"
        )
        assert main(["train", "recipe.yaml", "--out", "run", "--quiet"]) == 0
        shutil.copytree(home / "run", home / "begun")
        shutil.rmtree(home / "begun/final")
        tick.setattr("grape_pe.lab.compare.run.run_side_by_side", _in_this_process)
        assert main(["compare", "comparison.yaml", "--out", "results", "--quiet", "--jobs", "1"]) == 0
    finally:
        os.chdir(before)
        tick.undo()
    return home


def _in_this_process(works, *_) -> None:
    for work in works:
        _, _, root, name, *_ = work.arguments
        assert run_named(Path(root), name, []) == 0


def _write_sources(home: Path, tick: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"document {n} has some words. " * 9} for n in range(90)]
    (home / "a.txt").write_text("\n".join(row["text"] for row in rows))
    (home / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.table({"text": [row["text"] for row in rows]}), home / "a.parquet")
    (home / "torn.jsonl").write_text((home / "a.jsonl").read_text() + "{")
    (home / "tasks").mkdir()
    (home / "tasks/tiny.yaml").write_text(TASK)
    shutil.copytree(home / "data/tokenizer", home / "words")
    shutil.copytree(home / "data", home / "shards")
    (home / "shards/manifest.json").unlink()
    tick.setattr(sys.modules[prepare.__module__], "COMMIT_TOKENS", 1000)
    tick.setattr(sys.modules[open_source.__module__], "CHUNK_CHARACTERS", 1000)
    assert main(["data", "prepare", "torn.jsonl", "--out", "half", *PREPARE]) == 2  # the last line is torn


PREPARE = ["--tokenizer", "bytes", "--workers", "1", "--validation", "0.05"]


@dataclass(frozen=True)
class Case:
    """A command, the files it reads, and damages that leave such a file valid."""

    command: str
    files: tuple[str, ...]
    valid: tuple[str, ...] = ()
    more: list[str] = field(default_factory=list)
    slow: bool = False


#: lines may be missing: a kill cuts the last one short, and before the first there are none
LINES = ("empty", "truncated")
CHECKPOINT = "checkpoints/step-00000004"
TENSORS = "shard-00001-model-00001-of-00001.safetensors"
DATA = ("data/manifest.json", "data/train_000000.bin", "data/val_000000.bin")
CASES = [
    Case("report results", tuple(f"results/{name}" for name in (
        "compare.json", "runs/rope-s0/evaluation.json", "runs/fox-s0/picture.json"))),
    Case("report results", ("results/results.jsonl", "results/runs/rope-s0/metrics.jsonl"), LINES),
    Case("compare comparison.yaml --out results --quiet --jobs 1", (
        "comparison.yaml", "base.yaml", "results/compare.json", "results/runs/fox-s0/evaluation.json",
        "results/runs/rope-s0/picture.json", *DATA[:1])),
    Case("compare comparison.yaml --out results --quiet --jobs 1", (
        "results/results.jsonl", "results/runs/fox-s0/metrics.jsonl"), LINES),
    Case("train recipe.yaml --out begun --resume --quiet", (
        "recipe.yaml", "base.yaml", "begun/config.yaml", "begun/environment.json",
        f"begun/{CHECKPOINT}/state.json", f"begun/{CHECKPOINT}/{TENSORS}", *DATA,
        "data/tokenizer/tokenizer.json", "data/tokenizer/tokenizer_config.json")),
    Case("train recipe.yaml --out begun --resume --quiet", ("begun/metrics.jsonl",), LINES),
    Case("sample run --tokens 2", tuple(f"run/final/{name}" for name in (
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"))),
    Case("sample begun --tokens 2", (
        "begun/config.yaml", f"begun/{CHECKPOINT}/{TENSORS}", "data/manifest.json",
        "data/tokenizer/tokenizer.json")),
    Case("inspect run", ("run/final/config.json", "run/final/model.safetensors")),
    Case("eval lm run/final --tasks tiny --include tasks", (
        "run/final/config.json", "run/final/model.safetensors", "run/final/tokenizer.json")),
    Case("eval lm run/final --tasks tiny --include tasks", ("tasks/tiny.yaml",), slow=True),
    Case("data info data", DATA),
    Case("data verify data", DATA),
    Case("data adopt shards --tokenizer words", (
        "words/tokenizer.json", "words/tokenizer_config.json", "shards/train_000000.bin")),
    Case("data prepare a.txt --out new", ("a.txt",), ("truncated",), PREPARE),
    Case("data prepare a.jsonl --out new", ("a.jsonl",), (), PREPARE),
    Case("data prepare a.parquet --out new", ("a.parquet",), (), PREPARE),
    Case("data prepare torn.jsonl --out half", ("half/progress.json",), (), PREPARE),
]  # fmt: skip
DAMAGES = ("empty", "truncated", "not UTF-8", "wrong shape", "directory")


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "directory":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({
            "empty": b"", "truncated": content[: len(content) // 2], "not UTF-8": b"\xff\xfe\x81" + content,
            "wrong shape": b'[1, "two", {"three": null}]',
        }[how])  # fmt: skip


def contents(home: Path) -> dict[str, bytes]:
    found = [path for path in home.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(home)): path.read_bytes() for path in found}


def row(case: Case, file: str, how: str):
    name = f"{' '.join(case.command.split()[:2])}: {file}, {how}"
    return pytest.param(case, file, how, id=name, marks=[pytest.mark.slow] if case.slow else [])


ROWS = [row(case, file, how) for case in CASES for file in case.files for how in DAMAGES]


@pytest.mark.parametrize("case, file, how", ROWS)
def test_a_damaged_file_is_a_sentence(case, file, how, home, tmp_path, monkeypatch, capsys) -> None:
    copy = Path(shutil.copytree(home, tmp_path / "home"))
    monkeypatch.chdir(copy)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("grape_pe.lab.compare.run.run_side_by_side", _in_this_process)
    damage(copy / file, how)
    before = contents(copy)
    capsys.readouterr()
    code, said = main([*case.command.split(), *case.more]), capsys.readouterr().err
    assert "Traceback" not in said
    if how in case.valid:
        assert code == 0, said
        return
    assert code == 2, said
    lines = [line for line in said.splitlines() if line.startswith("grape: ")]
    assert len(lines) == 1 and said.splitlines()[-1] == lines[0], said
    after = contents(copy)
    assert {name for name in before if after.get(name) != before[name]} == set()
