"""Runs side by side: failures are one sentence, lost runs are made again, and only our own processes are signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from grape_pe.lab.compare.engines import Engine, Local, Lost, Resources, Work, open_engine
from grape_pe.lab.compare.engines.local import _devices
from grape_pe.lab.compare.schedule import PATIENCE, run_side_by_side
from grape_pe.lab.errors import LabError

HERE = Path(__file__).parent
ALONE = Resources(threads=1, gpus=0)
NOTE = "import os, sys; open(sys.argv[1], 'w').write(f'{os.getpid()} {os.getcwd()}')"
REFUSES = "import sys; print('grape: no such thing', file=sys.stderr); print('more'); sys.exit(2)"
CRASHES = "raise RuntimeError('a shape is wrong')"
OUT_OF_MEMORY = "import os; os.kill(os.getpid(), 9)"
INTERRUPTED = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.exit(130)
"""
#: a run under way: saves and ends when it gets SIGTERM
SAVES = """
import pathlib, sys, time
from grape_pe.lab.train.signals import StopSignals

begun, saved = map(pathlib.Path, sys.argv[1:])
with StopSignals() as signals:
    begun.touch()
    while not signals.received:
        time.sleep(0.01)
    saved.write_text(str(signals.received))
sys.exit(128 + signals.received)
"""


@pytest.fixture
def work(tmp_path: Path) -> Callable[..., Work]:
    def made(name: str, code: str, *arguments: Path, **more) -> Work:
        given = ("-c", code, *map(str, arguments))
        return Work(name, name.replace("-", " "), given, tmp_path / f"{name}.txt", ALONE, **more)

    return made


def test_all_are_run_and_failures_are_a_sentence(tmp_path: Path, work) -> None:
    paths = [tmp_path / str(number) for number in range(3)]
    run_side_by_side([work(path.name, NOTE, path) for path in paths], Local(), 2)
    assert len({path.read_text() for path in paths}) == 3  # a process each
    assert {path.read_text().split()[1] for path in paths} == {os.getcwd()}
    with pytest.raises(LabError, match=r"^no such thing$"):
        run_side_by_side([work("refuse", REFUSES)], Local(), 1)
    with pytest.raises(
        LabError, match=r"^crash: its process ended with code 1 \(RuntimeError: .* wrong\); see .*crash.txt"
    ):
        run_side_by_side([work("crash", CRASHES)], Local(), 1)
    with pytest.raises(
        LabError, match=r"^fox seed 1: its process was killed, perhaps out of memory; .*jobs$"
    ):
        run_side_by_side([work("fox-seed-1", OUT_OF_MEMORY)], Local(), 1)


def test_what_an_earlier_attempt_printed_is_not_the_reason(work) -> None:
    for code, said in ((REFUSES, "no such thing"), (CRASHES, "a shape is wrong")):
        with pytest.raises(LabError, match=said):
            run_side_by_side([work("same", code)], Local(), 1)


def test_the_others_save_and_strangers_live(tmp_path: Path, work) -> None:
    """When one is interrupted the others get SIGTERM; another child of this process gets nothing."""
    begun, saved, engine = tmp_path / "begun", tmp_path / "saved", Local()
    stranger = engine.submit(work("stranger", SAVES, tmp_path / "x", tmp_path / "y"))
    try:
        with pytest.raises(KeyboardInterrupt):
            run_side_by_side([work("a", INTERRUPTED, begun), work("b", SAVES, begun, saved)], engine, 2)
        assert saved.read_text() == str(int(signal.SIGTERM))
        assert engine.poll(stranger) is None and not (tmp_path / "y").exists()
    finally:
        engine.cancel(stranger, force=True)
        stranger.process.wait()


CTRL_C = """
import signal
import sys
from pathlib import Path
from grape_pe.lab.compare.engines import Local, Resources, Work
from grape_pe.lab.compare.schedule import run_side_by_side
from test_lab_side_by_side import SAVES

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
begun, saved, log = sys.argv[1:]
try:
    run_side_by_side([Work("a", "a", ("-c", SAVES, begun, saved), Path(log), Resources(1, 0))], Local(), 1)
except KeyboardInterrupt:
    raise SystemExit(130) from None
"""


def started(script: str, *arguments: Path, **more) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], start_new_session=True,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths, **more},
    )  # fmt: skip


def wait_for(path: Path, running: subprocess.Popen[str]) -> None:
    while running.poll() is None and not path.exists():
        time.sleep(0.02)


def test_ctrl_c_leaves_no_traceback(tmp_path: Path) -> None:
    """SIGINT to the whole group, as a terminal sends it: the run saves, and nothing is printed."""
    begun, saved = tmp_path / "begun", tmp_path / "saved"
    running = started(CTRL_C, begun, saved, tmp_path / "log")
    wait_for(begun, running)
    os.killpg(running.pid, signal.SIGINT)
    _, said = running.communicate(timeout=120)
    assert (running.returncode, said) == (130, "")
    assert saved.read_text() == str(int(signal.SIGTERM))


#: a worker that is still importing when its parent is killed
STARTING = """
import os, sys, time
from pathlib import Path

here = Path(sys.argv[1])
(here / "pid").write_text(str(os.getpid()))
while not (here / "go").exists():
    time.sleep(0.01)
from grape_pe.lab.orphans import end_with_input
end_with_input()
(here / "worked").touch()
"""
#: one that is at work
WORKING = """
import os, sys, time
from pathlib import Path
from grape_pe.lab.orphans import end_with_input

here = Path(sys.argv[1])
end_with_input()
(here / "pid").write_text(str(os.getpid()))
time.sleep(600)
"""
PARENT = """
import sys
from pathlib import Path
from grape_pe.lab.compare.engines import Local, Resources, Work
from grape_pe.lab.compare.schedule import run_side_by_side
import test_lab_side_by_side as code

here = sys.argv[1]
work = Work("a", "a", ("-c", getattr(code, sys.argv[2]), here), Path(here) / "log", Resources(1, 0))
run_side_by_side([work], Local(), 1)
"""


@pytest.mark.parametrize("worker", ["STARTING", "WORKING"])
def test_a_worker_ends_with_a_parent_that_is_killed(tmp_path: Path, worker: str) -> None:
    """Importing torch takes seconds: a worker that went on after them would hold its run's lock."""
    running = started(PARENT, tmp_path, Path(worker))
    wait_for(tmp_path / "pid", running)
    running.kill()
    running.communicate()
    (tmp_path / "go").touch()
    pid, ends = int((tmp_path / "pid").read_text()), time.monotonic() + 60
    while _runs(pid) and time.monotonic() < ends:
        time.sleep(0.02)
    assert not _runs(pid) and not (tmp_path / "worked").exists()


def _runs(pid: int) -> bool:
    from psutil import STATUS_ZOMBIE, NoSuchProcess, Process

    try:
        return Process(pid).status() != STATUS_ZOMBIE
    except NoSuchProcess:
        return False


@pytest.fixture
def at_once(monkeypatch) -> None:
    monkeypatch.setattr("grape_pe.lab.compare.schedule.LOOK", 0.0)


class Scripted(Engine):
    """Nothing runs: each attempt at a run ends as the script says, one poll after it began."""

    def __init__(self, script: dict[str, Sequence[object]]) -> None:
        self.script = {name: list(ends) for name, ends in script.items()}
        self.told: list[str] = []
        self.running: set[str] = set()
        self.most = 0

    def resources(self, jobs: int, threads: int | None, gpus: int | None) -> Resources:
        return ALONE

    def room(self, resources: Resources) -> None:
        return None

    def submit(self, work: Work) -> str:
        self.told.append(work.name)
        self.running.add(work.name)
        self.most = max(self.most, len(self.running))
        return work.name

    def poll(self, handle: str) -> int | None:
        end = self.script[handle].pop(0) if self.script[handle] else 0
        if isinstance(end, BaseException):
            self.running.discard(handle)
            raise end
        if end is not None:
            self.running.discard(handle)
        return end  # type: ignore[return-value]

    def cancel(self, handle: str, force: bool = False) -> None:
        self.told.append(f"cancel {handle}" + " now" * force)


def test_a_lost_run_is_made_again_and_before_those_that_wait(work, at_once) -> None:
    engine = Scripted({"a": [Lost("node died"), None, 0], "b": [None, 0], "c": [0]})
    run_side_by_side([work(name, "") for name in "abc"], engine, 2)
    assert engine.told == ["a", "b", "a", "c"] and engine.most == 2


def test_without_places_the_engine_gets_all_at_once(work, at_once) -> None:
    engine = Scripted({name: [None, 0] for name in "abc"})
    run_side_by_side([work(name, "") for name in "abc"], engine, None)
    assert engine.most == 3


def test_a_run_that_is_lost_again_and_again_is_given_up(work, at_once) -> None:
    """But only if it does not get further: each time a node is taken away, a checkpoint may have been reached."""
    steps = iter(range(100))
    often = [Lost("preempted")] * (2 * PATIENCE)
    run_side_by_side([work("a", "", progress=lambda: next(steps))], Scripted({"a": often}), 1)
    engine = Scripted({"a": often, "b": [None] * 2 * PATIENCE})
    with pytest.raises(LabError, match=f"^a: lost {PATIENCE} times without progress.*preempted"):
        run_side_by_side([work("a", ""), work("b", "")], engine, 2)
    assert engine.told.count("a") == PATIENCE and engine.told[-1] == "cancel b"


def test_a_failure_cancels_the_others_and_a_second_ctrl_c_does_not_wait(work, at_once) -> None:
    engine = Scripted({"a": [7], "b": [None, None, 143]})
    with pytest.raises(LabError, match=r"^a: its process ended with code 7"):
        run_side_by_side([work("a", ""), work("b", "")], engine, 2)
    assert engine.told == ["a", "b", "cancel b"]
    engine = Scripted({"a": [None, KeyboardInterrupt(), None, KeyboardInterrupt()], "b": [None] * 9})
    with pytest.raises(KeyboardInterrupt):
        run_side_by_side([work("a", ""), work("b", "")], engine, 2)
    assert engine.told[2:] == ["cancel a", "cancel b", "cancel a now", "cancel b now"]


@pytest.mark.parametrize(
    "on, slurm, said",
    [
        ("kubernetes", {}, "--on must be local, ray, .* or slurm, got 'kubernetes'"),
        ("ray://", {}, "--on must be"),
        ("ray://host", {}, "--on must be"),
        ("ray", {"partition": "gpu"}, "--slurm partition has no effect with --on ray"),
    ],
)
def test_an_engine_that_is_not_known_is_refused(on: str, slurm: dict[str, str], said: str, tmp_path) -> None:
    with pytest.raises(LabError, match=said):
        open_engine(on, tmp_path / "logs", slurm)
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("on, module", [("ray", "ray"), ("slurm", "submitit")])
def test_an_engine_that_is_not_installed_says_how(on: str, module: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'grape-pe\[{on}\]'"):
        open_engine(on, tmp_path, {"time": "10"} if on == "slurm" else {})


def test_places_share_the_gpus_of_this_machine(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("grape_pe.lab.compare.engines.local.available_cores", lambda: 16)
    engine = Local()
    assert engine.resources(0, None, None) == Resources(threads=4, gpus=1)
    assert engine.resources(0, None, 2) == Resources(threads=8, gpus=2)
    assert engine.resources(0, None, 0) == Resources(threads=1, gpus=0)
    assert engine.resources(2, 3, None) == Resources(threads=3, gpus=1)
    assert [engine.room(Resources(1, gpus)) for gpus in (0, 1, 2, 3)] == [16, 4, 2, 1]
    with pytest.raises(LabError, match="--gpus-per-job must be at most 4, the GPUs of this machine, got 5"):
        engine.resources(0, None, 5)
    assert [_devices(place, 2) for place in range(3)] == ["0,1", "2,3", "0,1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [_devices(place, 1) for place in (0, 3, 4)] == ["4", "7", "4"] and _devices(0, 0) == ""
