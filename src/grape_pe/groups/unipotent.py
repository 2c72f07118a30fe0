"""Additive logits as group actions: unipotent matrices I + s A with A^2 = 0, in GL(D + k).

A = sum_r p_r q_r^T is kept as its two factors and never multiplied out. A query is moved by G(i), a
key by the inverse transpose of G(j): what distorts cancels and a bias linear in the offset remains
(Eq. A1-A9 of docs/math.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Unipotent:
    """exp(s A) = I + s A, with A = sum_r p_r q_r^T of rank R (Eq. A1).

    Args:
        p: (..., R, D).
        q: (..., R, D).
        s: (...).
    """

    p: Tensor
    q: Tensor
    s: Tensor

    def apply(self, x: Tensor) -> Tensor:
        inner = torch.einsum("...rd,...d->...r", self.q, x)
        return x + self.s.unsqueeze(-1) * torch.einsum("...rd,...r->...d", self.p, inner)

    def compose(self, other: Unipotent) -> Unipotent:
        if self.p is not other.p or self.q is not other.q:
            raise ValueError(
                "unipotents compose by adding s only when they share one generator; "
                "put generators that annihilate each other into one dictionary (check_dictionary)"
            )
        return Unipotent(self.p, self.q, self.s + other.s)

    def inverse(self) -> Unipotent:
        return Unipotent(self.p, self.q, -self.s)

    def contragredient(self) -> Unipotent:
        """The inverse transpose, (I + s A)^-T = I - s A^T: how keys move (Eq. A2)."""
        return Unipotent(self.q, self.p, -self.s)

    def generator(self) -> Tensor:
        return self.p.transpose(-1, -2) @ self.q

    def as_matrix(self, width: int | None = None) -> Tensor:
        generator = self.generator()
        eye = torch.eye(generator.shape[-1], dtype=generator.dtype, device=generator.device)
        return eye + self.s[..., None, None] * generator


def check_dictionary(p: Tensor, q: Tensor, tolerance: float = 1e-6) -> None:
    """Raise unless A_r A_s = 0 for all atoms A_r = p_r q_r^T, that is <q_r, p_s> = 0 (Eq. A6).

    Args:
        p: (..., R, D).
        q: (..., R, D).
        tolerance: largest product that counts as zero.
    """
    scale = p.norm(dim=-1).max() * q.norm(dim=-1).max()
    products = (q @ p.transpose(-1, -2)).abs()
    worst = products.max()
    if not worst <= tolerance * scale.clamp_min(1e-30):  # so that NaN is refused too
        r, s = divmod(int(products.flatten().argmax()) % (p.shape[-2] ** 2), p.shape[-2])
        raise ValueError(
            f"a dictionary needs A_r A_s = 0 for all atoms, but <q_{r}, p_{s}> = {worst.item():.3g}; "
            "the sum would not be nilpotent. Give the p's and the q's disjoint coordinates"
        )


def shift_generator(u: Tensor) -> tuple[Tensor, Tensor]:
    """The (D + 1) lift: A = [[0, u], [0, 0]], a translation by u of [x; 1] (Eq. A3).

    Args:
        u: (..., D).
    """
    p = torch.cat([u, u.new_zeros(*u.shape[:-1], 1)], -1)
    q = torch.zeros_like(p)
    q[..., -1] = 1
    return p.unsqueeze(-2), q.unsqueeze(-2)


def slope_generator(width: int, rate: Tensor, atoms: int = 1) -> tuple[Tensor, Tensor]:
    """The (D + 2R) lift: A = -sum_r rate_r e_{D+R+r} e_{D+r}^T (Eq. A4). `rate` is (..., R).

    Args:
        width: D.
        rate: (..., R).
        atoms: R.
    """
    if rate.dim() and rate.shape[-1] not in (1, atoms):
        raise ValueError(
            f"the last axis of rate runs over atoms: expected {atoms} (or 1 for all), got {rate.shape[-1]}; "
            "a rate for each token is (T, 1)"
        )
    if not bool((rate >= 0).all()):
        raise ValueError(
            f"rates must be >= 0 for a penalty that grows with distance, got {rate.min().item():.3g}; "
            "pass its absolute value, or use the signed (D + 1) lift of shift_generator"
        )
    eye = torch.eye(width + 2 * atoms, dtype=rate.dtype, device=rate.device)
    p = -rate.unsqueeze(-1) * eye[width + atoms :]
    return p, eye[width : width + atoms].expand(p.shape)


def lift_query(q: Tensor, atoms: int = 1) -> Tensor:
    """[q; 1; 0] (R ones, then R zeros).

    Args:
        q: (..., D).
        atoms: R.
    """
    ones = q.new_ones(*q.shape[:-1], atoms)
    return torch.cat([q, ones, torch.zeros_like(ones)], -1)


def lift_key(k: Tensor, atoms: int = 1) -> Tensor:
    """[k; 0; 1] (R zeros, then R ones): no constant is added to the plain score.

    Args:
        k: (..., D).
        atoms: R.
    """
    ones = k.new_ones(*k.shape[:-1], atoms)
    return torch.cat([k, torch.zeros_like(ones), ones], -1)


def path_product(width: int, psi: Tensor) -> Unipotent:
    """prod_l (I - psi_l E) = I - (sum_l psi_l) E with E = e_{D+2} e_{D+1}^T (Eq. A8). psi: (..., L).

    Args:
        width: D.
        psi: (..., L).
    """
    p, q = slope_generator(width, psi.new_ones(1))
    return Unipotent(p, q, psi.sum(-1))


class Element(Protocol):
    """What `Joint` asks of a rotation."""

    def apply(self, x: Tensor) -> Tensor: ...

    def inverse(self) -> Any: ...

    def compose(self, other: Any) -> Any: ...

    def as_matrix(self, width: int) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Joint:
    """Rotation and bias as one action: blockdiag(exp(m L), I - m w Lambda e e^T) in GL(D + 2) (Eq. A9).

    The nilpotent sits in the *lower left*; in the upper right it would score zero.

    Args:
        rotation: acts on the first coordinates.
        unipotent: acts on all coordinates and changes the lifted ones only.
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
        """The inverse transpose: a rotation is its own, a unipotent is not."""
        return Joint(self.rotation, self.unipotent.contragredient(), self.width)

    def as_matrix(self, width: int | None = None) -> Tensor:
        rotation = self.rotation.as_matrix(self.width)
        lifted = self.unipotent.as_matrix()
        batch = torch.broadcast_shapes(rotation.shape[:-2], lifted.shape[:-2])
        out = lifted.expand(*batch, -1, -1).clone()
        out[..., : self.width, : self.width] = rotation
        return out


def score(g_query: Unipotent | Joint, q: Tensor, g_key: Unipotent | Joint, k: Tensor) -> Tensor:
    """<G_i q, G_j^-T k> for lifted q and k: depends on j - i alone (Eq. A2).

    Args:
        g_query: G_i.
        q: a lifted query.
        g_key: G_j.
        k: a lifted key.
    """
    return (g_query.apply(q) * g_key.contragredient().apply(k)).sum(-1)
