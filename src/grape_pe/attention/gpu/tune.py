"""Times the candidate tiles on the user's GPU (`grape doctor --tune`); the launcher takes what is kept.

Column n is candidate n of every kernel (launch.TILES). Each column is checked against float64 in a child process
(check.py). Another child times the columns that passed, all of them in each round. The fastest tile of each
kernel is kept in the cache folder, after the fastest have passed the check together.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from . import child, store, verdict
from .child import Verdict
from .device import describe
from .store import Case, Tiles

if TYPE_CHECKING:
    from .check import Problem

ROUNDS = 5
#: length of the sequences that are timed
TOKENS = 4096
Times = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Tuning:
    """Tiles that were kept, with the seconds of all that were timed; or the reason why none was kept."""

    reason: str | None
    tiles: Tiles = field(default_factory=dict)
    times: Times = field(default_factory=dict)


def columns() -> list[Tiles]:
    from .launch import TILES

    count = max(map(len, TILES.values()))
    return [
        {name: list(astuple(tiles[min(n, len(tiles) - 1)])) for name, tiles in TILES.items()}
        for n in range(count)
    ]


def tune(device: torch.device, case: Case) -> Tuning:
    """Check and time every column in child processes, and keep the fastest tile of each kernel."""
    case = replace(case, masks=("causal",))
    try:
        with store.machine_lock(4 * child.LIMIT):
            return _tune(device, case)
    except TimeoutError:
        return Tuning("another process has been checking for too long")


def _tune(device: torch.device, case: Case) -> Tuning:
    given = {**asdict(case), "impl": "triton", "device": str(device)}
    checked = [(column, child.run({**given, "tiles": column})) for column in columns()]
    sound = [column for column, found in checked if found.ok]
    if not sound:
        return Tuning(f"no tile passed its check: {checked[-1][1].reason}")
    timed = child.run({**given, "tokens": TOKENS, "columns": sound})
    if not timed.ok:
        return Tuning(f"the tiles could not be timed: {timed.reason}")
    times = _passed(timed.times, sound)
    best = {kernel: _numbers(min(found, key=found.__getitem__)) for kernel, found in times.items()}
    last = child.run({**given, "tiles": best})
    if not last.ok:
        return Tuning(f"the fastest tiles failed their check together: {last.reason}", times=times)
    if not store.keep_tiles(describe(device), case, best):
        return Tuning("the cache folder cannot be used, so nothing is kept", times=times)
    verdict.keep(describe(device), case, last)
    return Tuning(None, best, times)


def _passed(times: Times, sound: list[Tiles]) -> Times:
    """Without tiles of columns that failed: the launcher takes another tile where one does not fit."""
    allowed = {kernel: [column[kernel] for column in sound] for kernel in sound[0]}
    found = {
        kernel: {tile: seconds for tile, seconds in rows.items() if _numbers(tile) in allowed.get(kernel, [])}
        for kernel, rows in times.items()
    }
    return {kernel: rows for kernel, rows in found.items() if rows}


def _numbers(tile: str) -> list[int]:
    return [int(number) for number in tile.split()]


# In the child process


def force(tiles: Tiles) -> None:
    """Use these tiles in this process wherever they fit."""
    from . import compile as gpu
    from . import launch

    launch.forced = tiles
    gpu.forget_choices()


def measured(problem: Problem, given: list[Tiles]) -> Verdict:
    """Median seconds of each kernel by tile, training and decoding; each round runs every column."""
    from . import check

    tensors = check.inputs(problem)
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(ROUNDS):
        for column in given:
            force(column)
            check.evaluate(problem, tensors, True, (1,))  # compiles what is new
            with _recorded(problem.device) as found:
                check.evaluate(problem, tensors, True, (1,))
            for (kernel, tile), spent in _summed(problem.device, found).items():
                if kernel in column:
                    seconds[kernel][tile].append(spent)
    times = {
        kernel: {tile: statistics.median(found) for tile, found in rows.items()}
        for kernel, rows in seconds.items()
    }
    return Verdict(True, None, times=times)


@contextmanager
def _recorded(device: str) -> Iterator[list[tuple[Any, Any, Any]]]:
    """The launches made inside, each with a mark before and after it."""
    from . import compile as gpu

    found: list[tuple[Any, Any, Any]] = []
    plain = gpu.start

    def start(launch: Any) -> None:
        before = _mark(device)
        plain(launch)
        found.append((launch, before, _mark(device)))

    gpu.start = start
    try:
        yield found
    finally:
        gpu.start = plain


def _summed(device: str, found: list[tuple[Any, Any, Any]]) -> dict[tuple[str, str], float]:
    """Seconds by kernel and tile. A call may launch a kernel several times, for some heads each."""
    if device != "cpu":
        torch.cuda.synchronize(device)
    total: dict[tuple[str, str], float] = defaultdict(float)
    for launch, before, after in found:
        spent = after - before if device == "cpu" else before.elapsed_time(after) / 1000
        total[launch.kernel.__name__, " ".join(map(str, astuple(launch.tile)))] += spent
    return total


def _mark(device: str) -> Any:
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
