"""PoPE (Gopalakrishnan et al., 2025): plane vectors with lengths from content, angles from position (Eq. M18)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bias import NO_BIAS
from ..groups import PlaneRotation
from ..groups.rotation import reduce_angle
from ..precision import exact_dtype
from .base import Encoded, Encoding, HeadShape, State, Tokens, own_parameter
from .facts import Facts
from .frequencies import Frequencies


class PoPE(Encoding):
    """PoPE: the score sum_i softplus(q_i) softplus(k_i) cos((t - j) theta_i - delta_i) / sqrt(D), with D frequencies.

    Encoded queries and keys have 2D features, so cached keys need twice the memory. The default scale of `attend`
    is then 1/sqrt(2D); a factor sqrt(2) of the queries makes it 1/sqrt(D). If you pass your own scale, divide it by
    sqrt(2). delta is learned for each key head and starts at 0.

    Args:
        shape: heads, key heads, features of a head, and width.
        base: base of the frequencies base^(-i/D).
    """

    transforms = True
    sets_norms = True
    facts = (
        Facts(
            name="pope",
            about="lengths from the content, angles from the position (width 2D)",
            formula="logit(t, j) = Σ_i sp(q_i) sp(k_i) cos((t − j) θ_i − δ_i) / √D",
            group="none on q and k; on the vectors of length sp(q_i) and angle 0 a torus of SO(2D)",
            source="Gopalakrishnan et al., 2025, PoPE, arXiv:2509.10534",
            recovers="PoPE",
            learned="phases δ",
        ),
    )

    def __init__(self, shape: HeadShape, *, base: float = 10_000.0) -> None:
        super().__init__(shape)
        self.frequencies = Frequencies(shape.head_dim, base=base)
        self.phase = own_parameter(shape.kv_heads, 1, shape.head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.frequencies.reset_parameters()
        nn.init.zeros_(self.phase)

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        angle = (tokens.positions * self.frequencies()[0]).unsqueeze(1)  # (B|1, 1, T, D)
        q = _polar(tokens.q, angle, math.sqrt(2))
        k = _polar(tokens.k, angle + self.phase.to(angle.dtype))
        return Encoded(q, k, NO_BIAS)

    def rebase_keys(self, k: Tensor, offset: float) -> Tensor:
        theta = self.frequencies()[0, 0]
        back = torch.full((1,), -float(offset), dtype=exact_dtype(k.device), device=k.device)
        return PlaneRotation.from_angle(back * theta, k.dtype).apply(super().rebase_keys(k, offset))


def _polar(x: Tensor, angle: Tensor, factor: float = 1.0) -> Tensor:
    """Plane vectors of length factor * softplus(x) at these angles, as (..., 2D): first, then second coordinates."""
    angle = reduce_angle(angle, x.dtype)
    length = factor * F.softplus(x.to(angle.dtype))
    return torch.cat([length * angle.cos(), length * angle.sin()], -1).to(x.dtype)
