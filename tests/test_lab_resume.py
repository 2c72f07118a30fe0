"""A run that was killed and continued is the run that was not, to the last bit."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from grape_pe.lab.train.metrics import read_metrics
from grape_pe.lab.train.trainer import train
from lab_runs import Running, grape, start, tiny_data, words

STEPS = 16


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("resume"))


def weights(run: Path) -> bytes:
    return (run / "final/model.safetensors").read_bytes()


def losses(run: Path) -> list[tuple]:
    """Every logged number that depends on the mathematics alone."""
    return [
        (line["kind"], line["step"], *(line.get(name) for name in ("loss", "lr", "grad_norm", "values")))
        for line in read_metrics(run)
    ]


def arguments(data: Path, out: Path, **changes) -> list[str]:
    given = {"train__steps": STEPS, "train__checkpoint_every": 1, "model__encoding": "grape-ap", **changes}
    return words(data, out, **given)


def half_written(run: Path) -> list[Path]:
    return list((run / "checkpoints").glob(".part-*"))


def newest(run: Path) -> int:
    return max((int(p.name[5:]) for p in (run / "checkpoints").glob("step-*")), default=0)


def wait_for_a_write(running: Running, run: Path, beyond: int) -> None:
    """Until a checkpoint later than `beyond` is being written."""
    while running.alive() and not any(int(p.name[-8:]) > beyond for p in half_written(run)):
        time.sleep(0.0005)


def kill_often(given: list[str], run: Path, ranks: int, kills: int, dice: random.Random) -> tuple[int, int]:
    """Continue and kill, up to `kills` times, then let it end: (kills, of them inside a write)."""
    done = inside = 0
    while done < kills:
        running = start([*given, "--resume"], ranks)
        if done % 3 == 2:
            time.sleep(dice.uniform(0.02, 0.6))  # whatever it does: starting, reading, training, writing
        else:
            wait_for_a_write(running, run, newest(run) + dice.randrange(2))
            time.sleep(dice.uniform(0, 0.01))
        running.send(signal.SIGKILL)
        if running.wait()[0] == 0:  # it was quicker
            break
        done += 1
        inside += bool(half_written(run))
    code, said = grape([*given, "--resume"], ranks)
    assert code == 0, said
    return done, inside


@pytest.mark.parametrize("ranks, kills", [(1, 12), (2, 3), pytest.param(2, 12, marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_ends_the_same(data: Path, tmp_path: Path, ranks: int, kills: int) -> None:
    strategy = {"train__strategy": "fsdp"} if ranks > 1 else {}
    whole, dice = tmp_path / "whole", random.Random(0)
    code, said = grape(arguments(data, whole, **strategy), ranks)
    assert code == 0, said
    done = inside = 0
    while done < kills:  # a run that ended too soon is followed by another
        broken = tmp_path / f"broken-{done}"
        more = kill_often(arguments(data, broken, **strategy), broken, ranks, kills - done, dice)
        done, inside = done + more[0], inside + more[1]
        assert losses(broken) == losses(whole)
        assert weights(broken) == weights(whole)
        assert not half_written(broken)
    assert inside >= kills // 3


def test_a_half_written_checkpoint_is_invisible(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert grape(arguments(data, run, train__steps=4))[0] == 0
    end = weights(run)
    hidden = run / "checkpoints/.part-step-00000099"
    hidden.mkdir()
    (hidden / "state.json").write_text('{"step": 99}')
    assert grape([*arguments(data, run, train__steps=4), "--resume"])[0] == 0
    assert not hidden.exists() and weights(run) == end


def test_a_run_killed_before_its_first_checkpoint_starts_again(data: Path, tmp_path: Path) -> None:
    """What the first moments leave behind: a lock, half a file, lines of steps now undone."""
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").touch()
    (run / ".part-environment.json").write_text('{"started"')
    assert grape([*arguments(data, run, train__steps=3), "--resume"])[0] == 0
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 4, "loss": 1.0}\n{"kind": "trai')
    assert grape([*arguments(data, run, train__steps=3), "--resume"])[0] == 0
    assert [line["step"] for line in read_metrics(run) if line["kind"] == "train"] == [1, 2, 3]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_saves_and_the_run_goes_on(data: Path, tmp_path: Path, number: int, ranks: int) -> None:
    run = tmp_path / "run"
    given = arguments(data, run, train__steps=300, train__checkpoint_every=0, train__eval_every=0)
    running = start(given, ranks)
    while running.alive() and len(read_metrics(run)) < 5:
        time.sleep(0.002)
    running.send(number)
    code, said = running.wait()
    assert code == 128 + number, said
    assert said.startswith("stopped and saved at step") and len(said.splitlines()) == 1
    stopped = newest(run)
    assert 5 <= stopped < 300 and len(read_metrics(run)) == stopped
    assert not (run / "final").exists()


def test_a_stopped_run_ends_as_if_it_had_not_been(data: Path, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    sizes = {"train__steps": 60, "train__checkpoint_every": 20, "train__eval_every": 20}
    assert grape(arguments(data, whole, **sizes))[0] == 0
    given = arguments(data, stopped, **sizes)
    running = start(given)
    while running.alive() and len(read_metrics(stopped)) < 25:
        time.sleep(0.002)
    running.send(signal.SIGTERM)
    running.send(signal.SIGTERM)  # a cluster may ask twice: each time it only saves
    assert running.wait()[0] == 143
    assert grape([*given, "--resume"])[0] == 0
    assert losses(stopped) == losses(whole) and weights(stopped) == weights(whole)


def test_the_signal_of_one_rank_stops_all(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = arguments(data, run, train__steps=300, train__checkpoint_every=0)
    running = start(given, ranks=2)
    while running.alive() and len(read_metrics(run)) < 3:
        time.sleep(0.002)
    Running(running.processes[1:], []).send(signal.SIGTERM)
    code, said = running.wait()
    assert code == 143 and [process.exitcode for process in running.processes] == [143, 143], said


def test_resume_from_nothing_starts(data: Path, tmp_path: Path) -> None:
    code, said = grape([*arguments(data, tmp_path / "new", train__steps=3), "--resume"])
    assert code == 0, said


def test_what_does_not_change_the_mathematics_may_change(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert grape(arguments(data, run, train__steps=6))[0] == 0
    given = arguments(data, run, train__steps=6, train__micro_batch=1, train__keep=5, train__recompute=True)
    code, said = grape([*given, "--resume"])
    assert code == 0, said


def test_a_wsd_run_may_grow_until_its_decay_begins(data: Path, tmp_path: Path) -> None:
    """It ends as the run that was longer from the start."""
    wsd = {"train__schedule": "wsd", "train__decay": 0.25, "train__eval_every": 0}
    whole, grown = tmp_path / "whole", tmp_path / "grown"
    assert grape(arguments(data, whole, train__steps=12, **wsd))[0] == 0
    short = arguments(data, grown, train__steps=8, train__keep=9, **wsd)
    assert grape(short)[0] == 0
    longer = [*arguments(data, grown, train__steps=12, train__keep=9, **wsd), "--resume"]
    code, said = grape(longer)
    assert code == 2 and "at step 8 its decay has begun, after step 6; remove" in said
    for late in (7, 8):
        shutil.rmtree(grown / f"checkpoints/step-{late:08d}")
    code, said = grape([*longer, "--train.lr", "0.5"])
    assert code == 2 and "begun with another configuration" in said
    assert grape(longer)[0] == 0
    assert losses(grown)[-4:] == losses(whole)[-4:] and weights(grown) == weights(whole)
    assert grape(longer)[0] == 0  # config.yaml has grown with it
    code, said = grape([*short, "--resume"])
    assert code == 2 and "train.steps: 12 -> 8" in said


@pytest.mark.slow
def test_torchrun_starts_a_job_again_when_a_rank_was_killed(data: Path, tmp_path: Path) -> None:
    """One of two ranks dies between checkpoints; nobody types a command, and the end is the same to the last bit.

    A store of its own for each attempt: in the shared one, ranks find the addresses of those that died (torch 2.13).
    """
    from psutil import Process

    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    sizes = {
        "train__steps": 400,
        "train__checkpoint_every": 20,
        "train__strategy": "fsdp",
        "train__eval_every": 200,
    }
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    plain = [*launch, "-m", "grape_pe.cli", *arguments(data, whole, **sizes)]
    subprocess.run(plain, check=True, capture_output=True)
    given = ["--max-restarts=2", "-m", "grape_pe.cli", *arguments(data, broken, **sizes), "--resume"]
    own = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    running = subprocess.Popen([*launch, *given], env=own, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    killed: set[int] = set()
    for beyond in (20, 200):
        while running.poll() is None and newest(broken) < beyond:
            time.sleep(0.01)
        assert running.poll() is None
        ranks = [child.pid for child in Process(running.pid).children()]
        assert len(ranks) == 2 and not killed & set(ranks)
        killed |= set(ranks)
        os.kill(ranks[1], signal.SIGKILL)
    _, said = running.communicate(timeout=600)
    assert running.returncode == 0, said.decode()
    assert losses(broken) == losses(whole) and weights(broken) == weights(whole)


def test_newest_and_best_are_kept(data: Path, tmp_path: Path) -> None:
    """With a rate that ruins the model after its best step."""
    from lab_runs import tiny_config

    config = tiny_config(
        data, train__steps=8, train__checkpoint_every=1, train__eval_every=1, train__keep=2, train__lr=3.0,
        train__min_lr=3.0, train__warmup=7, train__clip=0,
    )  # fmt: skip
    outcome = train(config, tmp_path / "run", quiet=True)
    validation = {x["step"]: x["loss"] for x in read_metrics(tmp_path / "run") if x["kind"] == "validation"}
    best = min(validation, key=lambda step: validation[step])
    assert best < 7, f"the test needs an early best step, got {validation}"
    kept = sorted(int(p.name[5:]) for p in (tmp_path / "run/checkpoints").iterdir())
    assert kept == [best, 7, 8]
    assert outcome.best_loss == validation[best]
    state = json.loads((tmp_path / "run/checkpoints/step-00000008/state.json").read_text())
    assert state["best_step"] == best and state["best_loss"] == validation[best]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_real_command_killed_at_random(data: Path, tmp_path: Path, ranks: int) -> None:
    """`grape train` as users start it, also under torchrun, with the whole process group killed."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if ranks == 2 else []
    prefix = [sys.executable, *launch, "-m", "grape_pe.cli"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    steps = {"train__steps": 200}
    subprocess.run([*prefix, *arguments(data, whole, **steps)], check=True, capture_output=True)
    dice = random.Random(1)
    kills = 0
    while kills < 10:
        before = newest(broken)
        running = subprocess.Popen(
            [*prefix, *arguments(data, broken, **steps), "--resume"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while running.poll() is None and newest(broken) <= before:
            time.sleep(0.01)
        time.sleep(dice.uniform(0, 0.3))
        assert running.poll() is None
        _kill_all(running)
        kills += 1
    subprocess.run([*prefix, *arguments(data, broken, **steps), "--resume"], check=True, capture_output=True)
    assert losses(broken) == losses(whole) and weights(broken) == weights(whole)


def _kill_all(running: subprocess.Popen) -> None:
    """The process and its children: torchrun's workers are no members of its process group."""
    from psutil import NoSuchProcess, Process, wait_procs

    family = [*Process(running.pid).children(recursive=True), Process(running.pid)]
    for process in family:
        with contextlib.suppress(NoSuchProcess):
            process.kill()
    running.wait()
    wait_procs(family, timeout=10)
