"""One test for each finding of docs/paper-notes.md: the written form fails, ours holds, in float64."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grape_pe import build
from grape_pe.bias import PathBias, SlopeBias, SlopeTerm
from grape_pe.groups import (
    BasisRotation,
    Joint,
    PlaneRotation,
    Rank2Rotation,
    Unipotent,
    complex_structure,
    lift_key,
    lift_query,
    path_product,
    quarter_turn,
    rank2_generator,
    score,
    shift_generator,
    slope_generator,
    spectrum,
    unitary_from,
)

# What counts as equal, and what counts as plainly different, in float64.
TOL = {"same": 1e-12, "apart": 1e-2}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


def unit(width: int, index: int) -> Tensor:
    return torch.eye(width, dtype=torch.float64)[index]


def expm(x: Tensor) -> Tensor:
    """torch's matrix_exp of two copies: a lone matrix takes an inaccurate path (pytorch#196592)."""
    return torch.linalg.matrix_exp(torch.stack([x, x]))[0]


def same(actual: Tensor, expected: Tensor | float) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64).expand(actual.shape)
    torch.testing.assert_close(actual, expected, atol=TOL["same"], rtol=0.0)


def apart(actual: Tensor, expected: Tensor | float) -> None:
    assert (actual - expected).abs().max() > TOL["apart"]


def turn(theta: float) -> Tensor:
    c, s = math.cos(theta), math.sin(theta)
    return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)


def edge_matrix(width: int) -> Tensor:
    """E = e_{D+2} e_{D+1}^T."""
    return torch.outer(unit(width + 2, width + 1), unit(width + 2, width))


def test_1_the_generator_turns_the_other_way() -> None:
    a, b = normal(2, 5)
    pair, quarter = torch.stack([a, b], -1), turn(math.pi / 2)
    apart(pair @ quarter @ pair.mT, rank2_generator(a, b))
    same(pair @ quarter @ pair.mT, -rank2_generator(a, b))

    theta, n = 0.3, 7
    written = expm(n * theta * rank2_generator(unit(2, 0), unit(2, 1)))
    apart(written, turn(n * theta))
    same(written, turn(-n * theta))
    rope = PlaneRotation.from_angle(torch.full((1, 1), n * theta, dtype=torch.float64), torch.float64)
    same(rope.as_matrix(2)[0], turn(n * theta))
    same(rope.as_matrix(2)[0], Rank2Rotation(unit(2, 0), unit(2, 1), number(-n * theta)).as_matrix())

    vector = normal(6, seed=1)  # L(a, Ja) turns by -|a|^2
    alpha = vector.square().sum()
    moved = Rank2Rotation.from_vector(vector, number(0.2)).apply(vector)
    across = quarter_turn(vector)
    apart(moved, torch.cos(0.2 * alpha) * vector + torch.sin(0.2 * alpha) * across)
    same(moved, torch.cos(0.2 * alpha) * vector - torch.sin(0.2 * alpha) * across)


def test_2_orthogonal_vectors_do_not_make_orthogonal_planes() -> None:
    def generators(vectors: Tensor) -> list[Tensor]:
        return [rank2_generator(a, quarter_turn(a, "interleaved")) for a in vectors]

    # a1 = e1, a2 = e2 are orthogonal, yet span one and the same plane with their quarter turns.
    one, two = generators(torch.eye(4, dtype=torch.float64)[:2])
    same(one, two)
    written = expm(0.3 * one) @ expm(0.5 * two)
    same(written[2:, 2:], torch.eye(2, dtype=torch.float64))  # half of the space is never turned
    rope = spectrum.of_planes(torch.tensor([0.3, 0.5], dtype=torch.float64), 4).eigenvalues
    apart(torch.linalg.eigvals(written).real.sort().values, rope.real.sort().values)

    # Orthogonal vectors in general: the generators do not even commute.
    frame = torch.linalg.qr(normal(4, 4)).Q
    one, two = generators(frame.mT[:2])
    apart(one @ two, two @ one)

    # A unitary basis: orthogonal to every J a_j too, and RoPE in that basis.
    basis = unitary_from(normal(2, 2, 2), "interleaved")
    one, two = generators(basis.mT[0::2])
    same(one @ two, two @ one)
    angle = torch.tensor([[0.3, 0.5]], dtype=torch.float64)
    ours = BasisRotation(basis, PlaneRotation.from_angle(angle, torch.float64, "interleaved")).as_matrix(4)[0]
    same(ours, expm(-0.3 * one) @ expm(-0.5 * two))
    same(torch.linalg.eigvals(ours).real.sort().values, rope.real.sort().values)


def test_3_the_closed_form_needs_eta_outside_and_s_squared_inside() -> None:
    a, b, eta = *normal(2, 5), number(3.0)
    generator, s = rank2_generator(a, b), spectrum.area(a, b)
    z = eta * s
    eye, exact = torch.eye(5, dtype=torch.float64), expm(eta * generator)
    written = eye + z.sin() / z * generator + (1 - z.cos()) / z**2 * generator @ generator
    apart(written, exact)
    same(eye + z.sin() / s * generator + (1 - z.cos()) / s**2 * generator @ generator, exact)
    same(Rank2Rotation(a, b, eta).as_matrix(), exact)

    # At a parallel to b, differentiating through s gives no number; through s^2 the right one.
    along = a.clone().requires_grad_()
    square = along.dot(along) * a.dot(a) * 4 - along.dot(2 * a) ** 2
    (through_s,) = torch.autograd.grad((eta * (square - square.detach()).sqrt()).cos(), along)  # s = 0
    assert not through_s.isfinite().all()
    x, g = normal(1, 5, seed=3), normal(1, 5, seed=4)
    (slope,) = torch.autograd.grad(Rank2Rotation(along, 2 * a, eta).apply(x), along, g)
    free = a.clone().requires_grad_()
    matrix = expm(eta * rank2_generator(free, 2 * a))
    (reference,) = torch.autograd.grad(x @ matrix.mT, free, g)
    torch.testing.assert_close(slope, reference, atol=1e-10, rtol=0.0)


@pytest.mark.parametrize("kind", ["forget", "phase"])
def test_4_prefix_sums_are_inclusive(kind: str) -> None:
    step = normal(7).abs()  # -log f of FoX, or the phase increments
    step = step if kind == "forget" else torch.nn.functional.softplus(step)
    inclusive = step.cumsum(0)
    exclusive = inclusive - step
    wanted = torch.stack([torch.stack([-step[j + 1 : t + 1].sum() for j in range(7)]) for t in range(7)])
    written = exclusive - exclusive.unsqueeze(-1)
    apart(written.tril(), wanted.tril())
    same(written[4, 2], -step[2:4].sum())  # tokens j … t-1: one too early
    c = inclusive.view(1, 1, -1)
    ours = SlopeBias((SlopeTerm(c, c, torch.ones(1, 1, 1, dtype=torch.float64)),)).dense()
    assert ours is not None
    same(ours[0, 0].tril(), wanted.tril())


def test_5_the_forget_factor_has_a_minus() -> None:
    log_f, (q, k) = -normal(5).abs(), normal(2, 3, seed=1)
    e, eye = edge_matrix(3), torch.eye(5, dtype=torch.float64)
    total = log_f.sum()

    def scored(sign: float) -> Tensor:
        product = eye
        for value in log_f:
            product = product @ (eye + sign * value * e)
        return lift_query(q) @ torch.linalg.inv(product).mT @ lift_key(k)

    same(scored(+1.0), q @ k - total)  # as written: a reward for the past
    apart(scored(+1.0), q @ k + total)
    same(scored(-1.0), q @ k + total)
    same(lift_query(q) @ path_product(3, log_f).contragredient().apply(lift_key(k)), q @ k + total)


def test_6_the_joint_nilpotent_sits_in_the_lower_left() -> None:
    m, rate, theta, (q, k) = -6.0, 0.4, 0.3, normal(2, 2)
    rotation = PlaneRotation.from_angle(torch.full((1, 1), m * theta, dtype=torch.float64), torch.float64)
    turned = q @ turn(m * theta) @ k

    written = torch.block_diag(turn(m * theta), torch.tensor([[1.0, m * rate], [0.0, 1.0]]).double())
    scored = lift_query(q) @ torch.linalg.inv(written).mT @ lift_key(k)
    same(scored, turned)  # no bias at all, and no constant either
    apart(scored, turned + m * rate)

    p, r = slope_generator(2, number(rate).unsqueeze(0))
    joint = Joint(rotation, Unipotent(p, r, number(m)), 2)
    same(lift_query(q) @ joint.contragredient().as_matrix()[0] @ lift_key(k), turned + m * rate)
    same(joint.as_matrix()[0, 3, 2], -m * rate)


def test_7_radial_offsets_do_not_add_and_axis_offsets_run_from_query_to_key() -> None:
    i, j, t = normal(3, 3)
    e, eye = edge_matrix(2), torch.eye(4, dtype=torch.float64)

    def element(offset: Tensor) -> Tensor:
        return eye - offset * e

    def radial(x: Tensor, y: Tensor) -> Tensor:
        return (x - y).norm()

    same(radial(t + 5.0, j + 5.0), radial(t, j))  # translation-invariant …
    apart(element(radial(t, j)) @ element(radial(j, i)), element(radial(t, i)))  # … but no composition
    weights = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    same(
        element(weights @ (j - t)) @ element(weights @ (i - j)), element(weights @ (i - t))
    )  # signed sums of coordinates do compose

    # On one axis the template of the additive score is slope * (j - t), a penalty for the past.
    n = torch.arange(4, dtype=torch.float64).view(1, 1, -1)
    dense = SlopeBias((SlopeTerm(n, n, torch.ones(1, 1, 1, dtype=torch.float64)),)).dense()
    assert dense is not None
    written = n[0, 0].unsqueeze(-1) - n[0, 0]  # u_t - u_j put in the place of m
    assert (written.tril() >= 0).all() and written.tril().max() > 0  # a reward that grows with distance
    same(dense[0, 0], -written)
    assert (dense.tril() <= 0).all()


def probes(mode: str, positions: Tensor) -> PathBias:
    """GRAPE-AP's bias by hand, every plane of the probe turned at frequency one (Eq. P3)."""
    probe = normal(1, 2, positions.numel(), 4)
    angle = positions.unsqueeze(-1).expand(-1, 2)
    turned = PlaneRotation.from_angle(angle, torch.float64).apply(probe)
    query = turned if mode == "relative" else probe
    key = probe if mode == "none" else turned
    return PathBias(query, key, torch.full((1, 2, 1), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("mode", ["key", "relative", "none"])
def test_8_a_probe_rotated_on_one_side_depends_on_absolute_positions(mode: str) -> None:
    positions = torch.arange(6, dtype=torch.float64)
    here, there = probes(mode, positions).dense(), probes(mode, positions + 5).dense()
    assert here is not None and there is not None
    if mode == "key":  # as written
        apart(here, there)
    else:
        same(here, there)
    # What turns the key probe is its own absolute position, exp(l J).
    still, bias = probes("none", positions), probes(mode, positions)
    turned = expm(5 * complex_structure(4, dtype=torch.float64)) @ still.probe_k[0, 0, 5]
    same(bias.probe_k[0, 0, 5], still.probe_k[0, 0, 5] if mode == "none" else turned)


def test_9_the_last_edge_belongs_to_the_sum() -> None:
    """Constant edges must be ALiBi. With l = t left out, the query's own predecessor costs nothing."""
    zero = torch.zeros(1, 1, 5, 2, dtype=torch.float64)
    ours = PathBias(zero, zero, torch.ones(1, 1, 1, dtype=torch.float64)).dense()
    assert ours is not None
    distance = (torch.arange(5).unsqueeze(-1) - torch.arange(5)).clamp(min=0).double()
    written = -math.log(2) * (distance - 1).clamp(min=0)  # sum over j < l < t
    slope = -math.log(2) * distance  # g(0) = -log 2 an edge
    apart(written, slope)
    same(ours[0, 0], slope)
    same(written[3, 2], 0.0)
    assert ours[0, 0, 3, 2] < 0


def test_10_the_shift_lift_adds_a_constant_and_a_signed_slope() -> None:
    u, q, k = normal(3, 4)
    one = torch.ones(1, dtype=torch.float64)
    p, r = shift_generator(u)

    def scored(i: float, j: float, key: Tensor) -> Tensor:
        left, right = Unipotent(p, r, number(i)), Unipotent(p, r, number(j))
        return score(left, torch.cat([q, one]), right, torch.cat([key, one]))

    apart(scored(9, 2, k), q @ k + 7 * (u @ k))  # no constant, as one would read it
    same(scored(9, 2, k), q @ k + 1 - (2 - 9) * (u @ k))
    same(scored(4, 4, k), q @ k + 1)
    # The slope has the sign of <u, k>: for one of k, -k the past is rewarded. The (d+2) lift penalises both.
    slopes = torch.stack([scored(9, 2, key) - scored(9, 9, key) for key in (k, -k)])
    assert slopes.min() < 0 < slopes.max()
    p, r = slope_generator(4, (u @ k).abs().unsqueeze(0))
    for key in (k, -k):
        biased = score(Unipotent(p, r, number(9)), lift_query(q), Unipotent(p, r, number(2)), lift_key(key))
        assert biased < q @ key


def test_11_a_learned_norm_after_the_rotation_breaks_the_relative_law() -> None:
    """Score of q at i and k at j, normalised before or after the rotation, with learned weights of both sides."""
    q, k = normal(2, 8)
    weights = normal(2, 8, seed=1).exp()
    frequencies = normal(4, seed=2).exp()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / x.square().mean().sqrt() * weight

    def turned(n: float, x: Tensor) -> Tensor:
        return PlaneRotation.from_angle(n * frequencies, torch.float64).apply(x)

    def after(i: float, j: float, w: Tensor) -> Tensor:
        return norm(turned(i, q), w[0]) @ norm(turned(j, k), w[1])

    def before(i: float, j: float, w: Tensor) -> Tensor:
        return turned(i, norm(q, w[0])) @ turned(j, norm(k, w[1]))

    apart(after(9, 2, weights), after(14, 7, weights))
    same(before(9, 2, weights), before(14, 7, weights))
    # Exact again where W_q W_k commutes with the rotation: one weight for all, or one for each plane (half-split).
    one, plane = torch.ones(2, 8, dtype=torch.float64), weights[:, :4].repeat(1, 2)
    same(after(9, 2, one), before(9, 2, one))
    for w in (one, plane):
        same(after(9, 2, w), after(14, 7, w))


def test_12_a_unipotent_bias_is_a_polynomial_in_the_offset() -> None:
    """Differences of order r vanish for every nilpotent generator of index r; those of the other biases do not."""
    m = torch.arange(12, dtype=torch.float64)
    for r in (2, 3, 4):
        q, k = normal(2, r)
        nilpotent = normal(r, r, seed=1).triu(1)
        basis = torch.linalg.qr(normal(r, r, seed=2)).Q
        nilpotent = basis @ nilpotent @ basis.T  # nilpotent of index r, in another basis
        scores = torch.stack([q @ expm(n * nilpotent).T @ k for n in m])
        size = scores.abs().max()
        same(scores.diff(n=r) / size, 0.0)
        assert scores.diff(n=r - 1).abs().max() > TOL["apart"]
    u, q, k = normal(3, 4)
    lifts = [  # of the paper: linear
        (*shift_generator(u), torch.cat([q, q.new_ones(1)]), torch.cat([k, k.new_ones(1)])),
        (*slope_generator(4, number(0.7).unsqueeze(0)), lift_query(q), lift_key(k)),
    ]
    for p, right, left_q, left_k in lifts:
        at = [score(Unipotent(p, right, n), left_q, Unipotent(p, right, number(0)), left_k) for n in m]
        same(torch.stack(at).diff(n=2), 0.0)
    others = {
        "kerple log": -torch.log1p(m), "kerple power": -(m**0.5), "sandwich": torch.cos(m) + torch.cos(0.1 * m),
        "fire": torch.log1p(m) / math.log(1 + 20),
    }  # fmt: skip
    for bias in others.values():
        for r in (2, 3, 4):
            assert bias.diff(n=r).abs().max() > TOL["apart"]


def test_13_normalised_probes_bound_an_edge() -> None:
    p, other = normal(2, 8)
    unit_p, unit_other = (x / x.square().mean().sqrt() for x in (p, other))
    same(unit_p @ unit_other / 8, torch.cosine_similarity(p, other, dim=0))
    low, high = (torch.nn.functional.logsigmoid(number(z)) for z in (-1, 1))
    assert -1.32 < low < -1.31 and -0.32 < high < -0.31

    def edges(normalize_query: bool) -> Tensor:
        """Costs of one step back for ALiBi's slope of one, in a model whose projection has grown."""
        torch.manual_seed(0)
        enc = build(
            "grape-ap", heads=2, head_dim=4, width=6, slopes=1.0, normalize_query=normalize_query
        ).double()
        with torch.no_grad():
            enc.projection.weight.mul_(50)
        x, q = 3 * normal(1, 40, 6), normal(1, 2, 40, 4)
        return (
            enc(q, q, x=x).bias.dense().diff(dim=-1).tril(-1)[0][:, 1:]
        )  # b(t, j + 1) - b(t, j), negated below

    inside = torch.ones(39, 39, dtype=torch.bool).tril()
    text, code = (-edges(flag)[:, inside] for flag in (True, False))
    assert low - 1e-9 <= text.min() < -1.2 and -0.4 < text.max() <= high + 1e-9
    assert code.min() < 10 * low and code.max() > 0.1 * high


# The pages themselves

ROOT = Path(__file__).parents[1]


def test_every_finding_names_its_test() -> None:
    page = (ROOT / "docs" / "paper-notes.md").read_text()
    assert re.findall(r"^\*Test\.\* `(\w+)`$", page, re.MULTILINE) == sorted(
        (name for name in globals() if re.match(r"test_\d+_", name)), key=lambda name: int(name.split("_")[1])
    )
    assert [int(n) for n in re.findall(r"^## (\d+)\. ", page, re.MULTILINE)] == list(range(1, 14))


def cited(text: str) -> set[str]:
    """Labels after "Eq.": A1, also out of ranges (A1-A4, A1 to A4) and lists (A5, G1)."""
    found: set[str] = set()
    for match in re.findall(r"Eq\. ([A-Z]\d+(?:(?:-|, | and | to )[A-Z]\d+)*)", text):
        labels = re.split(r"(-|, | and | to )", match)
        found.update(labels[0::2])
        for left, joint, right in zip(labels[0::2], labels[1::2], labels[2::2], strict=False):
            if joint in ("-", " to "):
                found.update(f"{left[0]}{n}" for n in range(int(left[1:]), int(right[1:]) + 1))
    return found


def test_every_cited_equation_is_defined_once() -> None:
    page = (ROOT / "docs" / "math.md").read_text()
    defined = re.findall(r"^\\tag\{(\w+)\}$", page, re.MULTILINE)
    assert len(defined) == len(set(defined))
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md"), *(ROOT / "tests").glob("*.py")]
    for source in sources:
        missing = cited(source.read_text()) - set(defined)
        assert not missing, f"{source.name} cites {sorted(missing)}, which docs/math.md does not define"
    assert cited("Eq. A1-A3, G1 and (Eq. M2)") == {"A1", "A2", "A3", "G1", "M2"}
