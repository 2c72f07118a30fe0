"""Spectra for longer contexts: equal to transformers' `rope_parameters`, on fixed and on learned frequencies."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import grape_pe as grape
from grape_pe.encodings.frequencies import STEP_DIVISOR
from grape_pe.encodings.prepared import Preparation

YARN = {"type": "yarn", "factor": 4.0, "original_context": 2048}
LLAMA3 = {"type": "llama3", "factor": 8.0, "original_context": 8192}
NTK = {"type": "ntk", "factor": 4.0}
SETTINGS = [
    ({"type": "linear", "factor": 4.0}, 10_000.0),
    ({"type": "linear", "factor": 2.5}, 500_000.0),
    (YARN, 10_000.0),
    ({**YARN, "factor": 16.0, "original_context": 4096, "attention_factor": 0.9}, 500_000.0),
    ({**YARN, "beta_fast": 16.0, "beta_slow": 2.0}, 10_000.0),
    ({**YARN, "truncate": False}, 100_000.0),
    ({**YARN, "original_context": 8, "truncate": True}, 10_000.0),  # a ramp of no width
    (LLAMA3, 500_000.0),
    ({**LLAMA3, "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 16.0}, 10_000.0),
]


def build(name="rope", head_dim=64, **options):
    return grape.build(name, heads=4, kv_heads=2, head_dim=head_dim, width=8, **options)


def theirs(parameters, head_dim):
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=parameters
    )
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize(("scaling", "base"), SETTINGS, ids=str)
def test_frequencies_and_attention_factor_are_those_of_transformers(scaling, base, head_dim):
    enc = build(head_dim=head_dim, base=base, scaling=scaling)
    names = {"type": "rope_type", "original_context": "original_max_position_embeddings"}
    parameters = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if scaling["type"] == "llama3" else {}
    parameters |= {"rope_theta": base, **{names.get(key, key): value for key, value in scaling.items()}}
    rule = enc.frequencies.scaling
    for given in (parameters, rule.rope_parameters(base, head_dim // 2)):
        want, attention = theirs(given, head_dim)
        torch.testing.assert_close(enc.frequencies()[0, 0].float(), want, rtol=1e-6, atol=0)
        assert rule.attention == pytest.approx(attention, abs=1e-12)
        assert enc.query_factor == pytest.approx(attention**2, abs=1e-12)


@pytest.mark.parametrize("head_dim", [8, 128])
def test_ntk_is_another_base(head_dim):
    enc = build(head_dim=head_dim, scaling=NTK)
    grown = 10_000.0 * 4.0 ** (head_dim / (head_dim - 2))
    torch.testing.assert_close(
        enc.frequencies(), build(head_dim=head_dim, base=grown).frequencies(), rtol=1e-6, atol=0
    )
    plain = build(head_dim=head_dim).frequencies()[0, 0]
    ratio = plain / enc.frequencies()[0, 0]
    assert ratio[0] == pytest.approx(1.0) and ratio[-1] == pytest.approx(4.0, rel=1e-5)
    parameters = enc.frequencies.scaling.rope_parameters(10_000.0, head_dim // 2)
    assert parameters == {"rope_type": "default", "rope_theta": pytest.approx(grown)}


@pytest.mark.parametrize(
    "scaling", [{"type": "linear", "factor": 4.0}, NTK, YARN, LLAMA3], ids=lambda s: s["type"]
)
def test_a_learned_spectrum_is_scaled_where_it_now_is(scaling):
    """A plane that learned another plane's frequency is scaled as that one."""
    enc, fixed = build("grape-m", scaling=scaling), build("rope", scaling=scaling)
    planes = 32
    with torch.no_grad():  # theta_i -> theta_{i + 3}
        enc.frequencies.delta.fill_(-3 / planes * math.log(10_000.0) * STEP_DIVISOR)
    got = enc.frequencies()[0, 0]
    torch.testing.assert_close(got[:-3], fixed.frequencies()[0, 0, 3:], rtol=1e-6, atol=0)
    got.sum().backward()
    assert enc.frequencies.delta.grad.abs().min() > 0
    between = (1.013 * build().frequencies()[0, 0]).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda t: enc.frequencies.scaling(t, 1e4), between)


def test_scores_are_scaled_by_the_attention_factor():
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 5, 64), torch.randn(1, 2, 5, 64)
    enc = build(scaling=YARN)
    code, plain = enc(q, k), build(spectrum=enc.frequencies()[0, 0].tolist())(q, k)
    factor = (0.1 * math.log(4.0) + 1.0) ** 2
    torch.testing.assert_close(code.q, plain.q * factor)
    torch.testing.assert_close(code.k, plain.k)


def test_prepared_layers_with_different_scaling():
    encodings = [
        build("grape-m", scaling=YARN),
        build("grape-m"),
        build("grape-m", scaling=NTK),
        build(scaling=YARN),
    ]
    encodings[2].frequencies.strength = 0.25
    q, k, at = torch.randn(1, 4, 2, 64), torch.randn(1, 2, 2, 64), torch.tensor([[70, 71]])
    with torch.no_grad():
        prepared = Preparation(encodings)(at, q.dtype)
        for enc in encodings:
            tokens = grape.Tokens(q, k, prepared.positions, None, None, prepared.values)
            got, want = enc.encode(tokens, None), enc(q, k, positions=at)
            torch.testing.assert_close(got.q, want.q, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got.k, want.k, rtol=1e-5, atol=1e-5)


def test_repr_builds_it_again():
    enc = build("grape-m", scaling=YARN, rotary_dim=16)
    again = eval(repr(enc), {"build": grape.build})
    torch.testing.assert_close(again.frequencies(), enc.frequencies())


@pytest.mark.parametrize(
    ("scaling", "match"),
    [
        ({"type": "dynamic", "factor": 2.0}, '"dynamic" changes the frequencies while a sequence grows'),
        ({"type": "longrope", "factor": 2.0}, '"linear", "ntk", "yarn" or "llama3", got .longrope.'),
        ({"type": "yarn", "factor": 2.0}, "needs 'original_context'"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 3}, "unknown option 'beta_fast'"),
        ({"type": "linear", "factor": 0.5}, "at least 1, got 0.5"),
        ({"type": "linear", "factor": "4"}, "must be a positive number, got '4'"),
        ({**LLAMA3, "high_freq_factor": 0.5}, "must be above low_freq_factor"),
        ({"factor": 4.0}, "scaling must be like"),
        (4.0, "scaling must be like"),
        ("linear", "scaling must be like"),
        ("yarn:4", "needs .original_context."),
    ],
)
def test_refusals(scaling, match):
    with pytest.raises((TypeError, ValueError), match=match):
        build(scaling=scaling)


def test_more_refusals():
    with pytest.raises(ValueError, match="got coords=2"):
        build(scaling=NTK, coords=2)
    with pytest.raises(ValueError, match="rotary_dim must be even, from 2 to head_dim = 64, got 65"):
        build(rotary_dim=65)
    with pytest.raises(ValueError, match='needs rotary_dim=64, all features, got 16; use basis="orthogonal"'):
        build("grape-m-basis", rotary_dim=16, basis="unitary")


def test_written_as_type_and_factor():
    short, long = (build(scaling=each).frequencies() for each in ("ntk:4", {"type": "ntk", "factor": 4.0}))
    assert torch.equal(short, long) and not torch.equal(short, build().frequencies())
