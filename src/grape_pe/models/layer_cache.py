"""The cache of one attention layer of a model: a `StreamingCache` that also knows documents and padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..bias import Bias
from ..cache import StreamingCache
from ..encodings import Encoding
from ..encodings.base import Encoded
from .kv_shift import KVShift
from .layout import Layout, Tail


@dataclass(frozen=True, eq=False)
class Seen:
    """What `attend` needs: encoded queries, all keys and values they may see, the bias, the masks."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Bias
    masks: dict[str, Any]


class LayerCache(StreamingCache):
    """Keeps padded tokens in place, marked, and the document of every token.

    Sequences of a batch stay side by side as the tokenizer padded them: running sums over padding cancel
    between the tokens that count, and nothing else a token leaves behind depends on what came before.
    """

    def __init__(
        self,
        encoding: Encoding,
        *,
        window: int | None = None,
        sinks: int = 0,
        capacity: int | None = None,
        rollback: int = 128,
        kv_shift: KVShift | None = None,
    ) -> None:
        super().__init__(encoding, window=window, sinks=sinks, capacity=capacity, rollback=rollback)
        self.kv_shift = kv_shift
        self.packed = False
        self.layout = Layout()

    def append_layout(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, layout: Layout) -> Seen:
        """Append the new tokens; returns all that they see."""
        assert layout.positions is not None
        self.layout = layout
        self.shift = None if self.kv_shift is None else partial(self.kv_shift, starts=layout.starts)
        code = self.append(q, k, v, x=x, positions=layout.positions)
        self.packed |= layout.documents is not None
        self.ragged |= layout.padding is not None
        return self._seen(code)

    def _seen(self, code: Encoded) -> Seen:
        count = code.q.shape[2]
        last = None if self.window is None else self.window + max(count, 1) - 1
        held = {name: self.tokens.view(name, last) for name in self.tokens.storage}
        traces = {name.removeprefix("bias."): t for name, t in held.items() if name.startswith("bias.")}
        masks: dict[str, Any] = {"documents": held["document"][:, 0]} if self.packed else {}
        if self.window is not None and count > 1:  # for one query, what is read is the window
            masks |= {"window": self.window, "sinks": self.sinks}
        if self.ragged:
            masks["key_padding"] = held["padding"][:, 0]
        return Seen(code.q, held["k"], held["v"], code.bias.replaced(traces), masks)

    def tail(self) -> Tail | None:
        """The last token so far, from which positions and documents go on."""
        if self.next_position is None:
            return None
        document, padding = (self.tokens.view(name)[:, 0, -1] for name in ("document", "padding"))
        return Tail(self.next_position, document, padding)

    def _positions(self, q: Tensor, positions: Tensor | None) -> Tensor:
        if positions is None:
            return super()._positions(q, None)
        return positions  # they may start again: the layout has found the documents

    def _columns(self, code: Encoded, v: Tensor, where: Tensor, shift_state: Any) -> Any:
        columns, states, aliases = super()._columns(code, v, where, shift_state)
        batch, count = v.shape[0], v.shape[2]
        if self.layout.padding is not None:
            columns["padding"] = self.layout.padding.unsqueeze(1).expand(batch, 1, count)
        tail = self.tail()
        last = torch.zeros(batch, dtype=torch.long, device=v.device) if tail is None else tail.document
        ids = last.unsqueeze(-1) if self.layout.documents is None else self.layout.documents
        columns["document"] = ids.expand(batch, count).unsqueeze(1)
        return columns, states, aliases
