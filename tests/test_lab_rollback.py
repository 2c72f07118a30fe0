"""`train.rollback_above`: a run goes back from a rise of the loss, leaves out its batches, and records it."""

from __future__ import annotations

import importlib
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
from grape_pe.lab.train.rollback import Rollback, batch_of, look
from grape_pe.lab.train.trainer import Trainer, train
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


def test_the_report_names_it(whole: Path) -> None:
    (note,) = read_results([whole]).notes
    assert note.startswith(
        "rope, seed 0: the loss rose at step 92; training went back to step 80 and on with batch 92"
    )


def kill(given: list[str], run: Path, dice: random.Random, ranks: int) -> int:
    """Continue it and kill it later, a little or at once: the exit code, 0 if it was quicker."""
    running = start([*given, "--resume"], ranks, poison)
    lines = len(read_metrics(run)) + dice.randrange(40)
    while running.alive() and len(read_metrics(run)) < lines:
        time.sleep(0.001)
    running.send(signal.SIGKILL)
    return running.wait()[0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_any_moment_it_ends_the_same(ranks: int, data: Path, whole: Path, tmp_path: Path) -> None:
    """Also on two ranks, which must decide alike, against two ranks that were not killed."""
    want, dice = whole, random.Random(0)
    if ranks > 1:
        want = tmp_path / "whole"
        assert start(words(data, want, **SIZES), ranks, poison).wait()[0] == 0
        assert [x["noticed"] for x in of_kind(want, "rollback")] == [POISONED[-1] + 1]
    run = tmp_path / "run"
    given = words(data, run, **SIZES)
    killed = sum(kill(given, run, dice, ranks) != 0 for _ in range(8))
    assert killed >= 4 and start([*given, "--resume"], ranks, poison).wait()[0] == 0
    assert numbers(run) == numbers(want) and weights(run) == weights(want)


@pytest.mark.parametrize("moment", ["_remove", "_forget_after"])
def test_killed_while_it_goes_back(
    moment: str, data: Path, whole: Path, poisoned: None, tmp_path: Path, monkeypatch: Any
) -> None:
    """Between the new state and the removal of later checkpoints, and before the line in metrics.jsonl."""
    run, config = (
        tmp_path / "run",
        tiny_config(data, **{**SIZES, "train__checkpoint_every": 4, "train__keep": 6}),
    )
    train(config, tmp_path / "whole", quiet=True)
    module = f"grape_pe.lab.train.{'checkpoint' if moment == '_remove' else 'metrics'}"
    usual = importlib.import_module(module).__dict__[moment]

    def killed(path: Path, *more: int) -> Any:
        if path.name == "step-00000088" or any(more[1:]):
            raise KeyboardInterrupt
        return usual(path, *more)

    with monkeypatch.context() as patch:
        patch.setattr(f"{module}.{moment}", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config, run, quiet=True)
    assert not of_kind(run, "rollback")
    train(config, run, resume=True, quiet=True)
    assert numbers(run) == numbers(tmp_path / "whole") and weights(run) == weights(tmp_path / "whole")


def test_not_a_number_is_a_rise_and_rollbacks_are_bounded(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each return leaves out one of three batches whose loss is not a number; the third stops the run."""
    run, usual = tmp_path / "run", Trainer._loss
    monkeypatch.setattr(Trainer, "_steps", noting(Trainer._steps, given := []))

    def loss(self: Trainer, part: Batch, count: float) -> torch.Tensor:
        number = batch_of(self.progress.step, self.progress.rollbacks)
        return usual(self, part, count) * (
            math.nan if number in (25, 31, 38) and self.model.training else 1.0
        )

    monkeypatch.setattr(Trainer, "_loss", loss)
    config = tiny_config(data, **{**SIZES, "train__rollbacks": 2})
    with pytest.raises(
        Diverged, match=r"the loss is nan at step 27.*step-00000020; the run went back 2 times of 2"
    ):
        train(config, run, quiet=True)
    assert given == [0, 20, 20]
    assert [(x["number"], x["to"], x["batch"], x["noticed"], x["loss"]) for x in of_kind(run, "rollback")] == [
        (1, 20, 26, 26, None), (2, 20, 32, 26, None),
    ]  # fmt: skip
    with pytest.raises(Diverged, match="the run went back 2 times of 2"):
        train(config, run, resume=True, quiet=True)


def noting(steps: Any, given: list[int]) -> Any:
    def noted(self: Trainer, signals: Any) -> int:
        given.append(self.progress.step)
        return steps(self, signals)

    return noted


def test_a_rise_is_many_high_losses_in_a_row() -> None:
    usual = [Taken(i, 3.0 + 0.1 * (i % 3), 1.0) for i in range(USUAL)]
    high = [Taken(USUAL + i, 4.0, 1.0) for i in range(RISE)]
    seen, rise = look((), [*usual, *high], 1.2)
    assert rise is not None and (rise.since, rise.last, rise.loss) == (USUAL, USUAL + RISE - 1, 4.0)
    assert rise.median == pytest.approx(3.1) and len(seen) == USUAL + RISE
    single = [*high[:-1], Taken(USUAL + RISE - 1, 3.1, 1.0)]
    for quiet in ([*usual, *single], [*usual[1:], *high], [*usual, *high[:-1]]):
        assert look((), quiet, 1.2)[1] is None
    assert look((), [*usual, *high], 1.4)[1] is None
    part, none = look((), usual[:40], 1.2)
    assert none is None and look(part, [*usual[40:], *high], 1.2)[1].args == rise.args
    assert look(part, [Taken(40, 3.0, math.inf)], 1.2)[1].since == 40


def test_which_batch_a_step_takes() -> None:
    first, second = Rollback(80, 92, 92, 5.0, 3.0), Rollback(60, 110, 98, 5.0, 3.0)
    assert [batch_of(step, ()) for step in (0, 99)] == [0, 99]
    assert [batch_of(step, [first]) for step in (79, 80, 81)] == [79, 92, 93]
    assert [batch_of(step, [first, second]) for step in (59, 60, 85)] == [59, 110, 135]


@pytest.mark.parametrize("changes, says", [
    ({"train.rollback_above": 0.9}, "train.rollback_above must be above 1"),
    ({"train.rollback_above": 1.2, "train.keep": 1}, "train.keep - 1"),
    ({"train.rollback_above": 1.2, "train.checkpoint_every": 0}, "must be at least 9, got 0"),
    ({"train.rollbacks": 0}, "train.rollbacks"),
])  # fmt: skip
def test_settings_that_cannot_work(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(LabError, match=says):
        load("demo", changes)


def test_a_rise_before_the_first_checkpoint_stops(data: Path, poisoned: None, tmp_path: Path) -> None:
    config = tiny_config(data, **{**SIZES, "train__checkpoint_every": 90})
    with pytest.raises(Diverged, match="no checkpoint is from before"):
        train(config, tmp_path / "run", quiet=True)
