"""A cache of fixed size for compiled decoding: its lengths are tensors, so one graph serves every step.

Token i of a sequence stands in slot i, whatever padding came with it. Slots not yet filled are hidden by a mask.
No value is read by Python in a step of one token on a GPU or under torch.compile.

Letters: B batch, H query heads, T new tokens, S slots (the capacity).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bias import Bias, DistanceBias, NoBias, PathBias, SlopeBias, SlopeTerm, SumBias
from ..encodings.base import Encoding
from ..precision import ensure, without_autocast
from .inputs import AttentionInputs, Norms, encode
from .layout import Layout, checked, drops, moves, valid
from .table import fit, take, writable

#: queries whose rows of the bias are formed at a time, when several tokens come at once
ROWS = 64


@dataclass(frozen=True, eq=False, kw_only=True)
class StaticLayout(Layout):
    """The T tokens of a call in a static cache.

    slots: (B, T), where the tokens are written; also their indices in the sequence.
    taken: (B,), the tokens of each sequence without padding; None if there is no padding.
    fresh: the cache is empty, so the tokens of the call see each other only.
    """

    slots: Tensor
    taken: Tensor | None
    fresh: bool

    def visible(self, slots: int, window: int | None, sinks: int) -> Tensor:
        """(B, 1, T, S): what a token sees, itself included."""
        t = self.slots[:, None, :, None]
        j = torch.arange(slots, device=t.device)
        seen = j <= t
        return seen if window is None else seen & ((t - j < window) | (j < sinks))


class Place:
    """Where the sequences of a static cache stand, shared by its layers: all values are tensors."""

    def __init__(self, batch: int, device: torch.device) -> None:
        with writable():
            self.columns = torch.zeros((), dtype=torch.long, device=device)  # of the attention mask
            self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # tokens of each sequence
            self.next = torch.zeros(batch, dtype=torch.long, device=device)  # the position that follows
        _keep_addresses(self.columns, self.lengths, self.next)

    def advance(
        self, count: int, capacity: int, fresh: bool, positions: Tensor | None, padding: Tensor | None
    ) -> StaticLayout:
        """The layout of `count` new tokens; the sequences then stand after them."""
        device = self.lengths.device
        readable = not torch.compiler.is_compiling() and (count > 1 or device.type == "cpu")
        if padding is not None and readable and not bool(padding.any()):
            padding = None
        moved: dict[str, Any] = {} if padding is None or count == 1 else moves(padding)
        taken = None if padding is None else count - padding.sum(-1)
        step = torch.arange(count, device=device)
        slots = self.lengths.unsqueeze(-1) + step
        where = self._positions(step, positions, moved.get("order"))
        bad = drops(where, None if fresh else self.next - 1)
        ensure(~(bad if taken is None else bad & valid(taken, count)).any(), readable, INCREASE)
        ensure((slots < capacity).all(), readable, FULL)
        last = where[:, -1]
        if taken is not None:
            last = where.gather(1, (taken - 1).clamp(min=0).unsqueeze(-1))[:, 0]
            last = torch.where(taken > 0, last, self.next - 1)
        self.next.copy_(last + 1)
        self.lengths.add_(count if taken is None else taken)
        self.columns.add_(count)
        return StaticLayout(positions=where, padding=padding, slots=slots, taken=taken, fresh=fresh, **moved)

    def _positions(self, step: Tensor, positions: Tensor | None, order: Tensor | None) -> Tensor:
        """(B, T), those of each sequence first."""
        batch = len(self.lengths)
        if positions is None:
            return self.next.unsqueeze(-1) + step
        if positions.is_floating_point():
            raise ValueError(f"position_ids of a static cache must be integers, got {positions.dtype}; {USE}")
        rows = checked(positions, "position_ids", batch, len(step), 1, step.device).expand(batch, -1)
        return rows if order is None else take(rows, order, 1)

    def select(self, index: Tensor) -> None:
        """Keep the sequences `index`, in that order."""
        self.lengths, self.next = _selected(self.lengths, index), _selected(self.next, index)

    def reset(self) -> None:
        for tensor in (self.columns, self.lengths, self.next):
            tensor.zero_()


class StaticCache:
    """Keys, values, bias tensors and running state of one attention layer, in storage of `capacity` tokens.

    It cannot take tokens back, holds no packed documents and has no gradients: `StreamingCache` does all that.
    `window` and `sinks` hide keys; all are stored.
    """

    def __init__(
        self,
        encoding: Encoding,
        *,
        capacity: int,
        window: int | None = None,
        sinks: int = 0,
        shift: nn.Module | None = None,
        key_norm: nn.Module | None = None,
        norm_after: Norms | None = None,
    ) -> None:
        if encoding.lookback > 1:
            raise ValueError(
                f"{encoding!r} reads several earlier tokens, which a static cache does not keep; {USE}"
            )
        self.encoding, self.shift, self.key_norm, self.norm_after = encoding, shift, key_norm, norm_after
        self.capacity, self.window, self.sinks = capacity, window, sinks
        self.tokens: dict[str, Tensor] = {}  # (B, H, S, …)
        self.state: Any = None  # of encoding and shift: nested tuples of (B, n, 1, …)

    @property
    def batch(self) -> int:
        """Sequences it holds; 0 before the first call."""
        return len(self.tokens["k"]) if self.tokens else 0

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, layout: StaticLayout
    ) -> AttentionInputs:
        """Write packed tokens and return all they see."""
        state, shifted = (None, None) if layout.fresh else self.state
        norms = self.key_norm, self.norm_after
        code, v, shifted = encode(self.encoding, q, k, v, x, layout, self.shift, *norms, state, shifted)
        of_bias = {f"bias.{name}": tensor for name, tensor in code.bias.key_tensors().items()}
        with torch.no_grad():
            self._write({"k": code.k, "v": v, **of_bias}, (code.state, shifted), layout, code.bias)
        if layout.fresh:
            masks = {} if self.window is None else {"window": self.window, "sinks": self.sinks}
            return AttentionInputs(code.q, code.k, v, code.bias, masks)
        if torch.is_grad_enabled() and code.q.requires_grad:
            raise ValueError(
                f"a static cache has no gradients: call the model under torch.no_grad(), or {USE}"
            )
        cached = {name.removeprefix("bias."): self.tokens[name] for name in of_bias}
        bias = code.bias.replaced(cached) if cached else code.bias
        visible = layout.visible(self.capacity, self.window, self.sinks)
        k, v = self.tokens["k"], self.tokens["v"]
        return StaticInputs(code.q, k, v, bias, {}, slots=layout.slots, visible=visible)

    def _write(self, columns: dict[str, Tensor], state: Any, layout: StaticLayout, bias: Bias) -> None:
        batch, count = layout.slots.shape
        if layout.fresh and not self._fits(columns["k"]):
            check_bias(self.encoding, bias)
            self.tokens = {n: _room(t, batch, self.capacity) for n, t in columns.items()}
            self.state = _map(lambda t: _room(t, batch, 1), state)
        elif layout.fresh:
            _map(lambda t: t.zero_(), self.state)
        for name, tensor in columns.items():
            new, cached = tensor.expand(batch, *tensor.shape[1:]), self.tokens[name]
            if layout.fresh:
                cached[:, :, :count].copy_(new)
            else:
                cached.scatter_(2, fit(layout.slots, new, 2).expand_as(new), new.to(cached.dtype))
        _map(lambda old, new: old.copy_(_latest(old, new, layout)), self.state, state)

    def _fits(self, k: Tensor) -> bool:
        """Whether there is storage for such keys: the batch or the model's dtype may have changed by a reset."""
        cached = self.tokens.get("k")
        return cached is not None and (len(cached), cached.dtype, cached.device) == (
            len(k),
            k.dtype,
            k.device,
        )

    def select(self, index: Tensor) -> None:
        """Keep the sequences `index`, in that order."""
        self.tokens = {name: _selected(t, index) for name, t in self.tokens.items()}
        self.state = _map(lambda t: _selected(t, index), self.state)

    def fork(self) -> Self:
        """An independent copy."""
        copied = copy.copy(self)
        with writable():
            copied.tokens = {name: t.clone() for name, t in self.tokens.items()}
            copied.state = _map(torch.clone, self.state)
        return copied


@dataclass(eq=False, slots=True, kw_only=True)
class StaticInputs(AttentionInputs):
    """Queries and all slots: `visible` (B, 1, T, S) says which a query sees."""

    slots: Tensor
    visible: Tensor

    def attend(self, *, scale: float | None = None) -> Tensor:  # type: ignore[override]
        count = self.q.shape[2]
        parts = [slice(first, min(first + ROWS, count)) for first in range(0, count, ROWS)]
        with without_autocast(self.q):
            done = [self._attend(rows, scale) for rows in parts]
        return done[0] if len(done) == 1 else torch.cat(done, 2)

    def _attend(self, rows: slice, scale: float | None) -> Tensor:
        """Attention of some queries; with a bias at least in float32, in which the bias is never rounded."""
        q, k, v, mask = self.q[:, :, rows], self.k, self.v, self.visible[:, :, rows]
        dense = bias_rows(self.bias, rows, self.slots[:, rows])
        if dense is not None:
            dense = dense.to(torch.promote_types(q.dtype, torch.float32))
            mask = torch.where(mask, dense, float("-inf"))
            q, k, v = (x.to(mask.dtype) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
        return y.to(self.v.dtype)

    def weights(self, **options: Any) -> Tensor:
        raise ValueError(f"output_attentions is not available with a static cache; {USE}")


def check_bias(encoding: Encoding, bias: Bias) -> None:
    """Refuse biases whose rows depend on where the last key stands."""
    for part in bias.parts if isinstance(bias, SumBias) else (bias,):
        if not isinstance(part, (NoBias, SlopeBias, SlopeTerm, PathBias, DistanceBias)):
            raise ValueError(
                f"{encoding!r} has a {type(part).__name__}, which a static cache cannot compute (it computes "
                f"SlopeBias, PathBias and DistanceBias); {USE}"
            )


def bias_rows(bias: Bias, rows: slice, t: Tensor) -> Tensor | None:
    """(B|1, H|1, rows, S): the bias of queries at tokens t (B, rows); None for zero, any value at later slots."""
    if isinstance(bias, SumBias):
        parts = [part for part in (bias_rows(part, rows, t) for part in bias.parts) if part is not None]
        return sum(parts[1:], parts[0])
    cols = slice(0, bias.key_length or 0)
    if isinstance(bias, PathBias):
        return bias.sums(rows, cols, t[:, None, :, None], cols.stop)
    return bias.tile(rows, cols)


# single quotes: torch 2.13 does not escape double ones when it writes an assertion's message into C++
USE = "use cache_implementation='dynamic' (the default)"
INCREASE = f"position_ids must continue from the cached ones and increase, without packed documents; {USE}"
FULL = "the static cache is full: it holds max_cache_len tokens; set a larger max_cache_len"


def _map(function: Callable[..., Any], *states: Any) -> Any:
    """The function of corresponding tensors of nested tuples."""
    if isinstance(states[0], tuple):
        return tuple(_map(function, *parts) for parts in zip(*states, strict=True))
    return None if states[0] is None else function(*states)


def _latest(old: Tensor, new: Tensor, layout: StaticLayout) -> Tensor:
    """The state after the last token of each sequence: the old one where there is none."""
    count = layout.slots.shape[1]
    new = new.narrow(2, new.shape[2] - count, count)
    if layout.taken is None:
        return new[:, :, -1:]
    index = fit(layout.taken.unsqueeze(-1), new, 2)
    return torch.cat([old, new.to(old.dtype)], 2).gather(2, index.expand_as(old))


def _room(like: Tensor, batch: int, slots: int) -> Tensor:
    with writable():
        room = torch.zeros(batch, like.shape[1], slots, *like.shape[3:], dtype=like.dtype, device=like.device)
    _keep_addresses(room)
    return room


def _selected(tensor: Tensor, index: Tensor) -> Tensor:
    """The rows `index`, in the same storage if there are as many as before."""
    with writable():
        rows = tensor.index_select(0, index.to(tensor.device))
    return tensor.copy_(rows) if rows.shape == tensor.shape else rows


def _keep_addresses(*tensors: Tensor) -> None:
    """For CUDA graphs: these tensors are written in place and never move."""
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)
