"""Batches of a probe, generated on demand; each row is a pure function of (seed, step, row)."""

from __future__ import annotations

import torch

from ..data.batches import Batch, check_rows
from ..errors import LabError
from .base import TRAIN, Case, Task
from .dice import Dice

#: independent streams of random numbers
LENGTHS, ROWS, VALIDATION, TEST = range(4)
VALIDATION_ROWS = 512


class TaskBatches:
    """Batches of a probe. All rows of a step have one random length, so that ranks agree on shapes.

    Args:
        batch: rows in the global batch of a step.
    """

    def __init__(self, task: Task, batch: int, seed: int = 0) -> None:
        if batch < 1:
            raise LabError(f"batch must be at least 1, got {batch}")
        self.task, self.size, self.seed = task, batch, seed
        self.vocab_size = task.vocab_size
        self.validation_rows = VALIDATION_ROWS

    def length(self, step: int) -> int:
        """The length of all rows of a step."""
        lengths = self.task.train_lengths()
        return lengths[int(Dice((self.seed, LENGTHS, step), range(1)).integers(0, len(lengths))[0])]

    def batch(self, step: int, rows: range) -> Batch:
        """Some rows of the global batch of a step."""
        check_rows(rows, self.size, "the batch")
        if step < 0:
            raise LabError(f"step must be 0 or more, got {step}")
        return draw(self.task, (self.seed, ROWS, step), rows, Case(TRAIN, self.length(step)))

    def validation(self, rows: range) -> Batch:
        """Rows of the longest training length, distributed as in training, the same for every seed."""
        check_rows(rows, self.validation_rows, "the validation set")
        return draw(self.task, (VALIDATION,), rows, Case(self.task.splits[0], self.task.length))


def draw(task: Task, path: tuple[int, ...], rows: range, case: Case) -> Batch:
    """Some rows of the stream named by `path`, as tensors."""
    tokens, targets = task.sample(Dice(path, rows), case)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets))
