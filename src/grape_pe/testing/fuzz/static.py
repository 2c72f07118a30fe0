"""A static cache with the calls of a `StreamingCache` that it has, as the Hugging Face model uses it."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor

from ...cache.static import Place, StaticCache
from ...encodings import Encoding
from ...encodings.prepared import Preparation


class Static:
    """One layer: a `StaticCache` and its `Place`."""

    rollback = 0

    def __init__(self, encoding: Encoding, *, capacity: int, **settings: Any) -> None:
        self.store = StaticCache(encoding, capacity=capacity, **settings)
        self.preparation = Preparation([encoding])
        self.place: Place | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)  # encoding, window, sinks, shift, norms, capacity

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        x: Tensor,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        fresh = self.place is None
        place = Place(len(q), q.device) if self.place is None else self.place
        layout = place.advance(q.shape[2], self.capacity, fresh, positions, padding)
        layout = layout.prepare(self.preparation, q.dtype)
        q, k, v = (layout.pack(t, 2) for t in (q, k, v))
        inputs = self.store.extend(q, k, v, layout.pack(x), layout)
        self.place = place
        return layout.unpack(inputs.attend(), 2)

    def select(self, index: Tensor) -> Self:
        self.store.select(index)
        if self.place is not None:
            self.place.select(index)
        return self

    def repeat(self, times: int) -> Self:
        assert self.place is not None
        return self.select(torch.arange(len(self.place.lengths)).repeat_interleave(times))

    def fork(self) -> Self:
        copied = type(self).__new__(type(self))
        copied.store, copied.preparation = self.store.fork(), self.preparation
        copied.place = copy.deepcopy(self.place)
        return copied
