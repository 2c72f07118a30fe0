"""One process or many: the same code under `python` and under `torchrun`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import RunConfig
from ..errors import LabError


@dataclass
class World:
    """Which rank this is, of how many, on which device; and how ranks add things up."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    #: for what runs in the background: its messages must not mix with those of training
    background: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def rows(self, total: int) -> range:
        """This rank's share of `total` rows: disjoint over ranks, all of them together."""
        return range(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def total(self, *values: float | Tensor) -> list[float]:
        """Sums over all ranks, in float64."""
        summed = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values])
        if self.size > 1:
            dist.all_reduce(summed)
        return [float(v) for v in summed.cpu()]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def agree(self, problem: str | None) -> None:
        """Raise on every rank if one has a problem; without this the others would wait for ever."""
        told: list[Any] = [problem]
        if self.size > 1:
            told = [None] * self.size
            dist.all_gather_object(told, problem)
        said = next((each for each in told if each), None)
        if said:
            raise LabError(said)


def default_device() -> torch.device:
    """Where a model runs: the GPU of this process (by LOCAL_RANK) if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


@contextmanager
def world() -> Iterator[World]:
    """Join the other processes if `torchrun` started several; one process needs nothing."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    device = default_device()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    if size == 1:
        yield World(device=device)
        return
    # gloo beside nccl: asynchronous checkpoints gather on the CPU
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        yield World(dist.get_rank(), size, device, dist.new_group(backend="gloo"))
    finally:
        dist.destroy_process_group()


def check_split(config: RunConfig, size: int) -> None:
    """Refuse a batch that the ranks cannot share evenly."""
    train = config.train
    share, left = divmod(train.batch, size)
    if left:
        raise LabError(f"train.batch must be a multiple of the {size} ranks, got {train.batch}")
    if train.micro_batch and share % train.micro_batch:
        raise LabError(
            f"each of {size} ranks takes {share} sequences, which train.micro_batch must divide, "
            f"got {train.micro_batch}"
        )
    if train.strategy == "fsdp" and train.shard and size % train.shard:
        raise LabError(f"train.shard must divide the {size} ranks, got {train.shard}")
