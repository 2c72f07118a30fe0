"""PoPE (Gopalakrishnan et al., 2025): content sets the lengths of planar vectors, position their angles (Eq. M18)."""

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
    """score = sum_i softplus(q_i) softplus(k_i) cos((t - j) theta_i - delta_i) / sqrt(D), D frequencies for D features.

    Encoded queries and keys have 2D features, so a cache stores twice the keys. Queries have a factor sqrt(2), with
    which the default scale of `attend`, 1/sqrt(2D), becomes 1/sqrt(D); divide a scale of your own by it. delta, of each
    key head, is learned from 0 and not clamped, because a phase is periodic.

    Args:
        shape: heads, key heads, features of a head, and width.
        base: of the frequencies.
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
    """(..., 2D): the first and the second coordinates of vectors of length softplus(x) at these angles."""
    angle = reduce_angle(angle, x.dtype)
    length = factor * F.softplus(x.to(angle.dtype))
    return torch.cat([length * angle.cos(), length * angle.sin()], -1).to(x.dtype)
