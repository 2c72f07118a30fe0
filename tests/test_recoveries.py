"""What is recovered exactly: RoPE, ALiBi, FoX and NoPE as special cases, and the explicit lifts."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import grape_pe as grape
from grape_pe import groups, testing
from grape_pe.encodings.additive import alibi_slopes, project
from grape_pe.encodings.gated_cumsum import softplus_inverse

SHAPE = {"heads": 4, "head_dim": 16, "width": 12}
EXACT = testing.TOL[torch.float64]
FLOAT32 = 1e-6


def bias_of(enc, data):
    return enc(data.q, data.k, x=data.x, v=data.v, positions=data.positions).bias.dense()


# RoPE ------------------------------------------------------------------------------------------


def test_rope_is_grape_m_with_the_fixed_spectrum_bit_for_bit():
    rope, learned = grape.build("rope", **SHAPE), grape.build("grape-m", **SHAPE)
    data = testing.sample(rope)
    assert torch.equal(testing.scores(rope, data), testing.scores(learned, data))


def huggingface_llama(head_dim: int, heads: int):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=heads * head_dim, num_attention_heads=heads, max_position_embeddings=2**20
    )
    return llama.LlamaRotaryEmbedding(config), llama.apply_rotary_pos_emb


def test_rope_is_huggingface_llamas_rotary():
    """Their frequencies and their application, with their angles formed exactly: equal to 1e-6."""
    rotary, apply = huggingface_llama(head_dim=64, heads=2)
    enc = grape.build("rope", heads=2, head_dim=64)
    assert torch.equal(enc.frequencies()[0, 0].float(), rotary.inv_freq)
    data = testing.sample(enc, tokens=4097)
    angle = torch.arange(4097).double()[:, None] * rotary.inv_freq.double()
    cos, sin = (torch.cat([f(angle)] * 2, -1).float()[None] for f in (torch.cos, torch.sin))
    q, k = apply(data.q, data.k, cos, sin)
    code = enc(data.q, data.k)
    assert (code.q - q).abs().max() < FLOAT32 * data.q.abs().max()
    assert (code.k - k).abs().max() < FLOAT32 * data.k.abs().max()


def test_huggingface_llamas_own_angles_differ_only_by_their_rounding():
    """Run as it is, theirs rounds angles to float32: half a unit in the last place of the angle."""
    rotary, apply = huggingface_llama(head_dim=64, heads=2)
    enc = grape.build("rope", heads=2, head_dim=64)
    data = testing.sample(enc, tokens=4097)
    q, _ = apply(data.q, data.k, *rotary(data.q, torch.arange(4097)[None]))
    worst = (enc(data.q, data.k).q - q).abs().max()
    rounding = 4096 * torch.finfo(torch.float32).eps / 2
    assert worst < 2 * rounding * data.q.abs().max()


def test_the_relative_law_holds_at_two_to_the_twenty_where_theirs_is_lost():
    rotary, apply = huggingface_llama(head_dim=64, heads=2)
    enc = grape.build("rope", heads=2, head_dim=64)
    data = testing.sample(enc, tokens=32)

    def theirs(start: int):
        q, k = apply(data.q, data.k, *rotary(data.q, torch.arange(start, start + 32)[None]))
        return q.double() @ k.double().transpose(-1, -2) / 8

    testing.assert_relative_law(enc, data, shift=2**20)
    assert (theirs(2**20) - theirs(0)).abs().max() > 1e-3


def test_layouts_are_interchangeable_through_the_weight_converter():
    torch.manual_seed(0)
    half, inter = (
        grape.build("rope", heads=3, head_dim=8, layout=layout) for layout in ("half", "interleaved")
    )
    w_q, w_k, x = (torch.randn(*size, dtype=torch.float64) for size in ((24, 10), (24, 10), (2, 7, 10)))

    def logits(enc, q_weight, k_weight):
        q, k = ((x @ w.T).view(2, 7, 3, 8).transpose(1, 2) for w in (q_weight, k_weight))
        code = enc(q, k)
        return code.q @ code.k.transpose(-1, -2)

    converted = [grape.convert_layout(w, 8, to="interleaved") for w in (w_q, w_k)]
    assert (logits(inter, *converted) - logits(half, w_q, w_k)).abs().max() < EXACT
    assert torch.equal(grape.convert_layout(converted[0], 8, to="half"), w_q)


def test_basis_and_plane_start_as_rope():
    rope, basis = grape.build("rope", **SHAPE), grape.build("grape-m-basis", **SHAPE)
    unitary = grape.build("grape-m-basis", basis="unitary", **SHAPE)
    data = testing.sample(rope)
    for enc in (basis, unitary):
        testing.assert_close(testing.scores(enc, data), testing.scores(rope, data), torch.float32, "basis")
    plane = grape.build("grape-m-plane", heads=1, head_dim=16, frequency=0.5)
    with torch.no_grad():
        plane.a.copy_(torch.eye(16)[:1])
        plane.b.copy_(torch.eye(16)[8:9])
    one = grape.build("rope", heads=1, head_dim=16, spectrum=[0.5] + [0.0] * 7)
    data = testing.sample(one)
    testing.assert_close(testing.scores(plane, data), testing.scores(one, data), torch.float32, "plane")


def test_mixture_is_the_exponential_of_its_generator():
    torch.manual_seed(0)
    enc = grape.build("grape-m-mix", heads=1, head_dim=12, rank=6).double()
    frame = groups.orthonormal_columns(enc.frame)[0]
    generator = frame @ groups.skew_from_pairs(*enc.pairs)[0, 0] @ frame.T
    data = testing.sample(enc, tokens=200)
    matrices = torch.linalg.matrix_exp(torch.arange(200.0).double()[:, None, None] * generator)
    want = torch.einsum("tde,bhte->bhtd", matrices, data.q)
    assert (enc(data.q, data.k).q - want).abs().max() < EXACT


def test_nope_is_the_zero_generator():
    nope, zero = grape.build("nope", **SHAPE), grape.build("rope", spectrum=[0.0] * 8, **SHAPE)
    data = testing.sample(zero)
    assert torch.equal(testing.scores(nope, data), testing.scores(zero, data))
    assert nope(data.q, data.k).q is data.q


# ALiBi and FoX ---------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 10, 12, 16, 17])
def test_alibi_slopes_follow_the_published_recipe(heads: int):
    slopes = alibi_slopes(heads)
    assert len(slopes) == heads and all(s > 0 for s in slopes)
    power = 2 ** int(math.log2(heads))
    assert slopes[:power] == [2 ** (-8 * (i + 1) / power) for i in range(power)]
    # the extra heads take every other slope of the next power: ALiBi's own code, written out
    more = [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * (heads - power), 2)]
    assert slopes[power:] == more


def test_alibi_is_grape_a_with_constant_gates():
    alibi, gated = (grape.build(name, **SHAPE).double() for name in ("alibi", "grape-a-q"))
    with torch.no_grad():  # v = 0 makes the gate log 2; the strength makes up for it
        gated.v.zero_()
        gated.strength.fill_(softplus_inverse(1 / math.log(2)))
    data = testing.sample(gated)
    assert (bias_of(gated, data) - bias_of(alibi, data)).abs().max() < EXACT


def test_alibi_is_fox_with_a_constant_forget_gate():
    alibi, fox = (grape.build(name, **SHAPE).double() for name in ("alibi", "fox"))
    with torch.no_grad():  # log f = -slope  <=>  b = -log(e^slope - 1)
        fox.clock.projection.weight.zero_()
        fox.clock.projection.bias.copy_(-torch.expm1(alibi.slopes).log())
    data = testing.sample(fox)
    assert (bias_of(fox, data) - bias_of(alibi, data)).abs().max() < EXACT


def test_phase_modulated_slope_starts_as_alibi():
    alibi, phase = (grape.build(name, **SHAPE).double() for name in ("alibi", "grape-a-phase"))
    phase.reset_parameters()  # the initial bias, now in float64
    data = testing.sample(phase)
    assert (bias_of(phase, data) - bias_of(alibi, data)).abs().max() < EXACT


def forget_logs(fox, data):
    """log f, straight from the definition."""
    linear = fox.clock.projection
    return torch.sigmoid(F.linear(data.x, linear.weight, linear.bias)).log().transpose(1, 2)


def test_fox_is_its_definition_a_path_integral_and_a_product_of_matrices():
    torch.manual_seed(0)
    fox = grape.build("fox", **SHAPE).double()
    data = testing.sample(fox, batch=1, tokens=6)
    log_f, got = forget_logs(fox, data), bias_of(fox, data)
    d = SHAPE["head_dim"]
    for t in range(6):
        for j in range(t + 1):
            edges = log_f[:, :, j + 1 : t + 1]
            assert (got[:, :, t, j] - edges.sum(-1)).abs().max() < EXACT  # endpoint-independent path
            product = torch.eye(d + 2, dtype=torch.float64)
            for edge in edges[0, 0]:  # prod (I - log f_l E)
                product = groups.path_product(d, edge[None]).as_matrix() @ product
            q, k = groups.lift_query(data.q[0, 0, t]), groups.lift_key(data.k[0, 0, j])
            explicit = q @ torch.linalg.inv(product).T @ k
            assert (explicit - data.q[0, 0, t] @ data.k[0, 0, j] - got[0, 0, t, j]).abs() < EXACT


# The formulas of the gated forms ------------------------------------------------------------------


def test_query_key_gated_slope_is_its_formula():
    torch.manual_seed(0)
    enc = grape.build("grape-a-qk", kv_heads=2, **SHAPE).double()
    data = testing.sample(enc)
    v, u = F.normalize(enc.v[:, 0], dim=-1), F.normalize(enc.u[:, 0], dim=-1)
    for h, t, j in ((0, 5, 2), (3, 11, 0), (1, 4, 4)):
        gate = F.softplus(v[h] @ data.q[1, h, t] / 4) + F.softplus(u[h // 2] @ data.k[1, h // 2, j] / 4)
        want = (j - t) * alibi_slopes(4)[h] * F.softplus(enc.strength[h, 0]) * gate
        assert (bias_of(enc, data)[1, h, t, j] - want).abs() < EXACT


def test_shift_lift_scores_a_signed_slope_and_a_constant():
    torch.manual_seed(0)
    enc = grape.build("grape-a-shift", **SHAPE).double()
    data = testing.sample(enc)
    t, j, d = 7, 3, 16
    omega = alibi_slopes(4)[0]
    u = omega * F.normalize(enc.u[0, 0], dim=-1) / 4
    p, q = groups.shift_generator(u)
    at = [groups.Unipotent(p, q, torch.tensor(float(n)).double()) for n in (t, j)]
    one = torch.ones(1, dtype=torch.float64)
    lifted = [torch.cat([x, one]) for x in (data.q[0, 0, t], data.k[0, 0, j])]
    explicit = groups.score(at[0], lifted[0], at[1], lifted[1])
    want = data.q[0, 0, t] @ data.k[0, 0, j] + 1 + bias_of(enc, data)[0, 0, t, j]
    assert (explicit - want).abs() < EXACT
    assert project(data.k, enc.u).shape == (2, 4, 12, 1) and d == data.q.shape[-1]


def test_dictionary_is_a_sum_of_annihilating_atoms():
    """Each atom in coordinates of its own: the explicit GL(D + 2R) matrices score the whole bias."""
    torch.manual_seed(0)
    enc = grape.build("grape-a-dict", atoms=3, **SHAPE).double()
    with torch.no_grad():
        enc.strength.normal_()
    data = testing.sample(enc)
    t, j, h = 9, 2, 1
    gates = F.softplus(project(data.q, enc.v))[0, h, t] + F.softplus(project(data.k, enc.u))[0, h, j]
    rate = (alibi_slopes(4)[h] * F.softplus(enc.strength[h]) * gates).detach()
    p, q = groups.slope_generator(16, rate, atoms=3)
    groups.check_dictionary(p, q)
    move = groups.Unipotent(p, q, torch.tensor(float(j - t)).double())
    explicit = (
        groups.lift_query(data.q[0, h, t], 3)
        @ torch.linalg.inv(move.as_matrix()).T
        @ groups.lift_key(data.k[0, h, j], 3)
    )
    want = data.q[0, h, t] @ data.k[0, h, j] + bias_of(enc, data)[0, h, t, j]
    assert (explicit - want).abs() < EXACT


def test_rotation_and_bias_are_one_action_of_the_joint_group():
    torch.manual_seed(0)
    enc = grape.build("grape-m+grape-a-qk", heads=1, head_dim=6).double()
    data = testing.sample(enc)
    t, j = 8, 3
    term = enc(data.q, data.k, positions=data.positions).bias.terms[0]
    rate = (term.rate_q[0, 0, t] + term.rate_k[0, 0, j]).detach().view(1)
    p, q = groups.slope_generator(6, rate)
    theta = enc.parts["grape-m"].frequencies()[0, 0]

    def joint(n: int):
        turn = groups.PlaneRotation.from_angle(n * theta, torch.float64)
        return groups.Joint(turn, groups.Unipotent(p, q, torch.tensor(float(n)).double()), 6)

    lifted = groups.lift_query(data.q[0, 0, t]), groups.lift_key(data.k[0, 0, j])
    offset = lifted[0] @ torch.linalg.inv(joint(j - t).as_matrix()).T @ lifted[1]
    moved = groups.score(joint(t), lifted[0], joint(j), lifted[1])
    code = enc(data.q, data.k, positions=data.positions)
    want = code.q[0, 0, t] @ code.k[0, 0, j] + code.bias.dense()[0, 0, t, j]
    assert (offset - want).abs() < EXACT and (moved - want).abs() < EXACT


# GRAPE-AP and PaTH ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rotation", ["key", "relative", "none"])
@pytest.mark.parametrize("link", ["logsigmoid", "bounded"])
@pytest.mark.parametrize("unit", [None, False, True])
def test_path_integral_is_its_sum(rotation: str, link: str, unit: bool | None):
    torch.manual_seed(0)
    options = {} if unit is None else {"normalize_query": unit}
    enc = grape.build("grape-ap", probe_rotation=rotation, link=link, **options, **SHAPE).double()
    data = testing.sample(enc, batch=1, tokens=7)
    raw = enc.projection(data.x).view(7, 4, 8)
    p = raw / (raw.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    query = p if unit else raw
    turn = [torch.linalg.matrix_exp(n * groups.complex_structure(8, dtype=torch.float64)) for n in range(7)]
    g = F.logsigmoid if link == "logsigmoid" else (lambda z: torch.sigmoid(z) - 1)
    got = bias_of(enc, data)
    for h in (0, 3):
        for t in range(7):
            left = turn[t] @ query[t, h] if rotation == "relative" else query[t, h]
            for j in range(7):
                right = [p[n, h] if rotation == "none" else turn[n] @ p[n, h] for n in range(j + 1, t + 1)]
                want = sum(alibi_slopes(4)[h] * g(left @ r / 8) for r in right) if right else 0.0
                assert abs(got[0, h, t, j] - want) < EXACT


@pytest.mark.parametrize("conv", [0, 3])
def test_path_attention_is_the_product_of_its_factors(conv: int):
    torch.manual_seed(0)
    enc = grape.build("path", conv=conv, kv_heads=2, **SHAPE).double()
    data = testing.sample(enc, batch=1, tokens=6)
    features = enc.up(enc.down(data.x))[0]
    if conv:  # depthwise and causal, then SiLU
        taps, before = enc.conv.weight[:, 0], F.pad(features, (0, 0, 2, 0))
        features = sum(taps[:, i] * before[i : i + 6] for i in range(3))
        features = features * torch.sigmoid(features)
    w = F.normalize(features.view(6, 2, 16), dim=-1)
    beta = 2 * torch.sigmoid(enc.strength(data.x))[0]
    got = testing.scores(enc, data)
    for h, t, j in ((0, 5, 0), (3, 4, 1), (1, 2, 2)):
        vector = data.q[0, h, t]
        for s in range(t, j, -1):
            direction = w[s, h // 2]
            vector = vector - beta[s, h // 2] * direction * (direction @ vector)
        assert (got[0, h, t, j] - data.k[0, h // 2, j] @ vector / 4).abs() < EXACT


def test_path_attention_has_one_scale():
    """Another scale changes the whole score by one factor: the plain product and what the path changes."""
    torch.manual_seed(0)
    enc = grape.build("path", kv_heads=2, **SHAPE).double()
    data = testing.sample(enc, tokens=6)
    code = enc(data.q, data.k, x=data.x)
    logits = testing.scores(enc, data) * 4 * 0.3  # scores divides by sqrt(16)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    weight = logits.masked_fill(~causal, -torch.inf).softmax(-1)
    want = weight @ data.v.repeat_interleave(2, 1)
    got = grape.attend(code.q, code.k, data.v, bias=code.bias, scale=0.3)
    assert (got - want).abs().max() < EXACT


def test_radial_bias_is_minus_the_distance():
    enc = grape.build("alibi", heads=2, head_dim=4, coords=2, metric="radial").double()
    data = testing.sample(enc)
    place = data.positions.double()
    want = -enc.slopes[:, None, None] * torch.cdist(place, place)
    assert (bias_of(enc, data)[0] - want).abs().max() < EXACT
