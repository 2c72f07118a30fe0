"""Layers of transformers' `StaticCache`, for `generate(cache_implementation="static")` and compiled decoding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from ..cache import StreamingCache
from ..cache.static import USE, Place, StaticCache, StaticLayout
from ..cache.table import writable
from ..encodings import Encoding
from .cache_layer import GrapeCacheLayer


class GrapeStaticLayer(GrapeCacheLayer, StaticLayer):  # type: ignore[misc]
    """Storage for `max_cache_len` tokens, allocated by the first call and then written in place.

    All layers of a cache share one `place`, which belongs to the first.
    """

    is_compileable = True
    is_croppable = False
    stream: None = None  # a `StreamingCache` in dynamic layers
    store: StaticCache | None = None
    place: Place | None = None
    owns_place = False
    fresh = True  # nothing was written since the last reset

    def open(self, make: Callable[..., StreamingCache], encoding: Encoding, rollback: int) -> StaticCache:
        """The cache of this layer; made now, with the settings of the one that `make` makes, if there is none."""
        if self.store is None:
            like = make(encoding)
            names = ("window", "sinks", "shift", "key_norm", "norm_after")
            settings = {name: getattr(like, name) for name in names}
            self.store = StaticCache(encoding, capacity=self.max_cache_len, **settings)
        return self.store

    @property
    def encoding(self) -> Encoding | None:
        return None if self.store is None else self.store.encoding

    @property
    def empty(self) -> bool:
        return self.fresh

    def forget(self) -> None:
        """As new, for any model."""
        self.store = None

    def stored(self, name: str) -> Tensor | None:
        return None if self.store is None else self.store.tokens.get(name)

    def get_seq_length(self) -> Any:
        return 0 if self.fresh or self.place is None else self.place.columns

    def reset(self) -> None:
        self.fresh = True
        if self.owns_place and self.place is not None:
            self.place.reset()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(f"a static cache cannot take tokens back; {USE}")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.store is not None:
            self.store.select(beam_idx)
        if self.owns_place and self.place is not None:
            self.place.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.keys is not None:
            self.reorder_cache(torch.arange(len(self.keys)).repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the cached tensors; the model's modules are shared."""
        copied = copy.copy(self)
        copied.store = None if self.store is None else self.store.fork()
        with writable():
            copied.place = copy.deepcopy(self.place, memo)
        return copied


def static_layout(
    layers: Sequence[GrapeStaticLayer], x: Tensor, positions: Tensor | None, padding: Tensor | None
) -> StaticLayout:
    """Positions of the new tokens; the cache then counts them as stored."""
    first, (batch, count) = layers[0], x.shape[:2]
    if not count:
        raise ValueError(f"a static cache takes one token or more a call, got none; {USE}")
    fresh = first.fresh
    if fresh:
        place = first.place
        if place is None or len(place.lengths) != batch:
            place = Place(batch, x.device)
        for layer in layers:
            layer.place, layer.fresh, layer.owns_place = place, False, layer is first
    place = first.place
    assert place is not None
    if len(place.lengths) != batch:
        raise ValueError(f"the cache holds {len(place.lengths)} sequences, the call has {batch}")
    return place.advance(count, first.max_cache_len, fresh, positions, padding)
