"""The attention of adapted models: stock projections, with any encoding instead of RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..cache import Layout, StreamingCache
from ..encodings import Encoding
from ..layers.attention import attention_inputs, dense_weights
from .adapted_config import IMPLEMENTATION
from .families import Family


class Adapted(nn.Module):
    """The attention of an adapted model: stock projections; encoding, cache and `attend` of this package."""

    encoding: Encoding | None  # None if the model has one for all layers
    scale: float
    window: int | None
    config: Any

    def forward(
        self,
        hidden_states: Tensor,
        *,
        layout: Layout,
        shared_encoding: Encoding | None = None,
        cache_layers: Sequence[Any] | None = None,
        output_attentions: bool = False,
        **kwargs: Any,  # unused: the stock model's mask, cache, positions and rotary embeddings
    ) -> tuple[Tensor, Tensor | None]:
        x, encoding = layout.pack(hidden_states), shared_encoding if self.encoding is None else self.encoding
        assert encoding is not None
        cache = None
        if cache_layers is not None:
            layer = cache_layers[self.layer_idx]  # type: ignore[call-overload]
            cache = layer.open(partial(StreamingCache, window=self.window), encoding, self.config.rollback)
        family: Family = self.config.family
        masks: dict[str, Any] = {} if self.window is None else {"window": self.window}
        q, k, v = family.project(self, x)
        inputs = attention_inputs(q, k, v, x, layout, encoding, cache, **masks)
        y = getattr(self, family.output)(inputs.attend(scale=self.scale).transpose(1, 2).flatten(2))
        dense = dense_weights(inputs, layout, cache, scale=self.scale) if output_attentions else None
        return layout.unpack(y), dense


def _no_mask(*_: Any, **__: Any) -> None:
    """Adapted layers get a `Layout` instead of a mask."""


def _unreachable(module: nn.Module, *_: Any, **__: Any) -> Any:
    raise TypeError(
        f"attn_implementation={IMPLEMENTATION!r} is for models changed by grape_pe.hf.adapt, got a "
        f"{type(module).__name__}; load the model with AutoModelForCausalLM after import grape_pe.hf, "
        "or, for a stock model, use attn_implementation='sdpa'"
    )


AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
AttentionInterface.register(IMPLEMENTATION, _unreachable)
