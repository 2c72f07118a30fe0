"""Runs side by side in processes: failures are one sentence, and only our own processes are signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grape_pe.lab.compare import processes as side_by_side
from grape_pe.lab.compare.processes import Task, run_side_by_side
from grape_pe.lab.errors import LabError
from grape_pe.lab.train.signals import StopSignals


def note(place: int, path: Path) -> int:
    path.write_text(f"{place} {os.getpid()}")
    return 0


def refuse(_place: int) -> int:
    raise LabError("no such thing")


def out_of_memory(_place: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def interrupted(_place: int, other: Path) -> int:
    while not other.exists():
        time.sleep(0.01)
    return signal.SIGINT


def save_when_asked(_place: int, begun: Path, saved: Path) -> int:
    """A run under way: saves and ends when it gets SIGTERM."""
    with StopSignals() as signals:
        begun.touch()
        while not signals.received:
            time.sleep(0.01)
        saved.write_text(str(signals.received))
        return signals.received


def test_all_are_run_and_failures_are_a_sentence(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(2)]
    run_side_by_side([Task("note", note, (path,)) for path in paths], places=2)
    assert len({path.read_text().split()[1] for path in paths}) == 2  # a process each
    with pytest.raises(LabError, match=r"^no such thing$"):
        run_side_by_side([Task("refuse", refuse)], places=1)
    with pytest.raises(
        LabError, match=r"^fox seed 1: its process was killed, perhaps out of memory; .*jobs$"
    ):
        run_side_by_side([Task("fox seed 1", out_of_memory)], places=1)


def test_the_others_save_and_strangers_live(tmp_path: Path) -> None:
    """When one is interrupted the others get SIGTERM; another child of this process gets nothing."""
    begun, saved = tmp_path / "begun", tmp_path / "saved"
    stranger = side_by_side._start(Task("stranger", save_when_asked, (tmp_path / "x", tmp_path / "y")), 0)
    try:
        tasks = [Task("a", interrupted, (begun,)), Task("b", save_when_asked, (begun, saved))]
        with pytest.raises(KeyboardInterrupt):
            run_side_by_side(tasks, places=2)
        assert saved.read_text() == str(int(signal.SIGTERM))
        assert stranger.process.is_alive() and not (tmp_path / "y").exists()
    finally:
        stranger.process.kill()
        stranger.process.join()


INTERRUPTED = """
import signal
import sys
from pathlib import Path
from grape_pe.lab.compare.processes import Task, run_side_by_side
from test_lab_side_by_side import save_when_asked

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    begun, saved = map(Path, sys.argv[1:])
    try:
        run_side_by_side([Task("a", save_when_asked, (begun, saved))], 1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
"""


def test_ctrl_c_leaves_no_traceback(tmp_path: Path) -> None:
    """SIGINT to the whole group, as a terminal sends it: the run saves, and nothing is printed."""
    script, begun, saved = tmp_path / "script.py", tmp_path / "begun", tmp_path / "saved"
    script.write_text(INTERRUPTED)
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    running = subprocess.Popen(
        [sys.executable, str(script), str(begun), str(saved)], start_new_session=True,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    while running.poll() is None and not begun.exists():
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)
    _, said = running.communicate(timeout=120)
    assert (running.returncode, said) == (130, "")
    assert saved.read_text() == str(int(signal.SIGTERM))


STARTING = """
import os
import sys
import time
from pathlib import Path

here = Path(__file__).parent
if os.environ.get("SLOW_IMPORT") == "1" and "slow_import" in sys.modules:
    (here / "pid").write_text(str(os.getpid()))
    while not (here / "go").exists():
        time.sleep(0.01)

def work(place):
    (here / "worked").touch()
    return 0
"""
KILLED = """
import os
from grape_pe.lab.compare.processes import Task, run_side_by_side

if __name__ == "__main__":
    import slow_import
    os.environ["SLOW_IMPORT"] = "1"
    run_side_by_side([Task("a", slow_import.work)], 1)
"""


def test_a_worker_whose_parent_is_killed_while_it_starts_does_nothing(tmp_path: Path) -> None:
    """Importing torch takes seconds: a worker that went on after them would hold its run's lock."""
    (tmp_path / "slow_import.py").write_text(STARTING)
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    running = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": paths})
    while running.poll() is None and not (tmp_path / "pid").exists():
        time.sleep(0.02)
    running.kill()
    running.wait()
    (tmp_path / "go").touch()
    worker = int((tmp_path / "pid").read_text())
    ends = time.monotonic() + 60
    while _runs(worker) and time.monotonic() < ends:
        time.sleep(0.02)
    assert not _runs(worker) and not (tmp_path / "worked").exists()


def _runs(pid: int) -> bool:
    from psutil import STATUS_ZOMBIE, NoSuchProcess, Process

    try:
        return Process(pid).status() != STATUS_ZOMBIE
    except NoSuchProcess:
        return False
