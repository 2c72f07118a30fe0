"""Commuting rotations against explicit matrices: planes, learned bases, unitary bases (Eq. M3-M9, M11)."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grape_pe.groups import (
    BasisRotation,
    DenseRotation,
    PlaneRotation,
    complex_structure,
    matrix_exp,
    orthogonal_from,
    quarter_turn,
    reduce_angle,
    unitary_from,
)

# Absolute tolerances: float64 closed forms, their float32 counterparts, angles at position 2^20.
TOL = {"exact": 1e-10, "rounding": 1e-14, "float32": 1e-5, "bfloat16": 3e-2, "far": 1e-9}
LAW = settings(max_examples=25, deadline=None)
LAYOUTS = ["half", "interleaved"]
layouts = st.sampled_from(LAYOUTS)
seeds = st.integers(0, 2**31 - 1)


def expm(x: Tensor) -> Tensor:
    """torch's matrix_exp of two copies: a lone matrix takes an inaccurate path (pytorch#196592)."""
    return torch.linalg.matrix_exp(torch.stack([x, x]))[0]


def close(actual: Tensor, expected: Tensor, tolerance: float = TOL["exact"]) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plane_pairs(width: int, layout: str) -> list[tuple[int, int]]:
    m = width // 2
    return [(i, i + m) if layout == "half" else (2 * i, 2 * i + 1) for i in range(m)]


def plane_generator(angle: Tensor, width: int, layout: str) -> Tensor:
    """sum_i angle_i (e_y e_x^T - e_x e_y^T), written entry by entry: its exponential turns by +angle."""
    out = torch.zeros(*angle.shape[:-1], width, width, dtype=torch.float64)
    for i, (x, y) in enumerate(plane_pairs(width, layout)):
        out[..., y, x] = angle[..., i]
        out[..., x, y] = -angle[..., i]
    return out


def test_turn_is_by_plus_theta() -> None:
    theta = torch.tensor([[0.3]], dtype=torch.float64)
    y = PlaneRotation.from_angle(theta, torch.float64).apply(torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    close(y, torch.tensor([[math.cos(0.3), math.sin(0.3)]], dtype=torch.float64))


@LAW
@given(width=st.integers(1, 9), tokens=st.integers(1, 5), layout=layouts, seed=seeds)
def test_planes_are_matrix_exp(width: int, tokens: int, layout: str, seed: int) -> None:
    angle = 50 * normal(tokens, width // 2, seed=seed)
    x = normal(tokens, width, seed=seed + 1)
    element = PlaneRotation.from_angle(angle, torch.float64, layout)
    matrix = expm(plane_generator(angle, width, layout))
    close(element.as_matrix(width), matrix)
    close(element.apply(x), (matrix @ x.unsqueeze(-1)).squeeze(-1))
    close(element.apply(x).norm(dim=-1), x.norm(dim=-1))


@LAW
@given(width=st.integers(1, 8), layout=layouts, seed=seeds)
def test_planes_compose_and_invert(width: int, layout: str, seed: int) -> None:
    first, second = (
        PlaneRotation.from_angle(9 * normal(3, width // 2, seed=seed + i), torch.float64, layout)
        for i in (0, 1)
    )
    product = first.as_matrix(width) @ second.as_matrix(width)
    close(first.compose(second).as_matrix(width), product)
    close(second.compose(first).as_matrix(width), product)
    close(first.inverse().as_matrix(width), first.as_matrix(width).mT)
    close(first.compose(first.inverse()).as_matrix(width), torch.eye(width).double().expand(3, -1, -1))


@LAW
@given(
    width=st.integers(2, 8), layout=layouts, i=st.integers(-300, 300), j=st.integers(-300, 300), seed=seeds
)
def test_planes_keep_the_relative_law(width: int, layout: str, i: int, j: int, seed: int) -> None:
    theta, q, k = (
        normal(width // 2, seed=seed),
        normal(1, width, seed=seed + 1),
        normal(1, width, seed=seed + 2),
    )

    def at(n: int) -> PlaneRotation:
        return PlaneRotation.from_angle(n * theta.unsqueeze(0), torch.float64, layout)

    moved = (at(i).apply(q) * at(j).apply(k)).sum()
    close(moved, (q * at(j - i).apply(k)).sum())


def test_odd_last_coordinate_is_left_alone() -> None:
    x = normal(4, 7)
    for layout in LAYOUTS:
        y = PlaneRotation.from_angle(normal(4, 3, seed=1), torch.float64, layout).apply(x)
        assert torch.equal(y[:, -1], x[:, -1])


def test_width_one_and_one_token() -> None:
    x = normal(1, 1)
    element = PlaneRotation.from_angle(torch.zeros(1, 0, dtype=torch.float64), torch.float64)
    assert torch.equal(element.apply(x), x)
    assert torch.equal(element.as_matrix(1), torch.ones(1, 1, 1, dtype=torch.float64))
    assert PlaneRotation.from_angle(normal(1, 2), torch.float64).apply(normal(1, 4)).shape == (1, 4)


def test_layouts_are_one_rotation_up_to_a_permutation() -> None:
    angle, x = normal(3, 4), normal(3, 8, seed=1)
    order = torch.arange(8).view(2, 4).T.reshape(-1)  # half -> interleaved
    half = PlaneRotation.from_angle(angle, torch.float64, "half").apply(x)
    close(PlaneRotation.from_angle(angle, torch.float64, "interleaved").apply(x[:, order]), half[:, order])


def test_apply_broadcasts_both_ways() -> None:
    angle, x = normal(3, 1, 5, 2), normal(5, 4, seed=1)
    full = PlaneRotation.from_angle(angle, torch.float64).apply(x)
    assert full.shape == (3, 1, 5, 4)
    close(full[2, 0], PlaneRotation.from_angle(angle[2, 0], torch.float64).apply(x))
    many = normal(2, 4, 5, 4, seed=2)
    close(
        PlaneRotation.from_angle(angle[0, 0], torch.float64).apply(many)[1, 3],
        PlaneRotation.from_angle(angle[0, 0], torch.float64).apply(many[1, 3]),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [1, 2, 5, 6])
def test_planes_gradcheck(width: int, layout: str) -> None:
    angle = normal(3, width // 2).requires_grad_()
    x = normal(2, 3, width, seed=1).requires_grad_()

    def turn(x: Tensor, angle: Tensor) -> Tensor:
        return PlaneRotation.from_angle(angle, torch.float64, layout).apply(x)

    assert torch.autograd.gradcheck(turn, (x, angle))
    inverse = lambda x, angle: PlaneRotation.from_angle(angle, torch.float64, layout).inverse().apply(x)  # noqa: E731
    assert torch.autograd.gradcheck(inverse, (x, angle))


def test_derivative_of_a_rotation_is_quarter_turn_of_the_result() -> None:
    angle = normal(1, 1).requires_grad_()
    x, g = normal(1, 2, seed=1), normal(1, 2, seed=2)
    y = PlaneRotation.from_angle(angle, torch.float64).apply(x)
    (slope,) = torch.autograd.grad(y, angle, g)
    close(slope.squeeze(), (g * quarter_turn(y.detach())).sum())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_low_precision_follows_float64(dtype: torch.dtype, tolerance: str, layout: str) -> None:
    angle, x = 1000 * normal(4, 3), normal(4, 7, seed=1)
    low = PlaneRotation.from_angle(angle, dtype, layout).apply(x.to(dtype))
    assert low.dtype == dtype
    full = PlaneRotation.from_angle(angle, torch.float64, layout).apply(x.to(dtype).double())
    close(low.double(), full, TOL[tolerance])


def decimal_turn(angle: Decimal) -> float:
    """An angle reduced to [-pi, pi] in sixty digits."""
    getcontext().prec = 60
    turn = 2 * Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
    rest = angle % turn
    return float(rest - turn if rest > turn / 2 else rest)


@LAW
@given(n=st.integers(-(2**20), 2**20), theta=st.floats(1e-5, 1.0))
def test_far_angles_are_exact(n: int, theta: float) -> None:
    angle = torch.tensor([[n]], dtype=torch.float64) * theta
    exact = decimal_turn(Decimal(n) * Decimal(theta))
    for dtype, tolerance in ((torch.float64, TOL["far"]), (torch.float32, 1e-6)):
        element = PlaneRotation.from_angle(angle, dtype)
        assert abs(element.angle.item()) <= math.pi + 1e-6
        assert abs(element.cos.item() - math.cos(exact)) < tolerance
        assert abs(element.sin.item() - math.sin(exact)) < tolerance


def test_float32_angle_would_be_wrong_far_out() -> None:
    """What Eq. M4 avoids: forming the product in float32 costs 0.03 rad at position 2^20."""
    theta = torch.logspace(0, -4, 256, base=10, dtype=torch.float64)
    n = 2**20 - torch.arange(64).unsqueeze(-1)
    exact, naive = n.double() * theta, n.float() * theta.float()
    assert (exact - naive).abs().max() > 0.01
    close(reduce_angle(exact, torch.float32).double(), torch.atan2(exact.sin(), exact.cos()), 1e-6)


def test_planes_refuse_wrong_width_and_layout() -> None:
    element = PlaneRotation.from_angle(normal(3, 2), torch.float64)
    with pytest.raises(ValueError, match=r"vectors of width 6 need 3 angles, .* got 2"):
        element.apply(normal(3, 6))
    with pytest.raises(ValueError, match="'half' and 'interleaved'"):
        element.compose(PlaneRotation.from_angle(normal(3, 2), torch.float64, "interleaved"))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("width", [4, 5])
def test_second_derivatives(layout: str, width: int) -> None:
    angle, x = normal(3, 2).requires_grad_(), normal(2, 3, width, seed=1).requires_grad_()

    def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        return PlaneRotation.from_angle(angle, torch.float64, layout).apply(x)

    assert torch.autograd.gradgradcheck(turned, (x, angle))
    assert torch.autograd.gradcheck(turned, (x, angle), check_forward_ad=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planes_compile_whole(layout: str) -> None:
    def turn(x: Tensor, angle: Tensor) -> Tensor:
        return PlaneRotation.from_angle(angle, x.dtype, layout).apply(x)

    x, angle = normal(3, 5).requires_grad_(), normal(3, 2, seed=1).requires_grad_()
    compiled = torch.compile(turn, backend="eager", fullgraph=True)(x, angle)
    close(compiled, turn(x, angle))
    g = normal(3, 5, seed=2)
    for ours, eager in zip(
        torch.autograd.grad(compiled, (x, angle), g),
        torch.autograd.grad(turn(x, angle), (x, angle), g),
        strict=True,
    ):
        close(ours, eager)


# Learned planes


@LAW
@given(width=st.integers(1, 7), layout=layouts, seed=seeds)
def test_basis_rotation_is_matrix_exp(width: int, layout: str, seed: int) -> None:
    basis = orthogonal_from(normal(width, width, seed=seed))
    angle, x = 20 * normal(4, width // 2, seed=seed + 1), normal(4, width, seed=seed + 2)
    element = BasisRotation(basis, PlaneRotation.from_angle(angle, torch.float64, layout))
    matrix = expm(basis @ plane_generator(angle, width, layout) @ basis.mT)
    close(element.as_matrix(width), matrix)
    close(element.apply(x), (matrix @ x.unsqueeze(-1)).squeeze(-1))
    close(element.inverse().as_matrix(width), matrix.mT)
    other = BasisRotation(basis, PlaneRotation.from_angle(angle.flip(0), torch.float64, layout))
    close(element.compose(other).as_matrix(width), matrix @ other.as_matrix(width))


def test_basis_per_head_and_scores_in_its_own_coordinates() -> None:
    basis = orthogonal_from(normal(2, 6, 6))
    planes = PlaneRotation.from_angle(normal(5, 3, seed=1), torch.float64)
    element = BasisRotation(basis, planes)
    q, k = normal(3, 2, 5, 6, seed=2), normal(3, 2, 5, 6, seed=3)
    full = element.apply(q) @ element.apply(k).mT
    close(element.apply_in_basis(q) @ element.apply_in_basis(k).mT, full)
    alone = BasisRotation(basis[1], planes)
    close(element.apply(q)[:, 1], alone.apply(q[:, 1]))
    close(element.as_matrix(6)[1], alone.as_matrix(6))


def test_basis_refuses_to_compose_with_another_basis() -> None:
    planes = PlaneRotation.from_angle(normal(3, 2), torch.float64)
    one, two = (BasisRotation(orthogonal_from(normal(4, 4, seed=i)), planes) for i in (0, 1))
    with pytest.raises(ValueError, match="same basis tensor"):
        one.compose(two)


def test_zero_weights_are_the_identity_basis() -> None:
    assert torch.equal(orthogonal_from(torch.zeros(5, 5)), torch.eye(5, dtype=torch.float64))
    for layout in LAYOUTS:
        assert torch.equal(unitary_from(torch.zeros(2, 3, 3), layout), torch.eye(6, dtype=torch.float64))


@pytest.mark.parametrize("size", [1e-4, 1e-3, 0.02, 0.04, 0.0499, 0.3, 2.0])
def test_a_lone_small_matrix_is_exponentiated_exactly(size: float) -> None:
    turn = torch.tensor([[0.0, -size], [size, 0.0]], dtype=torch.float64)
    c, s = math.cos(size), math.sin(size)
    exact = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
    close(matrix_exp(turn), exact, TOL["rounding"])
    close(matrix_exp(turn[None, None]), exact[None, None], TOL["rounding"])
    close(matrix_exp(turn.expand(3, 2, 2)), exact.expand(3, 2, 2), TOL["rounding"])
    for basis in (orthogonal_from(size * normal(4, 4)), unitary_from(size * normal(1, 2, 2, 2))[0]):
        close(basis @ basis.mT, torch.eye(4, dtype=torch.float64), TOL["rounding"])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("kind", ["orthogonal", "half", "interleaved"])
def test_bases_stay_orthogonal_under_any_optimizer(optimizer: type, kind: str) -> None:
    shape = (6, 6) if kind == "orthogonal" else (2, 3, 3)
    weight = torch.nn.Parameter(normal(*shape).float())
    target, step = normal(6, 6, seed=1), optimizer([weight], lr=0.3)
    start = None
    for _ in range(20):
        basis = orthogonal_from(weight) if kind == "orthogonal" else unitary_from(weight, kind)
        start = basis.detach() if start is None else start
        step.zero_grad()
        (basis * target).sum().backward()
        step.step()
    basis = orthogonal_from(weight) if kind == "orthogonal" else unitary_from(weight, kind)
    assert (basis - start).abs().max() > 0.1  # it did move
    close(basis @ basis.mT, torch.eye(6, dtype=torch.float64))
    close(torch.linalg.det(basis), torch.ones((), dtype=torch.float64))


@LAW
@given(m=st.integers(1, 4), layout=layouts, seed=seeds)
def test_unitary_basis_commutes_with_the_quarter_turn(m: int, layout: str, seed: int) -> None:
    basis = unitary_from(normal(2, m, m, seed=seed), layout)
    turn = complex_structure(2 * m, layout, torch.float64)
    close(basis @ turn, turn @ basis)
    close(basis.mT @ basis, torch.eye(2 * m, dtype=torch.float64))
    for x, y in plane_pairs(2 * m, layout):  # the second vector of every plane is J times the first
        close(basis[:, y], quarter_turn(basis[:, x], layout))


def test_a_merely_orthogonal_basis_does_not_commute_with_the_quarter_turn() -> None:
    basis, turn = orthogonal_from(normal(4, 4)), complex_structure(4, dtype=torch.float64)
    assert (basis @ turn - turn @ basis).abs().max() > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_basis_gradcheck(layout: str) -> None:
    weight, unitary = normal(3, 3).requires_grad_(), normal(2, 2, 2, seed=1).requires_grad_()
    angle, x = normal(2, 1, seed=2).requires_grad_(), normal(2, 3, seed=3).requires_grad_()

    def turn(w: Tensor, angle: Tensor, x: Tensor) -> Tensor:
        return BasisRotation(
            orthogonal_from(w), PlaneRotation.from_angle(angle, torch.float64, layout)
        ).apply(x)

    assert torch.autograd.gradcheck(turn, (weight, angle, x))
    assert torch.autograd.gradcheck(turn, (torch.zeros_like(weight).requires_grad_(), angle, x))
    assert torch.autograd.gradcheck(lambda w: unitary_from(w, layout), (unitary,))


def test_dense_rotation_laws() -> None:
    first, second = (DenseRotation(orthogonal_from(normal(3, 5, 5, seed=i))) for i in (0, 1))
    x = normal(3, 5, seed=2)
    close(first.apply(x), torch.einsum("tde,te->td", first.as_matrix(), x))
    close(first.compose(second).apply(x), first.apply(second.apply(x)))
    close(first.inverse().apply(first.apply(x)), x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [1, 2, 5, 6])
def test_quarter_turn_is_the_complex_structure(width: int, layout: str) -> None:
    turn = complex_structure(width, layout, torch.float64)
    x = normal(3, width)
    close(quarter_turn(x, layout), x @ turn.mT)
    square = -torch.eye(width, dtype=torch.float64)
    if width % 2:
        square[-1, -1] = 0
    close(turn @ turn, square)
    close(turn.mT, -turn)


@LAW
@given(axes=st.integers(2, 3), shared=st.booleans(), seed=seeds)
def test_n_dimensional_angles_are_products_over_axes(axes: int, shared: bool, seed: int) -> None:
    """Eq. M11: adding the axes' angles is multiplying their rotations, disjoint planes or shared ones."""
    m = 6
    theta = normal(axes, m, seed=seed)
    if not shared:  # plane i belongs to axis i mod axes
        theta = theta * (torch.arange(m) % axes == torch.arange(axes).unsqueeze(-1))
    n = (10 * normal(2, axes, seed=seed + 1)).round()

    def at(coordinates: Tensor) -> Tensor:
        return PlaneRotation.from_angle((coordinates @ theta).unsqueeze(0), torch.float64).as_matrix(2 * m)[0]

    product = torch.eye(2 * m, dtype=torch.float64)
    for a in range(axes):
        product = product @ expm(n[0, a] * plane_generator(theta[a], 2 * m, "half"))
    close(at(n[0]), product)
    close(at(n[0]).mT @ at(n[1]), at(n[1] - n[0]))
