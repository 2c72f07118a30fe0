"""One cache for every encoding, exact however the sequence is cut.

    cache = grape.StreamingCache(enc)
    y = cache.attend(q, k, v, x=x)          # any number of new tokens, at the positions that follow

Kept for each token: its encoded key, its value, the key-side tensors of its bias and, for the last
`rollback` tokens, the running state after it. Nothing is recomputed for an old token.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..attention.masks import check_window
from ..bias import Bias, NoBias, PathBias, ScoreBias, SumBias, TileBias
from ..encodings.base import Encoded, Encoding
from ..encodings.prepared import Preparation
from .inputs import AttentionInputs, Norms, check_packing, encode, move_to_end
from .layout import Layout, arrange
from .saving import load, saved_state
from .store import TokenStore

#: keys from which on a bound of their norms is kept; attention over fewer does not use it
BOUND_FROM = 2048


class StreamingCache(TokenStore):
    """Keys, values, bias tensors and running state of one attention layer.

    Args:
        encoding: the layer's encoding.
        window: a token sees fewer than `window` tokens back; older keys are dropped.
        sinks: the first tokens, which stay visible when a window is set. Refused where the bias sums or
            counts the tokens in between, because those are dropped.
        capacity: allocate storage for this many tokens once. Without a window, more tokens raise a ValueError.
            None: the storage doubles when it is full.
        rollback: how many tokens `crop` can remove; the cache keeps states and dropped keys for that long.
        shift: the layer's `KVShift`, if it has one; every call then needs x.
        key_norm: applied to the keys after the shift and before the encoding.
        norm_after: the norms of queries and keys that come after the encoding; `rebase` is then refused.

    Gradients pass through the tokens of a call and stop at what was cached before it.
    """

    def __init__(
        self,
        encoding: Encoding,
        *,
        window: int | None = None,
        sinks: int = 0,
        capacity: int | None = None,
        rollback: int = 128,
        shift: nn.Module | None = None,
        key_norm: nn.Module | None = None,
        norm_after: Norms | None = None,
    ) -> None:
        check_window(window, sinks)
        if (capacity is not None and capacity < 1) or rollback < 0:
            raise ValueError(
                f"capacity must be at least 1 token and rollback 0 or more, got {capacity} and {rollback}"
            )
        self.encoding, self.shift, self.key_norm, self.norm_after = encoding, shift, key_norm, norm_after
        self.window, self.sinks, self.capacity, self.rollback = window, sinks, capacity, rollback
        self.settles = any(isinstance(part, Encoding) and part.settles for part in encoding.modules())
        self.preparation = Preparation([encoding])
        self.reset()

    # Writing ------------------------------------------------------------------------------------

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        x: Tensor | None = None,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Append new tokens and attend from them: (B, H, T, Dv).

        Args:
            x: (B, T, C), the block's input, for encodings and shifts that read it.
            positions: those that follow, unless given; they must increase.
            padding: (B, T) bool, True where a sequence has no token, anywhere; such rows give zeros.
            documents: (T,) or (B, T) ids of packed sequences, a new one for each document. A document begins
                where the id changes; its positions start at 0 and it sees its own tokens only. Tokens cached
                without ids have id 0.
            options: of `grape.attend`.
        """
        where = {"positions": positions, "padding": padding, "documents": documents}
        layout, inputs = self._append(q, k, v, x, **where)
        return layout.unpack(inputs.attend(**options), 2)

    def append(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None = None, **where: Tensor) -> Self:
        """Append new tokens only; `where` as for `attend`: positions, padding, documents."""
        self._append(q, k, v, x, **where)
        return self

    def _append(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, **where: Tensor | None
    ) -> tuple[Layout, AttentionInputs]:
        layout = self._layout(q, k, x, **where)
        q, k, v = (layout.pack(t, 2) for t in (q, k, v))
        return layout, self.extend(q, k, v, None if x is None else layout.pack(x), layout)

    def _layout(self, q: Tensor, k: Tensor, x: Tensor | None, **where: Tensor | None) -> Layout:
        self.encoding.check(q, k, x)
        (batch, _, count, _), known = q.shape, len(self.sequences.lengths)
        if known not in (0, batch):
            raise ValueError(f"the cache holds {known} sequences, the call has {batch}")
        settings = {"tail": self.tail(), "coords": self.encoding.coords, "falls": False}
        layout = arrange(batch, count, q.device, **where, **settings)  # type: ignore[arg-type]
        check_packing(self.encoding, layout)
        return layout.prepare(self.preparation, q.dtype)

    def extend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, layout: Layout) -> AttentionInputs:
        """Append the tokens of a call, packed by `layout`; returns all that they see.

        Models call this, with one layout for all layers. Nothing changes if it raises.
        """
        before = self._state(self.carried), self._shift_state()
        norms = self.key_norm, self.norm_after
        code, v, shifted = encode(self.encoding, q, k, v, x, layout, self.shift, *norms, *before)
        count, counts, fresh = q.shape[2], layout.counts, not self.sequences.lengths
        if not count or (counts is not None and not any(counts)):
            self.sequences.append_columns(layout, count)
            return AttentionInputs(code.q, code.k, v, code.bias, {})
        columns, states, carried = self._columns(code, v, shifted, layout)
        self._check_sinks(code.bias, counts)
        self.tokens.check(columns)
        self.states.check(states)
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in columns.values())
        if learns and counts is not None and not fresh:
            raise ValueError("a padded call that continues a cache has no gradients; use torch.no_grad()")
        if self.settles and not fresh:
            self._settle(code.bias)
        self._write(columns, states, count, counts)
        self.sequences.append(layout, q.shape[0], count)
        self.carried = carried
        if fresh:
            return AttentionInputs(code.q, code.k, v, code.bias, self._masks(count, layout.documents))
        inputs = self._inputs(code, columns if learns else {}, counts)
        inputs.step = layout.prepared is not None and inputs.q.shape[2] == 1 and q.device.type == "cpu"
        return inputs

    @torch.no_grad()
    def _settle(self, bias: Bias) -> None:
        """Rewrite the cached bias tensors for later queries, except of tokens that can still be taken back."""
        cached = self._traces()
        for name, tensor in bias.replaced(cached).settled(self.states.length).key_tensors().items():
            if tensor is not cached[name]:
                cached[name].copy_(tensor)

    def _columns(
        self, code: Encoded, v: Tensor, shifted: tuple[Tensor, Tensor] | None, layout: Layout
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
        """What the two tables keep. A state that is also a bias tensor is kept once, as the latter."""
        batch, count = v.shape[0], v.shape[2]
        of_bias = code.bias.key_tensors()
        columns = {"k": code.k, "v": v}
        for name, tensor in of_bias.items():
            columns[f"bias.{name}"] = (
                tensor if len(tensor) == batch else tensor.expand(batch, *tensor.shape[1:])
            )
        if layout.documents is not None:
            columns["document"] = layout.documents.expand(batch, count).unsqueeze(1)
        states = {} if shifted is None else {"shift.k": shifted[0], "shift.v": shifted[1]}

        def named(state: Any) -> Any:
            if not isinstance(state, Tensor):
                return None if state is None else tuple(named(part) for part in state)
            for name, tensor in of_bias.items():
                if tensor is state:
                    return f"bias.{name}"
            states[f"state.{len(states)}"] = state.narrow(2, state.shape[2] - count, count)
            return f"state.{len(states) - 1}"

        return columns, states, named(code.state)

    def _check_sinks(self, bias: Bias, counts: Sequence[int] | None) -> None:
        if self.sinks and _reads_in_between(bias):
            raise ValueError(
                f"the bias of {self.encoding!r} sums or counts the tokens between query and key; with sinks those "
                "would be gone. Use a window without sinks (or pairwise=True in a TileBias of features alone)"
            )
        if self.sinks and counts is not None and min(self.sequences.lengths or counts) <= self.sinks:
            raise ValueError(
                f"padding needs more than sinks={self.sinks} tokens of every sequence, because the first "
                "ones are kept in the same place: prefill them without padding"
            )

    # Reading ------------------------------------------------------------------------------------

    def _inputs(
        self, code: Encoded, new: Mapping[str, Tensor], counts: Sequence[int] | None
    ) -> AttentionInputs:
        q, bias, rows = code.q, code.bias, None
        if counts is not None and q.shape[2] > 1:
            q, bias, rows = move_to_end(code, counts)
        count = q.shape[2]
        last = None if self.window is None else self.window + count - 1
        cached = {name: self.tokens.view(name, last) for name in self.tokens.storage}
        for name, tensor in new.items():
            old = cached[name].narrow(2, 0, cached[name].shape[2] - count)
            cached[name] = torch.cat([old, tensor], 2)
        document, k, v = cached.pop("document", None), cached.pop("k"), cached.pop("v")
        masks = self._masks(count, None if document is None else document[:, 0], self.tokens.hidden(last))
        if cached:
            bias = bias.replaced({name.removeprefix("bias."): tensor for name, tensor in cached.items()})
        if self.tokens.length >= BOUND_FROM and not isinstance(bias, NoBias):
            masks["key_bound"] = self._key_bound()
        return AttentionInputs(q, k, v, bias, masks, rows)

    def _masks(self, count: int, documents: Tensor | None, hidden: Tensor | None = None) -> dict[str, Any]:
        masks: dict[str, Any] = {}
        if self.window is not None and count > 1:  # for one query, what is read is the window
            masks |= {"window": self.window, "sinks": self.sinks}
        if documents is not None:
            masks["documents"] = documents
        if hidden is not None:
            masks["key_padding"] = hidden
        return masks

    def rebase(self, offset: float) -> Self:
        """Move all positions down by `offset`, keys and bias with them, where the relative law allows it."""
        if self.encoding.coords > 1:
            raise ValueError("positions of several coordinates cannot be rebased; keep them as they are")
        if self.norm_after is not None:
            raise ValueError(
                "keys cannot be moved to other positions: the QK norm stands after the rotation, and its weights do "
                "not commute with it; use qk_norm=True"
            )
        offset = float(offset)
        if not math.isfinite(offset):
            raise ValueError(f"rebase takes a finite offset, got {offset}")
        if not self.sequences.lengths:
            return self
        cached = self._traces()
        moved = self._blank().bias.replaced(cached).rebased(offset).key_tensors()
        keys = self.tokens.view("k")
        keys.copy_(self.encoding.rebase_keys(keys, offset).detach())
        for name, tensor in moved.items():
            cached[name].copy_(tensor.detach())
        self.sequences.move(int(offset) if offset.is_integer() else offset)
        self.bound = None
        return self

    # Size, saving ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on later: copies of all tensors, and plain values."""
        return saved_state(self)

    def load_state_dict(self, saved: Mapping[str, Any]) -> Self:
        """Continue from `state_dict()`, in a cache built with the same encoding and settings."""
        copied = copy.copy(self).reset()
        load(copied, saved)
        self.__dict__.update(copied.__dict__)
        return self

    def _blank(self) -> Encoded:
        """What the encoding returns for one zero token: the structure of its bias and state."""
        v, shape, coords = (
            torch.zeros_like(self.tokens.newest("v", 1)),
            self.encoding.shape,
            self.encoding.coords,
        )
        dtype = self.tokens.newest("k", 1).dtype
        q, k = (v.new_zeros(len(v), n, 1, shape.head_dim, dtype=dtype) for n in (shape.heads, shape.kv_heads))
        x = None if shape.width is None else k.new_zeros(len(k), 1, shape.width)
        positions = torch.zeros((1,) if coords == 1 else (1, coords), dtype=torch.long, device=k.device)
        return self.encoding(q, k, x=x, v=v, positions=positions)  # type: ignore[no-any-return]


def _reads_in_between(bias: Bias) -> bool:
    if isinstance(bias, SumBias):
        return any(_reads_in_between(part) for part in bias.parts)
    if isinstance(bias, TileBias):
        return not bias.pairwise
    return isinstance(bias, (PathBias, ScoreBias))
