"""Metrics of a run: metrics.jsonl, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...extras import require
from ..config import RunConfig
from ..files import write_text
from .rollback import Rollback
from .run_directory import METRICS, read_metrics, run_id


class Metrics:
    """Lines of {"kind", "step", …}. A run that continues from `step` first removes later lines, and each of its
    rollbacks has a line of kind "rollback"."""

    def __init__(self, directory: Path, config: RunConfig, step: int, rollbacks: Sequence[Rollback]) -> None:
        self.path = directory / METRICS
        recorded = _forget_after(self.path, step, len(rollbacks))
        self.file = self.path.open("a")
        self.board: Any = None
        if config.log.tensorboard:
            board = require("torch.utils.tensorboard", "lab")
            self.board = board.SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)
        self.wandb: Any = None
        if config.log.wandb:
            self.wandb = require("wandb", "wandb").init(
                project=config.log.wandb, name=directory.name, dir=str(directory), config=config.model_dump(),
                id=run_id(directory), resume="allow",
            )  # fmt: skip
        for number, each in enumerate(rollbacks[recorded:], start=recorded + 1):
            self.write("rollback", each.to, {"number": number, **asdict(each)})

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self.file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self.file.flush()
        numbers = {f"{kind}/{name}": value for name, value in _numbers(values)}
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(numbers, step=step)

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()


def _numbers(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif value is not None:
            yield name, float(value)


def _forget_after(path: Path, step: int, rollbacks: int) -> int:
    """Remove lines after `step`, except those of rollbacks; returns the number of rollbacks that have a line."""
    lines = read_metrics(path.parent)
    kept = [x for x in lines if (x["number"] <= rollbacks if x["kind"] == "rollback" else x["step"] <= step)]
    if path.exists():
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
    return sum(line["kind"] == "rollback" for line in kept)
