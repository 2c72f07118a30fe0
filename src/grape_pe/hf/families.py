"""The families of stock models that `adapt` supports: their classes, and how they compute q, k and v."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..groups.rotation import Layout
from ..layers.attention import split_heads

#: from the attention module and its input (B, T, C): q (B, H, T, D), k and v (B, Hkv, T, D)
Project = Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]]


def separate(attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three projections."""
    return _heads(attention, attention.q_proj(x), attention.k_proj(x), attention.v_proj(x))


def normed_heads(attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three projections, and a norm of each head's queries and keys."""
    q, k, v = separate(attention, x)
    return attention.q_norm(q), attention.k_norm(k), v


def normed_width(attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three projections, and a norm over the queries of all heads, and over the keys."""
    q, k = attention.q_norm(attention.q_proj(x)), attention.k_norm(attention.k_proj(x))
    return _heads(attention, q, k, attention.v_proj(x))


def fused(attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One projection, with all queries, then all keys, then all values."""
    config, size = attention.config, attention.head_dim
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    return _heads(attention, *attention.qkv_proj(x).split((queries, keys, keys), -1))


def fused_by_head(attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One projection, with query, key and value of the first head, then of the second, …"""
    heads = split_heads(attention.query_key_value(x), 3 * attention.head_size)
    q, k, v = heads.transpose(1, 2).chunk(3, -1)
    return q, k, v


def _heads(attention: Any, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (split_heads(t, attention.head_dim).transpose(1, 2) for t in tensors)
    return q, k, v


@dataclass(frozen=True)
class Family:
    """A family of stock models.

    Args:
        name: prefix of the stock classes.
        project: computes q, k and v.
        layout: which features form a plane of RoPE.
        attention: name of the attention module in a layer.
        output: name of the output projection in the attention.
        head_dim: name of the attribute of the attention with the features of a head.
        text: "Text" if the family also has image models, whose text classes have this suffix.
    """

    name: str
    project: Project = separate
    layout: Layout = "half"
    attention: str = "self_attn"
    output: str = "o_proj"
    head_dim: str = "head_dim"
    text: str = ""

    @property
    def config(self) -> type[PreTrainedConfig]:
        """The stock configuration class."""
        return getattr(transformers, f"{self.name}{self.text}Config")  # type: ignore[no-any-return]

    @property
    def base(self) -> type[PreTrainedModel]:
        """The stock model class without head."""
        return getattr(transformers, f"{self.name}{self.text}Model")  # type: ignore[no-any-return]

    @property
    def for_causal_lm(self) -> type[PreTrainedModel]:
        """The stock language model class."""
        return getattr(transformers, f"{self.name}ForCausalLM")  # type: ignore[no-any-return]

    @property
    def folds_bases(self) -> bool:
        """Whether a basis of queries and keys can be folded into their projections."""
        return self.project is separate


ROWS = (
    Family("Llama"),
    Family("Qwen2"),
    Family("Qwen3", normed_heads),
    Family("Mistral"),
    Family("SmolLM3"),
    Family("Olmo2", normed_width),
    Family("Phi3", fused),
    Family("GPTNeoX", fused_by_head, attention="attention", output="dense", head_dim="head_size"),
    Family("Glm", layout="interleaved"),
    Family("Gemma2"),
    Family("Gemma3", normed_heads, text="Text"),
)
