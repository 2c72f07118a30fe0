"""Additive logits as group actions: unipotent matrices G(s) = I + s A with A^2 = 0, in GL(D + k).

A = sum_r p_r q_r^T is stored as its factors. Queries are multiplied by G(i) and keys by the inverse transpose of
G(j), which adds a bias linear in j - i to the score (Eq. A1-A9 of docs/math.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Unipotent:
    """The matrix exp(s A) = I + s A, with A = sum_r p_r q_r^T (Eq. A1).

    Args:
        p: (..., R, D).
        q: (..., R, D), with every <q_r, p_s> = 0.
        s: (...).
    """

    p: Tensor
    q: Tensor
    s: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Multiply x, (..., D), by the matrix."""
        inner = torch.einsum("...rd,...d->...r", self.q, x)
        return x + self.s.unsqueeze(-1) * torch.einsum("...rd,...r->...d", self.p, inner)

    def compose(self, other: Unipotent) -> Unipotent:
        if self.p is not other.p or self.q is not other.q:
            raise ValueError(
                "Unipotent.compose needs two elements with the same tensors p and q; put generators with "
                "A_r A_s = 0 into one dictionary (check_dictionary)"
            )
        return Unipotent(self.p, self.q, self.s + other.s)

    def inverse(self) -> Unipotent:
        return Unipotent(self.p, self.q, -self.s)

    def contragredient(self) -> Unipotent:
        """The inverse transpose (I + s A)^-T = I - s A^T, for keys (Eq. A2)."""
        return Unipotent(self.q, self.p, -self.s)

    def generator(self) -> Tensor:
        """The matrix A, (..., D, D)."""
        return self.p.transpose(-1, -2) @ self.q

    def as_matrix(self, width: int | None = None) -> Tensor:
        generator = self.generator()
        eye = torch.eye(generator.shape[-1], dtype=generator.dtype, device=generator.device)
        return eye + self.s[..., None, None] * generator


def check_dictionary(p: Tensor, q: Tensor, tolerance: float = 1e-6) -> None:
    """Check that A_r A_s = 0 for all atoms A_r = p_r q_r^T, which is <q_r, p_s> = 0 (Eq. A6).

    Args:
        p: (..., R, D).
        q: (..., R, D).
        tolerance: largest |<q_r, p_s>| accepted, relative to the largest norms of p and q.

    Raises:
        ValueError: if a product is larger than the tolerance, or not a number.
    """
    scale = p.norm(dim=-1).max() * q.norm(dim=-1).max()
    products = (q @ p.transpose(-1, -2)).abs()
    worst = products.max()
    if not worst <= tolerance * scale.clamp_min(1e-30):  # so that NaN is refused too
        r, s = divmod(int(products.flatten().argmax()) % (p.shape[-2] ** 2), p.shape[-2])
        raise ValueError(
            f"a dictionary must be nilpotent: A_r A_s = 0 for all atoms, got <q_{r}, p_{s}> = {worst.item():.3g}; "
            "give p and q disjoint coordinates"
        )


def shift_generator(u: Tensor) -> tuple[Tensor, Tensor]:
    """The generator A = [[0, u], [0, 0]] of the (D + 1) lift, which translates [x; 1] by u (Eq. A3).

    Args:
        u: (..., D).

    Returns:
        The factors p and q of A, each (..., 1, D + 1).
    """
    p = torch.cat([u, u.new_zeros(*u.shape[:-1], 1)], -1)
    q = torch.zeros_like(p)
    q[..., -1] = 1
    return p.unsqueeze(-2), q.unsqueeze(-2)


def slope_generator(width: int, rate: Tensor, atoms: int = 1) -> tuple[Tensor, Tensor]:
    """The generator A = -sum_r rate_r e_{D+R+r} e_{D+r}^T of the (D + 2R) lift (Eq. A4).

    Args:
        width: D.
        rate: (..., R) or (..., 1), non-negative.
        atoms: R.

    Returns:
        The factors p and q of A, each (..., R, D + 2R).
    """
    if rate.dim() and rate.shape[-1] not in (1, atoms):
        raise ValueError(
            f"the last axis of rate is that of the atoms: expected {atoms} (or 1 for all), got {rate.shape[-1]}; "
            "give the rates of tokens the shape (T, 1)"
        )
    if not bool((rate >= 0).all()):
        raise ValueError(
            f"rate must be >= 0, so that the penalty grows with distance, got {rate.min().item():.3g}; "
            "pass its absolute value, or use shift_generator, which allows both signs"
        )
    eye = torch.eye(width + 2 * atoms, dtype=rate.dtype, device=rate.device)
    p = -rate.unsqueeze(-1) * eye[width + atoms :]
    return p, eye[width : width + atoms].expand(p.shape)


def lift_query(q: Tensor, atoms: int = 1) -> Tensor:
    """Append R ones and R zeros to a query: [q; 1; 0] (Eq. A4).

    Args:
        q: (..., D).
        atoms: R.

    Returns:
        (..., D + 2R).
    """
    ones = q.new_ones(*q.shape[:-1], atoms)
    return torch.cat([q, ones, torch.zeros_like(ones)], -1)


def lift_key(k: Tensor, atoms: int = 1) -> Tensor:
    """Append R zeros and R ones to a key: [k; 0; 1], which leaves <q, k> as it is (Eq. A4).

    Args:
        k: (..., D).
        atoms: R.

    Returns:
        (..., D + 2R).
    """
    ones = k.new_ones(*k.shape[:-1], atoms)
    return torch.cat([k, torch.zeros_like(ones), ones], -1)


def path_product(width: int, psi: Tensor) -> Unipotent:
    """The product of I - psi_l E over l, with E = e_{D+2} e_{D+1}^T: I - (sum_l psi_l) E (Eq. A8).

    Args:
        width: D.
        psi: (..., L).

    Returns:
        The product, in GL(D + 2).
    """
    p, q = slope_generator(width, psi.new_ones(1))
    return Unipotent(p, q, psi.sum(-1))


@dataclass(frozen=True, eq=False)
class Joint:
    """Rotation and bias in one matrix of GL(D + 2): blockdiag(exp(m L), I - m w Lambda e e^T) (Eq. A9).

    The nilpotent part is in the *lower left*; in the upper right it would add nothing to the score.

    Args:
        rotation: a rotation of the first D coordinates, such as a `PlaneRotation`.
        unipotent: an element on all D + 2 coordinates that changes only the last two.
        width: D, the number of coordinates that rotate.
    """

    rotation: Any
    unipotent: Unipotent
    width: int

    def apply(self, x: Tensor) -> Tensor:
        rotated = self.rotation.apply(x[..., : self.width].contiguous())
        return self.unipotent.apply(torch.cat([rotated, x[..., self.width :]], -1))

    def compose(self, other: Joint) -> Joint:
        return Joint(
            self.rotation.compose(other.rotation), self.unipotent.compose(other.unipotent), self.width
        )

    def inverse(self) -> Joint:
        return Joint(self.rotation.inverse(), self.unipotent.inverse(), self.width)

    def contragredient(self) -> Joint:
        """The inverse transpose, for keys; it changes only the unipotent part."""
        return Joint(self.rotation, self.unipotent.contragredient(), self.width)

    def as_matrix(self, width: int | None = None) -> Tensor:
        rotation = self.rotation.as_matrix(self.width)
        lifted = self.unipotent.as_matrix()
        batch = torch.broadcast_shapes(rotation.shape[:-2], lifted.shape[:-2])
        out = lifted.expand(*batch, -1, -1).clone()
        out[..., : self.width, : self.width] = rotation
        return out


def score(g_query: Unipotent | Joint, q: Tensor, g_key: Unipotent | Joint, k: Tensor) -> Tensor:
    """The score <G_i q, G_j^-T k> of lifted q and k, which depends on positions by j - i only (Eq. A2).

    Args:
        g_query: G_i.
        q: a lifted query, (..., D + k).
        g_key: G_j.
        k: a lifted key, (..., D + k).

    Returns:
        The score, (...).
    """
    return (g_query.apply(q) * g_key.contragredient().apply(k)).sum(-1)
