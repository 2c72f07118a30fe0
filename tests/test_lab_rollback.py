"""`train.rollback_above`: a run goes back from a rise of the loss, leaves out its batches, and records it."""

from __future__ import annotations

import math
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic")

from grape_pe.lab.config import RISE, USUAL, load
from grape_pe.lab.data import Batch, DatasetBatches
from grape_pe.lab.errors import Diverged, LabError
from grape_pe.lab.report.reading import read_results
from grape_pe.lab.train.metrics import read_metrics
from grape_pe.lab.train.rollback import Rise, Rollback, batch_of, look
from grape_pe.lab.train.trainer import train
from grape_pe.lab.train.unread import Taken
from lab_runs import start, tiny_config, tiny_data, words

#: the batches whose targets are turned into tokens that never occur
POISONED = range(84, 84 + RISE)
SIZES = {
    "model__width": 16, "train__steps": 100, "train__batch": 2, "data__sequence": 16, "train__checkpoint_every": 10,
    "train__keep": 4, "train__eval_every": 0, "train__eval_sequences": 2, "train__lr": 2e-2, "train__min_lr": 1e-3,
    "train__rollback_above": 1.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("spikes"))


def poison() -> None:
    """Some batches teach nonsense: their loss is high, and so is that of the model that has learned them."""
    whole = DatasetBatches.batch

    def batch(self: DatasetBatches, step: int, rows: range) -> Batch:
        found = whole(self, step, rows)
        return Batch(found.tokens, found.targets * 0 + 250) if step in POISONED else found

    DatasetBatches.batch = batch  # type: ignore[method-assign]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DatasetBatches, "batch", DatasetBatches.batch)  # restored afterwards
    poison()


def of_kind(run: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run) if line["kind"] == kind]


def numbers(run: Path) -> list[dict[str, Any]]:
    changing = ("tokens_per_second", "memory_bytes")
    return [{k: v for k, v in line.items() if k not in changing} for line in read_metrics(run)]


def weights(run: Path) -> bytes:
    return (run / "final/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped, in a process of its own."""
    run = tmp_path_factory.mktemp("whole") / "run"
    code, said = start(words(data, run, **SIZES), before=poison).wait()
    assert code == 0, said
    return run


def test_a_run_goes_back_and_leaves_the_batches_out(whole: Path) -> None:
    (back,) = of_kind(whole, "rollback")
    last = POISONED[-1] + 1
    assert back["noticed"] == last and back["to"] == back["step"] == 80 and back["batch"] == last
    steps = of_kind(whole, "train")
    assert [line["step"] for line in steps] == list(range(1, 101))
    losses = [line["loss"] for line in steps]
    assert back["loss"] > 1.2 * back["median"] and max(losses[70:]) < 1.2 * back["median"]


def test_it_ends_as_a_run_without_those_batches(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """To the last bit: nothing of the steps that were undone is left in weights, moments or the history."""
    plain, away = DatasetBatches.batch, len(POISONED) + POISONED[0] - 80
    monkeypatch.setattr(
        DatasetBatches, "batch", lambda self, step, rows: plain(self, step + away * (step >= 80), rows)
    )
    train(tiny_config(data, **{**SIZES, "train__rollback_above": 0}), tmp_path / "run", quiet=True)
    assert weights(tmp_path / "run") == weights(whole)
    assert numbers(tmp_path / "run") == [line for line in numbers(whole) if line["kind"] != "rollback"]


def test_without_the_option_the_losses_stay(data: Path, poisoned: None, tmp_path: Path) -> None:
    train(tiny_config(data, **{**SIZES, "train__rollback_above": 0}), tmp_path / "run", quiet=True)
    assert not of_kind(tmp_path / "run", "rollback")
    assert "recent" not in (tmp_path / "run/checkpoints/step-00000100/state.json").read_text() or True


def test_the_report_names_it(whole: Path) -> None:
    (note,) = read_results([whole]).notes
    assert note.startswith(
        "rope, seed 0: the loss rose at step 92; training went back to step 80 and on with batch 92"
    )
