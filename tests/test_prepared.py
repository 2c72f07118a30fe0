"""Work shared by all layers of a step: the same as each layer doing its own."""

import pytest
import torch

import grape_pe as grape
from grape_pe.cache import Layout
from grape_pe.cache.inputs import encode
from grape_pe.encodings.prepared import FEW, Preparation
from grape_pe.hf.fade import fade_in
from grape_pe.testing import TOL

H, HKV, D, C = 4, 2, 8, 16
SPECS = [
    ("rope", {}),
    ("rope", {"layout": "interleaved"}),
    ("grape-m", {}),
    ("grape-m", {"per_head": True}),
    ("grape-m", {"head_dim": 7}),
    ("grape-m-basis", {}),
    ("grape-a-q", {}),
    ("grape-a-qk", {}),
    ("grape-a-dict", {}),
    ("grape-ap", {}),
    ("grape-ap", {"probe_rotation": "relative", "probe": "q"}),
    ("grape-ap", {"probe_dim": 5}),
    ("rope+fox", {}),
    ("rope+grape-a-qk", {}),
    ("grape-m+grape-ap", {}),
]


def layers(name, count=3, dtype=torch.float64, **options):
    """Encodings of as many layers, away from their initial values."""
    torch.manual_seed(0)
    sizes = {"heads": H, "kv_heads": HKV, "head_dim": D, "width": C, **options}
    built = [fade_in(grape.build(name, **sizes)).to(dtype) for _ in range(count)]
    for encoding in built:
        for parameter in encoding.parameters():
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return built


def tokens(encoding, batch, count, dtype=torch.float64):
    width = encoding.shape.head_dim
    q, k, v = (torch.randn(batch, n, count, width, dtype=dtype) for n in (H, HKV, HKV))
    return q, k, v, torch.randn(batch, count, C, dtype=dtype)


def same(got, want, dtype=torch.float64):
    pairs = [(got.q, want.q), (got.k, want.k)]
    ours, theirs = ({**code.bias.query_tensors(), **code.bias.key_tensors()} for code in (got, want))
    assert type(got.bias) is type(want.bias) and ours.keys() == theirs.keys()
    for a, b in [*pairs, *((ours[name], theirs[name]) for name in ours)]:
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b.expand_as(a), rtol=TOL[dtype], atol=TOL[dtype])


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize(("name", "options"), SPECS)
@torch.no_grad()
def test_prepared_together_is_each_alone(name, options, count):
    encodings = layers(name, **options)
    preparation = Preparation(encodings)
    for positions in (torch.arange(70, 70 + count)[None], torch.tensor([[3], [900]]) + torch.arange(count)):
        layout = Layout(positions).prepare(preparation, torch.float64)
        assert layout.prepared is not None
        for encoding in encodings:
            q, k, v, x = tokens(encoding, 2, count)
            got, _, _ = encode(encoding, q, k, v, x, layout)
            want, _, _ = encode(encoding, q, k, v, x, Layout(positions))
            same(got, want)


@torch.no_grad()
def test_changed_parameters_are_seen():
    """Nothing is kept from one call to the next."""
    encodings = layers("grape-m+grape-a-qk")
    preparation, where = Preparation(encodings), torch.tensor([[9]])
    Layout(where).prepare(preparation, torch.float64)
    for parameter in encodings[1].parameters():
        parameter.data.mul_(1.5)
    q, k, v, x = tokens(encodings[1], 1, 1)
    got, _, _ = encode(encodings[1], q, k, v, x, Layout(where).prepare(preparation, torch.float64))
    same(got, encode(encodings[1], q, k, v, x, Layout(where))[0])


def test_where_nothing_is_prepared():
    """Gradients, many tokens, real positions, autocast and transforms take the ordinary way."""
    preparation, where = Preparation(layers("rope")), torch.tensor([[9]])
    assert preparation(where, torch.float32) is None  # gradients are on
    with torch.no_grad():
        assert preparation(where, torch.float32) is not None
        assert preparation(torch.arange(FEW + 1)[None], torch.float32) is None
        assert preparation(where.double(), torch.float32) is None and preparation(None, torch.float32) is None
        with torch.autocast("cpu"):
            assert preparation(where, torch.float32) is None
        seen = []
        torch.func.vmap(lambda t: seen.append(preparation(where, torch.float32)) or t)(torch.zeros(2))
        assert seen == [None]


@torch.no_grad()
def test_hooks_of_an_encoding_still_run():
    encodings, seen = layers("rope"), []
    encodings[0].register_forward_hook(lambda *_: seen.append(True))
    q, k, v, x = tokens(encodings[0], 1, 1)
    encode(
        encodings[0], q, k, v, x, Layout(torch.tensor([[4]])).prepare(Preparation(encodings), torch.float64)
    )
    assert seen == [True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "name", ["alibi", "fox", "grape-a-qk", "grape-a-k", "grape-a-dict", "grape-ap", "fox+grape-ap"]
)
@torch.no_grad()
def test_a_row_is_the_tile_of_one_query(name, dtype):
    torch.manual_seed(0)
    encoding = grape.build(name, heads=H, kv_heads=HKV, head_dim=D, width=C).to(dtype)
    q, k, v, x = tokens(encoding, 2, 40, dtype)
    bias = encoding(q, k, v=v, x=x).bias.queries(slice(39, 40))
    want = bias.tile(slice(0, 1), slice(0, 40))
    torch.testing.assert_close(bias.row(40), want, rtol=TOL[dtype], atol=TOL[dtype])
