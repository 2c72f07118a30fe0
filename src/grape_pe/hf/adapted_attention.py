"""Attention of adapted models: any encoding in the place of RoPE, on the stock projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from ..cache import Layout, StreamingCache
from ..encodings import Encoding
from ..layers.attention import dense_weights, see, split_heads
from .adapted_config import IMPLEMENTATION


class Adapted(nn.Module):
    """Attention of an adapted model: stock projections, our encoding, cache and softmax."""

    encoding: Encoding | None  # None where the model has one for all layers, and passes it
    scale: float
    config: Any

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            split_heads(proj(x), self.head_dim).transpose(1, 2)  # type: ignore[operator,arg-type]
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v

    def forward(
        self,
        hidden_states: Tensor,
        *,
        layout: Layout,
        shared_encoding: Encoding | None = None,
        cache_layers: Sequence[Any] | None = None,
        output_attentions: bool = False,
        **kwargs: Any,  # the stock model's own mask, cache, positions and rotary embeddings
    ) -> tuple[Tensor, Tensor | None]:
        x, encoding = layout.pack(hidden_states), shared_encoding if self.encoding is None else self.encoding
        assert encoding is not None
        cache = None
        if cache_layers is not None:
            layer = cache_layers[self.layer_idx]  # type: ignore[call-overload]
            cache = layer.open(StreamingCache, encoding, self.config.rollback)
        seen = see(*self.project(x), x, layout, encoding, cache)
        y = self.o_proj(seen.attend(scale=self.scale).transpose(1, 2).flatten(2))  # type: ignore[operator]
        dense = dense_weights(seen, layout, cache, scale=self.scale) if output_attentions else None
        return layout.unpack(y), dense


class GrapeLlamaAttention(Adapted, LlamaAttention):  # type: ignore[misc]
    pass


class GrapeQwen2Attention(Adapted, Qwen2Attention):  # type: ignore[misc]
    pass


class GrapeQwen3Attention(Adapted, Qwen3Attention):  # type: ignore[misc]
    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


def _no_mask(*_: Any, **__: Any) -> None:
    """Adapted layers get a `Layout` instead of a mask."""


def _unreachable(module: nn.Module, *_: Any, **__: Any) -> Any:
    raise TypeError(
        f"attn_implementation={IMPLEMENTATION!r} belongs to models changed by grape_pe.hf.adapt, "
        f"and {type(module).__name__} is not; load the model with AutoModelForCausalLM after import grape_pe, "
        "or, for a stock model, use attn_implementation='sdpa'"
    )


AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
AttentionInterface.register(IMPLEMENTATION, _unreachable)
