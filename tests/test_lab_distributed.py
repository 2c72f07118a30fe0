"""Several ranks share a batch: the losses are those of one process, and checkpoints pass between them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

pytest.importorskip("pydantic")

from grape_pe.lab.config import load
from grape_pe.lab.errors import LabError
from grape_pe.lab.train.checkpoint import Checkpoints, TrainingState
from grape_pe.lab.train.distributed import World, check_split, world
from grape_pe.lab.train.metrics import read_metrics
from grape_pe.lab.train.trainer import train
from grape_pe.testing import TOL
from lab_runs import grape, start, tiny_config, tiny_data, words

TOLERANCE = 1e-5
# an odd validation set, so that the ranks' shares of it differ; every checkpoint kept
SIZES = {
    "model__encoding": "grape-ap", "model__kv_shift": True, "model__layers": 2, "train__steps": 8,
    "train__eval_sequences": 3, "train__checkpoint_every": 4, "train__keep": 9,
}  # fmt: skip
LAYOUTS = {
    "ddp": {"train__strategy": "ddp"},
    "ddp, accumulated": {"train__strategy": "ddp", "train__micro_batch": 1},
    "fsdp, accumulated": {"train__strategy": "fsdp", "train__micro_batch": 1},
    "hybrid": {"train__strategy": "fsdp", "train__shard": 1},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("distributed"))


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    train(tiny_config(data, **SIZES), out, quiet=True)
    return out


def curve(run: Path) -> list[float]:
    """Training and validation losses, in order."""
    return [line["loss"] for line in read_metrics(run) if line["kind"] != "encoding"]


def summaries(run: Path) -> list[dict[str, float]]:
    return [line["values"] for line in read_metrics(run) if line["kind"] == "encoding"]


def back_to(run: Path, step: int, copy: Path) -> Path:
    """The run as it was when its checkpoint of `step` was the newest."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "final")
    for later in (copy / "checkpoints").glob("step-*"):
        if int(later.name[5:]) > step:
            shutil.rmtree(later)
    return copy


def continued(run: Path, data: Path, ranks: int, **changes: object) -> list[float]:
    code, said = grape(words(data, run, "--resume", **SIZES, **changes), ranks)
    assert code == 0, said
    return curve(run)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_learn_what_one_process_learns(
    layout: str, data: Path, alone: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    code, said = grape(words(data, run, **SIZES, **LAYOUTS[layout]), ranks=2)
    assert code == 0, said
    assert len(curve(run)) == 8 + 2 and curve(run) == pytest.approx(curve(alone), abs=TOLERANCE)
    for ours, theirs in zip(summaries(run), summaries(alone), strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)
    if layout == "fsdp, accumulated":
        copy = back_to(run, 4, tmp_path / "on one")
        assert continued(copy, data, ranks=1) == pytest.approx(curve(alone), abs=TOLERANCE)


HALF = {"train__precision": "bf16", "train__recompute": True, "train__micro_batch": 1}


@pytest.mark.parametrize("layout", [
    {"train__strategy": "fsdp"},
    pytest.param({"train__strategy": "fsdp", "train__compile": True}, marks=pytest.mark.slow),
    pytest.param({"train__strategy": "ddp", "train__compile": True}, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_two_ranks_in_bfloat16_with_recomputation(
    layout: dict[str, object], data: Path, alone: Path, tmp_path: Path
) -> None:
    """Against one process in float32: all that separates them is the rounding of bfloat16."""
    run = tmp_path / "run"
    code, said = start(words(data, run, **SIZES, **HALF, **layout), ranks=2).wait(limit=900)  # it may compile
    assert code == 0, said
    assert curve(run) != curve(alone) and curve(run) == pytest.approx(curve(alone), abs=TOL[torch.bfloat16])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_checkpoint_of_one_process_continues_on_two_ranks(
    strategy: str, data: Path, alone: Path, tmp_path: Path
) -> None:
    copy = back_to(alone, 4, tmp_path / "on two")
    found = continued(copy, data, 2, train__strategy=strategy)
    assert found == pytest.approx(curve(alone), abs=TOLERANCE)


def test_a_refusal_is_told_by_every_rank(data: Path, alone: Path) -> None:
    """A rank that left without a word would leave the others waiting."""
    code, said = grape(words(data, alone, **SIZES), ranks=2)
    assert code == 2
    assert said.splitlines() == [f"grape: {alone} already holds a run; continue it with --resume, or give "
                                 "another --out"] * 2  # fmt: skip


@pytest.mark.parametrize(
    "changes, ranks, says",
    [
        ({"train.batch": 4}, 3, "train.batch must be a multiple of the 3 ranks, got 4"),
        ({"train.batch": 6, "train.micro_batch": 2}, 2, "takes 3 sequences, which train.micro_batch must"),
        ({"train.batch": 6, "train.strategy": "fsdp", "train.shard": 4}, 6, "train.shard must divide the 6"),
    ],
)
def test_a_batch_that_cannot_be_shared(changes: dict, ranks: int, says: str) -> None:
    with pytest.raises(LabError, match=says):
        check_split(load("demo", changes), ranks)


def test_restarts_in_the_store_of_the_dead_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {"WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LabError, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"), world(tmp_path):
        pass


@pytest.mark.parametrize("total, size", [(8, 1), (8, 3), (2, 5), (0, 2)])
def test_shares_are_disjoint_and_whole(total: int, size: int) -> None:
    shares = [World(rank, size).rows(total) for rank in range(size)]
    assert [row for share in shares for row in share] == list(range(total))
    assert max(map(len, shares)) <= -(-total // size)


def test_a_checkpoint_is_shown_when_every_rank_has_written(tmp_path: Path, monkeypatch) -> None:
    """Two ranks, of which the second is slow: nothing is shown before, everything right after."""
    writing: Future[None] = Future()
    monkeypatch.setattr("torch.distributed.checkpoint.async_save", lambda *_args, **_more: writing)
    monkeypatch.setattr(World, "agree", lambda _self, problem: None)
    model = torch.nn.Linear(2, 2)
    checkpoints = Checkpoints(tmp_path, 2, World(0, 2))
    checkpoints.save(model, torch.optim.AdamW(model.parameters()), TrainingState(20))
    assert not checkpoints.written
    writing.set_result(None)
    assert checkpoints.written
    checkpoints.check(1)
    assert checkpoints.found() == []
    checkpoints.check(2)
    assert [path.name for path in checkpoints.found()] == ["step-00000020"]


@pytest.mark.slow
def test_two_ranks_killed_after_a_checkpoint_lose_nothing_before_it(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = SIZES | {"train__steps": 1200, "train__checkpoint_every": 600, "train__eval_every": 0}
    running = start(words(data, run, **given), ranks=2)
    while running.alive() and not (run / "checkpoints/step-00000600").exists():
        time.sleep(0.01)
    running.send(signal.SIGKILL)
    running.wait()
    assert 600 <= len([line for line in read_metrics(run) if line["kind"] == "train"]) < 1200
    assert Checkpoints(run / "checkpoints", 2, World()).found()[-1].name == "step-00000600"


TWO_GROUPS = """
import os, time
from pathlib import Path
from grape_pe.lab.train.distributed import world
for _ in range(2):
    with world(Path(".")) as among:
        assert among.gathered(among.rank) == [0, 1]
    time.sleep(1.0 if os.environ["RANK"] == "0" else 0.0)
"""


@pytest.mark.parametrize("shared", ["0", "1"])
def test_one_rank_opens_its_second_group_before_the_other(shared: str, tmp_path: Path, monkeypatch) -> None:
    """A group must not connect to the addresses that the group before it left in the store."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", shared)
    script = tmp_path / "twice.py"
    script.write_text(TWO_GROUPS)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(
        [sys.executable, *launcher], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_under_torchrun(data: Path, alone: Path, tmp_path: Path) -> None:
    """The command line of the documentation, as a user types it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "grape_pe.cli"]
    given = words(data, tmp_path / "run", **SIZES, train__strategy="fsdp")
    command = [sys.executable, *launcher, *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the model is in") == 1
    assert curve(tmp_path / "run") == pytest.approx(curve(alone), abs=TOLERANCE)
