"""Runs as Slurm jobs, submitted by submitit."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ....extras import require
from ...errors import LabError
from ...files import read_json, write_json
from .engine import STOPPED, Lost, Remote, Work, changes
from .launch import run

#: parameters that --slurm refuses, with the reason or the option to use
FIXED = {
    "cpus_per_task": "--threads", "gpus_per_node": "--gpus-per-job", "gpus_per_task": "--gpus-per-job",
    "nodes": "a run has one node", "ntasks_per_node": "a run has one task", "job_name": "it is the run's name",
    "dependency": "runs do not depend on one another",
}  # fmt: skip
#: submitted jobs by name of the run
SUBMITTED = "submitted.json"
AGAIN = "remove it if no job of this comparison is queued or running (squeue)"
#: seconds between polls of a cancelled job
PAUSE = 5.0


class OnSlurm(Remote):
    """A run requests its threads as CPUs of one task on one node. Jobs outlive this process, which finds them again.

    Args:
        folder: for submitit's files, on shared storage.
        parameters: of sbatch: time (required), partition, gres, mem, account, qos, constraint, setup, …
    """

    def __init__(self, folder: Path, parameters: Mapping[str, str]) -> None:
        self.folder, self.parameters = folder.absolute(), dict(parameters)
        self.submitit: Any = require("submitit", "slurm")
        self.cluster = self.parameters.pop("cluster", "slurm")
        if self.cluster not in ("slurm", "local"):
            raise LabError(f"--slurm cluster must be slurm, or local to try it here, got {self.cluster!r}")
        for name, instead in FIXED.items():
            if name in self.parameters:
                raise LabError(f"--slurm {name} is not allowed ({instead}); leave it out")
        if "time" not in self.parameters:
            raise LabError(
                "--on slurm needs the time limit of a job: give --slurm time=MINUTES (or D-HH:MM:SS)"
            )
        self.minutes = minutes(self.parameters.pop("time"))
        if self.cluster == "local" and self.parameters:
            raise LabError(
                f"--slurm {next(iter(self.parameters))} has no effect with cluster=local; leave it out"
            )
        if self.cluster == "slurm" and self.submitit.SlurmExecutor.affinity() < 0:
            raise LabError(
                "--on slurm needs srun and sbatch, which are not on this machine; try --slurm cluster=local"
            )
        self.cancelled: dict[str, float] = {}

    @cached_property
    def executor(self) -> Any:
        kinds = {"slurm": self.submitit.SlurmExecutor, "local": self.submitit.LocalExecutor}
        self.folder.mkdir(parents=True, exist_ok=True)
        return kinds[self.cluster](self.folder / "%j")

    def submit(self, work: Work) -> Any:
        known = self._known()
        if self.cluster == "slurm" and work.name in known:
            earlier = self.submitit.SlurmJob(self.folder / "%j", known[work.name])
            if not earlier.done(force_check=True):
                return earlier
        self.executor.update_parameters(**self._settings(work))
        errors = (self.submitit.core.utils.FailedJobError, self.submitit.core.utils.FailedSubmissionError)
        try:
            job = self.executor.submit(run, work.arguments, work.log, os.getcwd(), changes(work.resources))
        except (*errors, OSError) as problem:
            raise LabError(f"sbatch refused {work.title}: {' '.join(str(problem).split())}") from None
        write_json(self.folder / SUBMITTED, {**known, work.name: job.job_id})
        return job

    def _known(self) -> dict[str, Any]:
        path = self.folder / SUBMITTED
        return read_json(path, AGAIN) if path.exists() else {}

    def _settings(self, work: Work) -> dict[str, Any]:
        """Parameters of submitit's executor; unknown ones are passed to sbatch."""
        if self.cluster == "local":
            gpus = {"gpus_per_node": work.resources.gpus} if work.resources.gpus else {}
            return {"timeout_min": self.minutes, **gpus}
        settings: dict[str, Any] = {
            "time": self.minutes, "job_name": re.sub(r"[^\w.=+-]+", "-", work.title), "nodes": 1,
            "ntasks_per_node": 1, "cpus_per_task": work.resources.cpus,
        }  # fmt: skip
        if work.resources.gpus and "gres" not in self.parameters:
            settings["gpus_per_node"] = work.resources.gpus
        valid, others = self.executor._valid_parameters(), {}
        for name, value in self.parameters.items():
            if name == "setup":
                settings[name] = [value]
            elif name in valid:
                settings[name] = value
            else:
                others[name] = value
        return {**settings, **({"additional_parameters": others} if others else {})}

    def poll(self, handle: Any) -> int | None:
        if not handle.done(force_check=self._asks(handle)):
            return None
        failed = handle.exception()
        if isinstance(failed, self.submitit.core.utils.UncompletedJobError):
            raise Lost(f"Slurm job {handle.job_id} ended without a result (state {handle.state})")
        if failed is not None:
            lines = [line for line in str(failed).splitlines() if "Error" in line] or [str(failed)]
            if "UncompletedJobError" in lines[-1]:
                raise Lost(f"Slurm job {handle.job_id} reached its time limit")
            raise LabError(f"Slurm job {handle.job_id}: {' '.join(lines[-1].split())}")
        code: int = handle.result()
        if code in STOPPED:
            raise Lost(f"Slurm job {handle.job_id} was asked to end")
        return code

    def _asks(self, handle: Any) -> bool:
        """Whether to query Slurm now instead of on submitit's schedule: every `PAUSE` seconds for a cancelled job."""
        due = self.cancelled.get(handle.job_id)
        if due is None or time.monotonic() < due:
            return False
        self.cancelled[handle.job_id] = time.monotonic() + PAUSE
        return True

    def cancel(self, handle: Any, force: bool = False) -> None:
        self.cancelled[handle.job_id] = 0.0
        handle.cancel(check=False)


def minutes(text: str) -> int:
    """Minutes of a time in Slurm's notation: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        raise LabError(f"--slurm time must be minutes, H:MM:SS or D-HH:MM:SS, got {text!r}")
    days, *rest = (int(part or 0) for part in found.groups())
    first, second, third = rest
    if found[1] is None and found[4] is None:  # M or M:S
        first, second, third = 0, first, second
    return max(1, -(-(((days * 24 + first) * 60 + second) * 60 + third) // 60))
