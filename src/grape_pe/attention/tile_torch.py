"""`grape::tiles` in plain torch: any device, any floating dtype, memory O(block x T).

A head and a block of queries at a time, so that the block's logits stay in cache; the backward pass
computes each block again from the saved maxima and sums. (Autograd does not reach inside a custom op, so the
derivatives are written out.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..bias import LINKS
from . import pruning
from .cpu.build import TILE
from .masks import Masks
from .tile_problem import TileProblem

ROWS = 256  # queries to a block
Grads = list[Tensor | None]


@dataclass(frozen=True)
class Part:
    """One block: queries `rows` of head `head` against keys `cols`; tiles computed and visible."""

    head: int
    rows: slice
    cols: slice
    computed: int
    visible: int


def torch_forward(p: TileProblem) -> tuple[Tensor, Tensor, Tensor]:
    out = p.q.new_zeros(*p.q.shape[:3], p.v.shape[-1])
    norms = p.q.new_full((*p.q.shape[:3], 2), float("inf"))
    work = torch.zeros(*p.q.shape[:2], 2, dtype=torch.int64, device=p.q.device)
    masks = _masks(p)
    for part in _parts(p):
        block = _Block(p, part, masks)
        top = block.logits.amax(-1, keepdim=True)
        top = top.masked_fill(top == float("-inf"), float("inf"))  # a row that sees nothing: weights of 0
        weights = (block.logits - top).exp()
        total = weights.sum(-1, keepdim=True)
        total = total.masked_fill(top == float("inf"), 1.0)
        out[:, part.head, part.rows] = (weights @ block.v / total)[:, 0]
        norms[:, part.head, part.rows] = torch.cat([top, total], -1)[:, 0]
        work[:, part.head] += torch.tensor([part.computed, part.visible], device=p.q.device)
    return out, norms, work


def torch_backward(
    p: TileProblem, d_out: Tensor, out: Tensor, norms: Tensor, work: Tensor, c_grad: bool
) -> Grads:
    inputs: Grads = [p.q, p.k, p.v, *(x if c_grad else None for x in (p.c_q, p.c_k))]
    inputs += [x if p.bias_grad else None for x in (p.rate_q, p.rate_k)]
    inputs += [p.probe_q, p.probe_k, p.path_rate]
    grads: Grads = [
        None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs
    ]
    masks = _masks(p)
    for part in _parts(p):
        rows = (slice(None), slice(part.head, part.head + 1), part.rows)
        block = _Block(p, part, masks)
        steps = block.gradients(d_out[rows], norms[rows])
        for target, step in zip(_views(grads, p, part), steps, strict=True):
            if target is not None and step is not None:
                target += step
    return grads


def _masks(p: TileProblem) -> Masks:
    lengths = p.q.shape[2], p.k.shape[2]
    return Masks(*lengths, p.q.device, p.causal, p.window or None, p.documents, p.key_padding)


def _parts(p: TileProblem) -> Iterator[Part]:
    if p.empty:
        return
    shift = p.k.shape[2] - p.q.shape[2]
    skip = _Skipper(p)
    for start in range(0, p.q.shape[2], ROWS):
        rows = slice(start, min(start + ROWS, p.q.shape[2]))
        low = max(0, rows.start + shift - p.window + 1) if p.window else 0
        high = rows.stop + shift if p.causal else p.k.shape[2]
        if p.window and not p.causal:
            high = min(high, rows.stop + shift + p.window - 1)
        if high <= low:
            continue
        first, end = low // TILE, -(-high // TILE)
        for head in range(p.q.shape[1]):
            begin = skip.first_tile(head, rows, first, end)
            cols = slice(max(low, begin * TILE), high)
            yield Part(head, rows, cols, end - begin, end - first)


class _Skipper:
    """The first tile of keys a block needs, from bounds made once for the whole problem."""

    def __init__(self, p: TileProblem) -> None:
        self.p, self.tau = p, p.tau()
        # Plain torch prunes slopes only: a path's bound would need the very sums it is to save.
        self.on = self.tau != pruning.OFF and p.c_k is not None and p.probe_q is None
        if self.on and p.c_k is not None:
            self.k_norm = pruning.key_bounds(p.k, p.v, TILE)
            self.slopes = pruning.slope_bounds(p.c_k, p.rate_k, TILE)
            self.held = self._own_logits()

    def _own_logits(self) -> Tensor:
        """(B, H, Tq): a row's logit with its own key, which every mask but padding lets it see."""
        p = self.p
        assert p.c_q is not None and p.c_k is not None and p.rate_q is not None
        queries, keys = p.q.shape[2], p.k.shape[2]
        own = torch.arange(queries, device=p.q.device) + keys - queries
        seen = own.clamp(min=0)
        key = p.k[:, :, seen].repeat_interleave(p.q.shape[1] // p.k.shape[1], 1)
        rate = p.rate_q if p.rate_k is None else p.rate_q + p.rate_k[..., seen]
        logit = p.scale * (p.q * key).sum(-1) + (rate * (p.c_k[..., seen] - p.c_q).to(rate.dtype)).sum(0)
        hidden = (own < 0)[None, None].expand_as(logit)
        if p.key_padding is not None:
            hidden = hidden | p.key_padding[:, None, seen]
        return logit.masked_fill(hidden, float("-inf"))

    def first_tile(self, head: int, rows: slice, first: int, end: int) -> int:
        if not self.on:
            return first
        p, pick = self.p, slice(first, end)
        assert p.c_q is not None and p.rate_q is not None
        bounds = self.slopes.select(head, pick)
        q_norm = p.q[:, head, rows].norm(dim=-1) * abs(p.scale)
        k_norm = self.k_norm[:, head * p.k.shape[1] // p.q.shape[1], pick]
        mine = p.c_q[:, :, head, rows], p.rate_q[:, :, head, rows]
        bound = pruning.logit_bounds(q_norm, k_norm, (*mine, bounds))
        needed = (~(bound < self.held[:, head, rows].unsqueeze(-1) - self.tau)).flatten(0, 1).any(0)
        return first + int(needed.to(torch.int32).argmax()) if bool(needed.any()) else end - 1


def _views(tensors: Grads, p: TileProblem, part: Part) -> Grads:
    """The parts of the ten tensors (inputs, or their gradients) that the block touches."""
    head, rows, cols, every = part.head, part.rows, part.cols, slice(None)
    kv, one = head * p.k.shape[1] // p.q.shape[1], slice(head, head + 1)
    past = slice(0, max(0, rows.stop + p.k.shape[2] - p.q.shape[2]))  # a path runs over all earlier tokens
    picks = [
        (every, one, rows),
        (every, slice(kv, kv + 1), cols),
        (every, slice(kv, kv + 1), cols),
        *((every, every, one, side) for side in (rows, cols, rows, cols)),
        (every, one, rows),
        (every, one, past),
        (one,),
    ]
    return [None if x is None else x[pick] for x, pick in zip(tensors, picks, strict=True)]


class _Block:
    """One head's block of queries: its logits, and from saved maxima and sums its gradients."""

    def __init__(self, p: TileProblem, part: Part, masks: Masks) -> None:
        self.p, self.part = p, part
        inputs: Grads = [p.q, p.k, p.v, p.c_q, p.c_k, p.rate_q, p.rate_k, p.probe_q, p.probe_k, p.path_rate]
        q, k, v, *rest = _views(inputs, p, part)
        assert q is not None and k is not None and v is not None
        self.q, self.k, self.v = q, k, v
        self.c_q, self.c_k, self.rate_q, self.rate_k, self.probe_q, self.probe_k, self.path_rate = rest
        logits = p.scale * (q @ k.transpose(-1, -2))
        if self.c_q is not None:
            self.offset, self.rate = self._slopes()
            logits = logits + (self.rate * self.offset).sum(0)
        if self.probe_q is not None and self.path_rate is not None:
            self.z, self.path = self._path()
            logits = logits + self.path_rate.view(1, -1, 1, 1) * self.path
        self.logits = logits.masked_fill(~masks.tile(part.rows, part.cols), float("-inf"))

    def _slopes(self) -> tuple[Tensor, Tensor]:
        """c_j - c_t and the rate it is multiplied by, (R, B, 1, rows, cols) each."""
        assert self.c_q is not None and self.c_k is not None and self.rate_q is not None
        offset = (self.c_k.unsqueeze(-2) - self.c_q.unsqueeze(-1)).to(self.q.dtype)
        rate = self.rate_q.unsqueeze(-1)
        return offset, rate if self.rate_k is None else rate + self.rate_k.unsqueeze(-2)

    def _path(self) -> tuple[Tensor, Tensor]:
        """z(t, l) for every l past the first column; and for each column the edges from it to t."""
        assert self.probe_q is not None and self.probe_k is not None
        first, width = self.part.cols.start, self.k.shape[2]
        probes = self.probe_k[:, :, first:]
        z = self.probe_q @ probes.transpose(-1, -2) / probes.shape[-1]
        edge = _link(z, self.p.bounded).masked_fill(self._future(z), 0.0)
        total = edge.flip(-1).cumsum(-1, dtype=torch.float64).flip(-1)[..., 1:].to(z.dtype)
        return z, F.pad(total[..., :width], (0, max(0, width - total.shape[-1])))

    def _future(self, z: Tensor) -> Tensor:
        shift = self.p.k.shape[2] - self.p.q.shape[2]
        t = torch.arange(self.part.rows.start, self.part.rows.stop, device=z.device) + shift
        token = torch.arange(self.part.cols.start, self.part.cols.start + z.shape[-1], device=z.device)
        return token > t.unsqueeze(-1)

    def gradients(self, d_out: Tensor, norms: Tensor) -> Grads:
        weights = (self.logits - norms[..., :1]).exp() / norms[..., 1:]
        d_v = _over_rows(weights, d_out)
        d_weights = d_out @ self.v.transpose(-1, -2)
        d_logits = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
        d_q = self.p.scale * (d_logits @ self.k)
        d_k = self.p.scale * _over_rows(d_logits, self.q)
        return [d_q, d_k, d_v, *self._slope_gradients(d_logits), *self._path_gradients(d_logits)]

    def _slope_gradients(self, d_logits: Tensor) -> Grads:
        if self.c_q is None or not self.p.bias_grad:
            return [None] * 4
        moved, held = d_logits * self.offset, (d_logits * self.rate).double()
        return [-held.sum(-1), held.sum(-2), moved.sum(-1), None if self.rate_k is None else moved.sum(-2)]

    def _path_gradients(self, d_logits: Tensor) -> Grads:
        """d psi(t, l) = rate * sum over j < l of d b(t, j), then through the link to both probes."""
        if self.probe_q is None or self.probe_k is None or self.path_rate is None:
            return [None] * 3
        first, size = self.part.cols.start, self.z.shape[-1]
        before = d_logits.cumsum(-1, dtype=torch.float64) - d_logits
        before = F.pad(before[..., :size], (0, max(0, size - before.shape[-1])))
        d_z = self.path_rate.view(1, -1, 1, 1) * before.to(self.z.dtype) * _link_slope(self.z, self.p.bounded)
        d_z = d_z.masked_fill(self._future(self.z), 0.0) / self.probe_k.shape[-1]
        d_keys = F.pad(_over_rows(d_z, self.probe_q), (0, 0, first, 0))
        d_rate = (d_logits * self.path).sum((0, 2, 3))
        return [d_z @ self.probe_k[:, :, first:], d_keys, d_rate]


def _over_rows(weights: Tensor, rows: Tensor) -> Tensor:
    return weights.transpose(-1, -2) @ rows


def _link(z: Tensor, bounded: bool) -> Tensor:
    return LINKS["bounded" if bounded else "logsigmoid"](z)


def _link_slope(z: Tensor, bounded: bool) -> Tensor:
    falling = torch.sigmoid(-z)
    return falling * torch.sigmoid(z) if bounded else falling
