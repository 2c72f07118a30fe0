"""Runs as processes on this machine."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

import torch

from ...errors import LabError
from .engine import Engine, Resources, Work
from .launch import start


@dataclass
class _Running:
    place: int
    process: subprocess.Popen[bytes]


class Local(Engine):
    """Each run gets the GPUs of the lowest free place."""

    def __init__(self) -> None:
        self.running: list[_Running] = []

    def resources(self, jobs: int, threads: int | None, gpus: int | None) -> Resources:
        there = torch.cuda.device_count()
        gpus = min(1, there) if gpus is None else gpus
        if gpus > there:
            raise LabError(
                f"--gpus-per-job must be at most {there}, the GPUs of this machine, got {gpus}; or give another --on"
            )
        together = jobs or (there // gpus if gpus else available_cores())
        return Resources(max(1, available_cores() // together) if threads is None else threads, gpus)

    def room(self, resources: Resources) -> int:
        if resources.gpus:
            return torch.cuda.device_count() // resources.gpus
        return max(1, available_cores() // resources.threads)

    def submit(self, work: Work) -> _Running:
        self.running = [each for each in self.running if each.process.poll() is None]
        taken = {each.place for each in self.running}
        place = next(place for place in range(len(taken) + 1) if place not in taken)
        visible = {"CUDA_VISIBLE_DEVICES": _devices(place, work.resources.gpus)}
        started = _Running(place, start(work.arguments, work.log, os.getcwd(), visible))
        self.running.append(started)
        return started

    def poll(self, handle: _Running) -> int | None:
        return handle.process.poll()

    def cancel(self, handle: _Running, force: bool = False) -> None:
        if force:
            handle.process.kill()
        else:
            handle.process.terminate()


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


def _devices(place: int, gpus: int) -> str:
    """The GPUs of a place among those visible here; more places than GPUs share them."""
    there = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(there)))).split(",")
    return ",".join(names[(place * gpus + number) % there] for number in range(gpus))
