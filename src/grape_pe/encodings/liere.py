"""LieRE (Ostmeier et al., 2025): the exponential of a dense skew generator, for each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..groups import DenseRotation, matrix_exp
from .base import HeadShape, State, Tokens, own_parameter
from .facts import Facts
from .rotary import RotationEncoding


class LieRE(RotationEncoding):
    """LieRE: the rotation exp(sum over axes a of n_a (W_a - W_a^T)), by `matrix_exp` in O(D^3) for each token.

    The relative law holds for one coordinate. It does not hold for more, because the generators of different axes
    do not commute.

    Args:
        shape: heads, key heads, features of a head, and width.
        per_head: whether each key head has its own generators.
        coords: number of coordinates (axes) of a position, 1 to 3.
    """

    facts = (
        Facts(
            name="liere",
            about="rotates by `matrix_exp` of a dense generator",
            formula="G_n = exp(n (W − W^T))",
            group="in SO(D): a one-parameter group with any skew generator",
            source="Ostmeier et al., 2024, LieRE, arXiv:2406.10322",
            recovers="baseline",
            learned="generators",
        ),
    )

    axes_commute = False

    def __init__(self, shape: HeadShape, *, per_head: bool = True, coords: int = 1) -> None:
        super().__init__(shape, coords)
        heads = shape.kv_heads if per_head else 1
        self.weight = own_parameter(heads, coords, shape.head_dim, shape.head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.shape.head_dim**-0.5)

    def element(self, tokens: Tokens, state: State) -> tuple[Any, State]:
        weight = self.weight.to(tokens.positions.dtype)
        skew = weight - weight.transpose(-1, -2)
        generator = torch.einsum("btn,hnde->bhtde", tokens.positions, skew)
        return DenseRotation(matrix_exp(generator).unsqueeze(2)), None
