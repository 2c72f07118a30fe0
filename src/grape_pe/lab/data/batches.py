"""Batches of a dataset. Each row is a pure function of (seed, step, row), so resuming needs no saved state.

A split is cut into windows of T+1 tokens, one every T tokens of a shard: the last token of a window is the
target of its last input and the first input of the next window. No window crosses the end of a shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import LabError
from .dataset import Dataset
from .permutation import permute

#: seed and epoch of the order of validation windows: a fixed one
VALIDATION_ORDER = (0, 0)


@dataclass(frozen=True)
class Batch:
    """Rows of tokens and their targets.

    Args:
        tokens: (rows, T) inputs.
        targets: (rows, T): the token that follows each input.
        documents: (rows, T) ids of the documents, or None.
    """

    tokens: Tensor  # (n, T) int64
    targets: Tensor  # (n, T) int64, -100 where nothing is to be predicted
    documents: Tensor | None = None  # (n, T) int64, counted from 0 in each row


class Batches(Protocol):
    """The data interface of the trainer, without state."""

    vocab_size: int
    validation_rows: int

    def batch(self, step: int, rows: range) -> Batch:
        """Some rows of the global batch of a step."""

    def validation(self, rows: range) -> Batch:
        """Rows of the validation set, the same for every run and seed; the first n are a random sample for any n."""


class Windows:
    """The windows of one split, numbered through its shards."""

    def __init__(self, dataset: Dataset, split: str, sequence: int):
        self.dataset, self.sequence = dataset, sequence
        self.shards = dataset.manifest.of(split)
        each = [max(0, shard.tokens - 1) // sequence for shard in self.shards]
        self.ends = np.cumsum(each, dtype=np.int64)
        self.count = int(sum(each))
        if self.count == 0:
            longest = max((shard.tokens for shard in self.shards), default=0)
            raise LabError(
                f"the {split} split of {dataset.directory} is too short: a sequence of {sequence} needs "
                f"{sequence + 1} tokens in a shard, the longest has {longest}; lower data.sequence or add data"
            )

    def read(self, number: int) -> npt.NDArray[np.int64]:
        """The T+1 tokens of a window."""
        place = int(np.searchsorted(self.ends, number, side="right"))
        first = int(self.ends[place - 1]) if place else 0
        return self.dataset.read(self.shards[place], (number - first) * self.sequence, self.sequence + 1)


class DatasetBatches:
    """Batches of a prepared dataset.

    An epoch visits every window of the train split once, in an order drawn from (seed, epoch); the next one
    may begin inside a batch.

    Args:
        dataset: from `open_dataset`.
        sequence: T, the number of inputs in a row.
        batch: rows in the global batch of a step.
        seed: of the order of the windows.
        documents: also give document ids, for attention that stays inside each document.
    """

    def __init__(self, dataset: Dataset, sequence: int, batch: int, seed: int = 0, documents: bool = False):
        if sequence < 1 or batch < 1:
            raise LabError(f"sequence and batch must be at least 1, got {sequence} and {batch}")
        self.dataset, self.sequence, self.size = dataset, sequence, batch
        self.seed, self.documents = seed, documents
        self.vocab_size = dataset.vocab_size
        self._train = Windows(dataset, "train", sequence)
        self._validation = Windows(dataset, "val", sequence)
        self.validation_rows = self._validation.count

    def batch(self, step: int, rows: range) -> Batch:
        check_rows(rows, self.size, "a batch")
        if step < 0:
            raise LabError(f"step must be 0 or more, got {step}")
        return self._rows(self._train, self._windows([step * self.size + row for row in rows]))

    def validation(self, rows: range) -> Batch:
        check_rows(rows, self.validation_rows, "the validation split")
        return self._rows(
            self._validation, permute(list(rows), self.validation_rows, *VALIDATION_ORDER).tolist()
        )

    def _windows(self, samples: list[int]) -> list[int]:
        """The window of each row of the run; a call may span epochs."""
        count = self._train.count
        found: dict[int, int] = {}
        for epoch in {sample // count for sample in samples}:
            inside = [sample for sample in samples if sample // count == epoch]
            places = permute([sample % count for sample in inside], count, self.seed, epoch)
            found.update(zip(inside, places.tolist(), strict=True))
        return [found[sample] for sample in samples]

    def _rows(self, windows: Windows, numbers: list[int]) -> Batch:
        shape = (len(numbers), self.sequence + 1)
        found = torch.empty(shape, dtype=torch.int64)
        for row, number in zip(found.numpy(), numbers, strict=True):
            row[:] = windows.read(number)
        tokens, targets = found[:, :-1].contiguous(), found[:, 1:].contiguous()
        if not self.documents:
            return Batch(tokens, targets)
        starts = tokens == self.dataset.eos
        starts[:, 0] = False  # each row begins in its document 0
        return Batch(tokens, targets, starts.cumsum(1))


def check_rows(rows: range, count: int, what: str) -> None:
    if rows and (min(rows) < 0 or max(rows) >= count):
        raise LabError(f"{what} has rows 0 to {count - 1}, got {rows}")
