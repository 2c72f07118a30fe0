"""Closed-form eigenvalues and singular values of the group elements, and of PaTH's factors for comparison.

Each function returns a `Spectrum` of a (..., D, D) matrix (Eq. S1-S7 of docs/math.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenvalues and singular values of a matrix, and what follows from them.

    Args:
        eigenvalues: (..., D), complex.
        singular_values: (..., D), largest first.
    """

    eigenvalues: Tensor
    singular_values: Tensor

    @property
    def determinant(self) -> Tensor:
        """The determinant, (...)."""
        return self.eigenvalues.prod(-1).real

    @property
    def condition(self) -> Tensor:
        """The condition number: largest over smallest singular value, (...)."""
        return self.singular_values[..., 0] / self.singular_values[..., -1]

    @property
    def radius(self) -> Tensor:
        """The spectral radius: the largest absolute eigenvalue, (...)."""
        return self.eigenvalues.abs().amax(-1)


def of_planes(angle: Tensor, width: int) -> Spectrum:
    """The spectrum of a rotation by angle_i in plane i, in any basis: e^(+-i angle), and ones (Eq. S2).

    Args:
        angle: (..., m), one for each plane.
        width: D.
    """
    phase = torch.polar(torch.ones_like(angle), angle)
    pairs = torch.cat([phase, phase.conj()], -1)
    rest = torch.ones(*angle.shape[:-1], width - pairs.shape[-1], dtype=pairs.dtype, device=angle.device)
    return Spectrum(torch.cat([pairs, rest], -1), angle.new_ones(*angle.shape[:-1], width))


def of_rank2(a: Tensor, b: Tensor, eta: Tensor) -> Spectrum:
    """The spectrum of exp(eta L(a, b)): e^(+-i eta s) and ones, with s the area spanned by a and b (Eq. S1).

    Args:
        a: (..., D).
        b: (..., D).
        eta: (...).
    """
    return of_planes((eta * area(a, b)).unsqueeze(-1), a.shape[-1])


def area(a: Tensor, b: Tensor) -> Tensor:
    """The area spanned by a and b: sqrt(|a|^2 |b|^2 - <a, b>^2)."""
    alpha = a.square().sum(-1)
    inner = (a * b).sum(-1)
    safe = torch.where(alpha > 0, alpha, 1.0)
    across = b - (inner / safe).unsqueeze(-1) * a
    return alpha.sqrt() * across.norm(dim=-1)


def of_mixture(skew: Tensor, n: Tensor, width: int) -> Spectrum:
    """The spectrum of exp(n E L_r E^T): that of exp(n L_r), and ones (Eq. S3).

    Args:
        skew: L_r, (..., r, r).
        n: (...).
        width: D.
    """
    mu = torch.linalg.eigvalsh(1j * skew)
    modes = torch.exp(-1j * n.unsqueeze(-1) * mu)
    rest = torch.ones(*modes.shape[:-1], width - modes.shape[-1], dtype=modes.dtype, device=modes.device)
    eigenvalues = torch.cat([modes, rest], -1)
    return Spectrum(eigenvalues, torch.ones_like(eigenvalues.real))


def singular_pair(s: Tensor) -> tuple[Tensor, Tensor]:
    """The two singular values of I + s e_p e_q^T that are not 1; their product is 1 (Eq. S4).

    Args:
        s: any shape.

    Returns:
        The larger and the smaller one, each of the shape of s.
    """
    half = s.abs() / 2
    larger = half + torch.sqrt(1 + half.square())
    return larger, 1 / larger


def of_nilpotent(generator: Tensor, s: Tensor) -> Spectrum:
    """The spectrum of I + s A for any A with A^2 = 0: each singular value of A gives a pair (Eq. S5).

    For the shift and slope lifts, dictionaries and path products; `of_joint` adds a rotation.

    Args:
        generator: A, (..., D, D).
        s: (...).
    """
    width = generator.shape[-1]
    sigma = torch.linalg.svdvals(generator)[..., : width // 2] * s.abs().unsqueeze(-1)
    larger, smaller = singular_pair(sigma)
    rest = torch.ones(
        *larger.shape[:-1], width - 2 * larger.shape[-1], dtype=larger.dtype, device=larger.device
    )
    values = torch.cat([larger, rest, smaller], -1).sort(-1, descending=True).values
    return Spectrum(torch.ones_like(values).to(torch.complex128), values)


def of_slope(s: Tensor, width: int) -> Spectrum:
    """The spectrum of I + s e_{D+2} e_{D+1}^T: ALiBi, FoX (s = -b), GRAPE-A and GRAPE-AP (Eq. S4).

    Args:
        s: any shape.
        width: D.
    """
    larger, smaller = singular_pair(s)
    rest = larger.new_ones(*larger.shape, width)
    values = torch.cat([larger.unsqueeze(-1), rest, smaller.unsqueeze(-1)], -1)
    return Spectrum(torch.ones_like(values).to(torch.complex128), values)


def of_joint(rotation: Spectrum, unipotent: Spectrum) -> Spectrum:
    """The spectrum of a block-diagonal matrix of a rotation and a slope (Eq. S6).

    Args:
        rotation: spectrum of the rotation, on D coordinates.
        unipotent: spectrum of the slope, on the two lifted coordinates.
    """
    eigenvalues = torch.cat([rotation.eigenvalues, unipotent.eigenvalues], -1)
    values = torch.cat([rotation.singular_values, unipotent.singular_values], -1)
    return Spectrum(eigenvalues, values.sort(-1, descending=True).values)


def of_householder(beta: Tensor, width: int) -> Spectrum:
    """The spectrum of PaTH's factor I - beta w w^T with |w| = 1; orthogonal only if beta is 0 or 2 (Eq. S7).

    Args:
        beta: any shape.
        width: D.
    """
    return _one_direction(1 - beta, width)


def of_aligned_path(beta: Tensor, width: int) -> Spectrum:
    """The spectrum of a product of PaTH factors with one direction w: it multiplies w by prod(1 - beta).

    Args:
        beta: (..., L), one for each factor.
        width: D.
    """
    return _one_direction((1 - beta).prod(-1), width)


def path_bounds(beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds for a product of PaTH factors with any directions (Eq. S7).

    Args:
        beta: (..., L) in [0, 2], one for each factor.

    Returns:
        The determinant, a lower bound of the smallest and an upper bound of the largest singular value, each (...).
    """
    factor = 1 - beta
    smallest = factor.abs().clamp(max=1).prod(-1)
    return factor.prod(-1), smallest, factor.abs().clamp(min=1).prod(-1)


def _one_direction(value: Tensor, width: int) -> Spectrum:
    rest = value.new_ones(*value.shape, width - 1)
    eigenvalues = torch.cat([value.unsqueeze(-1), rest], -1)
    return Spectrum(eigenvalues.to(torch.complex128), eigenvalues.abs().sort(-1, descending=True).values)
