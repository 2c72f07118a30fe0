"""The command line of one run, for engines: python -m grape_pe.lab.compare.worker ROOT runs/rope-s0

ROOT/compare.json has the settings. Exit codes: 0 done; 2 refused, with a reason on the last line; 128 + signal: saved.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.spawn import import_main_path
from pathlib import Path

import torch

from ...encodings.own import ModuleImportError, import_modules
from ...encodings.registry import main_script, own_modules
from ..errors import LabError
from ..files import locked
from ..orphans import end_with_input
from ..train.distributed import World
from ..train.feed import open_feed
from .comparison import COMPARISON, Begun, Comparison, Job, Resources, check_data, jobs, read_begun, trials
from .job import finished, run_job
from .schedule import REFUSAL

REFUSED = 2
#: below the directory of a comparison: output of its runs
LOGS = "logs"
#: in the environment of torchrun's processes
RANK = "TORCHELASTIC_RUN_ID"


def command(job: Job, root: Path) -> tuple[str, ...]:
    """The interpreter's arguments for this run."""
    modules = [part for name in own_modules() for part in ("--import", name)]
    script = main_script()
    more = ["--script", os.path.abspath(script)] if script else []
    return ("-m", __spec__.name, str(root.resolve()), job.name, *modules, *more)


def main(arguments: Sequence[str]) -> int:
    end_with_input()
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}")
    parser.add_argument("root", type=Path)
    parser.add_argument("name")
    parser.add_argument("--import", dest="modules", action="append", default=[])
    parser.add_argument("--script")
    options = parser.parse_args(arguments)
    try:
        import_modules(options.modules)  # custom encodings
        if options.script:
            import_main_path(options.script)
        stopped = run_named(options.root, options.name, arguments)
    except (LabError, ModuleImportError) as problem:
        print(f"{REFUSAL}{problem}", file=sys.stderr)
        return REFUSED
    return 128 + stopped if stopped else 0


def find(root: Path, name: str) -> tuple[Begun, Job]:
    """A run by its name, and its comparison."""
    begun = read_begun(root)
    if begun is None:
        raise LabError(f"no {COMPARISON} in {root}; name a directory of grape compare")
    return begun, next(job for stage in (trials, jobs) for job in stage(begun.comparison) if job.name == name)


def run_named(root: Path, name: str, arguments: Sequence[str]) -> int:
    """Make the run of this name; returns the signal that stopped it, or 0. `arguments` start it as a rank."""
    begun, job = find(root, name)
    torch.set_num_threads(begun.resources.threads)
    if RANK in os.environ:
        return run_job(job, begun.comparison, root)
    with locked(root / LOGS / name, wait=True):  # an earlier attempt may still be ending
        if finished(job, root):
            return 0
        _check_machine(job, begun.comparison, begun.resources, root)
        if begun.resources.gpus > 1:
            return under_torchrun(arguments, begun.resources.gpus)
        return run_job(job, begun.comparison, root)


def _check_machine(job: Job, comparison: Comparison, resources: Resources, root: Path) -> None:
    """Refuse a machine that would not give the result of the others."""
    there = torch.cuda.device_count()
    if there < resources.gpus:
        raise LabError(
            f"{job.title} needs {resources.gpus} GPUs (--gpus-per-job), and torch finds {there} on "
            f"{os.uname().nodename}"
        )
    if job.task is None:
        check_data(root, open_feed(comparison.recipe, World()).identity)


def under_torchrun(arguments: Sequence[str], ranks: int) -> int:
    """The same command once more as several ranks; returns the signal that stopped them, or 0."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    options = ["--standalone", f"--nproc-per-node={ranks}", "-m", __spec__.name]
    try:
        run(parse_args([*options, *arguments]))
    except SignalException as stopped:
        return int(stopped.sigval)
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        if first.exitcode in (128 + signal.SIGTERM, 128 + signal.SIGINT):
            return int(first.exitcode - 128)
        if first.exitcode == REFUSED:
            raise SystemExit(REFUSED) from None  # the rank has printed the reason
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
