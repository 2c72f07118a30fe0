"""exp(eta L(a, b)) for every a, b and eta, against torch.matrix_exp (Eq. R1-R5)."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grape_pe.groups import Rank2Rotation, quarter_turn, rank2_generator
from grape_pe.groups.rank2 import sinc_of_square, versine_of_square
from grape_pe.groups.spectrum import area

# Absolute tolerances in float64: closed forms, norms, angles of a million turns, float32 inputs.
TOL = {"exact": 1e-10, "norm": 1e-12, "far": 1e-8, "float32": 1e-5}
LAW = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31 - 1)


def expm(x: Tensor) -> Tensor:
    """torch's matrix_exp of two copies: a lone matrix takes an inaccurate path (pytorch#196592)."""
    return torch.linalg.matrix_exp(torch.stack([x, x]))[0]


def close(actual: Tensor, expected: Tensor, tolerance: float = TOL["exact"]) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pair(kind: str, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Vectors a, b of each kind, scaled so that a position of a few hundred is a few hundred radians."""
    a, b = normal(width, seed=seed) / width**0.5, normal(width, seed=seed + 1) / width**0.5
    return {
        "generic": (a, b),
        "parallel": (a, -1.5 * a),
        "equal": (a, a.clone()),
        "a = 0": (torch.zeros_like(a), b),
        "b = 0": (a, torch.zeros_like(b)),
        "both 0": (torch.zeros_like(a), torch.zeros_like(b)),
        "nearly parallel": (a, 2 * a + 1e-8 * b),
        "tiny": (1e-4 * a, 1e-4 * b),
        "b = Ja": (a, quarter_turn(a)),
    }[kind]


KINDS = ["generic", "parallel", "equal", "a = 0", "b = 0", "both 0", "nearly parallel", "tiny", "b = Ja"]


@LAW
@given(
    kind=st.sampled_from(KINDS),
    width=st.integers(1, 9),
    eta=st.sampled_from([0.0, 1e-9, 0.1, 1.0, -7.0, 300.0]),
    seed=seeds,
)
def test_closed_form_is_matrix_exp(kind: str, width: int, eta: float, seed: int) -> None:
    a, b = pair(kind, width, seed)
    element = Rank2Rotation(a, b, torch.tensor(eta, dtype=torch.float64))
    matrix = expm(eta * rank2_generator(a, b))
    x = normal(3, width, seed=seed + 2)
    close(element.as_matrix(), matrix)
    close(element.apply(x), x @ matrix.mT)


@LAW
@given(kind=st.sampled_from(KINDS), n=st.integers(-300, 300), k=st.integers(-300, 300), seed=seeds)
def test_compose_inverse_and_relative_law(kind: str, n: int, k: int, seed: int) -> None:
    a, b = pair(kind, 6, seed)
    first, second = (Rank2Rotation(a, b, torch.tensor(float(eta), dtype=torch.float64)) for eta in (n, k))
    close(first.compose(second).as_matrix(), first.as_matrix() @ second.as_matrix())
    close(first.inverse().as_matrix(), first.as_matrix().mT)
    close(
        first.inverse().compose(second).as_matrix(),
        Rank2Rotation(a, b, torch.tensor(float(k - n), dtype=torch.float64)).as_matrix(),
    )


def test_identities_of_the_generator() -> None:
    a, b = pair("generic", 5)
    generator, s = rank2_generator(a, b), area(a, b)
    frame, _ = torch.linalg.qr(torch.stack([a, b], -1))
    close(generator, torch.outer(a, b) - torch.outer(b, a))
    close(s.square(), a.dot(a) * b.dot(b) - a.dot(b) ** 2)
    close(generator @ generator, -s.square() * frame @ frame.mT)  # Eq. R2
    close(generator @ generator @ generator, -s.square() * generator)


def test_the_plane_is_turned_by_eta_s_and_the_rest_is_fixed() -> None:
    a, b = pair("generic", 6)
    element = Rank2Rotation(a, b, torch.tensor(0.9, dtype=torch.float64))
    frame, _ = torch.linalg.qr(torch.cat([torch.stack([a, b], -1), normal(6, 4, seed=5)], -1))
    moved = element.apply(frame.mT)
    close(moved[2:], frame.mT[2:])
    close((moved[0] * frame[:, 0]).sum(), torch.cos(0.9 * area(a, b)))


@LAW
@given(scale=st.floats(1e-12, 1e-1), seed=seeds)
def test_nearly_parallel_vectors_still_rotate(scale: float, seed: int) -> None:
    """With eta = 1/s the angle is one radian, and the map must preserve norms whatever s is."""
    a = normal(6, seed=seed)
    b = 2 * a + scale * normal(6, seed=seed + 1)
    element = Rank2Rotation(a, b, 1 / area(a, b))
    x = normal(4, 6, seed=seed + 2)
    close(element.apply(x).norm(dim=-1), x.norm(dim=-1), TOL["norm"])
    close(element.as_matrix() @ element.as_matrix().mT, torch.eye(6, dtype=torch.float64), TOL["norm"])
    close(element.apply(x), x @ element.as_matrix().mT)


def test_huge_angles_of_exact_area() -> None:
    """a = 2 e1, b = 3 e2: eta s is exact in float64, so the result must be too, however large."""
    a, b = torch.zeros(2, 4, dtype=torch.float64).unbind()
    a[0], b[1] = 2.0, 3.0
    for eta in (2.0**20 + 0.5, -(2.0**24) + 1, 1e9):
        matrix = Rank2Rotation(a, b, torch.tensor(eta, dtype=torch.float64)).as_matrix()
        assert abs(matrix[0, 0].item() - math.cos(6 * eta)) < TOL["norm"]
        assert abs(matrix[0, 1].item() - math.sin(6 * eta)) < TOL["norm"]  # turns by -eta s


def test_huge_angles_of_any_area() -> None:
    getcontext().prec = 60
    turn = 2 * Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
    a, b = pair("generic", 5)
    af, bf = ([Fraction(v) for v in vector.tolist()] for vector in (a, b))
    dot = lambda u, v: sum(p * q for p, q in zip(u, v, strict=True))  # noqa: E731
    square = dot(af, af) * dot(bf, bf) - dot(af, bf) ** 2
    s = (Decimal(square.numerator) / Decimal(square.denominator)).sqrt()
    for eta in (2.0**20, 1e6 + 0.25):
        reduced = float((Decimal(eta) * s % turn) / s)  # exp(eta L) = exp((eta mod 2 pi / s) L)
        near = expm(reduced * rank2_generator(a, b))
        far = Rank2Rotation(a, b, torch.tensor(eta, dtype=torch.float64))
        close(far.as_matrix(), near, TOL["far"])
        x = normal(5, seed=3)
        close(far.apply(x), near @ x, TOL["far"])
        close(far.apply(x).norm(), x.norm(), TOL["norm"])


@LAW
@given(width=st.integers(2, 7), layout=st.sampled_from(["half", "interleaved"]), seed=seeds)
def test_b_equal_to_ja_turns_by_minus_eta_norm_squared(width: int, layout: str, seed: int) -> None:
    a, eta = normal(width, seed=seed), torch.tensor(0.4, dtype=torch.float64)
    if width % 2:
        a[-1] = 0.0  # J leaves nothing of an odd last coordinate
    element = Rank2Rotation.from_vector(a, eta, layout)
    close(element.as_matrix(), expm(eta * rank2_generator(a, quarter_turn(a, layout))))
    angle = eta * a.square().sum()
    close(element.apply(a), angle.cos() * a - angle.sin() * quarter_turn(a, layout))  # Eq. R5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eta", [0.0, 0.7, -3.0])
def test_gradcheck_everywhere(kind: str, eta: float) -> None:
    a, b = (v.clone().requires_grad_() for v in pair(kind, 4))
    n = torch.tensor([eta, 2 * eta + 0.1], dtype=torch.float64).requires_grad_()
    x = normal(2, 4, seed=7).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b, n, x: Rank2Rotation(a, b, n).apply(x), (a, b, n, x))
    assert torch.autograd.gradcheck(lambda a, b, n: Rank2Rotation(a, b, n[0]).as_matrix(), (a, b, n))


def test_gradcheck_with_b_tied_to_a() -> None:
    a, n, x = (t.requires_grad_() for t in (normal(4), normal(3, seed=1), normal(3, 4, seed=2)))
    assert torch.autograd.gradcheck(lambda a, n, x: Rank2Rotation.from_vector(a, n).apply(x), (a, n, x))
    zero = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, n, x: Rank2Rotation.from_vector(a, n).apply(x), (zero, n, x))


def test_gradients_are_finite_and_right_for_tiny_vectors() -> None:
    """The derivative at a -> 0 is eta L(da, b) x: finite, and reached smoothly from every side."""
    b, x, g = normal(4, seed=1), normal(1, 4, seed=2), normal(1, 4, seed=3)
    expected = g[0] * b.dot(x[0]) - x[0] * b.dot(g[0])
    for size in (0.0, 1e-30, 1e-12, 1e-9):
        a = (size * normal(4)).requires_grad_()
        (slope,) = torch.autograd.grad(Rank2Rotation(a, b, torch.ones(1, dtype=torch.float64)).apply(x), a, g)
        close(slope, expected, 1e-7)


def test_a_plane_for_each_token_or_shared() -> None:
    a, b, eta, x = normal(5, 6), normal(5, 6, seed=1), normal(5, seed=2), normal(2, 5, 6, seed=3)
    each = Rank2Rotation(a, b, eta)
    close(each.apply(x), torch.einsum("tde,bte->btd", each.as_matrix(), x))
    shared = Rank2Rotation(a[:1], b[:1], eta)
    close(shared.apply(x), torch.einsum("tde,bte->btd", shared.as_matrix(), x))
    heads = Rank2Rotation(a[:2].unsqueeze(1), b[:2].unsqueeze(1), eta.expand(2, 5))
    tokens = normal(3, 2, 5, 6, seed=4)
    close(heads.apply(tokens), torch.einsum("htde,bhte->bhtd", heads.as_matrix(), tokens))
    one = heads.apply(tokens[0, 0, 0])  # one vector seen by every plane
    close(one, torch.einsum("htde,e->htd", heads.as_matrix(), tokens[0, 0, 0]))


def test_float32_vectors_with_float64_scalars() -> None:
    a, b = pair("generic", 8)
    n = torch.arange(0, 300, 7, dtype=torch.float64)
    x = normal(n.numel(), 8, seed=2)
    low = Rank2Rotation(a, b, n).apply(x.float())
    assert low.dtype == torch.float32
    close(low.double(), Rank2Rotation(a, b, n).apply(x), TOL["float32"])


def test_compose_refuses_another_plane() -> None:
    a, b, eta = normal(4), normal(4, seed=1), torch.ones((), dtype=torch.float64)
    with pytest.raises(ValueError, match="same tensors a and b"):
        Rank2Rotation(a, b, eta).compose(Rank2Rotation(a, b.clone(), eta))


@pytest.mark.parametrize("z", [0.0, 1e-12, 1e-3, 0.0999, 0.1, 0.1001, 1.0, 3.0, 50.0])
def test_series_meet_the_closed_forms(z: float) -> None:
    u = torch.tensor(z * z, dtype=torch.float64)
    sinc = math.sin(z) / z if z else 1.0
    versine = 2 * math.sin(z / 2) ** 2 / z**2 if z else 0.5
    assert abs(sinc_of_square(u).item() - sinc) < 1e-15
    assert abs(versine_of_square(u).item() - versine) < 1e-15
    u.requires_grad_()
    assert torch.autograd.gradcheck(sinc_of_square, (u + 1e-3,))
    assert torch.autograd.gradcheck(versine_of_square, (u + 1e-3,))
