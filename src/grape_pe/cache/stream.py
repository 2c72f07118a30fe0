"""`StreamingCache`, a KV cache for all encodings, with the same results as one call over the whole sequence.

    cache = grape.StreamingCache(enc)
    y = cache.attend(q, k, v, x=x)          # any number of new tokens

It stores the encoded key, the value and the key-side bias tensors of each token and, for the last `rollback` tokens,
the encoding's state after it. Nothing is computed again for earlier tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..attention.attend import check_tensors
from ..attention.masks import check_window
from ..bias import Bias, NoBias, PathBias, ScoreBias, SumBias, TileBias
from ..encodings.base import Encoded, Encoding
from ..encodings.prepared import Preparation
from .inputs import AttentionInputs, Norms, check_packing, encode, move_to_end
from .layout import Layout, arrange
from .saving import load, saved_state
from .store import TokenStore

#: from this number of keys on, a bound of their norms is kept, with which attention can skip keys
BOUND_FROM = 2048


class StreamingCache(TokenStore):
    """The KV cache of one attention layer: keys, values, bias tensors and the encoding's state.

    Gradients flow through the tokens of a call, but not to tokens cached by earlier calls.

    Args:
        encoding: the layer's encoding.
        window: a token attends to itself and to the `window` - 1 tokens before it; older keys are dropped.
        sinks: number of initial keys visible outside the window. Not possible if the bias sums or counts the
            tokens between query and key, because these are dropped.
        capacity: number of tokens to allocate storage for at once. Without a window, more tokens raise a ValueError.
            None: the storage doubles when it is full.
        rollback: number of tokens that `crop` can remove. Larger values store more states and dropped keys.
        shift: the layer's `KVShift`, if it has one; every call then needs x.
        key_norm: norm of the keys, after the shift and before the encoding.
        norm_after: norms of encoded queries and keys; `rebase` is then not possible.
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
        parts = encoding.modules() if isinstance(encoding, nn.Module) else ()
        if not any(isinstance(part, Encoding) for part in parts):  # PEFT wraps the encodings it trains
            raise TypeError(f"encoding must come from grape.build(…), got {type(encoding).__name__}")
        check_window(window, sinks)
        whole = all(isinstance(n, int) for n in (1 if capacity is None else capacity, rollback))
        if not whole or (capacity is not None and capacity < 1) or rollback < 0:
            raise ValueError(
                f"capacity must be at least 1 and rollback at least 0, got capacity={capacity} and "
                f"rollback={rollback}"
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
        """Append new tokens and compute their attention over all cached tokens.

        Args:
            q: queries before the encoding, (B, H, T, D).
            k: keys before the encoding, (B, Hkv, T, D).
            v: values, (B, Hkv, T, Dv).
            x: the attention block's input, (B, T, C); needed by contextual encodings and a KV-shift.
            positions: (T,) or (B, T), increasing; by default they continue from the last token.
            padding: bool (B, T), True where a sequence has no token, in any column. The output there is zero.
            documents: ids of packed documents, (T,) or (B, T). A document starts where the id changes. Its positions
                start at 0, and its tokens attend only to each other. Tokens cached without ids have id 0.
            options: options of `grape.attend`, such as `scale`.

        Returns:
            The attention output, (B, H, T, Dv).
        """
        where = {"positions": positions, "padding": padding, "documents": documents}
        layout, inputs = self._append(q, k, v, x, **where)
        return layout.unpack(inputs.attend(**options), 2)

    def append(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None = None, **where: Tensor) -> Self:
        """Append new tokens without attention. `where`: positions, padding and documents, as for `attend`."""
        self._append(q, k, v, x, **where)
        return self

    def _append(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, **where: Tensor | None
    ) -> tuple[Layout, AttentionInputs]:
        check_tensors(q, k, v)
        layout = self._layout(q, k, x, **where)
        q, k, v = (layout.pack(t, 2) for t in (q, k, v))
        return layout, self.extend(q, k, v, None if x is None else layout.pack(x), layout)

    def _layout(self, q: Tensor, k: Tensor, x: Tensor | None, **where: Tensor | None) -> Layout:
        self.encoding.check(q, k, x)
        settings = {"tail": self.tail(), "coords": self.encoding.coords, "allow_restarts": False}
        layout = arrange(len(q), q.shape[2], q.device, **where, **settings)  # type: ignore[arg-type]
        check_packing(self.encoding, layout)
        return layout.prepare(self.preparation, q.dtype)

    def extend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, layout: Layout) -> AttentionInputs:
        """Append tokens packed by `layout` and return the arguments of their attention.

        Models call this with one layout for all layers. The cache does not change if this raises an error.
        """
        before = self._state(self.state_names), self._shift_state()
        norms = self.key_norm, self.norm_after
        code, v, shifted = encode(self.encoding, q, k, v, x, layout, self.shift, *norms, *before)
        count, counts, fresh = q.shape[2], layout.counts, not self.sequences.lengths
        if not count or (counts is not None and not any(counts)):
            self.sequences.append_columns(layout, count)
            return AttentionInputs(code.q, code.k, v, code.bias, {})
        columns, states, state_names = self._columns(code, v, shifted, layout)
        self._check_sinks(code.bias, counts)
        self.tokens.check(columns)
        self.states.check(states)
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in columns.values())
        if learns and counts is not None and not fresh:
            raise ValueError(
                "a call with padding that continues a cache has no gradients; use torch.no_grad()"
            )
        if self.settles and not fresh:
            self._settle(code.bias)
        self._write(columns, states, count, counts)
        self.sequences.append(layout, q.shape[0], count)
        self.state_names = state_names
        if fresh:
            return AttentionInputs(code.q, code.k, v, code.bias, self._masks(count, layout.documents))
        inputs = self._inputs(code, columns if learns else {}, counts)
        inputs.step = layout.prepared is not None and inputs.q.shape[2] == 1 and q.device.type == "cpu"
        return inputs

    @torch.no_grad()
    def _settle(self, bias: Bias) -> None:
        """Apply `Bias.settled` to the cached bias tensors, except those of tokens that can still be removed."""
        cached = self._bias_tensors()
        for name, tensor in bias.replaced(cached).settled(self.states.length).key_tensors().items():
            if tensor is not cached[name]:
                cached[name].copy_(tensor)

    def _columns(
        self, code: Encoded, v: Tensor, shifted: tuple[Tensor, Tensor] | None, layout: Layout
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
        """The columns of both tables, and the state with names of columns instead of tensors.

        A state that is also a bias tensor is stored only as that.
        """
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
                f"sinks={self.sinks} is not possible for {self.encoding!r}: its bias sums or counts the tokens "
                "between query and key, which are dropped; use a window without sinks (or, for your own TileBias that "
                "reads only these two tokens, pairwise=True)"
            )
        if self.sinks and counts is not None and min(self.sequences.lengths or counts) <= self.sinks:
            raise ValueError(
                f"padding needs sequences of more than sinks={self.sinks} tokens, because the first tokens of all "
                "sequences must be aligned; run these tokens without padding first"
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
        if self.window is not None and count > 1:  # a single query reads only the keys of its window
            masks |= {"window": self.window, "sinks": self.sinks}
        if documents is not None:
            masks["documents"] = documents
        if hidden is not None:
            masks["key_padding"] = hidden
        return masks

    def rebase(self, offset: float) -> Self:
        """Make all cached positions smaller by `offset`, with keys and bias, if the relative law holds."""
        if self.encoding.coords > 1:
            raise ValueError(
                f"positions with coords={self.encoding.coords} cannot be rebased; keep them as they are"
            )
        if self.norm_after is not None:
            raise ValueError(
                "keys cannot be moved to other positions: the QK norm comes after the rotation, and its weights do "
                "not commute with it; use qk_norm=True"
            )
        offset = float(offset)
        if not math.isfinite(offset):
            raise ValueError(f"offset must be finite, got {offset}")
        if not self.sequences.lengths:
            return self
        cached = self._bias_tensors()
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
        """Copies of all tensors, lengths and settings, to continue later with `load_state_dict`."""
        return saved_state(self)

    def load_state_dict(self, saved: Mapping[str, Any]) -> Self:
        """Load the result of `state_dict()` into a cache with the same encoding and settings."""
        copied = copy.copy(self).reset()
        load(copied, saved)
        self.__dict__.update(copied.__dict__)
        return self

    def _blank(self) -> Encoded:
        """The encoding's output for one token of zeros, which has the structure of its bias and state."""
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
    """Whether b(t, j) depends on tokens between j and t, or on their number."""
    if isinstance(bias, SumBias):
        return any(_reads_in_between(part) for part in bias.parts)
    if isinstance(bias, TileBias):
        return not bias.pairwise
    return isinstance(bias, (PathBias, ScoreBias))
