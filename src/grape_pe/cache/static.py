"""`StaticCache`, a cache of fixed size for compiled decoding.

Lengths are tensors, so one compiled graph works for every step: a step of one token on a GPU or under torch.compile
reads no values on the host. Token i of a sequence is in slot i, without padding. A mask hides empty slots.

Letters: B batch, H query heads, T new tokens, S slots (the capacity).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bias import Bias, DistanceBias, NoBias, PathBias, SlopeBias, SlopeTerm, SumBias
from ..encodings.base import Encoding, map_state
from ..precision import ensure, without_autocast
from .inputs import AttentionInputs, Norms, encode
from .layout import Layout, checked, decreases, packing_order, valid
from .table import fit, take, writable

#: the bias of several new tokens is computed for this many queries at a time, to save memory
ROWS = 64


@dataclass(frozen=True, eq=False, kw_only=True)
class StaticLayout(Layout):
    """The layout of the T tokens of a call in a static cache.

    Args:
        slots: (B, T), the slots of the tokens, which are also their indices in the sequence.
        token_counts: (B,), number of tokens of each sequence; None if there is no padding.
        fresh: whether the cache is empty.
    """

    slots: Tensor
    token_counts: Tensor | None
    fresh: bool

    def visible(self, slots: int, window: int | None, sinks: int) -> Tensor:
        """The attention mask, (B, 1, T, S): True where a token may attend to a slot."""
        t = self.slots[:, None, :, None]
        j = torch.arange(slots, device=t.device)
        seen = j <= t
        return seen if window is None else seen & ((t - j < window) | (j < sinks))


class Progress:
    """Lengths and next positions of the sequences of a static cache, as tensors, shared by its layers.

    Args:
        batch: number of sequences.
        device: device of the tensors.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        with writable():
            self.columns = torch.zeros((), dtype=torch.long, device=device)  # width of the attention mask
            self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # tokens of each sequence
            self.next = torch.zeros(batch, dtype=torch.long, device=device)  # next position of each sequence
        _keep_addresses(self.columns, self.lengths, self.next)

    def advance(
        self, count: int, capacity: int, fresh: bool, positions: Tensor | None, padding: Tensor | None
    ) -> StaticLayout:
        """Add the `count` columns of a call to lengths and next positions, and return their layout.

        Args:
            count: number of tokens, padding included.
            capacity: slots of a sequence; more tokens are an error.
            fresh: whether the cache is empty.
            positions: the tokens' positions; None to continue from the next positions.
            padding: (B, count), True where a column is padding; None if there is none. Padding takes no slot.
        """
        device = self.lengths.device
        readable = not torch.compiler.is_compiling() and (count > 1 or device.type == "cpu")
        if padding is not None and readable and not bool(padding.any()):
            padding = None
        moved: dict[str, Any] = {} if padding is None or count == 1 else packing_order(padding)
        token_counts = None if padding is None else count - padding.sum(-1)
        step = torch.arange(count, device=device)
        slots = self.lengths.unsqueeze(-1) + step
        where = self._positions(step, positions, moved.get("order"))
        bad = decreases(where, None if fresh else self.next - 1)
        ensure(~(bad if token_counts is None else bad & valid(token_counts, count)).any(), readable, INCREASE)
        ensure((slots < capacity).all(), readable, FULL)
        last = where[:, -1]
        if token_counts is not None:
            last = where.gather(1, (token_counts - 1).clamp(min=0).unsqueeze(-1))[:, 0]
            last = torch.where(token_counts > 0, last, self.next - 1)
        self.next.copy_(last + 1)
        self.lengths.add_(count if token_counts is None else token_counts)
        self.columns.add_(count)
        return StaticLayout(
            positions=where, padding=padding, slots=slots, token_counts=token_counts, fresh=fresh, **moved
        )

    def _positions(self, step: Tensor, positions: Tensor | None, order: Tensor | None) -> Tensor:
        """The positions of the tokens, (B, T), in packed order."""
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
        """Remove all tokens."""
        for tensor in (self.columns, self.lengths, self.next):
            tensor.zero_()


class StaticCache:
    """Keys, values, bias tensors and state of one attention layer, in storage of fixed size.

    It does not support removal of tokens, packed documents or gradients; `StreamingCache` does.

    Args:
        encoding: the layer's encoding.
        capacity: number of slots.
        window: a token attends to itself and to the `window` - 1 tokens before it. All tokens are stored.
        sinks: number of initial keys visible outside the window.
        shift: the layer's `KVShift`, if it has one.
        key_norm: norm of the keys, after the shift and before the encoding.
        norm_after: norms of encoded queries and keys.
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
                f"{encoding!r} needs the states of {encoding.lookback} tokens, and a static cache keeps one; {USE}"
            )
        self.encoding, self.shift, self.key_norm, self.norm_after = encoding, shift, key_norm, norm_after
        self.capacity, self.window, self.sinks = capacity, window, sinks
        self.tokens: dict[str, Tensor] = {}  # (B, H, S, …)
        self.state: Any = None  # states of encoding and shift: nested tuples of (B, n, 1, …)

    @property
    def batch(self) -> int:
        """Number of sequences; 0 before the first call."""
        return len(self.tokens["k"]) if self.tokens else 0

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, layout: StaticLayout
    ) -> AttentionInputs:
        """Append packed tokens and return the arguments of their attention."""
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
                f"a static cache does not support gradients: call the model under torch.no_grad(), or {USE}"
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
            self.tokens = {n: _zeros(t, batch, self.capacity) for n, t in columns.items()}
            self.state = map_state(lambda t: _zeros(t, batch, 1), state)
        elif layout.fresh:
            map_state(lambda t: t.zero_(), self.state)
        for name, tensor in columns.items():
            new, cached = tensor.expand(batch, *tensor.shape[1:]), self.tokens[name]
            if layout.fresh:
                cached[:, :, :count].copy_(new)
            else:
                cached.scatter_(2, fit(layout.slots, new, 2).expand_as(new), new.to(cached.dtype))
        map_state(lambda old, new: old.copy_(_latest(old, new, layout)), self.state, state)

    def _fits(self, k: Tensor) -> bool:
        """Whether the storage fits these keys. After a reset, batch or dtype may differ."""
        cached = self.tokens.get("k")
        return cached is not None and (len(cached), cached.dtype, cached.device) == (
            len(k),
            k.dtype,
            k.device,
        )

    def select(self, index: Tensor) -> None:
        """Keep the sequences `index`, in that order."""
        self.tokens = {name: _selected(t, index) for name, t in self.tokens.items()}
        self.state = map_state(lambda t: _selected(t, index), self.state)

    def fork(self) -> Self:
        """Return an independent copy."""
        copied = copy.copy(self)
        with writable():
            copied.tokens = {name: t.clone() for name, t in self.tokens.items()}
            copied.state = map_state(torch.clone, self.state)
        return copied


@dataclass(eq=False, slots=True, kw_only=True)
class StaticInputs(AttentionInputs):
    """The arguments of attention over all slots; `visible`, (B, 1, T, S), is the mask."""

    slots: Tensor
    visible: Tensor

    def attend(self, *, scale: float | None = None) -> Tensor:  # type: ignore[override]
        count = self.q.shape[2]
        parts = [slice(first, min(first + ROWS, count)) for first in range(0, count, ROWS)]
        with without_autocast(self.q):
            done = [self._attend(rows, scale) for rows in parts]
        return done[0] if len(done) == 1 else torch.cat(done, 2)

    def _attend(self, rows: slice, scale: float | None) -> Tensor:
        """Attention of some queries. With a bias in at least float32, so that the bias is not rounded."""
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
    """Raise a ValueError unless `bias_rows` can compute this kind of bias."""
    for part in bias.parts if isinstance(bias, SumBias) else (bias,):
        if not isinstance(part, (NoBias, SlopeBias, SlopeTerm, PathBias, DistanceBias)):
            raise ValueError(
                f"{encoding!r} has a {type(part).__name__}, which a static cache cannot compute (it computes "
                f"SlopeBias, PathBias and DistanceBias); {USE}"
            )


def bias_rows(bias: Bias, rows: slice, t: Tensor) -> Tensor | None:
    """The bias of queries at tokens t, (B, rows), for all slots: (B|1, H|1, rows, S). None for zero.

    Slots after the query have any value; the mask hides them.
    """
    if isinstance(bias, SumBias):
        parts = [part for part in (bias_rows(part, rows, t) for part in bias.parts) if part is not None]
        return sum(parts[1:], parts[0])
    cols = slice(0, bias.key_length or 0)
    if isinstance(bias, PathBias):
        return bias.sums(rows, cols, t[:, None, :, None], cols.stop)
    return bias.tile(rows, cols)


# single quotes, because torch 2.13 does not escape double quotes of assertion messages in generated C++
USE = "use cache_implementation='dynamic' (the default)"
INCREASE = f"position_ids must continue from the cached ones and increase, without packed documents; {USE}"
FULL = "the static cache is full: it has max_cache_len tokens; set a larger max_cache_len"


def _latest(old: Tensor, new: Tensor, layout: StaticLayout) -> Tensor:
    """The state after the last token of each sequence; `old` if a sequence has no new token."""
    count = layout.slots.shape[1]
    new = new.narrow(2, new.shape[2] - count, count)
    if layout.token_counts is None:
        return new[:, :, -1:]
    index = fit(layout.token_counts.unsqueeze(-1), new, 2)
    return torch.cat([old, new.to(old.dtype)], 2).gather(2, index.expand_as(old))


def _zeros(like: Tensor, batch: int, slots: int) -> Tensor:
    with writable():
        room = torch.zeros(batch, like.shape[1], slots, *like.shape[3:], dtype=like.dtype, device=like.device)
    _keep_addresses(room)
    return room


def _selected(tensor: Tensor, index: Tensor) -> Tensor:
    """Select the rows `index`, in the same storage if their number does not change."""
    with writable():
        rows = tensor.index_select(0, index.to(tensor.device))
    return tensor.copy_(rows) if rows.shape == tensor.shape else rows


def _keep_addresses(*tensors: Tensor) -> None:
    """Mark tensors as written in place, so that CUDA graphs do not copy them."""
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)
