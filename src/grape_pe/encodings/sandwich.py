"""Sandwich: the inner product of two sinusoidal position embeddings, as a bias (Eq. D5)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..bias.distance import Profile
from ..precision import exact_dtype
from .base import HeadShape, Tokens
from .distance import ProfileEncoding, over
from .facts import Facts


def _cosines(distance: Tensor, numbers: Tensor, *, planes: int) -> Tensor:
    """ratio_h * sum for i = 1 … planes of (cos(d / 10000^(i / planes)) - 1)."""
    distance = distance.abs().to(exact_dtype(distance.device))
    total = torch.zeros_like(distance)
    for i in range(1, planes + 1):
        total = total + (torch.cos(distance / 10_000 ** (i / planes)) - 1)
    return over(numbers[..., 0], distance) * total.to(numbers.dtype)


class Sandwich(ProfileEncoding):
    """Sandwich: the bias (H / 8h) * sum for i = 1 … dim/2 of (cos((t - j) / 10000^(2i / dim)) - 1), heads h = 1 … H.

    It has no parameters. The -1 makes the bias 0 at distance 0 and negative elsewhere, without a change of the
    attention weights: it adds the same number to all logits of a query.

    Args:
        shape: heads, key heads, features of a head, and width.
        dim: width of the sinusoidal embeddings; 128 in the paper.
    """

    facts = (
        Facts(
            name="sandwich",
            about="adds the inner product of two sinusoidal embeddings",
            formula="b(t, j) = (H / 8h) Σ_i [cos((t − j) / 10000^{2i/d}) − 1]",
            group="none as a bias; each cosine is a character of SO(2), their sum is no homomorphism",
            source="Chi et al., 2023, Dissecting Transformer Length Extrapolation, arXiv:2212.10356",
        ),
    )
    ratios: Tensor

    def __init__(self, shape: HeadShape, *, dim: int = 128) -> None:
        super().__init__(shape)
        if not isinstance(dim, int) or dim < 2 or dim % 2:
            raise ValueError(f"dim of sandwich must be even and at least 2, got {dim!r}")
        self.dim = dim
        self.register_buffer("ratios", torch.empty(shape.heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.ratios.is_meta:
            heads = torch.arange(1, self.shape.heads + 1, dtype=torch.float32)
            self.ratios.copy_(self.shape.heads / (8 * heads))

    def numbers(self, tokens: Tokens) -> Tensor:
        return self.ratios.to(tokens.working).view(-1, 1, 1)

    def profile(self) -> Profile:
        return functools.partial(_cosines, planes=self.dim // 2)
