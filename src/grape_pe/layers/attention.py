"""The attention layer: projections, KV-shift, QK norm, any encoding, attention, output projection.

    layer = grape.Attention(512, heads=8, encoding="rope+fox")
    y = layer(x)                                # (B, T, 512), causal

Letters: B batch, T new tokens, C width, H query heads, Hkv key heads, D features of a head.
Parameters have the names of Hugging Face's Llama, for tools that select modules by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.masks import check_window
from ..cache import AttentionInputs, Layout, Norms, StreamingCache, encode
from ..encodings import Encoding, build
from .arguments import (
    QKNorm,
    call_layout,
    check_cache,
    check_input,
    check_norm_after,
    check_qk_norm,
    check_sinks,
    head_sizes,
    rotates,
)
from .kv_shift import KVShift
from .norm import RMSNorm

if TYPE_CHECKING:
    from ..parallel import ContextParallel


class Attention(nn.Module):
    """Causal self-attention with any encoding: `layer(x)` maps (B, T, width) to (B, T, width).

    Args:
        width: features of the input and the output.
        heads: number of query heads.
        kv_heads: number of key heads; must divide `heads`, which is the default.
        head_dim: features of a head; width / heads by default.
        encoding: a name for `grape.build`, such as "rope", "grape-ap" or "rope+fox". None only inside a
            model whose layers share one encoding.
        encoding_options: options of the encoding, as for `grape.build`.
        window: a token attends to itself and to the `window` - 1 tokens before it; to all tokens if None.
        sinks: number of initial keys visible outside the window.
        qk_norm: True normalizes queries and keys (RMSNorm with learned weights) before the encoding; "after"
            normalizes them after the rotation, which breaks the relative law (for encodings without a rotation it is
            the same as True); False does not normalize them.
        kv_shift: whether to mix each projected key and value with those of the token before.
        norm_eps: epsilon of the norms.
        output_norm: whether to apply an RMSNorm to the attention output of each head, with weights shared by all
            heads.
        output_gate: whether to multiply the attention output, after the norm, by sigmoid(W x), with x the layer's
            input.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        encoding: str | None = "rope+fox",
        encoding_options: Mapping[str, Any] | None = None,
        window: int | None = None,
        sinks: int = 0,
        qk_norm: QKNorm = True,
        kv_shift: bool = False,
        norm_eps: float = 1e-5,
        output_norm: bool = False,
        output_gate: bool = False,
    ) -> None:
        super().__init__()
        self.kv_heads, self.head_dim = head_sizes(width, heads, kv_heads, head_dim)
        check_window(window, sinks)
        self.width, self.heads, self.window, self.sinks = width, heads, window, sinks
        queries, keys = heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)
        self.qk_norm = check_qk_norm(qk_norm)
        self.q_norm = RMSNorm(self.head_dim, norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, norm_eps) if qk_norm else None
        self.o_norm = RMSNorm(self.head_dim, norm_eps) if output_norm else None
        self.g_proj = nn.Linear(width, queries, bias=False) if output_gate else None
        self.kv_shift = KVShift(width, self.kv_heads) if kv_shift else None
        sizes = {"heads": heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "width": width}
        options = {} if encoding_options is None else dict(encoding_options)
        self.encoding = None if encoding is None else build(encoding, **sizes, **options)

    def reset_parameters(self) -> None:
        """Initialize all parameters, for example after `to_empty`."""
        parts = (self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.q_norm, self.k_norm)
        for part in (*parts, self.o_norm, self.g_proj, self.kv_shift, self.encoding):
            if part is not None:
                part.reset_parameters()

    def extra_repr(self) -> str:
        window = "" if self.window is None else f", window={self.window}, sinks={self.sinks}"
        return f"{self.width}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}{window}"

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        padding: Tensor | None = None,
        cache: StreamingCache | None = None,
        parallel: ContextParallel | None = None,
    ) -> Tensor:
        """Compute attention.

        Args:
            x: (B, T, C).
            positions: (T,) or (B, T). By default they continue from the last token; where they do not increase, a
                document starts. An encoding with n coordinates needs positions, (T, n) or (B, T, n).
            documents: ids of packed documents, (T,) or (B, T); an id cannot be used again later. Tokens attend only to
                their own document. With a cache, the first document continues the cached one if their ids are equal;
                tokens cached without ids have id 0.
            padding: bool (B, T), True where a sequence has no token, in any column.
            cache: a cache from `cache()`. The tokens then continue the cached ones.
            parallel: the ranks that share each sequence. x then has the tokens of this rank (`parallel.split`).

        Returns:
            The attention output, (B, T, C), zero at padding.
        """
        encoding = self._own_encoding()
        check_input(x, self.width)
        if cache is not None:
            check_cache(cache, encoding, self.kv_shift, self.norms(encoding))
        layout = call_layout(x, encoding, positions, documents, padding, cache, parallel)
        check_sinks(self.sinks, layout)
        if cache is not None:
            layout = layout.prepare(cache.preparation, x.dtype)
        return self.run(x, layout, encoding, cache)[0]

    def cache(self, *, capacity: int | None = None, rollback: int = 128) -> StreamingCache:
        """Create an empty cache for this layer.

        Args:
            capacity: number of tokens to allocate storage for at once; None to grow as needed.
            rollback: number of tokens that `StreamingCache.crop` can remove.
        """
        return self.make_cache(self._own_encoding(), capacity=capacity, rollback=rollback)

    # For models, which check arguments and make a layout once for all layers -------------------------

    def make_cache(self, encoding: Encoding, **settings: Any) -> StreamingCache:
        """Create an empty cache for this layer with the model's `encoding` and settings of `StreamingCache`."""
        own = {"window": self.window, "sinks": self.sinks, "shift": self.kv_shift, **self.norms(encoding)}
        return StreamingCache(encoding, **{**own, **settings})

    def norms(self, encoding: Encoding) -> dict[str, Any]:
        """The arguments `key_norm` and `norm_after` of `StreamingCache`."""
        if self.qk_norm == "after" and rotates(encoding):
            check_norm_after(encoding)
            return {"key_norm": None, "norm_after": (self.q_norm, self.k_norm)}
        return {"key_norm": self.k_norm, "norm_after": None}

    def run(
        self,
        x: Tensor,
        layout: Layout,
        encoding: Encoding,
        cache: StreamingCache | None = None,
        weights: bool = False,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`forward` after the checks.

        Args:
            x: (B, T, C).
            layout: the layout of the call.
            encoding: the encoding of this layer.
            cache: the cache of this layer.
            weights: whether to return attention weights as well.
            wanted: indices (n,) into the B * T tokens, to compute the output of these only; needs a call without
                padding.

        Returns:
            The attention output, (B, T, C), or (1, n, C) with `wanted`; and the weights (B, H, T, Tk), or None.
        """
        x = layout.pack(x)
        masks: dict[str, Any] = {} if self.window is None else {"window": self.window, "sinks": self.sinks}
        norms = self.norms(encoding)
        q, k, v = self.project(x, self.q_norm if norms["norm_after"] is None else None)
        inputs = attention_inputs(q, k, v, x, layout, encoding, cache, self.kv_shift, **norms, **masks)
        y = inputs.attend()
        if wanted is not None:
            y = split_heads(pick(y.transpose(1, 2).flatten(2), wanted), y.shape[-1]).transpose(1, 2)
            x = pick(x, wanted)
        y = self.write(y, x)
        return layout.unpack(y), dense_weights(inputs, layout, cache) if weights else None

    def write(self, y: Tensor, x: Tensor) -> Tensor:
        """Apply output norm, gate and projection to the output of the heads: (B, H, T, D) -> (B, T, C)."""
        y = y.transpose(1, 2)
        if self.o_norm is not None:
            y = self.o_norm(y).to(x.dtype)
        y = y.flatten(2)
        if self.g_proj is not None:
            y = y * self.g_proj(x).sigmoid()
        return self.o_proj(y)  # type: ignore[no-any-return]

    def project(self, x: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x to q (B, H, T, D), k and v (B, Hkv, T, D). `norm` applies to q; that of k follows the KV-shift."""
        q, k, v = (split_heads(proj(x), self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if norm is not None:
            q = norm(q).to(v.dtype)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _own_encoding(self) -> Encoding:
        if self.encoding is None:
            raise ValueError(
                "this layer has encoding=None, because its model has one encoding for all layers; call the model, or "
                "build the layer with the name of an encoding"
            )
        return self.encoding


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Reshape (B, T, H * D) to (B, T, H, D), also for T = 0."""
    return x.view(*x.shape[:2], x.shape[2] // head_dim, head_dim)


def pick(x: Tensor, wanted: Tensor) -> Tensor:
    """Select tokens by indices (n,) into the B * T tokens of (B, T, C): (1, n, C).

    By F.embedding, whose backward is faster than that of indexing.
    """
    return F.embedding(wanted, x.flatten(0, 1)).unsqueeze(0)


def attention_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    layout: Layout,
    encoding: Encoding,
    cache: StreamingCache | None = None,
    shift: KVShift | None = None,
    key_norm: nn.Module | None = None,
    norm_after: Norms | None = None,
    **masks: Any,
) -> AttentionInputs:
    """Encode the packed tokens of a call and return the arguments of their attention, with cached keys if any.

    `masks` (window and sinks) apply to calls without a cache; a cache has its own.
    """
    if cache is not None:
        return cache.extend(q, k, v, x, layout)
    code, v, _ = encode(encoding, q, k, v, x, layout, shift, key_norm, norm_after)
    if layout.documents is not None:
        masks["documents"] = layout.documents
    return AttentionInputs(code.q, code.k, v, code.bias, masks, parallel=layout.parallel)


def dense_weights(
    inputs: AttentionInputs, layout: Layout, cache: StreamingCache | None, **options: Any
) -> Tensor:
    """Compute the attention weights, (B, H, T, Tk), in the order of the call."""
    dense = inputs.weights(**options)
    if inputs.k.shape[2] == dense.shape[2]:
        return layout.unpack(layout.unpack(dense, 2), 3)
    if cache is not None and cache.sequences.gaps:
        raise ValueError(
            "output_attentions is not available after padding between tokens, which the cache does not store; "
            "use use_cache=False"
        )
    return layout.unpack(dense, 2)
