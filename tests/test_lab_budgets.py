"""Budgets from one run, and the sweep of learning rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grape_pe.lab.compare.budgets import branches
from grape_pe.lab.compare.comparison import Comparison, jobs, load_comparison, trials
from grape_pe.lab.compare.run import compare
from grape_pe.lab.config import flat
from grape_pe.lab.errors import LabError
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
        ([99 * STEP], {}, "give fewer --budgets"),
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
