"""Non-commuting mixtures in a thin subspace, against torch.matrix_exp (Eq. N1-N5)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grape_pe.groups import (
    JointMixtureRotation,
    MixtureRotation,
    orthonormal_columns,
    rank2_generator,
    skew_from_pairs,
)
from grape_pe.groups.mixture import skew_exp_apply

# Absolute tolerances: float64 closed forms, float32 vectors, gradients against matrix_exp's own.
TOL = {"exact": 1e-10, "float32": 2e-5, "gradient": 1e-9}
LAW = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31 - 1)


def expm(x: Tensor) -> Tensor:
    """torch's matrix_exp of two copies: a lone matrix takes an inaccurate path (pytorch#196592)."""
    return torch.linalg.matrix_exp(torch.stack([x, x]))[0]


def close(actual: Tensor, expected: Tensor, tolerance: float = TOL["exact"]) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def skew_part(weight: Tensor) -> Tensor:
    return weight - weight.mT


def skew_of(kind: str, seed: int = 0) -> Tensor:
    """W (4 x 4) whose skew part W - W^T has the named eigenvalues."""
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    zero = torch.zeros(2, 2, dtype=torch.float64)
    turn = torch.linalg.qr(normal(4, 4, seed=seed)).Q
    angles = {"repeated": (0.6, 0.6), "nearly repeated": (0.6, 0.6 + 1e-9), "one plane": (0.8, 0.0)}
    if kind in angles:
        first, second = angles[kind]
        blocks = torch.block_diag(first * quarter, second * quarter)
        return turn @ blocks @ turn.mT / 2
    return {"generic": normal(4, 4, seed=seed), "zero": torch.block_diag(zero, zero)}[kind]


KINDS = ["generic", "repeated", "nearly repeated", "one plane", "zero"]


@LAW
@given(width=st.integers(1, 8), rank=st.integers(1, 5), pairs=st.integers(1, 3), seed=seeds)
def test_mixture_is_matrix_exp(width: int, rank: int, pairs: int, seed: int) -> None:
    rank = min(rank, width)
    frame = orthonormal_columns(normal(width, rank, seed=seed))
    skew = skew_from_pairs(normal(pairs, rank, seed=seed + 1), normal(pairs, rank, seed=seed + 2)) / rank
    n = torch.tensor([0.0, 1.0, -17.0, 211.5], dtype=torch.float64)
    element = MixtureRotation(frame, skew, n)
    matrix = expm(n[:, None, None] * (frame @ skew @ frame.mT))
    x = normal(4, width, seed=seed + 3)
    close(element.as_matrix(), matrix)
    close(element.apply(x), torch.einsum("tde,te->td", matrix, x))
    close(element.apply(x).norm(dim=-1), x.norm(dim=-1))


@LAW
@given(kind=st.sampled_from(KINDS), i=st.integers(-300, 300), j=st.integers(-300, 300), seed=seeds)
def test_mixture_composes_inverts_and_is_relative(kind: str, i: int, j: int, seed: int) -> None:
    frame, skew = orthonormal_columns(normal(6, 4, seed=seed)), skew_part(skew_of(kind, seed))

    def at(n: int) -> MixtureRotation:
        return MixtureRotation(frame, skew, torch.tensor([float(n)], dtype=torch.float64))

    q, k = normal(1, 6, seed=seed + 1), normal(1, 6, seed=seed + 2)
    close(at(i).compose(at(j)).apply(q), at(i).apply(at(j).apply(q)))
    close(at(i).inverse().apply(at(i).apply(q)), q)
    close((at(i).apply(q) * at(j).apply(k)).sum(), (q * at(j - i).apply(k)).sum())


def test_terms_of_a_mixture_overlap_and_do_not_commute() -> None:
    a, b = normal(2, 4), normal(2, 4, seed=1)
    one, two = rank2_generator(a[0], b[0]), rank2_generator(a[1], b[1])
    close(skew_from_pairs(a, b), one + two)
    assert (one @ two - two @ one).abs().max() > 0.1
    product = expm(one) @ expm(two)
    assert (expm(one + two) - product).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [[0.0, 0.7], [-2.0, 3.3]])
def test_gradcheck_everywhere(kind: str, n: list[float]) -> None:
    weight, positions = skew_of(kind).requires_grad_(), torch.tensor(n, dtype=torch.float64).requires_grad_()
    y = normal(2, 4, seed=5).requires_grad_()
    inputs = (y, weight, positions)
    assert torch.autograd.gradcheck(lambda y, w, n: skew_exp_apply(y, skew_part(w), n), inputs)


def test_gradcheck_through_frame_and_pairs() -> None:
    frame, a, b = (t.requires_grad_() for t in (normal(5, 3), normal(2, 3, seed=1), normal(2, 3, seed=2)))
    x, n = normal(2, 5, seed=3).requires_grad_(), torch.tensor([1.0, 2.5], dtype=torch.float64)

    def turn(frame: Tensor, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return MixtureRotation(orthonormal_columns(frame), skew_from_pairs(a, b), n).apply(x)

    assert torch.autograd.gradcheck(turn, (frame, a, b, x))
    assert torch.autograd.gradcheck(turn, (frame, torch.zeros_like(a).requires_grad_(), b, x))
    parallel = (2 * a).detach().requires_grad_()
    assert torch.autograd.gradcheck(turn, (frame, a, parallel, x))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_far_out_agree_with_matrix_exp(kind: str) -> None:
    """Positions of a few hundred, where finite differences are useless (Eq. N4)."""
    weight, n = skew_of(kind).requires_grad_(), torch.tensor([50.0, -300.0], dtype=torch.float64)
    y, g = normal(2, 4, seed=1), normal(2, 4, seed=2)
    (ours,) = torch.autograd.grad(skew_exp_apply(y, skew_part(weight), n), weight, g)
    matrix = expm(n[:, None, None] * skew_part(weight))
    (theirs,) = torch.autograd.grad(torch.einsum("tde,te->td", matrix, y), weight, g)
    close(ours, theirs, TOL["gradient"] * max(1.0, theirs.abs().max().item()))


@pytest.mark.parametrize("layout", ["heads", "batch positions", "one position"])
def test_shapes_and_their_gradients(layout: str) -> None:
    weight = normal(2, 3, 3).requires_grad_()  # a skew matrix for each head
    n = {"heads": normal(4), "batch positions": normal(3, 1, 4), "one position": normal(1)}[layout]
    n = n.requires_grad_()
    frame, x = orthonormal_columns(normal(2, 5, 3, seed=1)), normal(3, 2, 4, 5, seed=2).requires_grad_()
    element = MixtureRotation(frame, skew_part(weight), n)
    y = element.apply(x)
    for b, h, t in ((0, 1, 3), (2, 0, 1)):
        position = n.expand(3, 1, 4)[b, 0, t] if n.dim() > 1 else n.expand(4)[t]
        matrix = expm(position * (frame[h] @ skew_part(weight)[h] @ frame[h].mT))
        close(y[b, h, t], matrix @ x[b, h, t])
    g = normal(*y.shape, seed=3)
    ours = torch.autograd.grad(y, (weight, n, x), g)
    direct = torch.einsum("...de,...e->...d", element.as_matrix(), x)
    for mine, autograd in zip(ours, torch.autograd.grad(direct, (weight, n, x), g), strict=True):
        close(mine, autograd, TOL["gradient"])


def test_one_sequence_at_several_positions() -> None:
    """Fewer axes on x than on the positions: the result, and every gradient, broadcasts."""
    weight, n, x = (t.requires_grad_() for t in (normal(2, 3, 3), normal(3, 1, 4), normal(4, 3, seed=1)))
    y, g = skew_exp_apply(x, skew_part(weight), n), normal(3, 2, 4, 3, seed=2)
    assert y.shape == g.shape
    direct = (expm(n[..., None, None] * skew_part(weight)[:, None]) @ x.unsqueeze(-1)).squeeze(-1)
    close(y, direct)
    inputs = (weight, n, x)
    for ours, theirs in zip(
        torch.autograd.grad(y, inputs, g), torch.autograd.grad(direct, inputs, g), strict=True
    ):
        close(ours, theirs, TOL["gradient"])


def test_float32_vectors_far_out() -> None:
    frame, skew = orthonormal_columns(normal(8, 4)), skew_part(normal(4, 4, seed=1))
    n = torch.tensor([0.0, 4096.0, 2.0**20], dtype=torch.float64)
    x = normal(3, 8, seed=2)
    low = MixtureRotation(frame, skew, n).apply(x.float())
    assert low.dtype == torch.float32
    close(low.double(), MixtureRotation(frame, skew, n).apply(x), TOL["float32"])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_frame_stays_orthonormal_under_any_optimizer(optimizer: type) -> None:
    weight = torch.nn.Parameter(normal(8, 3).float())
    step, target, start = optimizer([weight], lr=0.3), normal(8, 3, seed=1), None
    for _ in range(20):
        frame = orthonormal_columns(weight)
        start = frame.detach() if start is None else start
        step.zero_grad()
        (frame * target).sum().backward()
        step.step()
    frame = orthonormal_columns(weight)
    assert (frame - start).abs().max() > 0.1
    close(frame.mT @ frame, torch.eye(3, dtype=torch.float64))


@LAW
@given(conditioning=st.floats(1.0, 1e7), dtype=st.sampled_from([torch.float32, torch.float64]), seed=seeds)
def test_frame_is_orthonormal_however_conditioned(conditioning: float, dtype: torch.dtype, seed: int) -> None:
    weight = normal(8, 3, seed=seed)
    weight[:, 1] = weight[:, 0] + weight[:, 1] / conditioning
    frame = orthonormal_columns(weight.to(dtype))
    close(frame.mT @ frame, torch.eye(3, dtype=torch.float64))
    triangle = frame.mT @ weight.to(dtype).double()  # W = Q R, R upper with a positive diagonal
    close(triangle.tril(-1), torch.zeros(3, 3, dtype=torch.float64))
    assert (triangle.diagonal() > 0).all()


def test_compose_refuses_another_generator() -> None:
    frame, skew, n = orthonormal_columns(normal(4, 2)), skew_part(normal(2, 2)), torch.ones(1).double()
    with pytest.raises(ValueError, match="same frame and skew"):
        MixtureRotation(frame, skew, n).compose(MixtureRotation(frame, skew.clone(), n))


# Several coordinates at once


@LAW
@given(axes=st.integers(1, 3), seed=seeds)
def test_joint_mixture_is_matrix_exp(axes: int, seed: int) -> None:
    frame, skew = orthonormal_columns(normal(6, 4, seed=seed)), skew_part(normal(axes, 4, 4, seed=seed + 1))
    n, x = 20 * normal(3, axes, seed=seed + 2), normal(3, 6, seed=seed + 3)
    element = JointMixtureRotation(frame, skew, n)
    total = torch.einsum("ta,axy->txy", n, skew)
    matrix = expm(frame @ total @ frame.mT)
    close(element.as_matrix(), matrix)
    close(element.apply(x), torch.einsum("tde,te->td", matrix, x))
    close(element.inverse().as_matrix(), matrix.mT)


def test_joint_mixture_relative_law_holds_only_for_commuting_axes() -> None:
    """Eq. N5: exp(X + Y) is not exp(X) exp(Y), so the score feels the origin unless axes commute."""
    frame, first = orthonormal_columns(normal(6, 4)), skew_part(normal(4, 4, seed=1))
    i, j, shift = (torch.tensor([v], dtype=torch.float64) for v in ([1.0, 2.0], [-0.5, 1.0], [2.0, -1.0]))
    q, k = normal(1, 6, seed=2), normal(1, 6, seed=3)

    def change(second: Tensor) -> float:
        skew = torch.stack([first, second])
        scores = [
            (
                JointMixtureRotation(frame, skew, i + s).apply(q)
                * JointMixtureRotation(frame, skew, j + s).apply(k)
            )
            for s in (torch.zeros_like(shift), shift)
        ]
        return (scores[0].sum() - scores[1].sum()).abs().item()

    assert change(0.3 * first) < TOL["exact"]
    assert change(skew_part(normal(4, 4, seed=4))) > 1e-2


def test_joint_mixture_gradcheck() -> None:
    weight, n = normal(2, 3, 3).requires_grad_(), normal(2, 2, seed=1).requires_grad_()
    x, frame = normal(2, 5, seed=2).requires_grad_(), orthonormal_columns(normal(5, 3, seed=3))
    turn = lambda w, n, x: JointMixtureRotation(frame, skew_part(w), n).apply(x)  # noqa: E731
    assert torch.autograd.gradcheck(turn, (weight, n, x))
    assert torch.autograd.gradcheck(turn, (torch.zeros_like(weight).requires_grad_(), n, x))
