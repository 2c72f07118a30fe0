"""A static cache, used as in the Hugging Face model, with the methods of a `StreamingCache` that it supports."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor

from ...cache.static import Progress, StaticCache
from ...encodings import Encoding
from ...encodings.prepared import Preparation


class Static:
    """One layer: a `StaticCache` and its `Progress`."""

    rollback = 0

    def __init__(self, encoding: Encoding, *, capacity: int, **settings: Any) -> None:
        self.store = StaticCache(encoding, capacity=capacity, **settings)
        self.preparation = Preparation([encoding])
        self.progress: Progress | None = None

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
        fresh = self.progress is None
        progress = Progress(len(q), q.device) if self.progress is None else self.progress
        layout = progress.advance(q.shape[2], self.capacity, fresh, positions, padding)
        layout = layout.prepare(self.preparation, q.dtype)
        q, k, v = (layout.pack(t, 2) for t in (q, k, v))
        inputs = self.store.extend(q, k, v, layout.pack(x), layout)
        self.progress = progress
        return layout.unpack(inputs.attend(), 2)

    def select(self, index: Tensor) -> Self:
        self.store.select(index)
        if self.progress is not None:
            self.progress.select(index)
        return self

    def repeat(self, times: int) -> Self:
        assert self.progress is not None
        return self.select(torch.arange(len(self.progress.lengths)).repeat_interleave(times))

    def fork(self) -> Self:
        copied = type(self).__new__(type(self))
        copied.store, copied.preparation = self.store.fork(), self.preparation
        copied.progress = copy.deepcopy(self.progress)
        return copied
