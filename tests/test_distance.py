"""Encodings over a table of distances: each against its formula written out, and `DistanceBias` at its edges."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import grape_pe as grape
from attention_cases import Errors, assert_rule, errors_of, one_thread  # noqa: F401
from grape_pe import testing
from grape_pe.attention import attend, record_pruning
from grape_pe.attention.cpu import build as native
from grape_pe.bias import DistanceBias
from grape_pe.encodings.t5 import t5_bucket
from grape_pe.precision import readable

SHAPE = {"heads": 3, "head_dim": 8}
NAMES = ("t5", "kerple-log", "kerple-power", "sandwich", "relative")
EXACT = testing.TOL[torch.float64]
compiled_kernel = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))


def made(name: str, **options) -> grape.Encoding:
    """In float64, with every parameter away from where it starts."""
    torch.manual_seed(1)
    enc = grape.build(name, **SHAPE, **options).double()
    for p in enc.parameters():
        p.data.add_(0.3 * torch.randn_like(p))
    return enc


def bias_of(enc: grape.Encoding, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The dense bias (B|1, H, T, T) and the queries it was made for."""
    q = torch.randn(2, 3, positions.shape[-1], 8, dtype=torch.float64)
    return enc(q, q, positions=positions).bias.dense().detach(), q


#: a row that starts late and one with gaps
PLACES = torch.tensor([[7, 8, 9, 10, 11, 12, 13], [0, 1, 5, 6, 40, 300, 301]])


def expect(enc: grape.Encoding, value, places: torch.Tensor = PLACES) -> None:
    """`value(h, d, q)` is the bias of head h at distance d for the query q, in plain Python."""
    got, q = bias_of(enc, places)
    for b, row in enumerate(places.tolist()):
        for h in range(3):
            for t, at in enumerate(row):
                for j, key in enumerate(row):
                    want = value(h, at - key, q[b, h, t])
                    assert float(got[b % got.shape[0], h, t, j]) == pytest.approx(want, abs=EXACT), (
                        b,
                        h,
                        t,
                        j,
                    )


# ----------------------------------------------------------------------------------- each by its formula


@pytest.mark.parametrize("both", (False, True))
def test_t5(both):
    """Buckets by their definition: exact below, then the number of geometric steps that fit, capped."""
    enc = made("t5", buckets=12, max_distance=20, both=both)

    def bucket(d: int) -> int:
        size, start = (6, 6 * (d < 0)) if both else (12, 0)
        d = abs(d) if both else max(d, 0)
        exact = size // 2
        edges = [exact * (20 / exact) ** (i / (size - exact)) for i in range(1, size - exact)]
        return start + (d if d < exact else exact + sum(d >= edge - 1e-9 for edge in edges))

    expect(enc, lambda h, d, q: enc.table[h, bucket(d)].item())


def test_kerple_log():
    enc = made("kerple-log")
    r1, r2 = ([math.log1p(math.exp(x)) for x in p.tolist()] for p in (enc.r1, enc.r2))
    expect(enc, lambda h, d, q: -r1[h] * math.log(1 + r2[h] * abs(d)))


def test_kerple_power():
    enc = made("kerple-power")
    r1 = [math.log1p(math.exp(x)) for x in enc.r1.tolist()]
    r2 = [2 / (1 + math.exp(-x)) for x in enc.r2.tolist()]
    expect(enc, lambda h, d, q: -r1[h] * abs(d) ** r2[h])


def test_sandwich():
    """The inner product of two sinusoidal embeddings, less that of an embedding with itself."""
    enc = made("sandwich", dim=6)

    def embedding(n: int) -> list[float]:
        angles = [n / 10_000 ** (2 * i / 6) for i in (1, 2, 3)]
        return [f(a) for a in angles for f in (math.sin, math.cos)]

    def value(h: int, d: int, q: torch.Tensor) -> float:
        product = sum(a * b for a, b in zip(embedding(d + 50), embedding(50), strict=True))
        return 3 / (8 * (h + 1)) * (product - 3)

    expect(enc, value)


@pytest.mark.parametrize("beyond", ("zero", "last", "-inf"))
@pytest.mark.parametrize("both", (False, True))
def test_relative(both, beyond):
    enc = made("relative", tables=2, reach=4, both=both, beyond=beyond)

    def value(h: int, d: int, q: torch.Tensor) -> float:
        low, high = (-3, 3) if both else (0, 3)
        if not low <= d <= high and beyond != "last":
            return 0.0 if beyond == "zero" else -math.inf
        mix = (enc.mix[h].T @ q / math.sqrt(8)).tolist()
        entry = min(max(d, low), high) - low
        return sum(w * enc.table[h, r, entry].item() for r, w in enumerate(mix))

    expect(enc, value)


def test_alibi_both_ways():
    enc = made("alibi", both=True)
    slopes = [2**-4, 2**-8, 2**-2]  # three heads: the recipe of two, then from that of four
    expect(enc, lambda h, d, q: -slopes[h] * abs(d))
    causal, q = grape.build("alibi", **SHAPE).double(), torch.randn(1, 3, 9, 8, dtype=torch.float64)
    y = [grape.attend(q, q, q, bias=one(q, q).bias) for one in (enc, causal)]
    assert (y[0] - y[1]).abs().max() < EXACT
    with pytest.raises(ValueError, match="both=True needs coords=1"):
        grape.build("alibi", **SHAPE, both=True, coords=2)


@pytest.mark.slow
@pytest.mark.parametrize("both", (False, True))
@pytest.mark.parametrize("buckets, most", ((32, 128), (8, 20), (64, 1000)))
def test_t5_is_the_bias_of_transformers(both, buckets, most):
    """Bucket for bucket, and as a whole bias. Run with transformers 5.22."""
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    from transformers import T5Config

    distance = torch.arange(-3000, 3001)
    theirs = t5.T5Attention._relative_position_bucket(-distance, both, buckets, most)
    assert torch.equal(t5_bucket(distance, buckets, most, both), theirs)
    config = T5Config(
        d_model=24, d_kv=8, num_heads=3, relative_attention_num_buckets=buckets,
        relative_attention_max_distance=most, is_decoder=not both,
    )  # fmt: skip
    layer = t5.T5Attention(config, has_relative_attention_bias=True)
    enc = grape.build("t5", **SHAPE, buckets=buckets, max_distance=most, both=both)
    enc.table.data.copy_(layer.relative_attention_bias.weight.data.T)
    q = torch.randn(1, 3, 300, 8)
    assert torch.equal(enc(q, q).bias.dense(), layer.compute_bias(300, 300))


# ----------------------------------------------------------------------------- the kernel on the encodings


@compiled_kernel
@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("name", (*NAMES, "rope+t5", "kerple-log+fox", "alibi"))
def test_gradients_of_parameters_at_length(name, causal):
    """Where a gradient weighs distances: the kernel errs no more than the dense computation in float32."""
    options = {"both": True} if name == "alibi" else {}

    def errors(draw: int) -> Errors:
        torch.manual_seed(draw)
        enc = grape.build(name, heads=2, head_dim=16, width=8, **options)
        given = torch.randn(3, 1, 2, 1000, 16)
        x, weight = torch.randn(1, 1000, 8), torch.randn(1, 2, 1000, 16)

        def run(impl: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
            enc.to(dtype).zero_grad()
            q, k, v = (one.to(dtype, copy=True).requires_grad_() for one in given)
            code = enc(q, k, x=x.to(dtype))
            y = attend(code.q, code.k, v, bias=code.bias, causal=causal, impl=impl)
            (y * weight).sum().backward()
            found = {"y": y.detach(), "q": q.grad, "k": k.grad, "v": v.grad}
            found |= {key: p.grad for key, p in enc.named_parameters()}
            return {key: value.double().clone() for key, value in found.items()}

        truth, dense = (run("reference", dtype) for dtype in (torch.float64, torch.float32))
        return errors_of(truth, dense, run("cpu", torch.float32), name, torch.float32)

    assert_rule(errors, name)


@compiled_kernel
def test_far_keys_are_skipped_and_change_nothing():
    q, k, v = torch.randn(3, 1, 2, 1024, 16)
    for name, options in (
        ("alibi", {"both": True, "slopes": 4.0}),
        ("relative", {"reach": 100, "both": True, "beyond": "-inf"}),
    ):
        bias = grape.build(name, heads=2, head_dim=16, **options)(q, k).bias
        with record_pruning() as report, torch.no_grad():
            y = attend(q, k, v, bias=bias, causal=False, impl="cpu")
        assert report.fraction > 0.3, name  # keys after a row's own are met first, and computed
        want = attend(*(x.double() for x in (q, k, v)), bias=bias, causal=False, impl="reference")
        assert (y - want).abs().max() < 1e-5


# ------------------------------------------------------------------------------------- edges of DistanceBias


@pytest.mark.parametrize("impl", ("reference", "blocks", "cpu", "decode", "auto"))
def test_a_query_whose_keys_are_all_beyond_minus_infinity_gives_zeros(impl):
    """As if a mask hid them; the gradients are zeros too."""
    if impl == "cpu" and not native.available():
        pytest.skip(str(native.why_not()))
    at = torch.tensor([[[0.0, 1.0, 50.0]]])
    table = torch.zeros(1, 1, 1, 1, 3, requires_grad=impl != "decode")
    bias = DistanceBias(at, at[..., :3], table, beyond="-inf")
    q, k, v = torch.randn(3, 1, 2, 3, 4)
    padding = torch.tensor([[False, False, True]])
    y = attend(q, k, v, bias=bias, key_padding=padding, impl=impl)
    assert torch.equal(y[:, :, 2], torch.zeros(1, 2, 4)) and bool(y.isfinite().all())
    if impl in ("decode", "auto"):
        return
    y, lse = attend(q, k, v, bias=bias, key_padding=padding, impl=impl, return_lse=True)
    assert bool((lse[:, :, 2] == -math.inf).all())
    y.sum().backward()
    assert bool(table.grad.isfinite().all())


def test_the_last_queries_of_one_may_be_none():
    """The table is not a tensor of queries, though it has one entry where they stand."""
    q = torch.randn(1, 3, 1, 8)
    bias = made("relative", reach=4)(q, q).bias.queries(slice(1, 1))
    assert bias.query_length == 0 and attend(q[:, :, :0], q, q, bias=bias).shape == (1, 3, 0, 8)


def test_the_table_of_a_batch_is_as_long_as_its_longest_sequence():
    """Not as the distance from one sequence to another, of which there is none."""
    at = torch.arange(9.0) + torch.tensor([[0.0], [5e6]])
    enc, q = made("kerple-log"), torch.randn(2, 3, 9, 8)
    bias = enc(q, q, positions=at).bias
    assert bias.span() == (-8, 8) and bias.resolved().table.shape[-1] == 17
    for b in range(2):
        alone = enc(q[b:], q[b:], positions=at[b]).bias
        assert torch.equal(bias.resolved().dense()[b], alone.dense()[0])


@pytest.mark.parametrize("name", (*NAMES, "alibi"))
def test_streaming_with_a_gap_is_the_full_computation(name):
    enc = made(name, **({"both": True} if name == "alibi" else {}))
    q, k, v = torch.randn(3, 1, 3, 12, 8, dtype=torch.float64)
    at = torch.tensor([3, 4, 5, 6, 90, 91, 92, 93, 94, 200, 201, 202])
    full = enc(q, k, positions=at)
    want = attend(full.q, full.k, v, bias=full.bias)
    bias, keys = None, []
    for part in (slice(0, 5), slice(5, 6), slice(6, 12)):
        code = enc(q[:, :, part], k[:, :, part], positions=at[part])
        bias = code.bias if bias is None else bias.extend(code.bias)
        keys.append(code.k)
        y = attend(code.q, torch.cat(keys, 2), v[:, :, : part.stop], bias=bias)
        assert (y - want[:, :, part]).abs().max() < EXACT


@pytest.mark.parametrize("name", (*NAMES, "alibi"))
def test_positions_between_whole_numbers_are_refused(name):
    enc = grape.build(name, **SHAPE, **({"both": True} if name == "alibi" else {}))
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(ValueError, match="positions that are whole numbers"):
        enc(q, q, positions=torch.tensor([0.5, 1.5]))


@pytest.mark.parametrize("name", NAMES)
def test_every_implementation_that_cannot_says_so(name):
    """They refuse by name, and `auto` takes an exact one."""
    q = torch.randn(1, 3, 5, 8)
    bias = grape.build(name, **SHAPE)(q, q).bias
    given = q.clone().requires_grad_()
    for impl, reason in (
        ("triton", "CUDA"),
        ("flex", "gradients of a DistanceBias"),
        ("sdpa", "DistanceBias"),
    ):
        with pytest.raises(ValueError, match=reason):
            attend(given, q, q, bias=bias, impl=impl)
    two = bias + grape.build("t5", **SHAPE)(q, q).bias
    with pytest.raises(ValueError, match="one DistanceBias, and the bias has several"):
        attend(q, q, q, bias=two, impl="cpu")
    want = attend(*[q.double()] * 3, bias=two, impl="reference")
    assert (attend(q, q, q, bias=two) - want).abs().max() < testing.TOL[torch.float32]


@pytest.mark.parametrize("name", ("t5", "kerple-log", "relative"))
def test_torch_func_and_compile(name):
    """torch.func takes the reference; compiled, a profile is computed by blocks and a table by the kernel."""
    enc = grape.build(name, heads=2, head_dim=8)
    q, k, v = torch.randn(3, 1, 2, 300, 8)

    def run(q: torch.Tensor) -> torch.Tensor:
        code = enc(q, k)
        return attend(code.q, code.k, v, bias=code.bias)

    plain = q.clone().requires_grad_()
    y = run(plain)
    y.sum().backward()
    grads = [p.grad.clone() for p in enc.parameters()]
    assert (torch.func.grad(lambda q: run(q).sum())(q) - plain.grad).abs().max() < 1e-4
    enc.zero_grad()
    again = q.clone().requires_grad_()
    z = torch.compile(run, backend="aot_eager", fullgraph=True)(again)
    z.sum().backward()
    assert (z - y).abs().max() < 1e-5 and (again.grad - plain.grad).abs().max() < 1e-4
    for want, p in zip(grads, enc.parameters(), strict=True):
        assert (p.grad - want).abs().max() < 1e-4 * (1 + want.abs().max())


def test_no_position_is_read_while_a_graph_is_captured(monkeypatch):
    """A read would end the capture; attention then takes an implementation without the table."""
    on_device = SimpleNamespace(is_meta=False, is_cuda=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not readable(on_device) and readable(torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert readable(on_device)


def test_half_precision_layers():
    """The bias is formed in float32: bfloat16 costs what rounding q, k and v does."""
    for name in NAMES:
        enc = grape.build(name, **SHAPE)
        q, k, v = torch.randn(3, 1, 3, 200, 8).bfloat16()
        truth = enc.double()(q.double(), k.double())
        want = attend(truth.q, truth.k, v.double(), bias=truth.bias, impl="reference")
        code = enc.float()(q, k)
        assert F.mse_loss(attend(code.q, code.k, v, bias=code.bias).double(), want) < 1e-5


@pytest.mark.parametrize(
    "name, options, words",
    (
        ("t5", {"buckets": 7}, "buckets of t5 must be a positive multiple of 2"),
        ("t5", {"max_distance": 16}, "max_distance of t5 must be an integer above 16"),
        ("sandwich", {"dim": 5}, "dim of sandwich must be even"),
        ("relative", {"reach": 0}, "reach of relative must be a positive integer"),
        ("relative", {"beyond": "first"}, 'beyond of relative must be "last", "zero" or "-inf"'),
    ),
)
def test_wrong_options_are_refused_by_name(name, options, words):
    with pytest.raises(ValueError, match=words):
        grape.build(name, **SHAPE, **options)
