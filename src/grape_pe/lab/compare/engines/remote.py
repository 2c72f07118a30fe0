"""What engines on other machines have in common."""

from __future__ import annotations

import os

from ...errors import LabError
from .engine import Engine, Resources

#: exit codes of a run that saved because it was asked to, and those of one that could not
STOPPED = (130, 143, -2, -15)


class Remote(Engine):
    """The engine queues what does not fit; what its machines have is not known here."""

    def resources(self, jobs: int, threads: int | None, gpus: int | None) -> Resources:
        if gpus is None:
            raise LabError(
                "--on needs the number of GPUs of a run where it is not this machine: "
                "give --gpus-per-job with 1 or more, or 0 to train on CPUs"
            )
        return Resources(1 if threads is None else threads, gpus)

    def room(self, resources: Resources) -> None:
        return None


def changes(resources: Resources) -> dict[str, str]:
    """What a run's environment has besides that of its machine: it finds modules of the user's own there too."""
    paths = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    return paths if resources.gpus else {**paths, "CUDA_VISIBLE_DEVICES": ""}
