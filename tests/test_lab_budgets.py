"""Budgets from one run, and the sweep of learning rates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grape_pe.lab.compare.archive import write_archive
from grape_pe.lab.compare.budgets import branches
from grape_pe.lab.compare.comparison import Comparison, jobs, join_directory, load_comparison, trials
from grape_pe.lab.compare.engines import Resources
from grape_pe.lab.compare.run import compare
from grape_pe.lab.config import flat
from grape_pe.lab.errors import LabError
from grape_pe.lab.report import markdown, read_results
from grape_pe.lab.report.ranking import ranking
from grape_pe.lab.train.optimization import learning_rate
from grape_pe.lab.train.run_directory import read_metrics
from grape_pe.lab.train.trainer import train
from lab_runs import tiny_config, tiny_data

STEP = 4 * 32  # tokens


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("budgets"))


def wsd(data: Path, **changes):
    return tiny_config(data, train__schedule="wsd", train__decay=0.25, **changes)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "final" / "model.safetensors")


def test_a_branch_is_the_straight_run_of_that_length(data: Path, tmp_path: Path) -> None:
    config = wsd(data, train__steps=24, train__keep=1)
    (branch,) = branches(config, [12 * STEP, 24 * STEP])
    assert branch.start == 9
    trunk = wsd(data, train__steps=24, train__keep=1, train__checkpoint_at=[9], train__checkpoint_every=4)
    train(trunk, tmp_path / "trunk", quiet=True)
    place = branch.directory(tmp_path / "trunk")
    train(branch.config, place, quiet=True, start=branch.checkpoint(tmp_path / "trunk"))
    straight = train(branch.config, tmp_path / "straight", quiet=True)
    mine, theirs = weights(place), weights(tmp_path / "straight")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    lines = [line for line in read_metrics(place) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [10, 11, 12]  # the rest was not trained again
    assert (
        straight.validation_loss == [x["loss"] for x in read_metrics(place) if x["kind"] == "validation"][-1]
    )
    longer = weights(tmp_path / "trunk")
    assert not all(torch.equal(mine[name], longer[name]) for name in mine)


def test_the_rate_is_the_long_runs_until_the_decay_begins(data: Path) -> None:
    config = wsd(data, train__steps=64)
    for branch in branches(config, [12 * STEP, 16 * STEP, 40 * STEP]):
        rates = [learning_rate(step, branch.config.train) for step in range(branch.config.train.steps)]
        assert rates[: branch.start] == [learning_rate(step, config.train) for step in range(branch.start)]
        assert rates[branch.start + 1] < rates[branch.start]


@pytest.mark.parametrize(
    "budgets, changes, said",
    [
        ([STEP + 1], {}, f"multiple of the {STEP} tokens of a step, got {STEP + 1}; try {STEP}"),
        ([99 * STEP], {}, "give smaller --budgets"),
        ([3 * STEP], {"train__decay": 0.5}, "before train.warmup"),
        ([4 * STEP], {"train__schedule": "cosine"}, "budgets need train.schedule wsd"),
    ],
)
def test_budgets_that_cannot_be_had_are_refused(data: Path, budgets, changes, said) -> None:
    settings = {"train__schedule": "wsd", "train__warmup": 2, **changes}
    with pytest.raises(LabError, match=said.replace("(", r"\(")):
        list(branches(tiny_config(data, **settings), budgets))


def tiny(data: Path, **more) -> Comparison:
    recipe = wsd(data, train__steps=16)
    found = load_comparison("demo", arms=["rope", "alibi"], overrides=flat(recipe), **more)
    return found.model_copy(update={"evaluation_tokens": 128, "validation_tokens": 200})


def test_a_comparison_with_a_sweep_and_budgets(data: Path, tmp_path: Path) -> None:
    asked = tiny(data, sweep=[1e-3, 1e-2], budgets=[8 * STEP, 16 * STEP])
    compare(asked, tmp_path / "out", side_by_side=2, quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [line["label"] for line in lines] == ["rope", "alibi"]
    for line in lines:
        assert [each["lr"] for each in line["sweep"]] == [1e-3, 1e-2]
        assert line["lr"] == min(line["sweep"], key=lambda each: each["loss"])["lr"]
        assert [each["tokens"] for each in line["budgets"]] == [8 * STEP, 16 * STEP]
        assert line["budgets"][-1]["loss"] == line["val_loss"]
        # seed 0 at the smallest budget is the trial that was chosen
        assert line["budgets"][0]["loss"] == min(each["loss"] for each in line["sweep"])
        assert all(len(each["stretches"]) == len(line["extrapolation"][0]["stretches"]) for each in
                   line["extrapolation"] if each["loss"] is not None)  # fmt: skip


def measured(root: Path) -> dict[str, dict[str, object]]:
    """Every evaluation.json by its place, without times and memory."""
    varies = ("seconds", "tokens_per_second", "peak_memory_bytes")
    found = {path: json.loads(path.read_text()) for path in root.glob("*/**/evaluation.json")}
    return {
        str(path.relative_to(root)): {name: value for name, value in said.items() if name not in varies}
        for path, said in found.items()
    }


def test_a_part_goes_on_elsewhere_to_the_same_results(data: Path, tmp_path: Path) -> None:
    asked = tiny(data, sweep=[1e-3, 1e-2], budgets=[8 * STEP, 16 * STEP])
    whole, part = tmp_path / "whole", tmp_path / "part"
    compare(asked, whole, side_by_side=2, quiet=True)
    shutil.copytree(whole, part)
    for place in ("runs/alibi-s0", "sweep/language/alibi-lr0.01"):
        shutil.rmtree(part / place)
    said = json.loads((part / "compare.json").read_text())
    (part / "compare.json").write_text(json.dumps({**said, "machine": {"name": "abacus"}}))
    file = write_archive(part, tmp_path / "part.jsonl")
    kinds = [json.loads(line)["kind"] for line in file.read_text().splitlines()]
    assert kinds == ["comparison", "language", "trial", "trial", "trial"]
    assert "1 of 2 runs done; not done: alibi 1" in markdown(read_results([file]))

    elsewhere = tmp_path / "elsewhere"
    compare(asked, elsewhere, side_by_side=2, quiet=True, start=file)
    assert measured(elsewhere) == measured(whole) and not (elsewhere / "runs/rope-s0/final").exists()
    assert (elsewhere / "runs/alibi-s0/final").exists()
    results = read_results([elsewhere])
    assert ranking(results) and [row.losses for row in ranking(results)] == [
        row.losses for row in ranking(read_results([whole]))
    ]
    assert any("name abacus" in note and "not speeds" in note for note in results.notes)
    compare(asked, elsewhere, side_by_side=2, quiet=True, start=file)  # the same line again changes nothing
    assert measured(elsewhere) == measured(whole)
    again = write_archive(elsewhere, tmp_path / "again.jsonl")
    assert set(file.read_text().splitlines()[1:]) < set(again.read_text().splitlines())


@pytest.mark.parametrize(
    "line, change, said",
    [
        (0, {"data": {"manifest": "other"}}, "a comparison on other data"),
        (0, {"threads": 7}, r"another threads per run \(7 -> 1; see --threads\)"),
        (0, {"gpus": 2}, r"another GPUs per run \(2 -> 0; see --gpus-per-job\)"),
        (0, {"kind": "language"}, "has no settings of a comparison"),
        (1, {"run": "../../x"}, "is not a run of this comparison"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(data: Path, tmp_path: Path, line, change, said) -> None:
    asked = tiny(data)
    (tmp_path / "begun").mkdir()
    join_directory(tmp_path / "begun", asked, Resources(1, 0))
    place = tmp_path / "begun/runs/rope-s0"
    place.mkdir(parents=True)
    (place / "evaluation.json").write_text('{"label": "rope", "seed": 0, "val_loss": 3.0}')
    file = write_archive(tmp_path / "begun", tmp_path / "file.jsonl")
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    lines[line] |= change
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    with pytest.raises(LabError, match=said):
        compare(asked, tmp_path / "out", threads=1, gpus=0, quiet=True, start=file)
    other = tiny(data, budgets=[8 * STEP, 16 * STEP])
    with pytest.raises(LabError, match="budgets" if not change.get("kind") else said):
        compare(other, tmp_path / "new", threads=1, gpus=0, quiet=True, start=file)


def test_trials_come_before_the_seeds_and_have_the_smallest_budget(data: Path) -> None:
    asked = tiny(data, sweep=[1e-3, 1e-2], budgets=[8 * STEP, 16 * STEP], seeds=2)
    found = list(trials(asked))
    assert [(job.arm.label, job.trial) for job in found] == [
        ("rope", 1e-3), ("rope", 1e-2), ("alibi", 1e-3), ("alibi", 1e-2),
    ]  # fmt: skip
    assert {job.config(asked).train.steps for job in found} == {8}
    assert [job.config(asked).train.lr for job in found] == [1e-3, 1e-2, 1e-3, 1e-2]
    assert next(iter(jobs(asked))).config(asked, 5e-3).train.checkpoint_at == [6]


def test_the_shipped_comparison_has_its_budgets_and_controls() -> None:
    small = load_comparison("small")
    assert {arm.label for arm in small.arms} >= {
        "rope-norm-after",
        "grape-ap-text",
        "alibi-steep",
        "fox-slow",
    }
    (first, *_), last = list(branches(small.recipe, small.budgets)), small.budgets[-1]
    assert last == small.recipe.tokens_per_step * small.recipe.train.steps
    assert first.tokens == 1 << 20 and small.validation_tokens >= 100_000
    assert small.evaluation_tokens // (16 * small.recipe.data.sequence) >= 16
