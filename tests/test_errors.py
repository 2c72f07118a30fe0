"""Wrong input: each error names what was expected, what came, and what to do."""

from __future__ import annotations

import pytest
import torch

import grape_pe as grape
from grape_pe import groups

SHAPE = {"heads": 4, "head_dim": 8}
Q, K = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
X = torch.randn(2, 5, 6)


def words_of(table):
    return [row[-1] for row in table]


def build(name="rope", **options):
    return grape.build(name, **{**SHAPE, **options})


BAD_BUILDS = [
    ("grap-m", {}, ValueError, "did you mean grape-m"),
    ("rope", {"bas": 1e4}, TypeError, "did you mean 'base'"),
    ("rope", {"learned": True}, TypeError, "unknown option 'learned'"),
    ("rope+fox", {"width": 6, "fox": {"gate": 1}}, TypeError, "unknown option 'gate'"),
    ("fox", {}, ValueError, "pass width"),
    ("rope+grape-m", {}, ValueError, "at most one part may transform"),
    ("rope+rope", {}, ValueError, "names a part twice"),
    ("rope", {"heads": 4, "kv_heads": 3}, ValueError, "multiple of kv_heads"),
    ("rope", {"head_dim": 0}, ValueError, "positive integer, got 0"),
    ("rope", {"coords": 4}, ValueError, "coords, the number of position coordinates, must be 1, 2 or 3"),
    ("rope", {"spectrum": [1.0]}, ValueError, "one frequency for each of the 4 planes, got 1"),
    ("rope", {"spectrum": "uniform"}, ValueError, "log-uniform"),
    ("rope", {"base": -1.0}, ValueError, "base must be a positive number"),
    ("rope", {"layout": "split"}, ValueError, 'layout must be "half" or "interleaved"'),
    ("grape-m", {"coords": 2, "axes": "x"}, ValueError, "axes must be"),
    ("grape-m-basis", {"basis": "q"}, ValueError, "basis must be"),
    ("grape-m-basis", {"basis": "unitary", "head_dim": 7}, ValueError, "even head_dim, got 7"),
    ("grape-m-plane", {"head_dim": 1}, ValueError, "head_dim >= 2"),
    ("grape-m-mix", {"rank": 3}, ValueError, "rank must be even, from 2 to head_dim = 8, got 3"),
    ("grape-m-mix", {"rank": 10}, ValueError, "got 10"),
    (
        "grape-m-ctx",
        {"width": 6, "gate": "relu"},
        ValueError,
        'gate must be "sigmoid", "softplus" or "forget"',
    ),
    ("alibi", {"slopes": [0.5, 0.25, -0.125, 1.0]}, ValueError, "slopes must be >= 0"),
    ("alibi", {"slopes": [0.5]}, ValueError, "each of the 4 heads, got 1"),
    ("alibi", {"metric": "city"}, ValueError, "metric must be"),
    ("grape-a-dict", {"atoms": 0}, ValueError, "atoms must be a positive integer"),
    ("grape-ap", {"width": 6, "probe": "z"}, ValueError, 'probe must be "linear", "q", "k" or "v"'),
    (
        "grape-ap",
        {"width": 6, "probe_rotation": "both"},
        ValueError,
        'probe_rotation must be "key", "relative" or "none"',
    ),
    ("grape-ap", {"width": 6, "link": "exp"}, ValueError, 'link must be "logsigmoid" or "bounded"'),
    ("grape-ap", {"probe": "q", "probe_dim": 4}, ValueError, 'needs probe="linear"'),
    ("path", {"width": 6, "rank": 0}, ValueError, "rank must be positive"),
]


@pytest.mark.parametrize("name,options,error,words", BAD_BUILDS, ids=words_of(BAD_BUILDS))
def test_bad_build(name, options, error, words):
    with pytest.raises(error, match=words):
        build(name, **options)


BAD_CALLS = [
    ("rope", {"q": Q[0]}, ValueError, r"q must be \(batch, 4 heads, tokens, 8\)"),
    ("rope", {"q": Q[:, :3]}, ValueError, "q must be"),
    ("rope", {"k": K[:, :2]}, ValueError, "set kv_heads"),
    ("rope", {"k": K.double()}, TypeError, "share a dtype"),
    (
        "rope",
        {"positions": torch.arange(4)},
        ValueError,
        r"positions must have shape \(5,\) or \(2, 5\).*got \(4,\)",
    ),
    ("rope", {"positions": torch.tensor([0, 1, float("nan"), 3, 4])}, ValueError, "finite"),
    ("rope", {"positions": torch.arange(5) > 2}, TypeError, "integer or real"),
    ("rope", {"positions": torch.arange(5).bfloat16()}, TypeError, "use integers or float32"),
    ("rope", {"positions": [0, 1, 2, 3, 4]}, TypeError, r"positions must be a torch\.Tensor, got list"),
    ("fox", {}, ValueError, r"expected x of shape \(2, 5, 6\), got nothing"),
    ("fox", {"x": X[:, :4]}, ValueError, r"got \(2, 4, 6\)"),
    ("rope+fox", {}, ValueError, "expected x of shape"),
    ("fox", {"x": X, "state": torch.zeros(2, 4, 1)}, ValueError, "positions must be given when continuing"),
    (
        "fox",
        {"x": X, "state": torch.zeros(1, 4, 1), "positions": torch.arange(5)},
        ValueError,
        "previous call",
    ),
]


@pytest.mark.parametrize("name,change,error,words", BAD_CALLS, ids=words_of(BAD_CALLS))
def test_bad_call(name, change, error, words):
    arguments = {"q": Q, "k": K, **change}
    with pytest.raises(error, match=words):
        build(name, width=6)(arguments.pop("q"), arguments.pop("k"), **arguments)


def test_n_dimensional_positions_are_required_and_checked():
    enc = build(coords=2)
    with pytest.raises(ValueError, match="coords=2"):
        enc(Q, K)
    with pytest.raises(ValueError, match=r"\(5, 2\)"):
        enc(Q, K, positions=torch.arange(5))
    with pytest.raises(ValueError, match="must have coords"):
        grape.build("rope+grape-a-qk", **SHAPE, rope={"coords": 2})


def test_values_are_required_for_a_probe_of_values():
    with pytest.raises(ValueError, match="pass v"):
        build("grape-ap", probe="v")(Q, K)


BAD_ATTENDS = [
    ({"q": Q[0]}, ValueError, "q must be"),
    ({"k": K[:, :3], "v": K[:, :3]}, ValueError, "multiple of key heads"),
    ({"v": K[:, :, :4]}, ValueError, "share"),
    ({"v": K.double()}, TypeError, "dtype"),
    ({"impl": "flash"}, ValueError, "impl must be one of"),
    ({"window": 0}, ValueError, "at least 1"),
    ({"documents": torch.zeros(4, dtype=torch.long)}, ValueError, "documents must be integer ids"),
    ({"key_padding": torch.zeros(2, 5)}, ValueError, "key_padding must be bool"),
    ({"k": K[:, :, :3], "v": K[:, :, :3]}, ValueError, "at least as many keys"),
    ({"bias": torch.zeros(5, 5)}, TypeError, "TileBias"),
]


@pytest.mark.parametrize("change,error,words", BAD_ATTENDS, ids=words_of(BAD_ATTENDS))
def test_bad_attend(change, error, words):
    arguments = {"q": Q, "k": K, "v": K, **change}
    with pytest.raises(error, match=words):
        grape.attend(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_a_bias_of_another_length_is_refused():
    bias = build("alibi")(Q, K).bias
    with pytest.raises(ValueError, match="bias is for 5 keys, but attention has 4"):
        grape.attend(Q[:, :, :5], K[:, :, :4], K[:, :, :4], bias=bias, causal=False)


def test_a_dictionary_that_is_not_nilpotent_is_refused():
    eye = torch.eye(4)
    groups.check_dictionary(eye[:2], eye[2:])
    with pytest.raises(ValueError, match="A_r A_s = 0"):
        groups.check_dictionary(eye[:2], eye[1:3])


def test_an_odd_width_cannot_change_layout():
    with pytest.raises(ValueError, match=r"head_dim must be even .* got 7; use 8"):
        grape.convert_layout(torch.randn(14, 3), 7, to="interleaved")


def test_registering_needs_an_encoding_and_a_free_name():
    with pytest.raises(TypeError, match=r"subclass of grape_pe\.Encoding"):
        grape.register("mine", torch.nn.Linear)
    with pytest.raises(ValueError, match="taken"):
        grape.register("rope", grape.encodings.base.NoPE)
