"""Encodings of q and k on arrival: xpos, pope, STRING, M-RoPE sections, unrotated heads, clocks by plane.

Each against its formula, written out here; in layers, models and caches; and where it is refused.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import grape_pe as grape
from grape_pe import groups, testing
from grape_pe.models import Decoder, DecoderConfig

SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 8, "width": 12}
EXACT = testing.TOL[torch.float64]
SPECTRUM = [0.9, -0.31, 0.07]  # of the Fourier planes of 8 features
OPTIONS = [
    ("xpos", {}),
    ("pope", {}),
    ("xpos+fox", {}),
    ("pope+grape-a-qk", {}),
    ("string-cayley", {}),
    ("string-circulant", {}),
    ("rope", {"rotary_heads": 1, "rotary_dim": 4}),
    ("grape-m-basis", {"rotary_heads": 1, "basis_per_head": True}),
    ("grape-m-ctx", {"phase_per_plane": True, "phase_per_head": True}),
    ("grape-m-ctx", {"phase_per_plane": True, "rotary_heads": 1, "rotary_dim": 4}),
]


def stirred(name: str, dtype: torch.dtype = torch.float64, **options):
    """With every parameter moved off its initial value."""
    torch.manual_seed(0)
    enc = grape.build(name, **{**SHAPE, **options})
    with torch.no_grad():
        for parameter in enc.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return enc.to(dtype)


def planes(x):
    """The planes (x_i, x_{i+m}) as complex numbers, key heads repeated for their queries."""
    x = x.double() if x.shape[1] == SHAPE["heads"] else x.double().repeat_interleave(2, 1)
    m = x.shape[-1] // 2
    return torch.complex(x[..., :m], x[..., m : 2 * m])


def theta(planes: int, base: float = 10_000.0):
    """As published code has it, rounded to float32."""
    return (1.0 / base ** (torch.arange(planes).float() / planes)).double()


def xpos_scores(q, k, n, scale_base: float, gamma: float = 0.4):
    """Published: each plane's product, turned by the offset, times zeta^(offset / scale_base)."""
    z_q, z_k, m = planes(q), planes(k), q.shape[-1] // 2
    zeta = torch.tensor([(i / m + gamma) / (1 + gamma) for i in range(m)], dtype=torch.float64)
    offset = (n[:, None] - n[None, :]).double()[..., None]  # t - j
    factor = torch.polar(zeta ** (offset / scale_base), -offset * theta(m))
    return torch.einsum("bhti,bhji,tji->bhtj", z_q.conj(), z_k, factor).real * q.shape[-1] ** -0.5


# xpos -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("start", [0, 2**20])
def test_xpos_is_the_published_score(dtype: torch.dtype, start: int):
    enc = grape.build("xpos", scale_base=16.0, **SHAPE)
    data = testing.sample(enc, dtype=dtype, tokens=64)
    data = data.at(data.positions + start)
    want = xpos_scores(data.q, data.k, data.positions, 16.0).tril()
    testing.assert_close(testing.scores(enc, data).tril(), want, dtype, "xpos", slack=1 if start == 0 else 10)


def test_xpos_is_exact_at_any_length_over_a_cache_that_is_rebased():
    """Its reach is 125 positions; 800 tokens are streamed, and all of them stay visible."""
    enc = grape.build("xpos", scale_base=4.0, **SHAPE)
    assert 100 < enc.reach(torch.float32) < 130
    data = testing.sample(enc, tokens=800, dtype=torch.float32)
    logits = xpos_scores(data.q, data.k, torch.arange(800), 4.0)
    hidden = torch.ones(800, 800, dtype=torch.bool).triu(1)
    want = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ data.v.double().repeat_interleave(2, 1)
    cache, got = grape.StreamingCache(enc), []
    for start in range(0, 800, 50):
        piece = data.cut(slice(start, start + 50))
        got.append(cache.attend(piece.q, piece.k, piece.v, x=piece.x))
        cache.rebase(50)
    testing.assert_close(torch.cat(got, 2), want, torch.float32, "xpos, rebased")


def test_xpos_refuses_positions_beyond_its_reach():
    enc = grape.build("xpos", **SHAPE)
    reach = enc.reach(torch.float32)
    assert 16_000 < reach < 16_100 and enc.reach(torch.float64) > 8 * reach
    data = testing.sample(enc, tokens=2, batch=1)
    code = enc(data.q, data.k, positions=torch.tensor([0, int(2 * reach)]))  # the middle is the reference
    assert code.k.isfinite().all() and code.k.square().sum().isfinite()
    with pytest.raises(ValueError, match=r"at most 16\d{3} from the middle .* call cache.rebase"):
        enc(data.q, data.k, positions=torch.tensor([0, int(2 * reach) + 4]))
    with pytest.raises(ValueError, match="raise scale_base"):
        enc(data.q, data.k, positions=torch.tensor([20_000, 20_001]), state=code.state * 0)
    enc(data.q.double(), data.k.double(), positions=torch.tensor([0, 200_000]))
    half = data.q.half(), data.k.half()
    with pytest.raises(ValueError, match=r"torch\.float16"):
        enc(*half, positions=torch.tensor([0, 4_000]))
    cache = grape.StreamingCache(enc).append(data.q, data.k, data.v)
    with pytest.raises(ValueError, match="if they are moved by -60000"):
        cache.rebase(-60_000)


@pytest.mark.parametrize("name", ["scale_base", "gamma"])
def test_xpos_names_a_wrong_number(name: str):
    with pytest.raises(ValueError, match=f"{name} must be a positive number, got 0"):
        grape.build("xpos", **{name: 0}, **SHAPE)


def test_xpos_acts_by_a_group_of_invertible_matrices_that_keep_no_length():
    enc = grape.build("xpos", **SHAPE)
    data = testing.sample(enc, dtype=torch.float64)
    element = testing.laws._element(enc, data)
    matrix = element.as_matrix(8)[0, 0, 0]  # (T, D, D)
    other = element.contragredient().as_matrix(8)[0, 0, 0]
    eye = torch.eye(8, dtype=torch.float64)
    assert (matrix.mT @ other - eye).abs().max() < EXACT
    assert (matrix[3] @ matrix[4] - matrix[7]).abs().max() < EXACT
    composed = element.compose(element).as_matrix(8)[0, 0, 0]
    assert (composed - matrix @ matrix).abs().max() < EXACT
    with pytest.raises(AssertionError, match="norm"):
        testing.assert_norm(enc, data)


# pope -------------------------------------------------------------------------------------------


def test_pope_is_its_formula_at_the_scale_of_the_head():
    enc = stirred("pope")
    data = testing.sample(enc)
    data = data.at(data.positions + 5)
    t, j = data.positions[:, None, None].double(), data.positions[None, :, None].double()
    lengths = F.softplus(data.q), F.softplus(data.k).repeat_interleave(2, 1)
    delta = enc.phase[:, 0].repeat_interleave(2, 0)[:, None, None]
    cos = torch.cos((t - j) * theta(8) - delta)  # (H, T, T, D)
    want = torch.einsum("bhti,bhji,htji->bhtj", *lengths, cos) / math.sqrt(8)
    code = enc(data.q, data.k, positions=data.positions)
    assert code.q.shape[-1] == code.k.shape[-1] == 16
    assert (testing.scores(enc, data) - want).abs().max() < EXACT
    weight = want.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    y = grape.attend(code.q, code.k, data.v, bias=code.bias)
    assert (y - weight @ data.v.repeat_interleave(2, 1)).abs().max() < EXACT


def test_pope_is_no_linear_action_but_a_torus_on_its_planes():
    enc = stirred("pope")
    data = testing.sample(enc)
    code, double = enc(data.q, data.k), enc(2 * data.q, 2 * data.k)
    assert (double.k - 2 * code.k).abs().max() > 0.1
    with pytest.raises(AssertionError, match="norm"):
        testing.assert_norm(enc, data)
    turn = groups.PlaneRotation.from_angle(3.0 * enc.frequencies()[0, 0], torch.float64)
    later = enc(data.q, data.k, positions=data.positions + 3)
    for now, then in ((code.q, later.q), (code.k, later.k)):
        assert (turn.apply(now) - then).abs().max() < EXACT
    cache = grape.StreamingCache(enc)
    cache.append(data.q, data.k, data.v, positions=data.positions + 3)
    keys = cache.rebase(3).tokens.view("k")
    assert (keys - code.k).abs().max() < EXACT


# STRING -----------------------------------------------------------------------------------------


def acted(enc, generator, data):
    """Scores with exp(n L) by torch's matrix exponential."""
    n = data.positions.double()[:, None, None]
    turn = torch.linalg.matrix_exp(n * generator)
    q, k = (torch.einsum("tde,bhte->bhtd", turn, x) for x in (data.q, data.k.repeat_interleave(2, 1)))
    return q @ k.mT * data.q.shape[-1] ** -0.5


@pytest.mark.parametrize("width", [7, 8])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_circulant_string_is_the_exponential_of_a_circulant(width: int, layout: str):
    """C - C^T for a random circulant C; its planes turn at 2 sum_s c_s sin(2 pi k s / D)."""
    torch.manual_seed(0)
    wanted = torch.tensor(SPECTRUM, dtype=torch.float32).double()
    s = torch.arange(width, dtype=torch.float64)
    sines = torch.sin(2 * math.pi * torch.arange(1, 4).double()[:, None] * s / width)  # (modes, D)
    c = (
        (wanted @ sines) / width + 0.3 * torch.randn(()) + 0.2 * torch.cos(2 * math.pi * s / width)
    )  # even: no part
    index = (torch.arange(width)[:, None] - torch.arange(width)[None, :]) % width
    generator = c[index] - c[index].T
    enc = grape.build("string-circulant", **{**SHAPE, "head_dim": width}, spectrum=SPECTRUM, layout=layout)
    data = testing.sample(enc, tokens=40, dtype=torch.float64)
    got = testing.scores(enc, data)
    assert (got - acted(enc, generator, data)).abs().max() < EXACT
    assert (got - testing.scores(grape.build("nope", **{**SHAPE, "head_dim": width}), data)).abs().max() > 0.1


def test_cayley_string_is_the_exponential_of_its_generator():
    enc = stirred("string-cayley")
    s = (enc.weight - enc.weight.mT)[0].detach()
    eye = torch.eye(8, dtype=torch.float64)
    basis = (eye - s) @ torch.linalg.inv(eye + s)
    assert (basis @ basis.T - eye).abs().max() < EXACT
    speed = enc.frequencies()[0, 0].detach()
    still = torch.zeros(4, 4, dtype=torch.float64)
    planar = torch.cat([torch.cat([still, -speed.diag()], 1), torch.cat([speed.diag(), still], 1)])
    data = testing.sample(enc, tokens=40)
    want = acted(enc, basis @ planar @ basis.T, data)
    assert (testing.scores(enc, data) - want).abs().max() < EXACT


def test_string_names_are_the_learned_basis_with_an_option():
    for name, basis in (("string-cayley", "cayley"), ("string-circulant", "circulant")):
        enc, same = stirred(name), stirred("grape-m-basis", basis=basis)
        data = testing.sample(enc)
        assert torch.equal(testing.scores(enc, data), testing.scores(same, data))
    rope, cayley = grape.build("rope", **SHAPE), grape.build("string-cayley", **SHAPE)
    data = testing.sample(rope)
    testing.assert_close(testing.scores(cayley, data), testing.scores(rope, data), torch.float32, "W = 0")


def test_circulant_sizes_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="head_dim >= 3, got 2"):
        grape.build("string-circulant", heads=1, head_dim=2)
    with pytest.raises(ValueError, match="at most 6 of 8 features, got rotary_dim=8"):
        grape.build("string-circulant", rotary_dim=8, **SHAPE)
    with pytest.raises(ValueError, match="same for all heads"):
        grape.build("grape-m-basis", basis="circulant", basis_per_head=True, **SHAPE)
    with pytest.raises(ValueError, match='basis must be "orthogonal"'):
        grape.build("grape-m-basis", basis="fourier", **SHAPE)


# M-RoPE -----------------------------------------------------------------------------------------


def test_sections_are_qwen2_vls_own_rotary():
    qwen = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    config = Qwen2VLTextConfig(
        hidden_size=256, num_attention_heads=2, num_key_value_heads=2, rope_parameters=rope
    )
    rotary = qwen.Qwen2VLRotaryEmbedding(config)
    enc = grape.build("rope", heads=2, head_dim=128, base=1e6, coords=3, sections=(16, 24, 24))
    data = testing.sample(enc, tokens=60)
    cos, sin = rotary(data.q, data.positions.T[:, None].expand(3, 2, -1))
    q, k = qwen.apply_rotary_pos_emb(data.q, data.k, cos, sin)
    code = enc(data.q, data.k, positions=data.positions)
    rounding = 2 * 32 * torch.finfo(torch.float32).eps  # of their angles, up to 32
    assert (code.q - q).abs().max() < rounding * data.q.abs().max()
    assert (code.k - k).abs().max() < rounding * data.k.abs().max()


def test_text_positions_in_sections_are_rope():
    enc = grape.build("grape-m", coords=3, sections=[1, 2, 1], **SHAPE)
    rope, n = grape.build("grape-m", **SHAPE), torch.arange(9)
    data = testing.sample(rope, tokens=9)
    code = enc(data.q, data.k, positions=n[:, None].expand(9, 3))
    assert torch.equal(code.k, rope(data.q, data.k).k)


def test_sections_stream_over_text_and_an_image():
    """Two words, a picture of 2 by 3, two more words: in pieces as at once, the law for every shift."""
    layer = grape.Attention(
        32, 4, 2, encoding="rope", encoding_options={"coords": 3, "sections": (1, 2, 1)}
    ).double()
    image = torch.cartesian_prod(torch.tensor([2]), torch.arange(2, 4), torch.arange(2, 5))
    text = torch.arange(2)[:, None].expand(2, 3)
    where = torch.cat([text, image, text + 5])
    x = torch.randn(1, 10, 32, dtype=torch.float64)
    cache = layer.cache()
    pieces = [layer(x[:, a:b], where[a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 10))]
    whole = layer(x, where)
    assert (torch.cat(pieces, 1) - whole).abs().max() < EXACT
    assert (layer(x, where + torch.tensor([7, 1, 3])) - whole).abs().max() < EXACT
    assert (layer(x, where * torch.tensor([1, 0, 1])) - whole).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sections": (1, 2, 1)}, "coords=1"),
        ({"sections": (1, 2), "coords": 3}, r"got \[1, 2\]"),
        ({"sections": "1/2/1", "coords": 3}, "got '?1/2/1"),
        ({"sections": 4, "coords": 3}, "got 4"),
        ({"sections": (1, 2, 3), "coords": 3}, "4 in total"),
        ({"sections": (1, 2, 1), "coords": 3, "axes": "mixed"}, 'need axes="disjoint"'),
    ],
)
def test_wrong_sections_are_refused(options, message: str):
    with pytest.raises(ValueError, match=message):
        grape.build("rope", **options, **SHAPE)


# Unrotated heads ----------------------------------------------------------------------------------


YARN = {"type": "yarn", "factor": 4.0, "original_context": 64}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rope", {}),
        ("rope", {"rotary_dim": 4, "scaling": YARN}),
        ("grape-m", {"per_head": True}),
        ("grape-m-basis", {}),
        ("grape-m-basis", {"basis_per_head": True, "basis": "unitary"}),
        ("string-circulant", {}),
        ("grape-m-ctx", {}),
        ("grape-m-ctx", {"phase_per_head": True, "rotary_dim": 4}),
    ],
)
def test_the_first_heads_turn_and_the_others_are_left_alone(name: str, options):
    """One of two key heads, with its two queries: as the same weights with one key head would turn it."""
    enc = stirred(name, rotary_heads=1, **options)
    alone = stirred(name, **{**options, "heads": 2, "kv_heads": 1})
    alone.load_state_dict(enc.state_dict())
    data = testing.sample(enc)
    code, want = enc(data.q, data.k, x=data.x), alone(data.q[:, :2], data.k[:, :1], x=data.x)
    assert torch.equal(code.q[:, :2], want.q) and torch.equal(code.k[:, :1], want.k)
    assert torch.equal(code.q[:, 2:], data.q[:, 2:]) and torch.equal(code.k[:, 1:], data.k[:, 1:])
    cache = grape.StreamingCache(enc)
    cache.append(data.q, data.k, data.v, x=data.x, positions=data.positions + 7)
    assert (cache.rebase(7).tokens.view("k") - code.k).abs().max() < EXACT


@pytest.mark.parametrize("count", [0, 3, 1.0, True])
def test_a_wrong_number_of_heads_is_refused(count):
    with pytest.raises(ValueError, match="rotary_heads must be from 1 to kv_heads = 2"):
        grape.build("rope", rotary_heads=count, **SHAPE)


@pytest.mark.parametrize(
    "name", ["grape-m-ctx", "grape-m-basis", "string-cayley", "string-circulant", "grape-m"]
)
def test_partial_rotation_leaves_the_other_features_out_of_the_angles(name: str):
    """With all frequencies at zero turns nothing moves; with rotary_dim exactly its features (of the basis) do."""
    enc = stirred(name, rotary_dim=4)
    data = testing.sample(enc)
    code, still = enc(data.q, data.k, x=data.x), (data.q, data.k)
    if hasattr(enc, "basis"):
        still = tuple(x @ enc.basis() for x in still)
    for got, was in zip((code.q, code.k), still, strict=True):
        assert (got[..., 4:] - was[..., 4:]).abs().max() < EXACT
        assert ((got - was)[..., :4].abs().amax((0, 1, 2)) > 1e-4).all()


# Clocks of each plane -----------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["sigmoid", "softplus"])
def test_each_plane_turns_by_a_running_sum_of_its_own(gate: str):
    enc = stirred("grape-m-ctx", phase_per_plane=True, phase_per_head=True, gate=gate)
    data = testing.sample(enc)
    linear, speed = enc.clock.projection, enc.frequencies()[0, 0]
    z = data.x @ linear.weight.T + linear.bias  # clocks by key head, then by plane
    step = torch.sigmoid(z / 16) if gate == "sigmoid" else F.softplus(z)
    step = step.view(2, 12, 2, 4)
    want = planes(data.k)[:, ::2].clone()
    for t in range(12):
        phase = step[:, :t].sum(1)  # (B, Hkv, planes), the steps of the tokens before
        want[:, :, t] *= torch.polar(torch.ones_like(phase), phase * speed)
    got = enc(data.q, data.k, x=data.x).k
    assert (torch.complex(got[..., :4], got[..., 4:]) - want).abs().max() < EXACT


def test_equal_clocks_of_all_planes_are_the_one_clock():
    one, many = stirred("grape-m-ctx"), stirred("grape-m-ctx", phase_per_plane=True)
    with torch.no_grad():
        many.frequencies.load_state_dict(one.frequencies.state_dict())
        many.clock.projection.weight.copy_(one.clock.projection.weight.expand(4, -1))
        many.clock.projection.bias.copy_(one.clock.projection.bias.expand(4))
    data = testing.sample(one)
    assert (testing.scores(one, data) - testing.scores(many, data)).abs().max() < EXACT


# In layers, models and caches -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_layers_and_decoders_stream_crop_and_take_padding(name: str, options):
    torch.manual_seed(0)
    layer = grape.Attention(32, 4, 2, encoding=name, encoding_options=options).double()
    for parameter in layer.encoding.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, 14, 32, dtype=torch.float64)
    whole, cache = layer(x), layer.cache()
    got = [layer(x[:, :6], cache=cache), layer(x[:, 6:9] + 1, cache=cache)]
    cache.crop(3)
    got = [got[0], *(layer(x[:, a:b], cache=cache) for a, b in ((6, 7), (7, 14)))]
    assert (torch.cat(got, 1) - whole).abs().max() < EXACT
    padding = torch.zeros(2, 14, dtype=torch.bool)
    padding[0, :5] = True
    assert (layer(x, padding=padding)[0, 5:] - layer(x[:1, 5:])[0]).abs().max() < EXACT
    documents = torch.tensor([0] * 8 + [1] * 6)
    assert (layer(x, documents=documents)[:, 8:] - layer(x[:, 8:])).abs().max() < EXACT
    config = DecoderConfig(
        vocab_size=40, width=32, layers=2, heads=4, kv_heads=2, encoding=name, encoding_options=options
    )
    model, tokens = Decoder(config), torch.randint(0, 40, (1, 9))
    loss = model(tokens).float().logsumexp(-1).sum()
    loss.backward()
    assert loss.isfinite() and all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_hugging_face_models_save_and_generate_with_both_caches(name: str, options, tmp_path):
    hf = pytest.importorskip("grape_pe.hf")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = hf.GrapeConfig(vocab_size=61, **sizes, encoding=name, encoding_options=options, pad_token_id=0)
    model = hf.GrapeForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    ids = torch.randint(1, 61, (2, 9))
    ids[0, :4] = 0
    model.save_pretrained(tmp_path)
    again = hf.GrapeForCausalLM.from_pretrained(tmp_path).eval()
    settings = {
        "max_new_tokens": 5,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    ways = [
        (model, {}),
        (again, {}),
        (model, {"cache_implementation": "static"}),
        (model, {"use_cache": False}),
    ]
    out = [m.generate(ids, attention_mask=(ids != 0).long(), **settings, **how) for m, how in ways]
    for other in out[1:]:
        assert torch.equal(other.sequences, out[0].sequences)
        testing.assert_close(torch.stack(other.logits), torch.stack(out[0].logits), torch.float32, name)


def test_a_norm_after_the_encoding_is_refused_where_lengths_mean_something():
    for name in ("xpos", "pope"):
        layer = grape.Attention(32, 4, encoding=name, qk_norm="after")
        with pytest.raises(ValueError, match="which changes the lengths"):
            layer(torch.randn(1, 3, 32))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("xpos", {}, "would change the logits"),
        ("pope+t5", {}, "pope is another encoding of q and k, for which a model must be trained"),
        ("t5+fox", {}, r"for example 'rope\+t5\+fox'. To remove the rotation, adapt to 'rope\+t5\+fox'"),
        ("nope", {}, "for example 'rope'. To remove the rotation, adapt to 'rope'"),
        ("string-circulant", {}, "would change the logits"),
        ("rope+fox", {"rotary_heads": 1}, "'rotary_heads' is set by the model's own RoPE"),
        ("grape-m-basis", {"basis": "circulant"}, 'basis="circulant" would change the logits'),
    ],
)
def test_what_cannot_start_as_a_models_rope_is_not_put_into_one(name: str, options, message: str):
    transformers = pytest.importorskip("transformers")
    from grape_pe.hf import adapt

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    stock = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, **sizes))
    with pytest.raises(ValueError, match=message):
        adapt(stock, name, **options)


# Against peers ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_xpos_is_that_of_x_transformers_and_rotary_embedding_torch():
    x_transformers = pytest.importorskip("x_transformers.x_transformers")
    rotary = pytest.importorskip("rotary_embedding_torch")
    enc = grape.build("xpos", heads=2, head_dim=64, layout="interleaved")
    data = testing.sample(enc, tokens=300)
    peer = x_transformers.RotaryEmbedding(64, use_xpos=True)
    angles, scale = peer(torch.arange(300))
    q = x_transformers.apply_rotary_pos_emb(data.q, angles, scale)
    k = x_transformers.apply_rotary_pos_emb(data.k, angles, scale**-1)
    other = rotary.RotaryEmbedding(64, use_xpos=True).rotate_queries_and_keys(data.q, data.k)
    got = testing.scores(enc, data).tril()
    rounding = 300 * torch.finfo(torch.float32).eps * 8  # of their angles
    for theirs in ((q, k), other):
        want = (theirs[0].double() @ theirs[1].double().mT / 8).tril()
        assert (got - want).abs().max() < rounding * want.abs().max()


@pytest.mark.slow
def test_pope_is_that_of_x_transformers_but_for_its_scale():
    peers = pytest.importorskip("x_transformers.x_transformers")
    enc = grape.build("pope", heads=2, head_dim=64)
    peer = peers.PolarEmbedding(64, 2)
    with torch.no_grad():
        enc.phase.copy_(peer.learned_bias.uniform_(-2 * math.pi, 0.0))
    data = testing.sample(enc, tokens=200)
    angles, delta = peer(torch.arange(200))
    q = peers.apply_polar_pos_emb(data.q, angles[:, None])
    k = peers.apply_polar_pos_emb(data.k, angles[:, None] + delta)
    want = q.double() @ k.double().mT / 8  # sqrt(64), the head's own scale
    rounding = 200 * torch.finfo(torch.float32).eps * 8
    assert (testing.scores(enc, data) - want).abs().max() < rounding * want.abs().max()


@pytest.mark.slow
def test_partial_rope_is_that_of_rotary_embedding_torch():
    peers = pytest.importorskip("rotary_embedding_torch")
    enc = grape.build("rope", heads=2, head_dim=64, rotary_dim=32, layout="interleaved")
    data = testing.sample(enc, tokens=200)
    q = peers.RotaryEmbedding(32).rotate_queries_or_keys(data.q)
    rounding = 200 * torch.finfo(torch.float32).eps * 2
    assert (enc(data.q, data.k).q - q).abs().max() < rounding * data.q.abs().max()
