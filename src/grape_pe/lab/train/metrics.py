"""What a run writes while it trains: metrics.jsonl, TensorBoard, Weights & Biases, a line on the screen."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...extras import require
from ..config import RunConfig
from ..files import write_text
from .run_directory import METRICS, read_metrics, run_id


class Metrics:
    """Lines of {"kind", "step", …}. A run that goes on from `step` first forgets what came after it."""

    def __init__(self, directory: Path, config: RunConfig, step: int) -> None:
        self.path = directory / METRICS
        _forget_after(self.path, step)
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


def _forget_after(path: Path, step: int) -> None:
    kept = [line for line in read_metrics(path.parent) if line["step"] <= step]
    if path.exists():
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))


class ProgressLine:
    """Step, loss, speed and time left: a live bar on a terminal, a line now and then elsewhere."""

    PAUSE = 15.0  # seconds between lines where there is no terminal

    def __init__(self, title: str, start: int, total: int, quiet: bool) -> None:
        self.title, self.start, self.total, self.quiet = title, start, total, quiet
        self.began = self.printed = time.monotonic()
        self.validation = ""
        self.bar: Any = None
        if not quiet and sys.stderr.isatty() and find_spec("rich") is not None:
            self._open_bar()

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[said]}"), TimeRemainingColumn(), console=Console(stderr=True),
        )  # fmt: skip
        self.bar.start()
        self.task = self.bar.add_task(self.title, total=self.total, completed=self.start, said="")

    def show(self, step: int, loss: float, speed: float, last: bool = False) -> None:
        self.tell(step, f"loss {loss:.4f}{self.validation}  {speed:,.0f} tokens/s", last)

    def tell(self, step: int, said: str, last: bool = False) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=step, said=said)
        elif not self.quiet and (last or time.monotonic() - self.printed > self.PAUSE):
            self.printed = time.monotonic()
            left = (self.printed - self.began) / max(1, step - self.start) * (self.total - step)
            print(f"{self.title} {step}/{self.total}  {said}  {left:.0f} s left", file=sys.stderr, flush=True)

    def validated(self, loss: float) -> None:
        self.validation = f"  validation {loss:.4f}"

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
