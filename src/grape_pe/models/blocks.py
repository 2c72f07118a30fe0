"""The blocks of the decoder: attention with any encoding, SwiGLU, pre-norm residuals.

Letters: B batch, T new tokens, C width, H query heads, Hkv key heads, D features of a head.
Parameters carry the names of Hugging Face's Llama, so that tools which look for them find them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import attend
from ..encodings import Encoding
from ..encodings.path import PaTH
from .config import DecoderConfig
from .kv_shift import KVShift
from .layer_cache import LayerCache, Seen
from .layout import Layout
from .norm import RMSNorm

EMBEDDING_STD = 0.02


class Attention(nn.Module):
    """q, k, v projections, QK norm, KV-shift, encoding, attention, output projection."""

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
        """(B, H, T, D), (B, Hkv, T, D) twice; queries and keys normalised."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        encoding: Encoding,
        cache: LayerCache | None = None,
        weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The attended values (B, T, C); with `weights` also the dense attention (B, H, T, Tk)."""
        seen = self._encode(*self.project(x), x, layout, encoding, cache)
        y = attend(seen.q, seen.k, seen.v, bias=seen.bias, **seen.masks)
        dense = attention_weights(seen) if weights else None
        return self.o_proj(y.transpose(1, 2).flatten(2)), dense

    def _encode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        layout: Layout,
        encoding: Encoding,
        cache: LayerCache | None,
    ) -> Seen:
        if cache is not None:
            return cache.append_layout(q, k, v, x, layout)
        if self.kv_shift is not None:
            k, v, _ = self.kv_shift(k, v, x, starts=layout.starts)
        code = encoding(q, k, x=x, v=v, positions=layout.positions)
        masks = {"documents": layout.documents, "key_padding": layout.padding}
        return Seen(code.q, code.k, v, code.bias, {n: t for n, t in masks.items() if t is not None})


def attention_weights(seen: Seen, scale: float | None = None) -> Tensor:
    """Dense softmax weights (B, H, T, Tk), for looking at: attention over the unit vectors of the keys."""
    unit = torch.eye(seen.k.shape[2], dtype=seen.v.dtype, device=seen.v.device)
    unit = unit.expand(*seen.k.shape[:2], -1, -1)
    return attend(seen.q, seen.k, unit, bias=seen.bias, scale=scale, impl="reference", **seen.masks)


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
        cache: LayerCache | None = None,
        weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The stream after this block, and the attention weights if asked for."""
        used = encoding if encoding is not None else self.self_attn.encoding
        assert used is not None
        h = self.input_layernorm(x)
        if layout.padding is not None:  # what a token reads of its neighbours must be as if none were there
            h = h.masked_fill(layout.padding.unsqueeze(-1), 0.0)
        y, dense = self.self_attn(h, layout, used, cache, weights)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), dense


def check_packing(encoding: Encoding, layout: Layout) -> None:
    """Refuse packed documents where the encoding itself reads across their borders."""
    parts = [module for module in encoding.modules() if isinstance(module, PaTH)]
    if layout.documents is not None and any(part.conv is not None for part in parts):
        raise ValueError(
            "path reads its directions through a short convolution, which would cross the borders of packed "
            "documents; use encoding_options={'conv': 0}, or one document a sequence"
        )
