"""`grape compare`: train every arm for every seed, side by side where cores or GPUs allow, and report.

    compare(load_comparison("demo"), "results/demo")

What is done stays done: the same call after a kill goes on where it stopped, and ends with the same table.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from ...encodings.registry import only_here
from ..errors import LabError
from ..files import locked, read_json, write_text
from ..progress import ProgressLine
from ..report import read_results, write_report
from ..train.distributed import World
from ..train.feed import open_feed
from ..train.run_directory import latest_metrics
from .archive import restore
from .comparison import (
    AGAIN,
    COMPARISON,
    EVALUATION,
    REPORT,
    RESULTS,
    Comparison,
    Job,
    check_data,
    jobs,
    join_directory,
    make_directory,
    trials,
)
from .job import finished, run_job
from .processes import Task, run_side_by_side


def compare(
    comparison: Comparison,
    out: str | os.PathLike[str],
    *,
    side_by_side: int = 0,
    quiet: bool = False,
    start: Path | None = None,
) -> Path:
    """Run what is missing of a comparison and write its results and report; returns the report's path.

    Args:
        comparison: from `load_comparison`.
        out: the directory of the results.
        side_by_side: runs at once; 0 for one on each GPU, or else one on each core.
        quiet: no progress line.
        start: a file of `grape report --jsonl`; the runs in it count as done.
    """
    root = Path(out)
    _check_importable(comparison)
    places = side_by_side or torch.cuda.device_count() or available_cores()
    make_directory(root)
    with locked(root):
        if start is not None:
            restore(start, root, comparison, _threads(places))
        if (root / COMPARISON).exists():
            read_results([root])  # a damaged file is named before anything runs or is written
        comparison = join_directory(root, comparison, _threads(places))
        if comparison.language:
            feed = open_feed(comparison.recipe, World())  # prepared once, before many ask for it
            check_data(root, feed.identity)
        for stage in (trials, jobs):  # a run needs the learning rate that its sweep found
            missing = [job for job in stage(comparison) if not finished(job, root)]
            if missing:
                _run_all(missing, comparison, root, places, quiet)
        return summarise(root, comparison)


def _check_importable(comparison: Comparison) -> None:
    """Runs are processes of their own, which import the encodings of users."""
    for arm in comparison.arms:
        for name in [arm.encoding] if isinstance(arm.encoding, str) else arm.encoding:
            for part in name.partition("@")[0].split("+"):
                if only_here(part):
                    raise LabError(
                        f"the encoding {part!r} is defined in this session, where other processes cannot find it; "
                        "write its class to a file and import that, as in: import mine"
                    )


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
            evaluation = read_json(job.directory(root) / EVALUATION, AGAIN)
            lines.append(json.dumps({"kind": "language" if job.task is None else "task", **evaluation}))
    write_text(root / RESULTS, "".join(line + "\n" for line in lines))
    return write_report([root], root / REPORT)


def _run_all(missing: list[Job], comparison: Comparison, root: Path, places: int, quiet: bool) -> None:
    watch = _Watch(missing, comparison, root, quiet)
    tasks = [Task(job.title, _run, (_threads(places), job, comparison, root)) for job in missing]
    try:
        run_side_by_side(tasks, places, watch.show)
    finally:
        watch.close()


def _run(place: int, threads: int, job: Job, comparison: Comparison, root: Path) -> int:
    """In a process of its own: take one GPU, keep to the threads of one run."""
    if torch.cuda.is_available():
        os.environ["LOCAL_RANK"] = str(place % torch.cuda.device_count())
    torch.set_num_threads(threads)
    return run_job(job, comparison, root)


class _Watch:
    """The progress of all runs on one line, read from their metrics."""

    def __init__(self, missing: list[Job], comparison: Comparison, root: Path, quiet: bool) -> None:
        self.missing, self.root = missing, root
        self.steps = {job.title: job.config(comparison).train.steps for job in missing}
        self.line = ProgressLine(f"{len(missing)} runs", self._look()[0], sum(self.steps.values()), quiet)

    def _look(self) -> tuple[int, list[str]]:
        """Steps done in all, and what is under way; the files of runs that have ended are not read again."""
        steps, active = 0, []
        for job in self.missing:
            if finished(job, self.root):
                steps += self.steps[job.title]
            elif last := latest_metrics(job.directory(self.root), "train"):
                steps += last["step"]
                active.append(f"{job.title} {last['step']}/{self.steps[job.title]} loss {last['loss']:.3f}")
        return steps, active

    def show(self) -> None:
        ended = sum(finished(job, self.root) for job in self.missing)
        steps, active = self._look()
        self.line.tell(steps, f"{ended}/{len(self.missing)} done  {', '.join(active[:2])}")

    def close(self) -> None:
        self.line.close()
