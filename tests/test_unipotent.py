"""Additive logits as unipotent actions, and both families in one, as explicit matrices (Eq. A1-A9)."""

from __future__ import annotations

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
    Unipotent,
    check_dictionary,
    lift_key,
    lift_query,
    orthogonal_from,
    orthonormal_columns,
    path_product,
    score,
    shift_generator,
    slope_generator,
)

# Absolute tolerance of every float64 identity here.
TOL = {"exact": 1e-10}
LAW = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31 - 1)
positions = st.integers(-300, 300)


def expm(x: Tensor) -> Tensor:
    """torch's matrix_exp of two copies: a lone matrix takes an inaccurate path (pytorch#196592)."""
    return torch.linalg.matrix_exp(torch.stack([x, x]))[0]


def close(actual: Tensor, expected: Tensor | float, tolerance: float = TOL["exact"]) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64).expand(actual.shape)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


def generator_of(kind: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """p, q of each generator, on lifted vectors of some width."""
    if kind == "shift":
        return shift_generator(normal(3, seed=seed))
    if kind == "slope":
        return slope_generator(3, normal(1, seed=seed).abs())
    if kind == "dictionary":
        return slope_generator(3, normal(2, seed=seed).abs(), atoms=2)
    p, q = torch.zeros(2, 6, dtype=torch.float64), torch.zeros(2, 6, dtype=torch.float64)
    p[:, :3], q[:, 3:] = normal(2, 3, seed=seed), normal(2, 3, seed=seed + 1)  # dense atoms, apart
    return p, q


GENERATORS = ["shift", "slope", "dictionary", "dense"]


@LAW
@given(kind=st.sampled_from(GENERATORS), i=positions, j=positions, seed=seeds)
def test_unipotent_laws(kind: str, i: int, j: int, seed: int) -> None:
    p, q = generator_of(kind, seed)
    width = p.shape[-1]
    a = Unipotent(p, q, number(1)).generator()
    at = lambda n: Unipotent(p, q, number(n))  # noqa: E731
    eye = torch.eye(width, dtype=torch.float64)
    close(a, sum(torch.outer(x, y) for x, y in zip(p, q, strict=True)))
    close(a @ a, 0.0)  # nilpotent of index 2
    close(at(i).as_matrix(), eye + i * a)  # Eq. A1
    close(at(i).compose(at(j)).as_matrix(), at(i).as_matrix() @ at(j).as_matrix())
    close(at(i).inverse().as_matrix() @ at(i).as_matrix(), eye)
    close(at(i).contragredient().as_matrix(), torch.linalg.inv(at(i).as_matrix()).mT, 1e-8)
    x, y = normal(2, width, seed=seed + 2)
    close(at(i).apply(x), at(i).as_matrix() @ x)
    moved = score(at(i), x, at(j), y)  # contragredient scoring: j - i alone (Eq. A2)
    close(moved, x @ at(i).as_matrix().mT @ at(j).contragredient().as_matrix() @ y)
    close(moved, x @ at(j - i).contragredient().as_matrix() @ y)
    close(moved, score(at(i + 77), x, at(j + 77), y))


@pytest.mark.parametrize("kind", GENERATORS)
def test_unipotent_is_matrix_exp(kind: str) -> None:
    p, q = generator_of(kind)
    s = torch.tensor([0.0, 1.0, -40.0], dtype=torch.float64)
    element = Unipotent(p, q, s)
    close(element.as_matrix(), expm(s[:, None, None] * element.generator()))
    x = normal(3, p.shape[-1])
    close(element.apply(x), torch.einsum("tde,te->td", element.as_matrix(), x))


def test_shift_lift_translates_and_scores_a_signed_slope_and_a_constant() -> None:
    u, q, k = normal(3, 4)
    p, r = shift_generator(u)
    at = lambda n: Unipotent(p, r, number(n))  # noqa: E731
    one = torch.ones(1, dtype=torch.float64)
    close(at(5).apply(torch.cat([q, one])), torch.cat([q + 5 * u, one]))
    # Eq. A3: the score is <q, k> + 1 - (j - i) <u, k>
    close(score(at(3), torch.cat([q, one]), at(11), torch.cat([k, one])), q @ k + 1 - 8 * (u @ k))


@LAW
@given(width=st.integers(1, 6), atoms=st.integers(1, 3), i=positions, j=positions, seed=seeds)
def test_slope_lift_scores_the_rate_times_the_offset(
    width: int, atoms: int, i: int, j: int, seed: int
) -> None:
    rate, (q, k) = normal(atoms, seed=seed).abs(), normal(2, width, seed=seed + 1)
    p, r = slope_generator(width, rate, atoms)
    moved = score(
        Unipotent(p, r, number(i)), lift_query(q, atoms), Unipotent(p, r, number(j)), lift_key(k, atoms)
    )
    close(moved, q @ k + rate.sum() * (j - i))  # Eq. A4; no constant
    explicit = torch.zeros(width + 2 * atoms, width + 2 * atoms, dtype=torch.float64)
    for a in range(atoms):
        explicit[width + atoms + a, width + a] = -rate[a]
    close(Unipotent(p, r, number(1)).generator(), explicit)


def test_rates_for_each_token_broadcast() -> None:
    rate, n = normal(5, 1).abs(), torch.arange(5, dtype=torch.float64)
    p, q = slope_generator(2, rate)
    element, x = Unipotent(p, q, n), normal(5, 4, seed=1)
    close(element.apply(x), torch.einsum("tde,te->td", element.as_matrix(), x))
    close(element.apply(x)[3, 3], x[3, 3] - 3 * rate[3, 0] * x[3, 2])


def test_gated_rates_from_both_ends_make_the_slope_term() -> None:
    """Eq. A5: with Lambda = rate_q + rate_k the relative element scores Lambda (j - i)."""
    rate_q, rate_k, (q, k) = number(0.3), number(0.5), normal(2, 4)
    p, r = slope_generator(4, (rate_q + rate_k).unsqueeze(0))
    relative = Unipotent(p, r, number(2 - 9)).contragredient()
    close(lift_query(q) @ relative.as_matrix() @ lift_key(k), q @ k + 0.8 * (2 - 9))


@LAW
@given(width=st.integers(1, 5), length=st.integers(1, 9), seed=seeds)
def test_path_product_is_the_product_of_its_matrices(width: int, length: int, seed: int) -> None:
    psi = -normal(length, seed=seed).abs()
    e = torch.zeros(width + 2, width + 2, dtype=torch.float64)
    e[width + 1, width] = 1.0
    product = torch.eye(width + 2, dtype=torch.float64)
    for value in psi:
        product = product @ (torch.eye(width + 2, dtype=torch.float64) - value * e)
    element = path_product(width, psi)
    close(element.as_matrix(), product)  # Eq. A8
    q, k = normal(2, width, seed=seed + 1)
    close(lift_query(q) @ element.contragredient().apply(lift_key(k)), q @ k + psi.sum())


def test_forgetting_is_a_path_product_and_a_slope_in_its_own_coordinate() -> None:
    log_f = -normal(8).abs()
    c = -log_f.cumsum(0)  # inclusive (Eq. A7)
    p, r = slope_generator(3, torch.ones(1, dtype=torch.float64))
    q, k = normal(2, 3, seed=1)
    for t in range(8):
        for j in range(t + 1):
            path = log_f[j + 1 : t + 1].sum()
            close(
                score(Unipotent(p, r, c[t]), lift_query(q), Unipotent(p, r, c[j]), lift_key(k)), q @ k + path
            )
            element = path_product(3, log_f[j + 1 : t + 1])
            close(lift_query(q) @ element.contragredient().apply(lift_key(k)), q @ k + path)


# Dictionaries


def test_dictionary_atoms_annihilate_and_commute() -> None:
    p, q = generator_of("dense")
    check_dictionary(p, q)
    atoms = [torch.outer(x, y) for x, y in zip(p, q, strict=True)]
    for one in atoms:
        for two in atoms:
            close(one @ two, 0.0)  # Eq. A6
    product = torch.eye(6, dtype=torch.float64)
    for atom in atoms:
        product = product @ expm(3 * atom)
    close(Unipotent(p, q, number(3)).as_matrix(), product)


def test_check_dictionary_names_the_offending_pair() -> None:
    p, q = generator_of("dense")
    q[1, 0] = 10.0  # now <q_1, p_0> = 10 p_0[0]
    p[0, 0], p[1, 0] = 2.0, 0.0
    with pytest.raises(ValueError, match=r"A_r A_s = 0 .* <q_1, p_0> = 20; .*disjoint coordinates"):
        check_dictionary(p, q)
    total = Unipotent(p, q, number(1)).generator()
    assert (total @ total).abs().max() > 1.0  # and rightly: the sum is not nilpotent
    with pytest.raises(ValueError, match="nan"):
        check_dictionary(torch.full_like(p, float("nan")), q)
    with pytest.raises(ValueError, match="A_r A_s = 0"):  # a batch of dictionaries, one of them bad
        check_dictionary(
            torch.stack([generator_of("dense")[0], p]), torch.stack([generator_of("dense")[1], q])
        )


def test_check_dictionary_is_relative_to_the_size_of_the_atoms() -> None:
    p, q = generator_of("dense")
    q[0, 0] = 1e-9  # rounding, not a violation
    check_dictionary(p, q)
    check_dictionary(1e6 * p, 1e6 * q)
    check_dictionary(torch.zeros_like(p), q)
    with pytest.raises(ValueError, match="nilpotent"):
        check_dictionary(1e-6 * p, p)


def test_slope_generator_refuses() -> None:
    with pytest.raises(ValueError, match=r"rate must be >= 0.* got -0.5; .*absolute value"):
        slope_generator(4, torch.tensor([-0.5]))
    with pytest.raises(ValueError, match="rate must be >= 0"):
        slope_generator(4, torch.tensor([float("nan")]))
    with pytest.raises(ValueError, match=r"expected 1 .* got 3; .*\(T, 1\)"):
        slope_generator(4, torch.ones(3))


def test_compose_refuses_another_generator() -> None:
    p, q = generator_of("slope")
    with pytest.raises(ValueError, match="same tensors p and q"):
        Unipotent(p, q, number(1)).compose(Unipotent(p.clone(), q, number(1)))


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("s", [0.0, 1.7])
def test_gradcheck(kind: str, s: float) -> None:
    p, q = (t.clone().requires_grad_() for t in generator_of(kind))
    n, x = number(s).requires_grad_(), normal(3, p.shape[-1], seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda p, q, n, x: Unipotent(p, q, n).apply(x), (p, q, n, x))
    k = normal(3, p.shape[-1], seed=4)
    lam = lambda p, q, n, x: score(Unipotent(p, q, n), x, Unipotent(p, q, 2 * n), k)  # noqa: E731
    assert torch.autograd.gradcheck(lam, (p, q, n, x))


# The joint action


def rotation_of(kind: str, n: Tensor) -> PlaneRotation | BasisRotation | Rank2Rotation | MixtureRotation:
    """A rotation of width 4 at positions n (T,), always from the same generator."""
    planes = PlaneRotation.from_angle(n.unsqueeze(-1) * normal(2), torch.float64)
    return {
        "planes": planes,
        "basis": BasisRotation(BASIS, planes),
        "rank2": Rank2Rotation(VECTORS[0], VECTORS[1], n),
        "mixture": MixtureRotation(FRAME, SKEW, n),
    }[kind]


BASIS = orthogonal_from(normal(4, 4, seed=1))
VECTORS = normal(2, 4, seed=2).unbind()
FRAME, SKEW = orthonormal_columns(normal(4, 3, seed=3)), normal(3, 3, seed=5) - normal(3, 3, seed=5).mT
SLOPE = slope_generator(4, torch.tensor([0.7], dtype=torch.float64))


def joint(kind: str, n: list[float]) -> Joint:
    at = torch.tensor(n, dtype=torch.float64)
    return Joint(rotation_of(kind, at), Unipotent(*SLOPE, at), 4)


@pytest.mark.parametrize("kind", ["planes", "basis", "rank2", "mixture"])
def test_joint_action(kind: str) -> None:
    i, j = [0.0, 3.0, -20.0], [5.0, 3.0, 111.0]
    first, second = joint(kind, i), joint(kind, j)
    x, matrix = normal(3, 6), first.as_matrix()
    close(matrix[:, :4, :4], rotation_of(kind, torch.tensor(i).double()).as_matrix(4))
    close(matrix[:, 5, 4], -0.7 * torch.tensor(i, dtype=torch.float64))  # lower left
    close(matrix[:, 4, 5], 0.0)
    close(first.apply(x), torch.einsum("tde,te->td", matrix, x))
    close(first.compose(second).as_matrix(), matrix @ second.as_matrix())
    close(first.inverse().as_matrix() @ matrix, torch.eye(6, dtype=torch.float64).expand(3, -1, -1))
    close(first.contragredient().as_matrix(), torch.linalg.inv(matrix).mT)
    # Eq. A9: one action scores the rotated product plus the slope, by j - i alone, with no constant
    q, k = normal(3, 4, seed=6), normal(3, 4, seed=7)
    offset = torch.tensor(j).double() - torch.tensor(i).double()
    turned = torch.einsum("td,tde,te->t", q, rotation_of(kind, offset).as_matrix(4), k)
    close(score(first, lift_query(q), second, lift_key(k)), turned + 0.7 * offset)


def test_joint_matrix_broadcasts_a_single_rotation() -> None:
    rotation = PlaneRotation.from_angle(normal(1, 2), torch.float64)
    many = Joint(rotation, Unipotent(*SLOPE, torch.arange(3).double()), 4)
    assert many.as_matrix().shape == (3, 6, 6)
    x = normal(3, 6)
    close(many.apply(x), torch.einsum("tde,te->td", many.as_matrix(), x))
