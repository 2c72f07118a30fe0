"""Run tasks in processes of their own, several at a time: what `grape compare` trains its runs with.

Each task gets a fresh process, so its memory is its own. Only processes started here are ever signalled.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from ...encodings.own import ModuleImportError, import_modules
from ...encodings.registry import own_modules
from ..errors import LabError
from ..orphans import end_with_parent


@dataclass(frozen=True)
class Task:
    """`call(place, *arguments)`, run in a process; it returns the signal that stopped it, or 0."""

    title: str
    call: Callable[..., int]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class _Running:
    task: Task
    process: BaseProcess
    answer: Connection


def run_side_by_side(tasks: Sequence[Task], places: int, tick: Callable[[], None] = lambda: None) -> None:
    """Run all tasks, at most `places` at once; `tick` is called about once a second.

    A task that fails stops the others (by SIGTERM, so that they can save) and raises LabError.
    A task that was stopped by a signal, or Ctrl-C here, stops the others and raises KeyboardInterrupt.
    """
    waiting, running = list(tasks), dict[int, _Running]()
    try:
        while waiting or running:
            for place in [place for place in range(places) if place not in running][: len(waiting)]:
                running[place] = _start(waiting.pop(0), place)
            wait([each.process.sentinel for each in running.values()], timeout=1.0)
            tick()
            for place in [place for place, each in running.items() if not each.process.is_alive()]:
                _check_end(running.pop(place))
    finally:
        _stop(list(running.values()))


def _start(task: Task, place: int) -> _Running:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_child, args=(theirs, own_modules(), place, task.call, task.arguments))
    with _interrupts_held():
        process.start()
    theirs.close()
    return _Running(task, process, ours)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C reaches this process only: a child inherits the blocked signal, and is stopped by SIGTERM."""
    resource_tracker.ensure_running()  # starting it later, with the first process, would unblock the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _child(
    answer: Connection, modules: list[str], place: int, call: Callable[..., int], arguments: tuple[Any, ...]
) -> None:
    end_with_parent()
    try:
        import_modules(modules)  # encodings of the user's own
        answer.send(call(place, *arguments))
    except (LabError, ModuleImportError) as problem:
        answer.send(str(problem))


def _check_end(ended: _Running) -> None:
    """Raise if a task did not run to its end."""
    ended.process.join()
    result: int | str | None = None
    with suppress(EOFError):
        result = ended.answer.recv() if ended.answer.poll() else None
    if isinstance(result, str):
        raise LabError(result)
    if result is None:
        raise LabError(_why(ended.task.title, ended.process.exitcode or 0))
    if result:
        raise KeyboardInterrupt


def _why(title: str, code: int) -> str:
    kept = "finished work is kept; run the same command again"
    if code == -signal.SIGKILL:
        return f"{title}: its process was killed, perhaps out of memory; {kept}, with fewer --jobs"
    if code < 0:
        return f"{title}: its process was ended by signal {-code}; {kept}"
    return f"{title}: its process ended with code {code} and the error above; {kept}"


def _stop(running: list[_Running]) -> None:
    """Ask tasks that are still going to save and end, and wait; a second Ctrl-C ends them at once."""
    try:
        for each in running:
            each.process.terminate()
        for each in running:
            each.process.join()
    except KeyboardInterrupt:
        for each in running:
            each.process.kill()
        raise
