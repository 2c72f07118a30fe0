"""One process, or several started by torchrun."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel import ContextParallel
from ..config import RunConfig
from ..errors import LabError
from .sharing import check_shareable

#: limit of a collective: longer than a checkpoint, a validation or a compilation takes on the slowest rank
TIMEOUT = timedelta(minutes=20)
#: numbers of the process groups that this process has opened, one after the other
GROUPS = itertools.count()
#: defaults of environment variables, as in torchtitan
FLIGHT_RECORDER = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "20000",
    "TORCH_FR_DUMP_TEMP_FILE": "{out}/flight-rank-",
}


@dataclass
class World:
    """This rank, the number of ranks, the device, and sums over ranks."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    #: for background work, whose messages must not mix with those of training
    background: dist.ProcessGroup | None = None
    #: the ranks that share sequences with this one
    parallel: ContextParallel | None = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def sharing(self) -> int:
        """Number of ranks that share a sequence."""
        return 1 if self.parallel is None else self.parallel.ring.size

    @property
    def groups(self) -> int:
        """Number of groups of ranks that share sequences."""
        return self.size // self.sharing

    def share_sequences(self, ranks: int) -> None:
        """Form groups of successive ranks, which are close to each other on a cluster."""
        if ranks > 1:
            self.parallel = ContextParallel(dist.new_subgroups(ranks)[0])

    def rows(self, total: int) -> range:
        """This group's share of `total` rows; the shares of all groups are a partition."""
        group = self.rank // self.sharing
        return range(total * group // self.groups, total * (group + 1) // self.groups)

    def total(self, *values: float | Tensor) -> list[float]:
        """Sums over all ranks in float64, through host memory, so that a GPU is not waited for."""
        summed = torch.tensor([float(v) for v in values], dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(summed)
        return summed.tolist()  # type: ignore[no-any-return]

    def added(self, value: Tensor) -> Tensor:
        """Sum of a tensor over all ranks, in place on the device."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def of_first(self, *values: float) -> list[float]:
        """The values of the first rank, on all."""
        return self.total(*(value if self.first else 0.0 for value in values))

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def gathered(self, value: Any) -> list[Any]:
        """The value of each rank, by rank, on all of them."""
        found = [value]
        if self.size > 1:
            found = [None] * self.size
            dist.all_gather_object(found, value)
        return found

    def check(self, call: Callable[[], object]) -> None:
        """Call on the first rank; its error is raised on all."""
        problem = None
        if self.first:
            try:
                call()
            except (ValueError, OSError) as refused:
                problem = str(refused)
        self.agree(problem)

    def agree(self, problem: str | None) -> None:
        """Raise the problem of any rank on all of them; the others would wait for ever otherwise."""
        for each in filter(None, self.gathered(problem)):
            raise LabError(each)


def default_device() -> torch.device:
    """The GPU of this process (by LOCAL_RANK) if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def first_rank() -> bool:
    """Whether this is the first rank, also while ranks are not connected."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def world(out: Path) -> Iterator[World]:
    """Connect the processes that `torchrun` started.

    A collective that takes longer than `TIMEOUT` ends the run; `torchrun --max-restarts` starts it again.
    NCCL then leaves the last collectives of each rank in `out`/flight-rank-N, for `torchfrtrace`.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    device = default_device()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    if size == 1:
        yield World(device=device)
        return
    _check_restarts()
    for name, value in FLIGHT_RECORDER.items():
        os.environ.setdefault(name, value.format(out=out))
    store, rank, size = _rendezvous(os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
    # a later group of these processes must not find the addresses that an earlier one left in the store
    keys = dist.PrefixStore(f"group-{next(GROUPS)}", store)
    # gloo beside nccl: ranks agree, and asynchronous checkpoints gather, on the CPU
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=keys, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield World(dist.get_rank(), size, device, dist.new_group(backend="gloo"))
    finally:
        dist.destroy_process_group()


@cache
def _rendezvous(address: str, port: str) -> tuple[dist.Store, int, int]:
    """The store at this address, this rank and the number of ranks; one store for all groups of a process."""
    store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    return store, rank, size


def _check_restarts() -> None:
    """Refuse restarts that would fail: a store that outlives them has addresses of ended processes."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise LabError(
            f"torchrun --max-restarts={restarts} needs a new store for each attempt; "
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun starts"
        )


def check_split(config: RunConfig, size: int) -> None:
    """Refuse a batch or sequences that the ranks cannot share evenly."""
    train = config.train
    among, takers = train.context_parallel, f"{size} ranks"
    if size % among:
        raise LabError(
            f"train.context_parallel must divide the number of ranks, got {among} for {size}; "
            f"try --train.context_parallel {math.gcd(among, size)}"
        )
    if among > 1:
        check_shareable(config)
        takers = f"{size // among} groups of {among} ranks"
    share, left = divmod(train.batch, size // among)
    if left:
        raise LabError(
            f"train.batch must be a multiple of the {takers}, got {train.batch}; "
            f"try --train.batch {(share + 1) * (size // among)}"
        )
    if train.micro_batch and share % train.micro_batch:
        raise LabError(
            f"each of {takers} takes {share} sequences, which train.micro_batch must divide, "
            f"got {train.micro_batch}; try --train.micro_batch {math.gcd(share, train.micro_batch)}"
        )
    if train.strategy == "fsdp" and train.shard and size % train.shard:
        raise LabError(
            f"train.shard must divide the {size} ranks, got {train.shard}; "
            f"try --train.shard {math.gcd(size, train.shard)}"
        )
