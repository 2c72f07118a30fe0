"""Closed-form spectra against torch.linalg on the explicit matrices (Eq. S1-S7)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grape_pe.groups import (
    BasisRotation,
    Joint,
    MixtureRotation,
    PlaneRotation,
    Rank2Rotation,
    Spectrum,
    Unipotent,
    orthogonal_from,
    orthonormal_columns,
    path_product,
    shift_generator,
    slope_generator,
    spectrum,
)

# Absolute tolerances. Eigenvalues of a Jordan block are only good to sqrt(eps) numerically, so those of
# unipotents are checked through the characteristic polynomial instead.
TOL = {"exact": 1e-10, "relative": 1e-10}
LAW = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31 - 1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor, tolerance: float = TOL["exact"]) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=TOL["relative"])


def same_multiset(actual: Tensor, expected: Tensor) -> None:
    """Complex values equal up to order: match each expected one with the nearest left."""
    left = actual.tolist()
    assert len(left) == expected.numel()
    for value in expected.tolist():
        nearest = min(left, key=lambda other: abs(other - value))
        assert abs(nearest - value) < TOL["exact"], (value, left)
        left.remove(nearest)


def check(spectrum: Spectrum, matrix: Tensor, jordan: bool = False) -> None:
    """One matrix, every property. `jordan`: only eigenvalues one, in blocks of size two."""
    width = matrix.shape[-1]
    if jordan:
        assert torch.equal(spectrum.eigenvalues, torch.ones(width, dtype=torch.complex128))
        step = matrix - torch.eye(width, dtype=torch.float64)
        close(step @ step, torch.zeros_like(step), 1e-9)
    else:
        same_multiset(spectrum.eigenvalues, torch.linalg.eigvals(matrix))
    values = torch.linalg.svdvals(matrix)
    close(spectrum.singular_values, values)
    close(spectrum.determinant, torch.linalg.det(matrix), 1e-9)
    if values[-1] > 1e-6:
        torch.testing.assert_close(spectrum.condition, values[0] / values[-1], rtol=1e-8, atol=0.0)
    close(spectrum.radius, spectrum.eigenvalues.abs().max())
    close(spectrum.singular_values, spectrum.singular_values.sort(descending=True).values)


@LAW
@given(width=st.integers(2, 7), n=st.integers(-300, 300), seed=seeds)
def test_rank2(width: int, n: int, seed: int) -> None:
    a, b = normal(2, width, seed=seed)
    eta = torch.tensor(float(n), dtype=torch.float64)
    check(spectrum.of_rank2(a, b, eta), Rank2Rotation(a, b, eta).as_matrix())


@pytest.mark.parametrize("kind", ["parallel", "zero"])
def test_rank2_degenerate_is_the_identity(kind: str) -> None:
    a, eta = normal(5), torch.tensor(3.0, dtype=torch.float64)
    a, b = (a, -2 * a) if kind == "parallel" else (torch.zeros_like(a), a)
    check(spectrum.of_rank2(a, b, eta), torch.eye(5, dtype=torch.float64))


def test_area_of_nearly_parallel_vectors_keeps_its_digits() -> None:
    """sqrt(|a|^2 |b|^2 - <a, b>^2) would lose all of them at 1e-9."""
    a, across = torch.tensor([[3.0, 0.0, 0.0], [0.0, 1e-9, 0.0]], dtype=torch.float64)
    close(spectrum.area(a, 2 * a + across), torch.tensor(3e-9, dtype=torch.float64), 0.0)


@LAW
@given(width=st.integers(1, 7), learned=st.booleans(), seed=seeds)
def test_planes(width: int, learned: bool, seed: int) -> None:
    angle = 30 * normal(1, width // 2, seed=seed)
    planes = PlaneRotation.from_angle(angle, torch.float64)
    basis = orthogonal_from(normal(width, width, seed=seed + 1))
    element = BasisRotation(basis, planes) if learned else planes
    check(spectrum.of_planes(angle[0], width), element.as_matrix(width)[0])


@LAW
@given(width=st.integers(3, 7), rank=st.integers(1, 3), n=st.integers(-300, 300), seed=seeds)
def test_mixture(width: int, rank: int, n: int, seed: int) -> None:
    weight = normal(rank, rank, seed=seed)
    skew, at = weight - weight.mT, torch.tensor([float(n)], dtype=torch.float64)
    element = MixtureRotation(orthonormal_columns(normal(width, rank, seed=seed + 1)), skew, at)
    check(spectrum.of_mixture(skew, at[0], width), element.as_matrix()[0])


@LAW
@given(width=st.integers(1, 5), s=st.floats(-50, 50))
def test_slope(width: int, s: float) -> None:
    e = torch.zeros(width + 2, width + 2, dtype=torch.float64)
    e[width + 1, width] = 1.0
    value = torch.tensor(s, dtype=torch.float64)
    check(spectrum.of_slope(value, width), torch.eye(width + 2, dtype=torch.float64) + s * e, jordan=True)


@pytest.mark.parametrize("s", [0.0, 1e-7, 0.3, -2.0, 1e8])
def test_singular_pair(s: float) -> None:
    larger, smaller = spectrum.singular_pair(torch.tensor(s, dtype=torch.float64))
    assert larger >= 1 >= smaller
    assert abs((larger * smaller).item() - 1) < TOL["exact"]
    square = 1 + s * s / 2 + abs(s) * math.sqrt(1 + s * s / 4)  # Eq. S4
    assert abs(larger.item() ** 2 / square - 1) < TOL["relative"]
    assert abs((larger - smaller).item() - abs(s)) <= TOL["relative"] * max(1.0, abs(s))


@LAW
@given(kind=st.sampled_from(["shift", "slope", "dictionary", "dense"]), s=st.floats(-20, 20), seed=seeds)
def test_nilpotent(kind: str, s: float, seed: int) -> None:
    if kind == "shift":
        p, q = shift_generator(normal(4, seed=seed))
    elif kind == "slope":
        p, q = slope_generator(3, normal(1, seed=seed).abs())
    elif kind == "dictionary":
        p, q = slope_generator(3, normal(2, seed=seed).abs(), atoms=2)
    else:
        p, q = torch.zeros(2, 2, 7, dtype=torch.float64).unbind()
        p[:, :3], q[:, 3:] = normal(2, 3, seed=seed), normal(2, 4, seed=seed + 1)
    element = Unipotent(p, q, torch.tensor(s, dtype=torch.float64))
    check(spectrum.of_nilpotent(element.generator(), element.s), element.as_matrix(), jordan=True)


def test_path_product_has_the_spectrum_of_one_slope() -> None:
    psi = -normal(9).abs()
    check(spectrum.of_slope(-psi.sum(), 4), path_product(4, psi).as_matrix(), jordan=True)


def test_joint() -> None:
    angle, n = normal(1, 2), torch.tensor([3.0], dtype=torch.float64)
    p, q = slope_generator(5, torch.tensor([0.4], dtype=torch.float64))
    element = Joint(PlaneRotation.from_angle(angle, torch.float64), Unipotent(p, q, n), 5)
    whole = spectrum.of_joint(spectrum.of_planes(angle[0], 5), spectrum.of_slope(0.4 * n[0], 0))
    matrix = element.as_matrix()[0]
    same_multiset(whole.eigenvalues, torch.linalg.eigvals(matrix))  # a triangular block: exact
    close(whole.singular_values, torch.linalg.svdvals(matrix))
    close(whole.determinant, torch.linalg.det(matrix))


# PaTH


def factor(beta: Tensor, direction: Tensor) -> Tensor:
    w = direction / direction.norm()
    return torch.eye(w.numel(), dtype=torch.float64) - beta * torch.outer(w, w)


@LAW
@given(width=st.integers(1, 6), beta=st.floats(0, 2), seed=seeds)
def test_householder(width: int, beta: float, seed: int) -> None:
    value = torch.tensor(beta, dtype=torch.float64)
    check(spectrum.of_householder(value, width), factor(value, normal(width, seed=seed)))


@pytest.mark.parametrize("beta", [0.0, 2.0, 0.5, 1.0])
def test_householder_is_orthogonal_at_the_ends_only(beta: float) -> None:
    values = spectrum.of_householder(torch.tensor(beta, dtype=torch.float64), 4).singular_values
    assert torch.equal(values, torch.ones_like(values)) == (beta in (0.0, 2.0))


@LAW
@given(length=st.integers(1, 8), seed=seeds)
def test_aligned_path(length: int, seed: int) -> None:
    beta, w = 2 * torch.sigmoid(4 * normal(length, seed=seed)), normal(4, seed=seed + 1)
    product = torch.eye(4, dtype=torch.float64)
    for value in beta:
        product = product @ factor(value, w)
    check(spectrum.of_aligned_path(beta, 4), product)


@LAW
@given(length=st.integers(1, 8), seed=seeds)
def test_path_bounds(length: int, seed: int) -> None:
    beta = 2 * torch.sigmoid(4 * normal(length, seed=seed))
    product = torch.eye(4, dtype=torch.float64)
    for value, w in zip(beta, normal(length, 4, seed=seed + 1), strict=True):
        product = product @ factor(value, w)
    determinant, low, high = spectrum.path_bounds(beta)
    values = torch.linalg.svdvals(product)
    close(determinant, torch.linalg.det(product))
    assert values[-1] >= low - TOL["exact"] and values[0] <= high + TOL["exact"]
    assert high == 1.0
    # the lower bound is reached when all directions agree
    close(spectrum.of_aligned_path(beta, 4).singular_values[-1], low)


def test_spectra_are_batched() -> None:
    a, b, eta = normal(3, 5), normal(3, 5, seed=1), normal(3, seed=2)
    whole = spectrum.of_rank2(a, b, eta)
    assert whole.eigenvalues.shape == whole.singular_values.shape == (3, 5)
    assert whole.determinant.shape == whole.condition.shape == whole.radius.shape == (3,)
    p, q = slope_generator(2, normal(3, 1).abs())
    unipotent = spectrum.of_nilpotent(Unipotent(p, q, eta).generator(), eta)
    close(unipotent.singular_values[1], spectrum.of_nilpotent(p[1].mT @ q[1], eta[1]).singular_values)
    joint = spectrum.of_joint(whole, spectrum.of_slope(eta, 0))
    assert joint.eigenvalues.shape == (3, 7)
