"""The blocks of the decoder: attention and SwiGLU with pre-norm residuals.

Parameters have the names of Hugging Face's Llama, for tools that select modules by name.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import Layout, StreamingCache
from ..encodings import Encoding
from ..layers import RMSNorm
from ..layers.attention import pick
from .config import DecoderConfig


class SwiGLU(nn.Module):
    """The feed-forward layer down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A decoder block: attention and SwiGLU, each after an RMSNorm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.width, self.depth = config.width, config.layers
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = config.build_attention(layer)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = SwiGLU(config)

    def reset_parameters(self) -> None:
        """Initialize matrices by N(0, 0.5/sqrt(width)), the two output projections by 1/sqrt(layers) of that."""
        std, attn, mlp = 0.5 / self.width**0.5, self.self_attn, self.mlp
        for linear in (attn.q_proj, attn.k_proj, attn.v_proj, attn.g_proj, mlp.gate_proj, mlp.up_proj):
            if linear is not None:
                nn.init.normal_(linear.weight, std=std)
        for linear in (attn.o_proj, mlp.down_proj):
            nn.init.normal_(linear.weight, std=std / self.depth**0.5)
        for norm in (
            self.input_layernorm,
            self.post_attention_layernorm,
            attn.q_norm,
            attn.k_norm,
            attn.o_norm,
        ):
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
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream after the block, and the attention weights or None; arguments as for `Attention.run`."""
        used = encoding if encoding is not None else self.self_attn.encoding
        assert used is not None
        y, dense = self.self_attn.run(self.input_layernorm(x), layout, used, cache, weights, wanted)
        x = (x if wanted is None else pick(x, wanted)) + y
        return x + self.mlp(self.post_attention_layernorm(x)), dense
