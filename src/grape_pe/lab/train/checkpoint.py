"""Checkpoints of a run: written in the background, atomic, readable by any number of ranks.

Tensors are safetensors files of torch.distributed.checkpoint, a shard per rank; the rest is JSON. A checkpoint is
written under a hidden name and renamed when it is complete.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ..errors import Diverged, LabError
from ..files import SCRATCH, damaged, read_json, typed, write_text
from .distributed import World
from .rollback import Rise, Rollback, returned

# A run of one process is intended. The warning comes from a background thread, which catch_warnings cannot reach.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

STATE = "state.json"
#: torch's CheckpointException is no Exception
FAILURES = (Exception, CheckpointException)
#: a parameter without a gradient has no optimizer state, which is no error
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)


@dataclass(frozen=True)
class TrainingState:
    """The state of a run after `step` optimizer steps; `recent` losses are for detecting a rise."""

    step: int = 0
    validation_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None
    recent: tuple[float, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
        directory: RUN/checkpoints.
        keep: newest ones kept, besides the best one and those of the steps in `always`.
        frozen: also write parameters that are not trained.
    """

    def __init__(
        self, directory: Path, keep: int, among: World, always: Sequence[int] = (), frozen: bool = True
    ) -> None:
        self.options = replace(OPTIONS, ignore_frozen_params=not frozen)
        self.directory, self.keep, self.world = directory, keep, among
        self.always = {checkpoint_name(step) for step in always}
        self.pending: tuple[Future[Any], Path, Path] | None = None

    def found(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        return sorted(p for p in self.directory.iterdir() if p.name.startswith("step-") and p.is_dir())

    def clean(self) -> None:
        """Remove unfinished checkpoints, and those that a rollback discarded."""
        self.world.check(self._clean)

    def _clean(self) -> None:
        for left in self.directory.glob(f"{SCRATCH}*"):
            shutil.rmtree(left, ignore_errors=True)
        states = {path: read_state(path).rollbacks for path in self.found()}
        last = max(states.values(), key=len, default=())
        for path, rollbacks in states.items():
            if len(rollbacks) < len(last) and path.name > checkpoint_name(last[-1].to):
                _remove(path)

    def go_back(self, rise: Rise, rollbacks: Sequence[Rollback], most: int) -> None:
        """Make the last checkpoint before a rise the newest. It records the rollback before later ones are removed."""
        self.finish()
        before = [path for path in self.found() if path.name < checkpoint_name(rise.since)]
        if not before or len(rollbacks) == most:
            kept = (
                f"the last checkpoint before it is {before[-1]}" if before else "no checkpoint is from before"
            )
            raise Diverged(
                f"stopped: {rise}; {kept}; the run went back {len(rollbacks)} times of {most} (train.rollbacks). "
                "A smaller train.lr or train.clip, or a longer train.warmup, may help"
            )
        state = read_state(before[-1])
        state = replace(state, rollbacks=returned(rise, state.step, rollbacks))
        self.world.check(lambda: write_text(before[-1] / STATE, json.dumps(asdict(state))))
        self.world.check(self._clean)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: TrainingState) -> None:
        """Begin to write a copy; training continues meanwhile."""
        self.finish()
        final = self.directory / checkpoint_name(progress.step)
        if final.exists():
            return
        scratch = self.directory / f"{SCRATCH}{final.name}"
        self.world.check(lambda: self._prepare(scratch, progress))
        writing = dcp.async_save(
            _tensors(*get_state_dict(model, optimizer, options=self.options)),
            storage_writer=HuggingFaceStorageWriter(str(scratch), save_distributed=True),
            process_group=self.world.background, no_dist=self.world.size == 1,
        )  # fmt: skip
        done = writing if isinstance(writing, Future) else writing.upload_completion
        self.pending = (done, scratch, final)

    def _prepare(self, scratch: Path, progress: TrainingState) -> None:
        """Make the hidden directory with the state."""
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            (scratch / STATE).write_text(json.dumps(asdict(progress)))
        except OSError as problem:
            raise LabError(self._unwritable(problem)) from None

    @property
    def written(self) -> bool:
        """Whether this rank's part of the pending write has ended."""
        return self.pending is not None and self.pending[0].done()

    def check(self, ranks_written: float) -> None:
        """Finish the pending checkpoint once all ranks have `written`; their number is the same on each."""
        if self.pending is not None and ranks_written == self.world.size:
            self.finish()

    def finish(self) -> None:
        """Wait for the pending write, rename it, and remove checkpoints that are no longer kept."""
        if self.pending is None:
            return
        writing, scratch, final = self.pending
        self.pending = None
        self.world.agree(self._reveal(writing, scratch, final))

    def _reveal(self, writing: Future[Any], scratch: Path, final: Path) -> str | None:
        try:
            writing.result()
            if self.world.first:
                os.replace(scratch, final)
                self._prune()
        except FAILURES as problem:
            if self.world.first:
                shutil.rmtree(scratch, ignore_errors=True)
            return self._unwritable(problem)
        return None

    def _unwritable(self, problem: BaseException) -> str:
        return f"cannot write a checkpoint to {self.directory}: {cause(problem)}; {self.last_good()}"

    def last_good(self) -> str:
        found = self.found()
        return f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"

    def _prune(self) -> None:
        found = self.found()
        losses = {path: loss for path in found if (loss := read_state(path).validation_loss) is not None}
        best = min(losses, key=losses.__getitem__, default=None)
        for old in found[: -self.keep]:
            if old != best and old.name not in self.always:
                _remove(old)

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, start: Path | None = None
    ) -> TrainingState:
        """Load the newest checkpoint, written by any number of ranks, or else `start`, one of another run; without
        either begin at step 0."""
        found = self.found() or ([] if start is None else [start])
        if not found:
            return TrainingState()
        weights, moments = get_state_dict(model, optimizer, options=self.options)
        tensors = _tensors(weights, moments)
        _read(tensors, found[-1], self.world.size == 1)
        moments = {**moments, **_part("optimizer.", tensors)}
        weights = _part("model.", tensors)
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=self.options
        )
        return read_state(found[-1])


def _remove(checkpoint: Path) -> None:
    hidden = checkpoint.with_name(
        f"{SCRATCH}{checkpoint.name}"
    )  # renamed first, so that it is never incomplete
    os.replace(checkpoint, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _tensors(weights: dict[str, Any], moments: dict[str, Any]) -> dict[str, Tensor]:
    """Weights and optimizer state as one flat mapping; settings of parameter groups are not saved."""
    named = {f"model.{name}": value for name, value in weights.items()}
    named |= {f"optimizer.{name}": value for name, value in moments.items()}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _part(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _not_of_metadata(record: logging.LogRecord) -> bool:
    return "metadata is not found" not in record.getMessage()


def _read(tensors: dict[str, Tensor], checkpoint: Path, alone: bool) -> None:
    root = logging.getLogger()
    root.addFilter(_not_of_metadata)  # torch logs a traceback before it raises the error
    try:
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(checkpoint)), no_dist=alone)
    except FAILURES as problem:
        raise LabError(
            f"cannot read the checkpoint {checkpoint}: {cause(problem)}; "
            "if it is damaged, remove that directory to continue from the checkpoint before it"
        ) from None
    finally:
        root.removeFilter(_not_of_metadata)


def read_state(checkpoint: Path) -> TrainingState:
    place, remedy = checkpoint / STATE, f"remove {checkpoint} and the checkpoint before it is used"
    try:
        return typed(TrainingState, read_json(place, remedy), place, remedy)
    except FileNotFoundError as problem:
        raise damaged(place, problem, remedy) from None


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Load the weights into a model of one process."""
    tensors = {f"model.{name}": t for name, t in model.state_dict().items()}
    _read(tensors, checkpoint, alone=True)
    model.load_state_dict(_part("model.", tensors))


def cause(problem: BaseException) -> str:
    """The first line of the innermost error."""
    inner = list(getattr(problem, "failures", {}).values())
    if inner:
        return cause(inner[0][0])
    text = (problem.strerror if isinstance(problem, OSError) else None) or str(problem).strip()
    return text.splitlines()[0] if text else type(problem).__name__
