"""Attention of one's own queries to the keys of all ranks, a block at a time, forward and backward.

Nothing of another rank is kept: in the backward pass the blocks go round again, each with its gradient. Tensors of a
rank: `rows` run along its queries (those of one token are shared by all), `keys` along its keys.
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
from ..precision import working_dtype
from .path import crossing, followed, paths_of
from .ring import Ring

Tensors = Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Pair:
    """A chunk of our queries, at `rows`, and one of another rank's keys, at `cols`, that they see."""

    rows: slice
    cols: slice
    number: int  # of the chunk of keys
    own: bool  # the two are the same chunk


def pairs(ring: Ring, other: int, tokens: int) -> Iterator[Pair]:
    """What our queries see of a rank that holds as many tokens as we do."""
    half = tokens // 2
    parts = slice(0, half), slice(half, tokens)
    for rows, ours in zip(parts, ring.held(ring.rank), strict=True):
        for cols, theirs in zip(parts, ring.held(other), strict=True):
            if theirs <= ours:
                yield Pair(rows, cols, theirs, theirs == ours)


Kind = TypeVar("Kind", bound=Bias)


def without_data(bias: Kind) -> Kind:
    """The bias as a form to fill in: held until the backward pass, it keeps no memory."""
    return bias.map(lambda x: x.detach().to("meta"))


def along(x: Tensor, part: slice) -> Tensor:
    return x if x.shape[2] == 1 else x[:, :, part]


class Attention:
    """out and lse of our queries. rows: q, what crosses the chunks (B, H, T, 2N) if there is a path, views."""

    def __init__(self, ring: Ring, bias: Bias, scale: float, prune: Prune, impl: str) -> None:
        self.ring, self.scale, self.prune, self.impl = ring, scale, prune, impl
        self.bias, self.has_path = without_data(bias), bool(paths_of(bias))

    def of_pair(self, rows: Tensors, keys: Tensors, pair: Pair) -> tuple[Tensor, Tensor]:
        """Output and logsumexp of one pair; the logsumexp with what the chunks between add to all its logits."""
        q, *views = (along(x, pair.rows) for x in rows)
        k, v, *traces = (x[:, :, pair.cols] for x in keys)
        carried = views.pop(0)[..., pair.number] if self.has_path else None
        names = [*self.bias.query_tensors(), *self.bias.key_tensors()]
        bias = self.bias.replaced(dict(zip(names, [*views, *traces], strict=True)))
        hidden = None
        if self.has_path and not pair.own:
            more = q.shape[2] - 1
            hidden = torch.arange(k.shape[2] + more, device=k.device).expand(k.shape[0], -1) >= k.shape[2]
            k, v, bias = F.pad(k, (0, 0, 0, more)), F.pad(v, (0, 0, 0, more)), followed(bias, more)
        out, lse = attend(
            q, k, v, bias=bias, causal=self.has_path or pair.own, key_padding=hidden,
            scale=self.scale, prune=self.prune, impl=self.impl, return_lse=True,
        )  # fmt: skip
        return out, lse if carried is None else lse + carried

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
        """The results of a pair and their gradients."""
        out, lse, d_out, d_lse = (x[:, :, pair.rows] for x in (*results, *grads))
        ours, our_lse = self.of_pair(rows, keys, pair)
        weight = share(our_lse.detach(), lse)
        yield ours, (weight.unsqueeze(-1) * d_out).to(ours.dtype)
        yield our_lse, weight * ((d_out * (ours.detach() - out)).sum(-1) + d_lse)


class Crossings:
    """(B, H, T, 2N): what each chunk of keys adds to the logits of all keys before it, one result."""

    def __init__(self, ring: Ring, paths: list[PathBias], batch: int, impl: str) -> None:
        self.ring, self.batch, self.impl = ring, batch, impl
        self.paths = [without_data(path) for path in paths]

    def of_pair(self, rows: Tensors, keys: Tensors, pair: Pair) -> Tensor:
        views = iter([along(x, pair.rows) for x in rows])
        paths = [
            path.replaced({"probe_q": next(views), "rate": next(views), "probe_k": probe_k[:, :, pair.cols]})
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
    """The part of a row's weight that lies in a block; 0 in a row that sees nothing."""
    return (lse - total.masked_fill(total == float("-inf"), 0.0)).exp()


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add a block of keys to the softmax of the rows, in place."""
    total = torch.logaddexp(lse, more_lse.to(lse.dtype))
    out *= share(lse, total).unsqueeze(-1)
    out += share(more_lse, total).unsqueeze(-1) * more
    lse.copy_(total)


def over_ring(work: Attention | Crossings, rows: Tensors, keys: Tensors) -> tuple[Tensor, ...]:
    """The results of all pairs; differentiable once."""
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
        saved = ctx.saved_tensors  # read once: gradient checkpointing allows no second time
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
    """Of the tensors that need one, over all ranks."""
    rows = _leaves(tensors[:count], needs)
    ours = [x for x in rows if x.requires_grad]
    of_rows: Tensors = []
    of_keys: Tensors = []
    for other, block in work.ring.blocks(tensors[count:]):
        keys = _leaves(block, needs[count:])
        theirs = [x for x in keys if x.requires_grad]
        made = _gradients(work, rows, keys, other, results, grads, [*ours, *theirs])
        of_rows = _added(of_rows, made[: len(ours)])
        # the sum for a block travels with it, one step behind, and ends where the block comes from
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
    """What one block of keys adds to the gradients of `wanted`, in at least float32."""
    with torch.enable_grad():
        seen = pairs(work.ring, other, rows[0].shape[2])
        found = [each for pair in seen for each in work.pulled_back(rows, keys, pair, results, grads)]
    outputs, towards = zip(*((x, d) for x, d in found if x.requires_grad), strict=True)
    made = torch.autograd.grad(outputs, wanted, towards, materialize_grads=True)
    return [x.to(working_dtype(x.dtype)) for x in made]


def _added(first: Tensors, second: Tensors) -> Tensors:
    return [x + y for x, y in zip(first, second, strict=True)] if first else second
