"""The directory of a run: claimed by one process at a time, never mixed with another configuration."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
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
    claim,
    contents,
    damaged,
    read_json,
    read_json_lines,
    read_text,
    write_json,
    write_text,
)
from .optimization import decay_steps

CONFIG, ENVIRONMENT, METRICS = "config.yaml", "environment.json", "metrics.jsonl"


class RunDirectory:
    """Open a run's directory for writing; it is locked against a second process until `close`.

    Args:
        before: names that may be there before the run begins.
    """

    def __init__(self, path: str | os.PathLike[str], before: Sequence[str] = ()) -> None:
        self.path, self.before = Path(path), before
        self.lock: Any = None

    def open(self, config: RunConfig, data: dict[str, Any], *, resume: bool) -> Self:
        """Check what is there, before anything is computed or written, then claim it.

        Raises LabError if it holds something else, another configuration, other data, or a run under way.
        """
        try:
            self.check(config, resume=resume)
            self._check_data(data)
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = claim(self.path)
            if not (self.path / CONFIG).exists():
                write_json(self.path / ENVIRONMENT, _environment(config, data))
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
        """Refuse a directory with something else in it, or with a run that cannot go on so."""
        if self.path.exists() and not self.path.is_dir():
            raise LabError(f"--out must be a directory, but {self.path} is a file")
        entries = contents(self.path)
        if not entries - {
            ENVIRONMENT,
            *self.before,
        }:  # nothing, or killed before its configuration was written
            return
        if CONFIG not in entries:
            raise LabError(
                f"{self.path} holds other files and no run; give an empty or new directory as --out"
            )
        if not resume:
            raise LabError(
                f"{self.path} already holds a run; continue it with --resume, or give another --out"
            )
        before = read_config(self.path, type(config))
        changed = [] if self._grows(before, config) else differences(before, config)
        if changed:
            raise LabError(
                f"{self.path} was begun with another configuration ({'; '.join(changed)}); "
                "a run is continued as it was begun: give the same options, or another --out"
            )
        read_metrics(self.path)

    def _grows(self, before: RunConfig, now: RunConfig) -> bool:
        """Whether all that differs in how it trains is more steps of a wsd schedule, whose decay is still to come."""
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

    def _check_data(self, data: dict[str, Any]) -> None:
        if not (self.path / CONFIG).exists():
            return
        before = _begun_with(self.path, "data")
        if before != data:
            raise LabError(f"the data of {self.path} have changed since it was begun: {before} -> {data}")


def read_config(path: Path, kind: type[RunConfig] = RunConfig) -> RunConfig:
    """The configuration a run was begun with."""
    place, remedy = path / CONFIG, "restore it from a copy, or train again in another --out"
    try:
        said = yaml.safe_load(read_text(place, remedy))
    except FileNotFoundError:
        raise LabError(f"{path} is not a run: it has no {CONFIG}") from None
    except yaml.YAMLError as problem:
        raise damaged(place, problem, remedy) from None
    if not isinstance(said, dict):
        raise damaged(place, f"expected a mapping of settings, got {type(said).__name__}", remedy)
    try:
        return checked(kind, said, field_names(kind))
    except LabError as problem:
        raise damaged(place, problem, remedy) from None


def _begun_with(path: Path, name: str) -> Any:
    """One field of what was written when the run was begun."""
    place, remedy = path / ENVIRONMENT, "restore it from a copy, or train again in another --out"
    try:
        return read_json(place, remedy)[name]
    except (FileNotFoundError, KeyError):
        raise damaged(place, f"it has no {name}", remedy) from None


def run_id(path: Path) -> str:
    """A name no other run has, the same whenever the run goes on."""
    return str(_begun_with(path, "id"))


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run so far; a last line that a kill cut short is left out."""
    path = directory / METRICS
    remedy = "remove it to continue without the earlier curves"
    lines = read_json_lines(path, remedy)
    for number, line in enumerate(lines, start=1):
        if not isinstance(line.get("kind"), str) or not isinstance(line.get("step"), int):
            raise damaged(path, f"line {number} has no kind and step", remedy)
    return lines


def latest_metrics(directory: Path, kind: str, tail: int = 1 << 16) -> dict[str, Any]:
    """The last whole line of a kind, from the end of the file alone; empty if there is none in it."""
    path = directory / METRICS
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - tail))
        lines = file.read().split(b"\n")
    for line in reversed(lines[:-1]):  # the last one may still be under way
        with contextlib.suppress(ValueError):  # the first one may begin in its middle
            found: dict[str, Any] = json.loads(line)
            if found["kind"] == kind:
                return found
    return {}


def _environment(config: RunConfig, data: dict[str, Any]) -> dict[str, Any]:
    here = surroundings()
    more = {"system": platform.platform(), "threads": torch.get_num_threads()}
    return {
        "id": secrets.token_hex(8),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seed": config.seed,
        **here,
        "machine": {**here["machine"], **more},
        "data": data,
    }


def surroundings() -> dict[str, Any]:
    """Where and how this process runs."""
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
