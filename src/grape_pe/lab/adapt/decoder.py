"""A Hugging Face model with the interface of `Decoder`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from ...cache import StreamingCache
from ...encodings import Encoding
from ...hf.cache import GrapeDynamicLayer
from ...models.loss import cross_entropy
from ..errors import LabError
from ..inspect.capture import LayerView, watch

#: largest change of a logit by `adapt`, relative to the largest logit
SAME = 1e-4


class PretrainedDecoder(nn.Module):
    """An adapted model: loss in chunks, logits, and a cache with or without a window."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pretrained = model

    @property
    def gradient_checkpointing(self) -> bool:
        return bool(self.pretrained.is_gradient_checkpointing)

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, wanted: bool) -> None:
        if wanted:
            self.pretrained.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def head(self) -> Tensor:
        """(V, C): the output embeddings."""
        weight = self.pretrained.get_output_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    def encodings(self) -> list[Encoding]:
        """The encoding of each layer."""
        trunk = self.pretrained.base_model
        return [trunk.encoding_of(i) for i in range(len(trunk.layers))]

    def attentions(self) -> list[Any]:
        """The attention of each layer."""
        trunk = self.pretrained.base_model
        return [trunk.attention_of(i) for i in range(len(trunk.layers))]

    def hidden(self, tokens: Tensor, *, cache: DynamicCache | None = None) -> Tensor:
        """Last hidden states (B, T, C)."""
        found = self.pretrained.base_model(
            input_ids=tokens, past_key_values=cache, use_cache=cache is not None
        )
        hidden = found.last_hidden_state
        assert isinstance(hidden, Tensor)
        return hidden

    def forward(
        self,
        tokens: Tensor,
        *,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        count: float | None = None,
    ) -> Tensor:
        """Logits (B, T, V); or, with `targets`, their mean cross entropy, as in `Decoder`."""
        if documents is not None:
            raise LabError("data.documents is not supported by grape adapt; leave it false")
        hidden = self.hidden(tokens)
        return hidden @ self.head.T if targets is None else cross_entropy(hidden, self.head, targets, count)

    def cache(self, *, window: int | None = None, rollback: int = 0) -> DynamicCache:
        """An empty cache; with a `window`, attention reaches fewer than this many tokens back in every layer."""
        cache = DynamicCache()
        cache.layers = []
        for encoding, attention in zip(self.encodings(), self.attentions(), strict=True):
            layer = GrapeDynamicLayer()
            reach = min((w for w in (window, attention.window) if w is not None), default=None)
            layer.store = StreamingCache(encoding, window=reach, rollback=rollback)
            layer.is_initialized = True
            cache.layers.append(layer)
        return cache

    def observe(self, tokens: Tensor) -> list[LayerView]:
        """Observations of every layer's encoding on tokens (T,)."""
        seen = watch(self, self.encodings(), tokens[None].to(self.head.device))
        scales = [attention.scale for attention in self.attentions()]
        return [
            LayerView(i, *each, scale=scale) for i, (each, scale) in enumerate(zip(seen, scales, strict=True))
        ]


@torch.no_grad()
def largest_change(before: Tensor, model: PretrainedDecoder, tokens: Tensor) -> float:
    """The largest difference of a logit since `before`."""
    return float((model(tokens) - before).abs().max())


def check_unchanged(before: Tensor, model: PretrainedDecoder, tokens: Tensor) -> float:
    """The largest difference of a logit since `before`, which must be rounding; returns it."""
    found = largest_change(before, model, tokens)
    if not found <= SAME * max(1.0, float(before.abs().max())):
        raise LabError(
            f"the logits changed by {found:.2g} before training: this model transforms logits (such as by "
            "soft-capping), which grape adapt does not support; use grape_pe.hf.adapt in your own training loop"
        )
    return found
