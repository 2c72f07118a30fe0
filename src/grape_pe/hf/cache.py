"""Cache layers for Hugging Face: a `StreamingCache` behind the interface `generate` expects.

`generate` builds them from the configuration's layer types. A cache with plain layers, as a user may pass it,
is upgraded while it is empty and refused when it is not: it has no room for bias tensors and states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache, StaticLayer
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, create_causal_mask

from ..cache import StreamingCache
from ..encodings import Encoding
from .cache_layer import GrapeCacheLayer
from .config import LAYER_TYPE
from .static_layer import GrapeStaticLayer

LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.setdefault(LAYER_TYPE, create_causal_mask)


class GrapeDynamicLayer(GrapeCacheLayer, DynamicLayer):  # type: ignore[misc]
    """Grows with the sequence: everything is forwarded to a `StreamingCache`, made at first use."""

    is_compileable = False
    stream: StreamingCache | None = None

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()

    def open(self, make: Callable[..., StreamingCache], encoding: Encoding, rollback: int) -> StreamingCache:
        """The `StreamingCache` of this layer; made now by `make` if there is none."""
        if self.stream is None:
            self.stream = make(encoding, rollback=rollback)
            self.is_initialized = True
        return self.stream

    @property
    def encoding(self) -> Encoding | None:
        return None if self.stream is None else self.stream.encoding

    @property
    def empty(self) -> bool:
        return self.stream is None or not self.stream.sequences.lengths

    def forget(self) -> None:
        """As new, for any model."""
        self.stream = None

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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.stream is not None:
            self.stream.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.stream is not None:
            self.stream.repeat(repeats)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the cached tensors; the model's modules are shared."""
        copied = copy.copy(self)
        copied.stream = None if self.stream is None else self.stream.fork()
        return copied


def layers_of(cache: Cache, count: int, encoding: Encoding) -> list[Any]:
    """All layers of a cache, for the model whose first layer has this encoding.

    An empty cache that another model has used starts anew.
    """
    layers = [layer_of(cache, i) for i in range(count)]
    if layers[0].encoding not in (None, encoding):
        if not layers[0].empty:
            raise ValueError(
                "past_key_values was filled by another model, whose encoding it would go on with; pass an empty "
                "DynamicCache() or nothing"
            )
        for layer in layers:
            layer.forget()
    return layers


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
