"""Checks of the arguments of attention layers and models, and the layout of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from ..cache import Layout, StreamingCache, arrange, check_packing
from ..cache.layout import check_ids, check_kind
from ..checks import check_integer
from ..encodings import Encoding
from ..encodings.path import PaTH

if TYPE_CHECKING:
    from ..parallel import ContextParallel

QKNorm = bool | Literal["after"]


def head_sizes(width: int, heads: int, kv_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """Check the sizes of a layer and return (kv_heads, head_dim) with their defaults."""
    for name, size in (("width", width), ("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        if size is not None or name in ("width", "heads"):
            check_integer(name, size)
    if head_dim is None and width % heads:
        raise ValueError(
            f"heads must divide width if head_dim is not given, got heads={heads} and width={width}; "
            f"change one of them, or pass head_dim"
        )
    kv_heads = heads if kv_heads is None else kv_heads
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got heads={heads} and kv_heads={kv_heads}")
    return kv_heads, width // heads if head_dim is None else head_dim


def check_qk_norm(value: Any) -> QKNorm:
    """Return the value, or raise a ValueError if qk_norm cannot have it."""
    if value is not True and value is not False and value != "after":
        raise ValueError(
            f'qk_norm must be True (before the encoding), "after" (after the rotation) or False, got {value!r}'
        )
    return value  # type: ignore[no-any-return]


def rotates(encoding: Encoding) -> bool:
    """Whether the encoding changes queries and keys. PaTH does not: its products are in the bias."""
    parts = (part for part in encoding.modules() if isinstance(part, Encoding))
    return any((part.transforms or part.sets_norms) and not isinstance(part, PaTH) for part in parts)


def check_norm_after(encoding: Encoding) -> None:
    """Raise a ValueError if a norm after the encoding would remove lengths of q and k that the encoding sets."""
    for part in encoding.modules():
        if isinstance(part, Encoding) and part.sets_norms:
            raise ValueError(
                f'qk_norm="after" would undo {type(part).__name__}, which changes the lengths of queries or keys; '
                "use qk_norm=True, which normalizes before the encoding"
            )


def check_input(x: Tensor, width: int) -> None:
    """Raise a ValueError unless x is (B, T, width)."""
    check_kind(x, "x")
    if x.dim() != 3 or x.shape[2] != width:
        raise ValueError(f"x must have shape (batch, tokens, width={width}), got {tuple(x.shape)}")


def check_cache(
    cache: StreamingCache, encoding: Encoding, shift: nn.Module | None, norms: dict[str, Any]
) -> None:
    """Raise an error unless the cache is for a layer with these modules."""
    if not isinstance(cache, StreamingCache):
        raise TypeError(f"cache must come from layer.cache(), got {type(cache).__name__}")
    same = cache.encoding is encoding and cache.shift is shift
    if not same or cache.key_norm is not norms["key_norm"] or cache.norm_after != norms["norm_after"]:
        raise ValueError("cache belongs to another layer; each layer needs its own, from layer.cache()")


def call_layout(
    x: Tensor,
    encoding: Encoding,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    padding: Tensor | None = None,
    cache: StreamingCache | None = None,
    parallel: ContextParallel | None = None,
) -> Layout:
    """Check the arguments of a call with x (B, T, …) and make its layout. A model makes one for all layers."""
    batch, count = x.shape[:2]
    if parallel is not None:
        return _shared(parallel, x, encoding, positions, documents=documents, padding=padding, cache=cache)
    if cache is None and positions is None and padding is None:
        layout = Layout() if documents is None else _packed(documents, batch, count)
    else:
        layout = arrange(
            batch,
            count,
            x.device,
            positions=positions,
            documents=documents,
            padding=padding,
            tail=None if cache is None else cache.tail(),
            coords=encoding.coords,
            allow_restarts=positions is None
            or documents is None,  # with both, positions increase in each document
        )
    check_packing(encoding, layout)
    return layout


def _shared(
    parallel: ContextParallel, x: Tensor, encoding: Encoding, positions: Tensor | None, **given: Any
) -> Layout:
    """The layout of sequences that several ranks share."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"parallel=… and {name}=… cannot be used together; leave one of them out")
    if positions is None and encoding.coords == 1:
        positions = parallel.tokens(x.shape[1] * parallel.ring.size, x.device)
    return Layout(positions, parallel=parallel)


def _packed(documents: Tensor, batch: int, count: int) -> Layout:
    """The layout of packed documents, without reading values, so that torch.compile can trace it."""
    check_kind(documents, "documents")
    if tuple(documents.shape) not in ((count,), (1, count), (batch, count)):
        raise ValueError(
            f"documents must have shape {(count,)} or {(batch, count)}, one for each token, "
            f"got {tuple(documents.shape)}"
        )
    check_ids(documents)
    return Layout.from_documents(documents)


def check_sinks(sinks: int, layout: Layout) -> None:
    """Raise a ValueError for packed documents with sinks."""
    if sinks and layout.documents is not None:
        raise ValueError(
            f"packed documents are not possible with sinks={sinks}: sinks are the first tokens of a sequence, and only "
            "its first document would have them; use sinks=0, or one document per sequence"
        )


def check_model_cache(cache: StreamingCache, encoding: Encoding) -> None:
    """Raise a ValueError unless the first layer's cache is for this encoding of the model's first layer."""
    if cache.encoding is not encoding:
        raise ValueError("cache belongs to another model; use one from model.cache() of this model")


def check_layers(encodings: Sequence[Encoding], layout: Layout, caches: Sequence[StreamingCache]) -> None:
    """Raise a ValueError unless all layers support the packing and all caches have the same tokens."""
    if layout.documents is not None:
        for encoding in encodings:
            check_packing(encoding, layout)
    if caches and any(cache.sequences.lengths != caches[0].sequences.lengths for cache in caches[1:]):
        raise ValueError(
            "the layers of the cache have different numbers of tokens, because a crop failed in one of them; "
            "reset the cache and fill it again"
        )
