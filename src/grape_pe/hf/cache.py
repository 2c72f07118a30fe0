"""Cache layers for Hugging Face: `LayerCache` behind the interface `generate` expects.

`generate` builds them from the configuration's layer types. A cache with plain layers, as a user may pass it,
is upgraded while it is empty and refused when it is not: it has no room for what tokens leave behind.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache, StaticLayer
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, create_causal_mask

from ..encodings import Encoding
from ..models.kv_shift import KVShift
from ..models.layer_cache import LayerCache
from .config import LAYER_TYPE

LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.setdefault(LAYER_TYPE, create_causal_mask)


class _Stream:
    """What both kinds of layer share: everything is forwarded to a `LayerCache`, made at first use."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False
    capacity: int | None = None

    def _start(self) -> None:
        self.stream: LayerCache | None = None
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.is_initialized = False

    def open(self, encoding: Encoding, kv_shift: KVShift | None, rollback: int) -> LayerCache:
        """The `LayerCache` of this layer; made now if there is none."""
        if self.stream is None:
            self.stream = LayerCache(encoding, capacity=self.capacity, rollback=rollback, kv_shift=kv_shift)
            self.is_initialized = True
        return self.stream

    def sync(self) -> None:
        """Show the keys and values held, for code that looks at them."""
        if self.stream is not None and self.stream.length:
            self.keys, self.values = self.stream.tokens.view("k"), self.stream.tokens.view("v")
        else:
            self.keys = self.values = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise TypeError("a grape cache layer is filled by the model itself, not from keys and values alone")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a grape cache layer also keeps bias traces and states: keys and values alone cannot be added; "
            "pass this cache to a grape model"
        )

    def get_seq_length(self) -> int:
        return 0 if self.stream is None else self.stream.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self.capacity is None else self.capacity

    def reset(self) -> None:
        if self.stream is not None:
            self.stream.reset()
        self.sync()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}")
        if self.stream is not None and tokens_to_remove:
            self.stream.crop(-tokens_to_remove)
        self.sync()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.stream is not None and self.stream.length:
            self.stream.select(beam_idx)
        self.sync()

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self.reorder_cache(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.stream is not None and self.stream.length:
            self.stream.repeat(repeats)
        self.sync()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of what is held, not of the model's modules it belongs to."""
        twin = copy.copy(self)
        twin.stream = None if self.stream is None else self.stream.fork()  # type: ignore[assignment]
        twin.sync()
        return twin


class GrapeDynamicLayer(_Stream, DynamicLayer):
    """Grows with the sequence."""

    _layer_type = LAYER_TYPE

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._start()


class GrapeStaticLayer(_Stream, StaticLayer):
    """Storage for `max_cache_len` tokens, allocated once. Not for compiled decoding."""

    _layer_type = LAYER_TYPE

    def __init__(self, max_cache_len: int, **kwargs: Any) -> None:
        super().__init__(max_cache_len=max_cache_len)
        self.capacity = max_cache_len
        self._start()


def layer_of(cache: Cache, index: int) -> GrapeDynamicLayer | GrapeStaticLayer:
    """Layer `index` of a cache, upgraded to ours if it is still empty."""
    if not isinstance(cache, (DynamicCache, StaticCache)):
        raise TypeError(
            f"past_key_values must be a DynamicCache or StaticCache, got {type(cache).__name__}: others "
            "have no room for bias traces; leave it out and one is made"
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
            f"past_key_values holds a {type(layer).__name__} of another model, without the bias traces and "
            "states a grape model keeps; pass an empty DynamicCache() or nothing"
        )
    fresh = GrapeStaticLayer(layer.max_cache_len) if isinstance(layer, StaticLayer) else GrapeDynamicLayer()
    cache.layers[index] = fresh
    return fresh
