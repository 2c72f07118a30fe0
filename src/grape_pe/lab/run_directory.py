"""The directory of a run: claimed by one process at a time, never mixed with another configuration."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, Self

import torch
import yaml

from .. import __version__
from .config import RunConfig, differences, validated
from .errors import LabError

CONFIG, ENVIRONMENT, METRICS, LOCK = "config.yaml", "environment.json", "metrics.jsonl", ".lock"
HIDDEN = ".part-"  # begins the name of a file that is not yet whole


class RunDirectory:
    """Open a run's directory for writing; as a context it is locked against a second process."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.lock: Any = None

    def open(self, config: RunConfig, data: dict[str, Any], *, resume: bool) -> Self:
        """Check what is there, before anything is computed or written, then claim it.

        Raises LabError if it holds something else, another configuration, other data, or a run under way.
        """
        try:
            self._check(config, data, resume)
            self.path.mkdir(parents=True, exist_ok=True)
            self._claim()
            if not (self.path / CONFIG).exists():
                write_whole(self.path / ENVIRONMENT, json.dumps(_environment(config, data), indent=2) + "\n")
                write_whole(self.path / CONFIG, config.to_yaml())
        except OSError as problem:
            raise LabError(f"cannot write to {self.path}: {problem.strerror}; give another --out") from None
        return self

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()

    def _check(self, config: RunConfig, data: dict[str, Any], resume: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise LabError(f"--out must be a directory, but {self.path} is a file")
        entries = {p.name for p in self.path.iterdir()} if self.path.is_dir() else set()
        begun = {LOCK, ENVIRONMENT, *(f"{HIDDEN}{name}" for name in (ENVIRONMENT, CONFIG))}
        if not entries - begun:  # also what is left if it was killed before its first step
            return
        if CONFIG not in entries:
            raise LabError(
                f"{self.path} holds other files and no run; give an empty or new directory as --out"
            )
        if not resume:
            raise LabError(
                f"{self.path} already holds a run; continue it with --resume, or give another --out"
            )
        changed = differences(read_config(self.path), config)
        if changed:
            raise LabError(
                f"{self.path} was begun with another configuration ({'; '.join(changed)}); "
                "a run is continued as it was begun: give the same options, or another --out"
            )
        before = json.loads((self.path / ENVIRONMENT).read_text())["data"]
        if before != data:
            raise LabError(f"the data of {self.path} have changed since it was begun: {before} -> {data}")

    def _claim(self) -> None:
        self.lock = (self.path / LOCK).open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LabError(f"{self.path} is being written by another process; wait for it to end") from None


def read_config(path: Path) -> RunConfig:
    """The configuration a run was begun with."""
    try:
        return validated(yaml.safe_load((path / CONFIG).read_text()))
    except (OSError, yaml.YAMLError) as problem:
        raise LabError(f"cannot read {path / CONFIG}: {problem}") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    scratch = path.with_name(f"{HIDDEN}{path.name}")
    scratch.write_text(text)
    os.replace(scratch, path)


def _environment(config: RunConfig, data: dict[str, Any]) -> dict[str, Any]:
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join(sys.argv),
        "seed": config.seed,
        "versions": {
            "grape-pe": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        },
        "data": data,
    }
