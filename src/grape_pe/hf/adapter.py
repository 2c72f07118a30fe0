"""Attention of adapted models: any encoding in the place of RoPE, on the stock projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from ..cache import Layout, StreamingCache
from ..encodings import Encoding
from ..models.blocks import dense_weights, see
from .cache import layer_of
from .model import make_layout

#: the name of our attention for transformers
IMPLEMENTATION = "grape"
#: the layout of each call under way, by the cosines that transformers makes for it
LAYOUTS = WeakTensorKeyDictionary()


class Adapted(nn.Module):
    """Attention of an adapted model: stock projections, our encoding, cache and softmax."""

    encoding: Encoding | None  # None where the model has one for all layers, and passes it
    scale: float
    config: Any

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # type: ignore[operator,arg-type]
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        shared_encoding: Encoding | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        encoding = shared_encoding if self.encoding is None else self.encoding
        assert encoding is not None
        layer = None if past_key_values is None else layer_of(past_key_values, self.layer_idx)  # type: ignore[arg-type]
        layout = self._layout(hidden_states, position_embeddings, attention_mask, position_ids, layer)
        x = layout.pack(hidden_states)
        cache = None if layer is None else layer.open(StreamingCache, encoding, self.config.rollback)
        seen = see(*self.project(x), x, layout, encoding, cache)
        y = self.o_proj(seen.attend(scale=self.scale).transpose(1, 2).flatten(2))  # type: ignore[operator]
        wanted = kwargs.get("output_attentions")
        return layout.unpack(y), dense_weights(seen, layout, cache, scale=self.scale) if wanted else None

    def _layout(
        self, x: Tensor, rotary: Any, mask: Tensor | None, positions: Tensor | None, layer: Any
    ) -> Layout:
        """The layout of a call, made by its first layer; all layers get the same rotary embeddings."""
        if torch.compiler.is_compiling():  # which finds out itself what is computed twice
            rotary = None
        layout = None if rotary is None else LAYOUTS.get(rotary[0])
        if layout is None:
            if mask is not None and bool((mask == 0).any()):
                positions = None  # counted over the tokens that are there
            else:
                mask = None
            layout = make_layout(x, mask, positions, None if layer is None else [layer])
            if rotary is not None:
                LAYOUTS[rotary[0]] = layout
        return layout


class GrapeLlamaAttention(Adapted, LlamaAttention):  # type: ignore[misc]
    pass


class GrapeQwen2Attention(Adapted, Qwen2Attention):
    pass


class GrapeQwen3Attention(Adapted, Qwen3Attention):
    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


def _padding_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """The (batch, tokens) mask as it came: an adapted layer makes no T x T mask of it."""
    return attention_mask


def _unreachable(module: nn.Module, *_: Any, **__: Any) -> Any:
    raise TypeError(
        f"attn_implementation={IMPLEMENTATION!r} belongs to models changed by grape_pe.hf.adapt, "
        f"and {type(module).__name__} is not; use sdpa"
    )


AttentionMaskInterface.register(IMPLEMENTATION, _padding_mask)
AttentionInterface.register(IMPLEMENTATION, _unreachable)
