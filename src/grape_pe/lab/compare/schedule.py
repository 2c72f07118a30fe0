"""Runs on an engine, several at a time: failures, lost runs, Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..errors import LabError
from .engines import Engine, Lost, Work
from .engines.launch import ATTEMPT, GRACE

#: seconds between polls of the runs, and between calls of `tick`
LOOK, TICK = 0.2, 1.0
#: a run lost this often without progress is an error
PATIENCE = 5
#: prefix of the line with which a run refuses to continue
REFUSAL = "grape: "
KEPT = "finished work is kept; run the same command again"


class _Losses:
    """Number of times each run was lost since its last progress."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[object, int]] = {}

    def note(self, work: Work, why: Lost) -> None:
        now = work.progress()
        before, count = self.seen.get(work.name, (now, 0))
        count = count + 1 if now == before else 1
        self.seen[work.name] = now, count
        if count >= PATIENCE:
            raise LabError(f"{work.title}: lost {count} times without progress, last because {why}; {KEPT}")


def run_side_by_side(
    works: Sequence[Work], engine: Engine, places: int | None, tick: Callable[[], None] = lambda: None
) -> None:
    """Make all runs, at most `places` at once (None: the engine queues them); calls `tick` about once a second.

    A run that is lost with its machine is repeated. A run that fails cancels the others, which save, and raises
    LabError. One that is stopped by a signal, or Ctrl-C, cancels the others and raises KeyboardInterrupt.
    """
    waiting, running, losses, due = list(works), list[tuple[Work, Any]](), _Losses(), 0.0
    try:
        while waiting or running:
            while waiting and (places is None or len(running) < places):
                running.append((waiting[0], engine.submit(waiting[0])))
                waiting.pop(0)
            for each in list(running):
                work, ended = each[0], _ended(engine, each[1])
                if ended is None:
                    continue
                running.remove(each)
                if isinstance(ended, Lost):
                    losses.note(work, ended)
                    waiting.insert(0, work)
                elif ended:
                    raise KeyboardInterrupt if ended in (130, 143) else LabError(_why(work, ended))
            if time.monotonic() >= due:
                tick()
                due = time.monotonic() + TICK
            if running:
                time.sleep(LOOK)
    finally:
        _stop(engine, running)


def _ended(engine: Engine, handle: Any) -> int | Lost | None:
    """The exit code of a run or the reason of its loss; None while it is running."""
    try:
        return engine.poll(handle)
    except Lost as why:
        return why


def _why(work: Work, code: int) -> str:
    lines: list[str] = []  # output of the last attempt
    with suppress(OSError):
        *_, last = work.log.read_text(errors="replace").rsplit(f"\n{ATTEMPT}", 1)
        lines = [line for line in last.splitlines()[1:] if line.strip()]
    refusals = [line for line in lines if line.startswith(REFUSAL)]
    if refusals:
        return refusals[-1].removeprefix(REFUSAL)
    if code == -9:
        return f"{work.title}: its process was killed, perhaps out of memory; {KEPT}, with fewer --jobs"
    if code < 0:
        return f"{work.title}: its process ended by signal {-code}; {KEPT}"
    last = f" ({lines[-1].strip()})" if lines else ""
    return f"{work.title}: its process ended with code {code}{last}; see {work.log}; {KEPT}"


def _stop(engine: Engine, running: Sequence[tuple[Work, Any]]) -> None:
    """Ask the remaining runs to save and end, and wait; a second Ctrl-C ends them at once."""
    try:
        for _, handle in running:
            engine.cancel(handle)
        until = time.monotonic() + GRACE + 30
        while any(not _over(engine, handle) for _, handle in running) and time.monotonic() < until:
            time.sleep(LOOK)
    except KeyboardInterrupt:
        for _, handle in running:
            engine.cancel(handle, force=True)
        raise


def _over(engine: Engine, handle: Any) -> bool:
    with suppress(LabError):
        return _ended(engine, handle) is not None
    return True
