"""Cache layers for Hugging Face: a `StreamingCache` or a `StaticCache` behind the interface `generate` expects.

`generate` builds them from the configuration's layer types; a static one for `cache_implementation="static"`. A cache
with plain layers, as a user may pass it, is upgraded while it is empty and refused when it is not: it has no room for
bias tensors and states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticLayer
from transformers.cache_utils import StaticCache as StockStaticCache
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, create_causal_mask

from ..cache import StreamingCache
from ..cache.static import USE, Place, StaticCache, StaticLayout
from ..cache.table import writable
from ..encodings import Encoding
from .config import LAYER_TYPE

LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.setdefault(LAYER_TYPE, create_causal_mask)


class GrapeCacheLayer:
    """Filled by the model itself: keys and values alone would lack the bias tensors and states."""

    _layer_type = LAYER_TYPE
    supports_early_init = False
    store: Any = None  # a `StreamingCache` or a `StaticCache`, made at first use

    # for code that looks at keys and values; transformers' own layers set them to None when built
    keys = property(lambda self: self.stored("k"), lambda self, value: None)
    values = property(lambda self: self.stored("v"), lambda self, value: None)

    @property
    def encoding(self) -> Encoding | None:
        return None if self.store is None else self.store.encoding

    def forget(self) -> None:
        """As new, for any model."""
        self.store = None

    def stored(self, name: str) -> Tensor | None:
        """The cached keys ("k") or values ("v"); None if there are none."""
        raise NotImplementedError

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError("a grape cache layer is filled by the model itself, not from keys and values alone")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a grape cache layer also keeps bias tensors and states: keys and values alone cannot be added; "
            "pass this cache to a grape model"
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.store is not None:
            self.store.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store is not None and self.store.batch:
            self.reorder_cache(torch.arange(self.store.batch).repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of the cached tensors; the model's modules are shared."""
        copied = copy.copy(self)
        copied.store = None if self.store is None else self.store.fork()
        return copied


class GrapeDynamicLayer(GrapeCacheLayer, DynamicLayer):  # type: ignore[misc]
    """Grows with the sequence."""

    is_compileable = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()

    @property
    def stream(self) -> StreamingCache | None:
        return self.store  # type: ignore[no-any-return]

    def open(self, make: Callable[..., StreamingCache], encoding: Encoding, rollback: int) -> StreamingCache:
        """The `StreamingCache` of this layer; made now by `make` if there is none."""
        if self.store is None:
            self.store = make(encoding, rollback=rollback)
            self.is_initialized = True
        return self.store  # type: ignore[no-any-return]

    @property
    def empty(self) -> bool:
        return self.stream is None or not self.stream.sequences.lengths

    def stored(self, name: str) -> Tensor | None:
        return None if self.stream is None or not self.stream.length else self.stream.tokens.view(name)

    def get_seq_length(self) -> int:
        return 0 if self.stream is None else self.stream.sequences.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def reset(self) -> None:
        if self.stream is not None:
            self.stream.reset()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}")
        if self.stream is not None and tokens_to_remove:
            self.stream.crop_columns(-tokens_to_remove)


class GrapeStaticLayer(GrapeCacheLayer, StaticLayer):  # type: ignore[misc]
    """Storage for `max_cache_len` tokens, allocated by the first call and then written in place.

    All layers of a cache share one `place`, which belongs to the first.
    """

    is_compileable = True
    is_croppable = False
    stream: None = None
    place: Place | None = None
    owns_place = False
    empty = True  # nothing was written since the last reset

    def open(self, make: Callable[..., StreamingCache], encoding: Encoding, rollback: int) -> StaticCache:
        """The cache of this layer; made now, with the settings of the one that `make` makes, if there is none."""
        if self.store is None:
            like = make(encoding)
            names = ("window", "sinks", "shift", "key_norm", "norm_after")
            settings = {name: getattr(like, name) for name in names}
            self.store = StaticCache(encoding, capacity=self.max_cache_len, **settings)
        return self.store  # type: ignore[no-any-return]

    def stored(self, name: str) -> Tensor | None:
        return None if self.store is None else self.store.tokens.get(name)

    def get_seq_length(self) -> Any:
        return 0 if self.empty or self.place is None else self.place.columns

    def reset(self) -> None:
        self.empty = True
        if self.owns_place and self.place is not None:
            self.place.reset()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(f"a static cache cannot remove tokens; {USE}")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.owns_place and self.place is not None:
            self.place.select(beam_idx)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = super().__deepcopy__(memo)
        with writable():
            copied.place = copy.deepcopy(self.place, memo)
        return copied


def static_layout(
    layers: Sequence[GrapeStaticLayer], x: Tensor, positions: Tensor | None, padding: Tensor | None
) -> StaticLayout:
    """Positions of the new tokens; the cache then counts them as stored."""
    first, (batch, count) = layers[0], x.shape[:2]
    if not count:
        raise ValueError(f"a static cache needs at least one token per call, got none; {USE}")
    fresh = first.empty
    if fresh:
        place = first.place
        if place is None or len(place.lengths) != batch:
            place = Place(batch, x.device)
        for layer in layers:
            layer.place, layer.empty, layer.owns_place = place, False, layer is first
    place = first.place
    assert place is not None
    if len(place.lengths) != batch:
        raise ValueError(f"the cache holds {len(place.lengths)} sequences, the call has {batch}")
    return place.advance(count, first.max_cache_len, fresh, positions, padding)


def layers_of(cache: Cache, count: int, encoding: Encoding) -> list[Any]:
    """All layers of a cache, for the model whose first layer has this encoding.

    An empty cache that another model has used starts anew.
    """
    layers = [layer_of(cache, i) for i in range(count)]
    if layers[0].encoding not in (None, encoding):
        if not layers[0].empty:
            raise ValueError(
                "past_key_values was filled by another model, whose encoding it would continue; pass an empty "
                "DynamicCache() or nothing"
            )
        for layer in layers:
            layer.forget()
    return layers


def layer_of(cache: Cache, index: int) -> GrapeDynamicLayer | GrapeStaticLayer:
    """Layer `index` of a cache, upgraded to ours if it is still empty."""
    if not isinstance(cache, (DynamicCache, StockStaticCache)):
        raise TypeError(
            f"past_key_values must be a DynamicCache or StaticCache, got {type(cache).__name__}: others "
            "have no room for the key-side tensors of the bias; leave it out and one is made"
        )
    if cache.offloading:
        raise ValueError('offloaded caches are not supported; use cache_implementation="dynamic" or "static"')
    while len(cache.layers) <= index:
        cache.layers.append(GrapeDynamicLayer())
    layer = cache.layers[index]
    if isinstance(layer, (GrapeDynamicLayer, GrapeStaticLayer)):
        return layer
    if type(layer) not in (DynamicLayer, StaticLayer) or layer.is_initialized:  # type: ignore[union-attr]
        raise ValueError(
            f"past_key_values holds a {type(layer).__name__} of another model, without the key-side "
            "tensors of the bias and the states of a grape model; pass an empty DynamicCache() or nothing"
        )
    fresh = GrapeStaticLayer(layer.max_cache_len) if isinstance(layer, StaticLayer) else GrapeDynamicLayer()
    cache.layers[index] = fresh
    return fresh
