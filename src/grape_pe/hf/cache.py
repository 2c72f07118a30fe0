"""Cache layers of transformers that store their tokens in a `StreamingCache` or a `StaticCache`.

`generate` builds them from the configuration's layer types; static ones for `cache_implementation="static"`. The
layers of a stock cache, which cannot store bias tensors and states, are replaced if they are empty; if not, an error is
raised.
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
from ..cache.static import USE, Progress, StaticCache, StaticLayout
from ..cache.table import writable
from ..encodings import Encoding
from .config import LAYER_TYPE

LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.setdefault(LAYER_TYPE, create_causal_mask)


class GrapeCacheLayer:
    """Base class of our cache layers. The model fills them, not `update`, because they also store bias tensors."""

    _layer_type = LAYER_TYPE
    supports_early_init = False
    store: Any = None  # a `StreamingCache` or a `StaticCache`, created at first use

    # for code that reads keys and values; the base classes set them to None in __init__
    keys = property(lambda self: self.stored("k"), lambda self, value: None)
    values = property(lambda self: self.stored("v"), lambda self, value: None)

    @property
    def encoding(self) -> Encoding | None:
        """The encoding of the layer that uses this cache; None before first use."""
        return None if self.store is None else self.store.encoding

    def forget(self) -> None:
        """Return to the initial state, for use by any model."""
        self.store = None

    def stored(self, name: str) -> Tensor | None:
        """The cached keys ("k") or values ("v"); None if there are none."""
        raise NotImplementedError

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "keys and values alone cannot be added to a grape cache layer, which also stores bias tensors and states; "
            "pass this cache to a grape model"
        )

    lazy_initialization = update

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.store is not None:
            self.store.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store is not None and self.store.batch:
            self.reorder_cache(torch.arange(self.store.batch, device="cpu").repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the cached tensors, but not the model's modules."""
        copied = copy.copy(self)
        copied.store = None if self.store is None else self.store.fork()
        return copied


class GrapeDynamicLayer(GrapeCacheLayer, DynamicLayer):  # type: ignore[misc]
    """A cache layer that grows with the sequence: a `StreamingCache`."""

    is_compileable = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()

    @property
    def stream(self) -> StreamingCache | None:
        """The `StreamingCache`; None before first use."""
        return self.store  # type: ignore[no-any-return]

    def open(self, make: Callable[..., StreamingCache], encoding: Encoding, rollback: int) -> StreamingCache:
        """Return the `StreamingCache`, created by `make` at first use."""
        if self.store is None:
            self.store = make(encoding, rollback=rollback)
            self.is_initialized = True
        return self.store  # type: ignore[no-any-return]

    @property
    def empty(self) -> bool:
        """Whether there are no tokens."""
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
            raise ValueError(
                f"crop needs the negative number of tokens to remove, got {tokens_to_remove}; pass {-tokens_to_remove}"
            )
        if self.stream is not None and tokens_to_remove:
            self.stream.crop_columns(-tokens_to_remove)


class GrapeStaticLayer(GrapeCacheLayer, StaticLayer):  # type: ignore[misc]
    """A cache layer of fixed size: a `StaticCache` for `max_cache_len` tokens, allocated by the first call.

    All layers of a cache share one `progress`, which the first layer resets and selects.
    """

    is_compileable = True
    is_croppable = False
    stream: None = None
    progress: Progress | None = None
    owns_progress = False
    empty = True  # no tokens since the last reset

    def open(self, make: Callable[..., StreamingCache], encoding: Encoding, rollback: int) -> StaticCache:
        """Return the `StaticCache`, created at first use with the settings of the cache that `make` creates."""
        if self.store is None:
            like = make(encoding)
            names = ("window", "sinks", "shift", "key_norm", "norm_after")
            settings = {name: getattr(like, name) for name in names}
            self.store = StaticCache(encoding, capacity=self.max_cache_len, **settings)
        return self.store  # type: ignore[no-any-return]

    def stored(self, name: str) -> Tensor | None:
        return None if self.store is None else self.store.tokens.get(name)

    def get_seq_length(self) -> Any:
        return 0 if self.empty or self.progress is None else self.progress.columns

    def reset(self) -> None:
        self.empty = True
        if self.owns_progress and self.progress is not None:
            self.progress.reset()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(f"a static cache cannot remove tokens; {USE}")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.owns_progress and self.progress is not None:
            self.progress.select(beam_idx)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = super().__deepcopy__(memo)
        with writable():
            copied.progress = copy.deepcopy(self.progress, memo)
        return copied


def static_layout(
    layers: Sequence[GrapeStaticLayer], x: Tensor, positions: Tensor | None, padding: Tensor | None
) -> StaticLayout:
    """Add the new tokens to the progress of a static cache and return their layout."""
    first, (batch, count) = layers[0], x.shape[:2]
    if not count:
        raise ValueError(f"a static cache needs at least one token per call, got none; {USE}")
    fresh = first.empty
    if fresh:
        progress = first.progress
        if progress is None or len(progress.lengths) != batch:
            progress = Progress(batch, x.device)
        for layer in layers:
            layer.progress, layer.empty, layer.owns_progress = progress, False, layer is first
    progress = first.progress
    assert progress is not None
    if len(progress.lengths) != batch:
        raise ValueError(f"the cache holds {len(progress.lengths)} sequences, the call has {batch}")
    return progress.advance(count, first.max_cache_len, fresh, positions, padding)


def layers_of(cache: Cache, count: int, encoding: Encoding) -> list[Any]:
    """All layers of a cache, for the model whose first layer has this encoding.

    An empty cache that was used by another model returns to its initial state.
    """
    layers = [layer_of(cache, i) for i in range(count)]
    if layers[0].encoding not in (None, encoding):
        if not layers[0].empty:
            raise ValueError(
                "past_key_values has tokens of another model; pass an empty DynamicCache() or nothing"
            )
        for layer in layers:
            layer.forget()
    return layers


def layer_of(cache: Cache, index: int) -> GrapeDynamicLayer | GrapeStaticLayer:
    """Layer `index` of a cache. An empty stock layer is replaced by one of ours."""
    if not isinstance(cache, (DynamicCache, StockStaticCache)):
        raise TypeError(
            f"past_key_values must be a DynamicCache or a StaticCache, got {type(cache).__name__}, which cannot store "
            "the key-side tensors of the bias; leave it out"
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
            f"past_key_values has a {type(layer).__name__} filled by another model, without the key-side "
            "tensors of the bias and the states of a grape model; pass an empty DynamicCache() or nothing"
        )
    fresh = GrapeStaticLayer(layer.max_cache_len) if isinstance(layer, StaticLayer) else GrapeDynamicLayer()
    cache.layers[index] = fresh
    return fresh
