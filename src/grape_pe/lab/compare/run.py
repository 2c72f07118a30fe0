"""`grape compare`: train every arm for every seed, side by side on an engine, and report.

    compare(load_comparison("demo"), "results/demo")

What is done stays done: the same call after a kill goes on where it stopped, and ends with the same table.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from ...encodings.registry import only_here
from ..errors import LabError
from ..files import locked, read_json, write_text
from ..progress import ProgressLine
from ..report import read_results, write_report
from ..train.distributed import World
from ..train.feed import open_feed
from ..train.run_directory import latest_metrics
from .archive import archived, restore
from .comparison import (
    AGAIN,
    COMPARISON,
    EVALUATION,
    REPORT,
    RESTORE,
    RESULTS,
    Begun,
    Comparison,
    Job,
    check_data,
    jobs,
    join_directory,
    make_directory,
    read_described,
    trials,
)
from .engines import Resources, Work, open_engine
from .job import finished
from .schedule import run_side_by_side
from .worker import LOGS, command


def compare(
    comparison: Comparison,
    out: str | os.PathLike[str],
    *,
    on: str = "local",
    side_by_side: int = 0,
    threads: int | None = None,
    gpus: int | None = None,
    slurm: Mapping[str, str] | None = None,
    quiet: bool = False,
    start: Path | None = None,
) -> Path:
    """Run what is missing of a comparison and write its results and report; returns the report's path.

    Args:
        comparison: from `load_comparison`.
        out: the directory of the results, which all machines share.
        on: where runs are made: "local", "ray", "ray://auto", "ray://HOST:PORT" or "slurm".
        side_by_side: runs at once; 0 for as many as there are GPUs or cores for, or the engine's own queue.
        threads: of each run on the CPU; by default those that the comparison was begun with.
        gpus: of each run, one process each; by default those that the comparison was begun with.
        slurm: parameters of sbatch.
        quiet: no progress line.
        start: a file of `grape report --jsonl`; the runs in it count as done.
    """
    root = Path(out)
    _check_importable(comparison)
    engine = open_engine(on, root / LOGS / "slurm", slurm or {})
    before = _begun(root, start)
    if before is not None:
        threads, gpus = before.threads if threads is None else threads, before.gpus if gpus is None else gpus
    resources = engine.resources(side_by_side, threads, gpus)
    make_directory(root)
    with locked(root), engine:
        if start is not None:
            restore(start, root, comparison, resources)
        if (root / COMPARISON).exists():
            read_results([root])  # a damaged file is named before anything runs or is written
        comparison = join_directory(root, comparison, resources)
        if comparison.language:
            feed = open_feed(comparison.recipe, World())  # prepared once, before many ask for it
            check_data(root, feed.identity)
        stages = [[job for job in stage(comparison) if not finished(job, root)] for stage in (trials, jobs)]
        for missing in filter(None, stages):  # a run needs the learning rate that its sweep found
            with _Watch(missing, comparison, root, quiet) as watch:
                places = side_by_side or engine.room(resources)
                run_side_by_side(works(missing, root, resources), engine, places, watch.show)
        return summarise(root, comparison)


def _begun(root: Path, start: Path | None) -> Begun | None:
    """The comparison that is in the directory, or else in the file."""
    path = root / COMPARISON
    if path.is_file():
        return read_described(read_json(path, RESTORE), path, RESTORE)
    return None if start is None else archived(start)


def works(missing: Sequence[Job], root: Path, resources: Resources) -> list[Work]:
    """The command line of each run."""
    found = []
    for job in missing:
        logs = root.resolve() / LOGS / job.name
        logs.mkdir(parents=True, exist_ok=True)
        progress = partial(_step, job, root)
        found.append(Work(job.name, job.title, command(job, root), logs / "output.txt", resources, progress))
    return found


def _step(job: Job, root: Path) -> object:
    return latest_metrics(job.directory(root), "train").get("step")


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


def summarise(root: Path, comparison: Comparison) -> Path:
    """results.jsonl and report.html of what is done."""
    lines = []
    for job in jobs(comparison):
        if finished(job, root):
            evaluation = read_json(job.directory(root) / EVALUATION, AGAIN)
            lines.append(json.dumps({"kind": "language" if job.task is None else "task", **evaluation}))
    write_text(root / RESULTS, "".join(line + "\n" for line in lines))
    return write_report([root], root / REPORT)


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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.line.close()
