"""Rotation in the plane of two vectors: the exponential of L(a, b) = a b^T - b a^T, applied in O(D).

Exact and differentiable for all a and b, also parallel, zero or huge ones: the closed form uses s^2, which is
smooth, instead of s (Eq. R1-R4 of docs/math.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..precision import ignores_autocast, working_dtype
from .rotation import Layout, join_planes, split_planes

_SERIES = 1e-2  # below this z^2 the five-term series is exact in float64


def rank2_generator(a: Tensor, b: Tensor) -> Tensor:
    """The matrix L(a, b) = a b^T - b a^T (Eq. R1). exp(theta L(e1, e2)) rotates by *minus* theta.

    Args:
        a: (..., D).
        b: (..., D).

    Returns:
        L(a, b), (..., D, D).
    """
    outer = a.unsqueeze(-1) * b.unsqueeze(-2)
    return outer - outer.transpose(-1, -2)


def quarter_turn(x: Tensor, layout: Layout = "half") -> Tensor:
    """Rotate every coordinate plane by +90 degrees: J x. An odd last coordinate becomes zero.

    Args:
        x: (..., D).
        layout: which coordinates form a plane, "half" or "interleaved".

    Returns:
        J x, (..., D).
    """
    x1, x2 = split_planes(x, layout)
    return join_planes(-x2, x1, x.shape[-1], layout)


def complex_structure(width: int, layout: Layout = "half", dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix J of `quarter_turn`. J^T = -J, and J^2 = -I on the first 2 * (D // 2) coordinates.

    Args:
        width: D.
        layout: which coordinates form a plane, "half" or "interleaved".
        dtype: dtype of the result.

    Returns:
        J, (D, D).
    """
    return quarter_turn(torch.eye(width, dtype=dtype), layout).T


def sinc_of_square(u: Tensor) -> Tensor:
    """sin(z) / z as a function of u = z^2 >= 0; smooth at 0."""
    small = u < _SERIES
    z = torch.where(small, 1.0, u).sqrt()
    series = 1 - u / 6 * (1 - u / 20 * (1 - u / 42 * (1 - u / 72)))
    return torch.where(small, series, z.sin() / z)


def versine_of_square(u: Tensor) -> Tensor:
    """(1 - cos z) / z^2 as a function of u = z^2 >= 0; smooth at 0, no cancellation."""
    small = u < _SERIES
    safe = torch.where(small, 1.0, u)
    series = (1 - u / 12 * (1 - u / 30 * (1 - u / 56 * (1 - u / 90)))) / 2
    return torch.where(small, series, 2 * (safe.sqrt() / 2).sin().square() / safe)


@dataclass(frozen=True, eq=False)
class Rank2Rotation:
    """The rotation exp(eta L(a, b)) in the plane of a and b (Eq. R3).

    Args:
        a: (..., D).
        b: (..., D).
        eta: (...), a factor for each pair of vectors.
    """

    a: Tensor
    b: Tensor
    eta: Tensor

    @classmethod
    def from_vector(cls, a: Tensor, eta: Tensor, layout: Layout = "half") -> Rank2Rotation:
        """The case b = J a: rotate the plane (a, J a) by -eta |a|^2 (Eq. R5)."""
        return cls(a, quarter_turn(a, layout), eta)

    def _orthogonal_pair(self) -> tuple[Tensor, Tensor]:
        """(a, b - proj_a b), which has the same L and an accurate s for nearly parallel a and b.

        Projected twice: one pass leaves an error of eps |b| along a. For nearly parallel vectors that is as large
        as the projected b, and the result would not be a rotation.
        """
        alpha = self.a.square().sum(-1, keepdim=True)
        nonzero = alpha > 0
        safe = torch.where(nonzero, alpha, 1.0)
        b = self.b
        for _ in range(2):
            gamma = (self.a * b).sum(-1, keepdim=True)
            b = b - torch.where(nonzero, gamma / safe, 0.0) * self.a
        return self.a, b

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """(f1, f2) of exp(eta L) = I + f1 L + f2 L^2 (Eq. R3)."""
        return self._closed_form()[2:]

    def _closed_form(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """a and b made orthogonal, and the coefficients f1 and f2."""
        a, b = self._orthogonal_pair()
        u = self.eta.square() * a.square().sum(-1) * b.square().sum(-1)  # (eta s)^2
        return a, b, self.eta * sinc_of_square(u), self.eta.square() * versine_of_square(u)

    @ignores_autocast
    def apply(self, x: Tensor) -> Tensor:
        """Rotate x, (..., D), with two inner products and one update. Coefficients stay in the dtype of eta."""
        a, b, f1, f2 = self._closed_form()
        alpha, beta = a.square().sum(-1), b.square().sum(-1)
        # x + f1 (a v - b u) - f2 (beta a u + alpha b v) with u = <a, x>, v = <b, x> (Eq. R4)
        working = working_dtype(x.dtype)
        a, b = a.to(working), b.to(working)
        pair = torch.stack([a, b], -1)  # (..., D, 2)
        uv = _contract(x.to(working), pair)
        turn = torch.stack([torch.stack([-f2 * beta, f1], -1), torch.stack([-f1, -f2 * alpha], -1)], -2).to(
            working
        )  # rows: coefficient of a, of b
        change = (turn * uv.unsqueeze(-2)).sum(-1)
        return (x.to(working) + _expand(change, pair)).to(x.dtype)

    def compose(self, other: Rank2Rotation) -> Rank2Rotation:
        if self.a is not other.a or self.b is not other.b:
            raise ValueError(
                "Rank2Rotation.compose needs two elements with the same tensors a and b; "
                "for different planes multiply their as_matrix()"
            )
        return Rank2Rotation(self.a, self.b, self.eta + other.eta)

    def inverse(self) -> Rank2Rotation:
        return Rank2Rotation(self.a, self.b, -self.eta)

    def as_matrix(self, width: int | None = None) -> Tensor:
        a, b, f1, f2 = self._closed_form()
        generator = rank2_generator(a, b)
        eye = torch.eye(generator.shape[-1], dtype=generator.dtype, device=generator.device)
        return eye + f1[..., None, None] * generator + f2[..., None, None] * (generator @ generator)


def _contract(x: Tensor, pair: Tensor) -> Tensor:
    """(..., D) with (..., D, 2) -> (..., 2); a single matrix product if all tokens share the pair."""
    if x.dim() > 1 and pair.shape[-3:-2] in ((), (1,)):
        return x @ pair.squeeze(-3) if pair.dim() > 2 else x @ pair
    return (x.unsqueeze(-1) * pair).sum(-2)


def _expand(uv: Tensor, pair: Tensor) -> Tensor:
    """(..., 2) with (..., D, 2) -> (..., D), the transpose of `_contract`."""
    if pair.shape[-3:-2] in ((), (1,)):
        shared = pair.squeeze(-3) if pair.dim() > 2 else pair
        return uv @ shared.transpose(-1, -2)
    return (uv.unsqueeze(-2) * pair).sum(-1)
