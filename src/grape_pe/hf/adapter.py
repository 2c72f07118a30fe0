"""Attention of adapted models: any encoding in the place of RoPE, on the stock projections."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from ..attention import attend
from ..encodings import Encoding
from ..models.blocks import attention_weights
from ..models.layer_cache import Seen
from .cache import layer_of
from .model import make_layout

#: the name of our attention for transformers
IMPLEMENTATION = "grape"


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
        x, encoding = hidden_states, shared_encoding if self.encoding is None else self.encoding
        assert encoding is not None
        layers = None
        if past_key_values is not None:
            layers = [layer_of(past_key_values, self.layer_idx)]  # type: ignore[arg-type]
        if attention_mask is not None and bool((attention_mask == 0).any()):
            position_ids = None  # counted over the tokens that are there
        else:
            attention_mask = None
        layout = make_layout(x, attention_mask, position_ids, layers)
        q, k, v = self.project(x)
        if layers is not None:
            seen = layers[0].open(encoding, None, self.config.rollback).append_layout(q, k, v, x, layout)
            layers[0].sync()
        else:
            code = encoding(q, k, x=x, v=v, positions=layout.positions)
            masks = {"documents": layout.documents, "key_padding": layout.padding}
            seen = Seen(code.q, code.k, v, code.bias, {n: t for n, t in masks.items() if t is not None})
        y = attend(seen.q, seen.k, seen.v, bias=seen.bias, scale=self.scale, **seen.masks)
        dense = attention_weights(seen, self.scale) if kwargs.get("output_attentions") else None
        return self.o_proj(y.transpose(1, 2).flatten(2)), dense  # type: ignore[operator]


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
