"""`Ring`: communication between ranks that share a sequence.

The sequence is cut into 2N chunks for N ranks, and rank r has chunks r and 2N-1-r ("zigzag"), so that causal attention
is the same work for every rank at every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ring:
    """The ranks of a process group, where each sends to the next.

    Args:
        group: the process group.
        rank: this rank.
        size: number of ranks, N.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def chunks(self) -> int:
        """Number of chunks, 2N."""
        return 2 * self.size

    def chunks_of(self, rank: int) -> tuple[int, int]:
        """The numbers of the two chunks of a rank, in the order of its tokens."""
        return rank, self.chunks - 1 - rank

    def blocks(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """(rank, its tensors) for all ranks: first this one, then the rank before, and so on.

        The next block is received while the caller computes with this one.
        """
        block = [x.contiguous() for x in tensors]
        for step in range(self.size):
            coming = self._exchange(block) if step + 1 < self.size else None
            yield (self.rank - step) % self.size, block
            if coming is not None:
                block = _received(*coming, block)

    def passed_on(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send tensors to the next rank, and return those of the rank before."""
        if self.size == 1 or not tensors:
            return list(tensors)
        return _received(*self._exchange(tensors), tensors)

    def _exchange(self, tensors: Sequence[Tensor]) -> tuple[list[Any], Tensor, Tensor]:
        """Start to send tensors to the next rank and to receive those of the rank before, as bytes."""
        ours = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in tensors])
        theirs = torch.empty_like(ours)
        after, before = ((self.rank + step) % self.size for step in (1, -1))
        ways = (dist.isend, ours, after), (dist.irecv, theirs, before)
        operations = [dist.P2POp(way, x, group=self.group, group_peer=peer) for way, x, peer in ways]
        # `ours` is returned so that it is not freed before it is sent
        return dist.batch_isend_irecv(operations), theirs, ours

    def gathered(self, x: Tensor) -> Tensor:
        """Gather x from all ranks, (N, …). Differentiable; gradients are summed in the order of the ranks."""
        return _Gathered.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]

    def before(self, ours: Tensor, summed: bool = False) -> Tensor:
        """The value of the chunk before each of this rank's chunks, (2, …), or with `summed` the sum over all before.

        `ours` has the values of this rank's two chunks, (2, …). Before the first chunk the value is zero.
        """
        of_ranks = self.gathered(ours)  # (N, 2, …)
        ordered = torch.cat([of_ranks[:, 0], of_ranks[:, 1].flip(0)])[:-1]
        ordered = torch.cat([torch.zeros_like(ordered[:1]), ordered])
        return (ordered.cumsum(0) if summed else ordered)[list(self.chunks_of(self.rank))]


def _received(works: list[Any], message: Tensor, _: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    for work in works:
        work.wait()
    parts = message.split([x.numel() * x.element_size() for x in like])
    # a clone, because a part of the message need not be aligned for its dtype
    return [part.clone().view(x.dtype).view(x.shape) for part, x in zip(parts, like, strict=True)]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return _all(x, ring)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # the sum of this rank's slice over all ranks, not by all_reduce, whose order of summation may vary
        return _all(grad, ctx.ring)[:, ctx.ring.rank].sum(0), None


def _all(x: Tensor, ring: Ring) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ring.size)]
    dist.all_gather(parts, x.contiguous(), group=ring.group)
    return torch.stack(parts)
