"""Common parts of engines on other machines."""

from __future__ import annotations

import os

from ...errors import LabError
from .engine import Engine, Resources

#: exit codes of a run that was asked to end, after saving or before
STOPPED = (130, 143, -2, -15)


class Remote(Engine):
    """The engine has its own queue; its machines are not known here."""

    def resources(self, jobs: int, threads: int | None, gpus: int | None) -> Resources:
        if gpus is None:
            raise LabError(
                "--on ray and --on slurm need --gpus-per-job: give the GPUs per run, or 0 to train on CPUs"
            )
        return Resources(1 if threads is None else threads, gpus)

    def room(self, resources: Resources) -> None:
        return None


def changes(resources: Resources) -> dict[str, str]:
    """Environment variables of a run: the user's PYTHONPATH, and no GPUs if it requests none."""
    paths = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    return paths if resources.gpus else {**paths, "CUDA_VISIBLE_DEVICES": ""}
