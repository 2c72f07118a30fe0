"""The directory of a run: its lock, configuration, environment and metrics."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
import yaml

from ... import __version__
from ..config import RunConfig, checked, differences, field_names
from ..errors import LabError
from ..files import (
    check_output,
    claim,
    damaged,
    read_json,
    read_json_lines,
    read_text,
    write_json,
    write_text,
)
from .optimization import decay_steps

CONFIG, ENVIRONMENT, METRICS = "config.yaml", "environment.json", "metrics.jsonl"
RESTORE = "restore it from a copy, or train again in another --out"


class RunDirectory:
    """A run's directory, locked by one process from `open` to `close`.

    Args:
        before: names that may exist before the run begins.
    """

    def __init__(self, path: str | os.PathLike[str], before: Sequence[str] = ()) -> None:
        self.path, self.before = Path(path), before
        self.lock: Any = None

    def open(self, config: RunConfig, data: dict[str, Any], *, resume: bool) -> Self:
        """Check the content and lock the directory, before anything is computed or written.

        Raises LabError on other files, another configuration, other data, or a running process.
        """
        try:
            self.check(config, resume=resume)
            if (self.path / CONFIG).exists() and (stored := _begun_with(self.path, "data")) != data:
                raise LabError(
                    f"the data of {self.path} have changed since it was begun: {stored} -> {data}; "
                    "restore them or give another --out"
                )
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = claim(self.path)
            if not (self.path / CONFIG).exists():
                here, began = surroundings(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
                here["machine"] |= {"system": platform.platform(), "threads": torch.get_num_threads()}
                about = {
                    "id": secrets.token_hex(8),
                    "started": began,
                    "seed": config.seed,
                    **here,
                    "data": data,
                }
                write_json(self.path / ENVIRONMENT, about)
                write_text(self.path / CONFIG, config.to_yaml())
            elif (before := read_config(self.path, type(config))).train.steps != config.train.steps:
                longer = before.train.model_copy(update={"steps": config.train.steps})
                write_text(self.path / CONFIG, before.model_copy(update={"train": longer}).to_yaml())
        except OSError as problem:
            raise LabError(f"cannot write to {self.path}: {problem.strerror}; give another --out") from None
        return self

    def close(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def check(self, config: RunConfig, *, resume: bool) -> None:
        """Refuse other files, or a run that cannot continue with these settings."""
        # a run that was killed before its configuration was written has an environment alone
        if not check_output(self.path, "run", CONFIG, {ENVIRONMENT, *self.before}):
            return
        if not resume:
            raise LabError(
                f"{self.path} already holds a run; continue it with --resume, or give another --out"
            )
        before = read_config(self.path, type(config))
        changed = [] if self._grows(before, config) else differences(before, config)
        if changed:
            raise LabError(
                f"{self.path} was begun with another configuration ({'; '.join(changed)}); "
                "give the same options, or another --out"
            )
        read_metrics(self.path)

    def _grows(self, before: RunConfig, now: RunConfig) -> bool:
        """Whether the only difference is more steps of a wsd schedule before its decay."""
        old, new = before.train, now.train
        if old.schedule != "wsd" or new.steps <= old.steps:
            return False
        done = max((int(p.name[5:]) for p in (self.path / "checkpoints").glob("step-*")), default=0)
        plateau = old.steps - decay_steps(old)
        if done > plateau:
            raise LabError(
                f"{self.path} cannot grow from {old.steps} to {new.steps} steps: at step {done} its decay has begun, "
                f"after step {plateau}; remove the checkpoints after that step (train.checkpoint_at keeps one there)"
            )
        longer = old.model_copy(update={"steps": new.steps})
        return not differences(before.model_copy(update={"train": longer}), now)


def read_config(path: Path, kind: type[RunConfig] = RunConfig) -> RunConfig:
    """The configuration of a run."""
    place = path / CONFIG
    if not place.exists():
        raise LabError(f"{path} is not a run: it has no {CONFIG}; name a directory of grape train")
    text = read_text(place, RESTORE)
    try:
        stored = yaml.safe_load(text)
        if not isinstance(stored, dict):
            raise ValueError(f"expected a mapping of settings, got {type(stored).__name__}")
        return checked(kind, stored, field_names(kind))
    except (ValueError, yaml.YAMLError) as problem:
        raise damaged(place, problem, RESTORE) from None


def _begun_with(path: Path, name: str) -> Any:
    """A field of environment.json, written at the beginning of the run."""
    place = path / ENVIRONMENT
    try:
        return read_json(place, RESTORE)[name]
    except (FileNotFoundError, KeyError):
        raise damaged(place, f"it has no {name}", RESTORE) from None


def run_id(path: Path) -> str:
    """A unique name of the run, kept when it continues."""
    return str(_begun_with(path, "id"))


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run so far; an incomplete last line is ignored."""
    path = directory / METRICS
    remedy = "remove it to continue without the earlier curves"
    lines = read_json_lines(path, remedy)
    for number, line in enumerate(lines, start=1):
        if not isinstance(line.get("kind"), str) or not isinstance(line.get("step"), int):
            raise damaged(path, f"line {number} has no kind and step", remedy)
    return lines


def training_cost(directory: Path, config: RunConfig) -> dict[str, Any]:
    """Tokens, time, median speed and peak memory of a run's training, from its metrics."""
    lines = [line for line in read_metrics(directory) if line["kind"] == "train"]
    speeds = [line["tokens_per_second"] for line in lines]
    return {
        "tokens": max(line["tokens"] for line in lines),
        "tokens_per_second": statistics.median(speeds),
        "peak_memory_bytes": max(line["memory_bytes"] for line in lines),
        "seconds": sum(config.tokens_per_step / speed for speed in speeds) * config.log.every,
    }


def latest_metrics(directory: Path, kind: str, tail: int = 1 << 16) -> dict[str, Any]:
    """The last line of a kind in the last `tail` bytes of the file; empty if there is none."""
    path = directory / METRICS
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - tail))
        lines = file.read().split(b"\n")
    for line in reversed(lines[:-1]):  # the last one may be incomplete
        with contextlib.suppress(ValueError):  # the first one may be incomplete
            found: dict[str, Any] = json.loads(line)
            if found["kind"] == kind:
                return found
    return {}


def surroundings() -> dict[str, Any]:
    """Versions, machine and command of this process."""
    return {
        "versions": {
            "grape-pe": __version__, "torch": torch.__version__, "python": platform.python_version(),
        },
        "machine": {
            "cores": os.cpu_count(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "name": platform.machine(),
        },
        "command": " ".join(["grape", *sys.argv[1:]]),
    }  # fmt: skip
