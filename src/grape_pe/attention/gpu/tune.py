"""Times the candidate tiles on the user's GPU (`grape doctor --tune`); the launcher takes what is kept.

Column n is candidate n of every kernel (launch.TILES). A child process (check.py) times the columns, all of them in
each round. The fastest tile of each kernel is kept in the cache folder, after they have passed the check together.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from . import store, verdict
from .store import Case, Tiles, describe
from .verdict import Verdict

if TYPE_CHECKING:
    from .check import Problem

ROUNDS = 5
#: length of the sequences that are timed
TOKENS = 4096


def columns() -> list[Tiles]:
    from .launch import TILES

    count = max(map(len, TILES.values()))
    return [
        {name: list(tiles[min(n, len(tiles) - 1)]) for name, tiles in TILES.items()} for n in range(count)
    ]


def tune(device: torch.device, case: Case) -> Verdict:
    """Time every column and check the fastest tiles, in child processes, and keep these."""
    return verdict.one_at_a_time(lambda: _tune(device, replace(case, masks=("causal",))))


def _tune(device: torch.device, case: Case) -> Verdict:
    timed = verdict.run_case(device, case, tokens=TOKENS, columns=columns())
    if not timed.ok:
        return Verdict(f"the tiles could not be timed: {timed.reason}")
    times = timed.times
    best = {
        kernel: [int(n) for n in min(found, key=found.__getitem__).split()] for kernel, found in times.items()
    }
    checked = verdict.run_case(device, case, tiles=best)
    if not checked.ok:
        return Verdict(f"the fastest tiles failed their check: {checked.reason}", times=times)
    if not store.keep_tiles(describe(device), case, best):
        return Verdict("the cache folder cannot be used, so nothing is kept", times=times)
    verdict.keep(describe(device), case, checked)
    return Verdict(None, times=times, tiles=best)


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

    call = functools.partial(check.evaluate, problem, check.inputs(problem), True, (1,))
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(ROUNDS):
        for column in given:
            force(column)
            call()  # compiles what is new
            for (kernel, tile), spent in _launch_seconds(problem.device, call).items():
                if kernel in column:
                    seconds[kernel][tile].append(spent)
    medians = {k: {t: statistics.median(x) for t, x in rows.items()} for k, rows in seconds.items()}
    return Verdict(None, times=medians)


def _launch_seconds(device: str, call: Callable[[], object]) -> dict[tuple[str, str], float]:
    """Seconds of a call by kernel and tile, summed: it may launch a kernel several times, for some heads each."""
    from . import compile as gpu

    marks: list[tuple[Any, Any, Any]] = []
    plain = gpu.start

    def start(launch: Any) -> None:
        before = _mark(device)
        plain(launch)
        marks.append((launch, before, _mark(device)))

    gpu.start = start
    try:
        call()
    finally:
        gpu.start = plain
    if device != "cpu":
        torch.cuda.synchronize(device)
    total: dict[tuple[str, str], float] = defaultdict(float)
    for launch, before, after in marks:
        spent = after - before if device == "cpu" else before.elapsed_time(after) / 1000
        total[launch.kernel.__name__, " ".join(map(str, launch.tile))] += spent
    return total


def _mark(device: str) -> Any:
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
