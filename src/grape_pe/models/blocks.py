"""The blocks of the decoder: attention with any encoding, SwiGLU, pre-norm residuals.

Letters: B batch, T new tokens, C width, H query heads, Hkv key heads, D features of a head.
Parameters carry the names of Hugging Face's Llama, so that tools which look for them find them.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import Layout, Seen, StreamingCache, encode
from ..encodings import Encoding
from .config import DecoderConfig
from .kv_shift import KVShift
from .norm import RMSNorm

EMBEDDING_STD = 0.02


class Attention(nn.Module):
    """q, k, v projections, KV-shift, QK norm, encoding, attention, output projection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.width, queries, bias=False)
        self.k_proj = nn.Linear(config.width, keys, bias=False)
        self.v_proj = nn.Linear(config.width, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.width, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.kv_shift = KVShift(config.width, config.kv_heads) if config.kv_shift else None
        self.encoding = None if config.shared_encoding else config.build_encoding()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, T, D), (B, Hkv, T, D) twice; queries normalised, keys not yet: they are shifted before."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None:
            q = self.q_norm(q).to(v.dtype)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def cache(self, encoding: Encoding, **settings: Any) -> StreamingCache:
        """An empty cache for this layer; `settings` are those of `StreamingCache`."""
        return StreamingCache(encoding, shift=self.kv_shift, key_norm=self.k_norm, **settings)

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        encoding: Encoding,
        cache: StreamingCache | None = None,
        weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The attended values (B, T, C); with `weights` also the dense attention (B, H, T, Tk)."""
        x = layout.pack(x)
        seen = see(*self.project(x), x, layout, encoding, cache, self.kv_shift, self.k_norm)
        y = self.o_proj(seen.attend().transpose(1, 2).flatten(2))
        return layout.unpack(y), dense_weights(seen, layout, cache) if weights else None


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
) -> Seen:
    """All that the packed tokens of a call see: with a cache also what came before."""
    if cache is not None:
        return cache.extend(q, k, v, x, layout)
    code, v, _ = encode(encoding, q, k, v, x, layout, shift, key_norm)
    masks = {} if layout.documents is None else {"documents": layout.documents}
    return Seen(code.q, code.k, v, code.bias, masks)


def dense_weights(seen: Seen, layout: Layout, cache: StreamingCache | None, **options: Any) -> Tensor:
    """The attention weights (B, H, T, Tk) in the order of the call."""
    dense = seen.weights(**options)
    if seen.k.shape[2] == dense.shape[2]:
        return layout.unpack(layout.unpack(dense, 2), 3)
    if cache is not None and cache.sequences.gaps:
        raise ValueError(
            "output_attentions is not available after padding between tokens, because the cache holds none "
            "of it; leave the cache out (use_cache=False)"
        )
    return layout.unpack(dense, 2)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm attention and SwiGLU, each added to the residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.width, self.depth = config.width, config.layers
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = SwiGLU(config)

    def reset_parameters(self) -> None:
        """Matrices N(0, 0.5/sqrt(width)), the two that write to the stream a further 1/sqrt(layers)."""
        std, attn, mlp = 0.5 / self.width**0.5, self.self_attn, self.mlp
        for linear in (attn.q_proj, attn.k_proj, attn.v_proj, mlp.gate_proj, mlp.up_proj):
            nn.init.normal_(linear.weight, std=std)
        for linear in (attn.o_proj, mlp.down_proj):
            nn.init.normal_(linear.weight, std=std / self.depth**0.5)
        for norm in (self.input_layernorm, self.post_attention_layernorm, attn.q_norm, attn.k_norm):
            if norm is not None:
                nn.init.ones_(norm.weight)
        for part in (attn.kv_shift, attn.encoding):
            if part is not None:
                part.reset_parameters()

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        encoding: Encoding | None = None,
        cache: StreamingCache | None = None,
        weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The stream after this block, and the attention weights if asked for."""
        used = encoding if encoding is not None else self.self_attn.encoding
        assert used is not None
        y, dense = self.self_attn(self.input_layernorm(x), layout, used, cache, weights)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), dense
