"""Engines of runs: this machine, a Ray cluster, or Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ...errors import LabError
from .engine import Engine, Lost, Resources, Work
from .local import Local

__all__ = ["Engine", "Local", "Lost", "Resources", "Work", "open_engine"]


def open_engine(on: str, folder: Path, slurm: Mapping[str, str]) -> Engine:
    """The engine of this name; refuses an unknown one, or one that is not installed.

    Args:
        on: "local", "ray", "ray://auto", "ray://HOST:PORT" or "slurm".
        folder: for submitit's files.
        slurm: parameters of sbatch.
    """
    if slurm and on != "slurm":
        raise LabError(f"--slurm {next(iter(slurm))} has no effect with --on {on}; give --on slurm")
    if on == "local":
        return Local()
    if on == "slurm":
        from .on_slurm import OnSlurm

        return OnSlurm(folder, slurm)
    if on in ("ray", "ray://auto") or re.fullmatch(r"ray://[^/\s:]+:\d+", on):
        from .on_ray import OnRay

        return OnRay(on.removeprefix("ray").removeprefix("://"))
    raise LabError(f"--on must be local, ray, ray://auto, ray://HOST:PORT or slurm, got {on!r}")
