"""`grape compare`: train every arm for every seed, side by side where cores or GPUs allow, and report.

    compare(load_comparison("demo"), "results/demo")

What is done stays done: the same call after a kill goes on where it stopped, and ends with the same table.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from .arm_run import finished, run_job
from .comparison import EVALUATION, REPORT, RESULTS, Comparison, Job, jobs, open_directory
from .feed import open_feed
from .metrics import ProgressLine, read_metrics
from .report import write_report
from .run_directory import write_whole
from .world import World


def compare(
    comparison: Comparison, out: str | os.PathLike[str], *, side_by_side: int = 0, quiet: bool = False
) -> Path:
    """Run what is missing of a comparison and write its results and report; returns the report's path.

    Args:
        side_by_side: runs at once; 0 for one on each GPU, or else one on each core.
    """
    root = Path(out)
    places = side_by_side or torch.cuda.device_count() or available_cores()
    comparison = open_directory(root, comparison, _threads(places))
    if comparison.language:
        open_feed(comparison.recipe, World())  # prepared once, before many ask for it
    missing = [job for job in jobs(comparison) if not finished(job, root)]
    if missing:
        _run_all(missing, comparison, root, places, quiet)
    return summarise(root, comparison)


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


def _threads(places: int) -> int:
    """Threads of one run: fixed for a comparison, because sums depend on them in the last bit."""
    return max(1, available_cores() // places)


def summarise(root: Path, comparison: Comparison) -> Path:
    """results.jsonl and report.html of what is done."""
    lines = []
    for job in jobs(comparison):
        if finished(job, root):
            said = json.loads((job.directory(root) / EVALUATION).read_text())
            lines.append(json.dumps({"kind": "language" if job.task is None else "task", **said}))
    write_whole(root / RESULTS, "".join(line + "\n" for line in lines))
    return write_report([root], root / REPORT)


def _run_all(missing: list[Job], comparison: Comparison, root: Path, places: int, quiet: bool) -> None:
    """A fresh process for every run, so that its memory is its own; `places` of them at a time."""
    watch = _Watch(missing, comparison, root, quiet)
    fresh = multiprocessing.get_context("spawn")
    free = fresh.Queue()
    for place in range(places):
        free.put(place)
    pool = ProcessPoolExecutor(
        min(places, len(missing)), fresh, _begin, (free, _threads(places)),
        max_tasks_per_child=1,
    )  # fmt: skip
    running: set[Future[int]] = {pool.submit(_run, job, comparison, root) for job in missing}
    try:
        while running:
            done, running = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
            watch.show()
            for each in done:
                if each.result():
                    raise KeyboardInterrupt
    finally:
        watch.close()
        _end(pool)


def _end(pool: ProcessPoolExecutor) -> None:
    """Ask runs that are still going to save and stop; when all is done there are none."""
    pool.shutdown(wait=False, cancel_futures=True)
    for child in multiprocessing.active_children():
        if child.pid is not None:
            os.kill(child.pid, signal.SIGTERM)
    pool.shutdown(wait=True)


#: of a worker process: which place it has, and where it gives it back
_place: int = 0
_places: Any = None


def _begin(places: Any, threads: int) -> None:
    """In a new process: die with the parent, take a place, keep to the threads of one run."""
    global _place, _places
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    _place, _places = places.get(), places
    if torch.cuda.is_available():
        os.environ["LOCAL_RANK"] = str(_place % torch.cuda.device_count())
    torch.set_num_threads(threads)


def _run(job: Job, comparison: Comparison, root: Path) -> int:
    try:
        return run_job(job, comparison, root)
    finally:
        _places.put(_place)


class _Watch:
    """The progress of all runs on one line, read from their metrics."""

    def __init__(self, missing: list[Job], comparison: Comparison, root: Path, quiet: bool) -> None:
        self.missing, self.root = missing, root
        self.steps = {job: job.config(comparison).train.steps for job in missing}
        self.line = ProgressLine(f"{len(missing)} runs", self._look()[0], sum(self.steps.values()), quiet)

    def _last(self, job: Job) -> dict[str, Any]:
        found = [line for line in read_metrics(job.directory(self.root)) if line["kind"] == "train"]
        return found[-1] if found else {}

    def _look(self) -> tuple[int, list[str]]:
        """Steps done in all, and what is under way; the files of runs that have ended are not read again."""
        steps, active = 0, []
        for job in self.missing:
            if finished(job, self.root):
                steps += self.steps[job]
            elif last := self._last(job):
                steps += last["step"]
                active.append(f"{job.title} {last['step']}/{self.steps[job]} loss {last['loss']:.3f}")
        return steps, active

    def show(self) -> None:
        ended = sum(finished(job, self.root) for job in self.missing)
        steps, active = self._look()
        self.line.tell(steps, f"{ended}/{len(self.missing)} done  {', '.join(active[:2])}")

    def close(self) -> None:
        self.line.close()
