"""`grape compare`: train every arm for every seed, side by side on an engine, and report.

    compare(load_comparison("demo"), "results/demo")

Finished runs are kept: the same call after an interruption continues, and ends with the same table.
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
    RESULTS,
    Comparison,
    Job,
    check_data,
    jobs,
    join_directory,
    make_directory,
    read_begun,
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
        out: the directory of the results, shared by all machines.
        on: the engine: "local", "ray", "ray://auto", "ray://HOST:PORT" or "slurm".
        side_by_side: parallel runs; 0 for as many as GPUs or cores allow, or the engine's own queue.
        threads: CPU threads per run; by default those that the comparison was begun with.
        gpus: GPUs per run, one process each; by default those that the comparison was begun with.
        slurm: parameters of sbatch.
        quiet: no progress line.
        start: a file of `grape report --jsonl`; the runs in it count as done.
    """
    root = Path(out)
    _check_importable(comparison)
    engine = open_engine(on, root / LOGS / "slurm", slurm or {})
    before = read_begun(root) or (None if start is None else archived(start))
    if before is not None:
        threads, gpus = before.threads if threads is None else threads, before.gpus if gpus is None else gpus
    resources = engine.resources(side_by_side, threads, gpus)
    make_directory(root)
    with locked(root), engine:
        if start is not None:
            restore(start, root, comparison, resources)
        if (root / COMPARISON).exists():
            read_results([root])  # refuse damaged files before anything runs
        comparison = join_directory(root, comparison, resources)
        if comparison.language:
            feed = open_feed(comparison.recipe, World())  # prepared once, before parallel runs need it
            check_data(root, feed.identity)
        stages = [[job for job in stage(comparison) if not finished(job, root)] for stage in (trials, jobs)]
        for missing in filter(None, stages):  # runs need the learning rate of their sweep
            with _Watch(missing, comparison, root, quiet) as watch:
                places = side_by_side or engine.room(resources)
                run_side_by_side(works(missing, root, resources), engine, places, watch.show)
        return summarise(root, comparison)


def works(missing: Sequence[Job], root: Path, resources: Resources) -> list[Work]:
    """The command line of each run."""
    found = []
    for job in missing:
        logs = root.resolve() / LOGS / job.name
        logs.mkdir(parents=True, exist_ok=True)
        progress = partial(_last_step, job, root)
        found.append(Work(job.name, job.title, command(job, root), logs / "output.txt", resources, progress))
    return found


def _last_step(job: Job, root: Path) -> object:
    return latest_metrics(job.directory(root), "train").get("step")


def _check_importable(comparison: Comparison) -> None:
    """Refuse encodings that separate processes cannot import."""
    for arm in comparison.arms:
        for name in [arm.encoding] if isinstance(arm.encoding, str) else arm.encoding:
            for part in name.partition("@")[0].split("+"):
                if only_here(part):
                    raise LabError(
                        f"the encoding {part!r} is defined in this session, which other processes cannot import; "
                        "write its class to a file and import that, as in: import mine"
                    )


def summarise(root: Path, comparison: Comparison) -> Path:
    """Write results.jsonl and report.html of the finished runs."""
    lines = []
    for job in jobs(comparison):
        if finished(job, root):
            evaluation = read_json(job.directory(root) / EVALUATION, AGAIN)
            lines.append(json.dumps({"kind": "language" if job.task is None else "task", **evaluation}))
    write_text(root / RESULTS, "".join(line + "\n" for line in lines))
    return write_report([root], root / REPORT)


class _Watch:
    """Progress of all runs on one line, read from their metrics."""

    def __init__(self, missing: list[Job], comparison: Comparison, root: Path, quiet: bool) -> None:
        self.missing, self.root = missing, root
        self.steps = {job.title: job.config(comparison).train.steps for job in missing}
        self.line = ProgressLine(f"{len(missing)} runs", self._look()[0], sum(self.steps.values()), quiet)

    def _look(self) -> tuple[int, list[str]]:
        """Total steps done, and the status of running jobs."""
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
        self.line.show(steps, f"{ended}/{len(self.missing)} done  {', '.join(active[:2])}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.line.close()
