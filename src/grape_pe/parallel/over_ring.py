"""Forward and backward of attention over the keys of all ranks, one block of keys at a time.

No tensor of another rank is kept: the backward pass receives all blocks again, and each carries its gradient. `rows`
are query-side tensors of this rank (those with one token are shared by all queries), `keys` are key-side tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import attend
from ..attention.problem import no_second_derivative
from ..attention.pruning import Prune
from ..bias import Bias, PathBias
from ..bias.base import of_rows
from ..precision import working_dtype
from .path import crossing, followed, paths_of
from .ring import Ring

Tensors = Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Pair:
    """A chunk of this rank's queries and a visible chunk of keys of some rank.

    Args:
        rows: the queries, in tensors of this rank.
        cols: the keys, in tensors of that rank.
        number: number of the chunk of keys in the sequence.
        own: whether both are the same chunk.
    """

    rows: slice
    cols: slice
    number: int
    own: bool


def pairs(ring: Ring, other: int, tokens: int) -> Iterator[Pair]:
    """All pairs of this rank's chunks of queries with visible chunks of keys of rank `other`."""
    half = tokens // 2
    parts = slice(0, half), slice(half, tokens)
    for rows, ours in zip(parts, ring.chunks_of(ring.rank), strict=True):
        for cols, theirs in zip(parts, ring.chunks_of(other), strict=True):
            if theirs <= ours:
                yield Pair(rows, cols, theirs, theirs == ours)


Kind = TypeVar("Kind", bound=Bias)


def without_data(bias: Kind) -> Kind:
    """The bias with its tensors on the meta device, so that it uses no memory until the backward pass."""
    return bias.map(lambda x: x.detach().to("meta"))


class Attention:
    """Output and logsumexp of this rank's queries.

    Its `rows` are q, the result of `Crossings` summed over later chunks (B, H, T, 2N) if there is a path, and the
    query-side tensors of the bias. Its `keys` are k, v, and the key-side tensors of the bias.

    Args:
        ring: the ranks.
        bias: the bias of this rank's tokens.
        scale: factor of <q, k>.
        prune: as for `grape.attend`.
        impl: as for `grape.attend`.
    """

    def __init__(self, ring: Ring, bias: Bias, scale: float, prune: Prune, impl: str) -> None:
        self.ring, self.scale, self.prune, self.impl = ring, scale, prune, impl
        self.bias, self.has_path = without_data(bias), bool(paths_of(bias))

    def of_pair(self, rows: Tensors, keys: Tensors, pair: Pair) -> tuple[Tensor, Tensor]:
        """Output and logsumexp of one pair. The path over the chunks between adds to the logsumexp."""
        q, *query_tensors = (of_rows(x, pair.rows) for x in rows)
        k, v, *key_tensors = (x[:, :, pair.cols] for x in keys)
        between = query_tensors.pop(0)[..., pair.number] if self.has_path else None
        names = [*self.bias.query_tensors(), *self.bias.key_tensors()]
        bias = self.bias.replaced(dict(zip(names, [*query_tensors, *key_tensors], strict=True)))
        hidden = None
        if self.has_path and not pair.own:
            more = q.shape[2] - 1
            hidden = torch.arange(k.shape[2] + more, device=k.device).expand(k.shape[0], -1) >= k.shape[2]
            k, v, bias = F.pad(k, (0, 0, 0, more)), F.pad(v, (0, 0, 0, more)), followed(bias, more)
        out, lse = attend(
            q, k, v, bias=bias, causal=self.has_path or pair.own, key_padding=hidden,
            scale=self.scale, prune=self.prune, impl=self.impl, return_lse=True,
        )  # fmt: skip
        return out, lse if between is None else lse + between

    def forward(self, rows: Tensors, keys: Tensors) -> tuple[Tensor, Tensor]:
        q, v = rows[0], keys[1]
        working = working_dtype(q.dtype)
        out = v.new_zeros(*q.shape[:3], v.shape[-1], dtype=working)
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=working)
        for other, block in self.ring.blocks(keys):
            for pair in pairs(self.ring, other, q.shape[2]):
                merge(out[:, :, pair.rows], lse[:, :, pair.rows], *self.of_pair(rows, block, pair))
        return out, lse

    def pulled_back(
        self, rows: Tensors, keys: Tensors, pair: Pair, results: Tensors, grads: Tensors
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The results of a pair, each with its gradient."""
        out, lse, d_out, d_lse = (x[:, :, pair.rows] for x in (*results, *grads))
        ours, our_lse = self.of_pair(rows, keys, pair)
        weight = share(our_lse.detach(), lse)
        yield ours, (weight.unsqueeze(-1) * d_out).to(ours.dtype)
        yield our_lse, weight * ((d_out * (ours.detach() - out)).sum(-1) + d_lse)


class Crossings:
    """The sum of the paths over each whole chunk of keys, (B, H, T, 2N), which is added to all keys before the chunk.

    Its `rows` are probe_q and rate of each path, its `keys` are probe_k of each path.

    Args:
        ring: the ranks.
        paths: the paths of this rank's bias.
        batch: B.
        impl: as for `grape.attend`.
    """

    def __init__(self, ring: Ring, paths: list[PathBias], batch: int, impl: str) -> None:
        self.ring, self.batch, self.impl = ring, batch, impl
        self.paths = [without_data(path) for path in paths]

    def of_pair(self, rows: Tensors, keys: Tensors, pair: Pair) -> Tensor:
        each = iter([of_rows(x, pair.rows) for x in rows])
        paths = [
            path.replaced({"probe_q": next(each), "rate": next(each), "probe_k": probe_k[:, :, pair.cols]})
            for path, probe_k in zip(self.paths, keys, strict=True)
        ]
        return crossing(paths, self.batch, pair.own, self.impl)

    def forward(self, rows: Tensors, keys: Tensors) -> tuple[Tensor]:
        probe, rate = rows[:2]
        tokens, dtype = probe.shape[2], working_dtype(probe.dtype)
        total = probe.new_zeros(self.batch, rate.shape[1], tokens, self.ring.chunks, dtype=dtype)
        for other, block in self.ring.blocks(keys):
            for pair in pairs(self.ring, other, tokens):
                total[:, :, pair.rows, pair.number] = self.of_pair(rows, block, pair)
        return (total,)

    def pulled_back(
        self, rows: Tensors, keys: Tensors, pair: Pair, results: Tensors, grads: Tensors
    ) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.of_pair(rows, keys, pair), grads[0][:, :, pair.rows, pair.number]


def share(lse: Tensor, total: Tensor) -> Tensor:
    """The share of a block in the softmax weight of each row; 0 for a row without visible keys."""
    return (lse - total.masked_fill(total == float("-inf"), 0.0)).exp()


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add a block of keys to the softmax of the rows, in place."""
    total = torch.logaddexp(lse, more_lse.to(lse.dtype))
    out *= share(lse, total).unsqueeze(-1)
    out += share(more_lse, total).unsqueeze(-1) * more
    lse.copy_(total)


def over_ring(work: Attention | Crossings, rows: Tensors, keys: Tensors) -> tuple[Tensor, ...]:
    """Compute the results of all pairs, with a first derivative."""
    return _OverRing.apply(work, len(rows), *rows, *keys)  # type: ignore[no-any-return, no-untyped-call]


class _OverRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: Attention | Crossings, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = work.forward(tensors[:count], tensors[count:])
        ctx.work, ctx.count = work, count
        ctx.save_for_backward(*tensors, *results)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        saved = ctx.saved_tensors  # read only once, as gradient checkpointing requires
        tensors, results = saved[: len(needs)], saved[len(needs) :]
        with torch.no_grad():
            found: Tensors = _all_gradients(ctx.work, ctx.count, tensors, needs, results, grads)
        if torch.is_grad_enabled():
            found = no_second_derivative(ONCE, found, [*tensors, *grads])
        each = iter(found)
        return None, None, *(next(each) if need else None for need in needs)


ONCE = "context parallelism has no second derivative; use grape.attend(…, impl='blocks') on one device"


def _all_gradients(
    work: Attention | Crossings,
    count: int,
    tensors: Tensors,
    needs: Sequence[bool],
    results: Tensors,
    grads: Tensors,
) -> list[Tensor]:
    """Gradients of the tensors that need one, summed over all ranks."""
    rows = _leaves(tensors[:count], needs)
    ours = [x for x in rows if x.requires_grad]
    of_rows: Tensors = []
    of_keys: Tensors = []
    for other, block in work.ring.blocks(tensors[count:]):
        keys = _leaves(block, needs[count:])
        theirs = [x for x in keys if x.requires_grad]
        made = _gradients(work, rows, keys, other, results, grads, [*ours, *theirs])
        of_rows = _added(of_rows, made[: len(ours)])
        # the gradient of a block is passed on one step after the block, and ends at the rank of the block
        of_keys = work.ring.passed_on(_added(of_keys, made[len(ours) :]))
    needing = [x for x, need in zip(tensors, needs, strict=True) if need]
    return [grad.to(x.dtype) for grad, x in zip([*of_rows, *of_keys], needing, strict=True)]


def _leaves(tensors: Tensors, needs: Sequence[bool]) -> list[Tensor]:
    return [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=False)]


def _gradients(
    work: Attention | Crossings,
    rows: Tensors,
    keys: Tensors,
    other: int,
    results: Tensors,
    grads: Tensors,
    wanted: Tensors,
) -> list[Tensor]:
    """The part of one block of keys in the gradients of `wanted`, in at least float32."""
    with torch.enable_grad():
        visible = pairs(work.ring, other, rows[0].shape[2])
        found = [each for pair in visible for each in work.pulled_back(rows, keys, pair, results, grads)]
    outputs, of_outputs = zip(*((x, d) for x, d in found if x.requires_grad), strict=True)
    made = torch.autograd.grad(outputs, wanted, of_outputs, materialize_grads=True)
    return [x.to(working_dtype(x.dtype)) for x in made]


def _added(first: Tensors, second: Tensors) -> Tensors:
    return [x + y for x, y in zip(first, second, strict=True)] if first else second
