"""The attention layer: projections, KV-shift, QK norm, any encoding, attention, output projection.

    layer = grape.Attention(512, heads=8, encoding="rope+fox")
    y = layer(x)                                # (B, T, 512), causal

Letters: B batch, T new tokens, C width, H query heads, Hkv key heads, D features of a head.
Parameters have the names of Hugging Face's Llama, so that tools which look for them find them.
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
        heads: query heads.
        kv_heads: key heads, if fewer; must divide `heads`.
        head_dim: features of a head; width / heads unless given.
        encoding: a name for `grape.build`, such as "rope", "grape-ap" or "rope+fox". None only inside a
            model whose layers share one encoding, which then calls `run`.
        encoding_options: options of the encoding, as for `grape.build`.
        window: a token sees fewer than `window` tokens back, itself included; all if None.
        sinks: the number of first tokens that stay visible outside the window.
        qk_norm: RMS-normalise queries and keys, with learned weights, before they are encoded; "after":
            after the rotation, which breaks the exact relative law (as True for encodings without a
            rotation).
        kv_shift: mix each projected key and value with those of the token before.
        norm_eps: epsilon of the norms.
        output_norm: RMS-normalise the attention output of each head, with one learned weight for all heads.
        output_gate: multiply the attention output, after the norm, by sigmoid(W x), with x the layer's
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
        """Initialise again, as after `to_empty`."""
        parts = (self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.q_norm, self.k_norm)
        for part in (*parts, self.o_norm, self.g_proj, self.kv_shift, self.encoding):
            if part is not None:
                part.reset_parameters()

    def extra_repr(self) -> str:
        seen = "" if self.window is None else f", window={self.window}, sinks={self.sinks}"
        return f"{self.width}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}{seen}"

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        padding: Tensor | None = None,
        cache: StreamingCache | None = None,
        parallel: ContextParallel | None = None,
    ) -> Tensor:
        """The attended values (B, T, C); zeros at padding.

        Args:
            x: (B, T, C).
            positions: (T,) or (B, T), if they are not those that follow; where they fall, a document begins.
                (T, n) or (B, T, n), and required, for an encoding with n coordinates.
            documents: (T,) or (B, T) ids of packed sequences: each is a sequence of its own, and an id is not
                used twice. With a cache, the first goes on if its id is the last one's (0 at first).
            padding: (B, T) bool, True where there is no token, anywhere in a sequence.
            cache: from `cache()`; the tokens then continue those before.
            parallel: the ranks that share each sequence; x has this rank's tokens (`parallel.split`).
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
        """An empty cache for this layer; `capacity` preallocates, `rollback` bounds `crop`."""
        return self.make_cache(self._own_encoding(), capacity=capacity, rollback=rollback)

    # For models: arguments are checked once a call, and one layout serves all layers ----------------

    def make_cache(self, encoding: Encoding, **settings: Any) -> StreamingCache:
        """An empty cache for this layer with the model's `encoding`; `settings` are `StreamingCache`'s."""
        own = {"window": self.window, "sinks": self.sinks, "shift": self.kv_shift, **self.norms(encoding)}
        return StreamingCache(encoding, **{**own, **settings})

    def norms(self, encoding: Encoding) -> dict[str, Any]:
        """The norms that `StreamingCache` applies: of keys before the encoding, or of both sides after it."""
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
        """The attended values (B, T, C); with `weights` also the dense attention (B, H, T, Tk).

        With `wanted` (n,), indices into the B * T tokens of a call without padding, the values (1, n, C) of these.
        """
        x = layout.pack(x)
        masks: dict[str, Any] = {} if self.window is None else {"window": self.window, "sinks": self.sinks}
        norms = self.norms(encoding)
        q, k, v = self.project(x, self.q_norm if norms["norm_after"] is None else None)
        inputs = see(q, k, v, x, layout, encoding, cache, self.kv_shift, **norms, **masks)
        y = inputs.attend()
        if wanted is not None:
            y = split_heads(pick(y.transpose(1, 2).flatten(2), wanted), y.shape[-1]).transpose(1, 2)
            x = pick(x, wanted)
        y = self.write(y, x)
        return layout.unpack(y), dense_weights(inputs, layout, cache) if weights else None

    def write(self, y: Tensor, x: Tensor) -> Tensor:
        """(B, T, C) from what the heads read, (B, H, T, D): output norm, gate, projection."""
        y = y.transpose(1, 2)
        if self.o_norm is not None:
            y = self.o_norm(y).to(x.dtype)
        y = y.flatten(2)
        if self.g_proj is not None:
            y = y * self.g_proj(x).sigmoid()
        return self.o_proj(y)  # type: ignore[no-any-return]

    def project(self, x: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, T, D), (B, Hkv, T, D) twice; queries by `norm`, keys not yet: they are shifted before."""
        q, k, v = (split_heads(proj(x), self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if norm is not None:
            q = norm(q).to(v.dtype)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _own_encoding(self) -> Encoding:
        if self.encoding is None:
            raise ValueError(
                "this layer was built with encoding=None, for a model that shares one encoding among its "
                "layers; call the model, or build the layer with the name of an encoding"
            )
        return self.encoding


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """(B, T, H * D) as (B, T, H, D), for no tokens as well."""
    return x.view(*x.shape[:2], x.shape[2] // head_dim, head_dim)


def pick(x: Tensor, wanted: Tensor) -> Tensor:
    """(1, n, C): these of the B * T tokens of (B, T, C). An embedding, whose gradient is quicker than an index's."""
    return F.embedding(wanted, x.flatten(0, 1)).unsqueeze(0)


def see(
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
    """All that the packed tokens of a call see: with a cache also what came before.

    `masks` (window, sinks) are for calls without a cache; a cache has its own.
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
    """The attention weights (B, H, T, Tk) in the order of the call."""
    dense = inputs.weights(**options)
    if inputs.k.shape[2] == dense.shape[2]:
        return layout.unpack(layout.unpack(dense, 2), 3)
    if cache is not None and cache.sequences.gaps:
        raise ValueError(
            "output_attentions is not available after padding between tokens, because the cache holds none "
            "of it; leave the cache out (use_cache=False)"
        )
    return layout.unpack(dense, 2)
