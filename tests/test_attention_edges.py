"""Where torch's own attention is not to be trusted as it is: half precision, autocast, scales, tracing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from attention_cases import (
    BIASES,
    assert_accurate,
    broken,
    errors_of,
    inputs,
    one_thread,  # noqa: F401
)
from grape_pe.attention import attend, flex, key_bound
from grape_pe.attention.flex import _slopes
from grape_pe.attention.pruning import record_pruning
from grape_pe.bias import Bias, SlopeBias, SlopeTerm
from grape_pe.testing import TOL

HALF = (torch.bfloat16, torch.float16)
Attended = tuple[Tensor, Tensor, Tensor]


def drawn(queries: int, keys: int, dtype: torch.dtype = torch.float32, kv_heads: int = 4) -> Attended:
    g = torch.Generator().manual_seed(queries + keys)
    sizes = ((4, queries), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (torch.randn(2, *size, 16, generator=g).to(dtype) for size in sizes)
    return q, k, v


def alibi(queries: int, keys: int, rate: float = 0.5, stride: float = 1.0) -> SlopeBias:
    c = stride * torch.arange(keys, dtype=torch.float64).view(1, 1, -1)
    return SlopeBias((SlopeTerm(c[..., keys - queries :], c, torch.full((1, 4, 1), rate)),))


def check(qkv: Attended, impl: str, bias: Bias | None = None, **options) -> None:
    """The rule of accuracy for the output."""
    exact = [x.double() for x in qkv]
    truth = attend(*exact, bias=bias, impl="reference", **options)
    dense = attend(*qkv, bias=bias, impl="reference", **options)
    got = attend(*qkv, bias=bias, impl=impl, **options)
    assert got.dtype == qkv[2].dtype
    what = f"{impl} in {got.dtype}"
    found = errors_of(*({"y": y.double()} for y in (truth, dense, got)), what, got.dtype)
    assert not broken(found), f"{what}: {broken(found)}"


def padding_after(first: int, keys: int) -> Tensor:
    return (torch.arange(keys) >= first).expand(2, -1)


@pytest.mark.parametrize("kv_heads", (1, 4))
@pytest.mark.parametrize("queries", (1, 5))
@pytest.mark.parametrize("dtype", HALF)
def test_decode_do_not_round_the_bias(dtype, queries, kv_heads):
    """The nearest visible key is 400 away: -120, which bfloat16 holds in steps of a half."""
    qkv = drawn(queries, 600, dtype, kv_heads)
    check(qkv, "decode", alibi(queries, 600, 0.3), key_padding=padding_after(200, 600))


@pytest.mark.parametrize("impl", ("decode", "cpu"))
@pytest.mark.parametrize("dtype", HALF)
def test_a_far_key_that_wins(dtype, impl):
    """A shift of the row would not help: what counts is the difference of two keys with biases apart."""
    q, k, v = drawn(1, 200, dtype)
    k[:, :, 20:40] = q * 14.0
    check((q, k, v), impl, alibi(1, 200, 0.3))


@pytest.mark.parametrize("kind", ("fox", "a-qk", "slope+path", "tile"))
@pytest.mark.parametrize("dtype", HALF)
def test_decoding_in_half_precision(dtype, kind):
    i = {name: x.to(dtype) if name in "qkv" else x for name, x in inputs(300, 3).items()}
    check((i["q"], i["k"], i["v"]), "decode", BIASES[kind](i))


def test_a_bias_beyond_float16_hides_nothing():
    qkv = drawn(1, 600, torch.float16)
    bias, padding = alibi(1, 600, 1e4), padding_after(200, 600)
    check(qkv, "decode", bias, key_padding=padding)
    assert torch.equal(
        attend(*qkv, bias=bias, impl="decode", key_padding=padding)[:, :, 0], qkv[2][:, :, 199]
    )


@pytest.mark.parametrize("dtype", (torch.float32, *HALF))
def test_decode_that_see_no_key_are_zero(dtype):
    padding = padding_after(0, 40) & torch.tensor([[True], [False]])
    for bias in (None, alibi(3, 40)):
        y = attend(*drawn(3, 40, dtype), bias=bias, impl="decode", key_padding=padding)
        assert (y[0] == 0).all() and (y[1] != 0).all()


def test_one_query_in_half_precision_has_gradients():
    qkv = tuple(x.requires_grad_() for x in drawn(1, 50, torch.bfloat16))
    attend(*qkv, bias=alibi(1, 50), impl="cpu").float().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.bfloat16 for x in qkv)


@pytest.mark.parametrize(
    "impl, queries, biased",
    [
        ("sdpa", 70, False),
        ("cpu", 70, True),
        ("blocks", 70, True),
        ("reference", 70, True),
        ("decode", 3, True),
    ],
)
def test_autocast_changes_nothing(impl, queries, biased):
    """Neither the output nor, where there is one, a gradient."""

    def run(autocast: bool) -> list[Tensor]:
        leaves = [x.requires_grad_(impl != "decode") for x in drawn(queries, 70)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = attend(*leaves, bias=alibi(queries, 70) if biased else None, impl=impl)
        if impl != "decode":
            y.square().sum().backward()
        return [y.detach(), *(x.grad for x in leaves if x.grad is not None)]

    for a, b in zip(run(False), run(True), strict=True):
        assert b.dtype == torch.float32 and torch.equal(a, b)


@pytest.mark.parametrize("scale", (-0.3, 0.0, -0.0))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, *HALF))
def test_scales_that_are_not_positive(dtype, scale):
    for queries, impl in ((70, "auto"), (70, "blocks"), (3, "decode")):
        for bias in (None, alibi(queries, 70)):
            check(drawn(queries, 70, dtype), impl, bias, scale=scale)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, *HALF))
@pytest.mark.parametrize("batch", (slice(0, 1), slice(0, 2)))
def test_one_query_and_many_keys(dtype, batch):
    """The first keys of a larger storage, with fewer key heads; some keys are skipped."""
    for kv_heads in (2, 4):
        q, k, v = (x[batch] for x in drawn(1, 2300, dtype, kv_heads))
        k, v = k[:, :, :2100], v[:, :, :2100]
        for bias in (None, alibi(1, 2100), alibi(1, 2100, rate=0.01)):
            for scale in (0.3, -0.3):
                check((q, k, v), "decode", bias, scale=scale)
                check((q, k, v), "decode", bias, scale=scale, key_bound=key_bound(k))


def test_gradients_at_a_negative_scale():
    for kind in ("none", "fox"):
        assert_accurate(inputs(70), kind, "cpu", torch.float32, {"scale": -0.3})


def case(name: str, keys: int = 70) -> dict:
    """Ways to call `rows` with three queries."""
    bound = torch.full((2, 4), 100.0)
    table = {
        "plain": {},
        "bias": {"bias": alibi(3, keys)},
        "masks": {"bias": alibi(3, keys), "key_padding": padding_after(keys // 2, keys), "window": keys},
        "bound": {"bias": alibi(3, keys), "key_bound": bound},
    }
    return table[name]


CASES = [("plain", 70), ("bias", 70), ("masks", 70), ("bound", 2100)]


def moved(options: dict, move) -> dict:
    return {
        name: x.map(move) if isinstance(x, Bias) else move(x) if isinstance(x, Tensor) else x
        for name, x in options.items()
    }


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name, keys", CASES)
def test_decode_on_meta(name, keys, dtype):
    def to_meta(x: Tensor) -> Tensor:
        return x.to("meta")

    with record_pruning():
        y = attend(*map(to_meta, drawn(3, keys, dtype)), impl="decode", **moved(case(name, keys), to_meta))
    assert y.is_meta and y.shape == (2, 4, 3, 16) and y.dtype == dtype


@pytest.mark.parametrize("name, keys", CASES)
def test_decode_of_fake_tensors(name, keys):
    mode = FakeTensorMode()
    qkv, options = [mode.from_tensor(x) for x in drawn(3, keys)], moved(case(name, keys), mode.from_tensor)
    with mode, record_pruning():
        assert attend(*qkv, impl="decode", **options).shape == (2, 4, 3, 16)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name, keys", CASES)
def test_decode_while_compiling(name, keys, dtype):
    torch._dynamo.reset()
    qkv, options = drawn(3, keys, dtype), case(name, keys)

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, impl="decode", **options)

    away = (
        compiled(*qkv) - attend(*qkv, impl="decode", **options)
    ).norm()  # torch's attention, and our kernel
    assert away <= TOL[dtype] * attend(*qkv, impl="reference", **options).norm()


@pytest.mark.parametrize(
    "impl, queries", [("sdpa", 70), ("auto", 70), ("cpu", 70), ("blocks", 70), ("decode", 3)]
)
@pytest.mark.parametrize("biased", (False, True))
def test_shapes_that_vary_while_compiling(impl, queries, biased):
    torch._dynamo.reset()
    qkv, bias = drawn(queries, 70, kv_heads=2), alibi(queries, 70) if biased and impl != "sdpa" else None

    @torch.compile(fullgraph=True, backend="eager", dynamic=True)
    def compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, bias=bias, impl=impl)

    torch.testing.assert_close(compiled(*qkv), attend(*qkv, bias=bias, impl=impl))


@pytest.fixture
def compiled_anew():
    """FlexAttention with nothing compiled, before and after."""
    forget_compiled()
    yield
    forget_compiled()


def forget_compiled() -> None:
    flex._compiled.cache_clear()
    torch._dynamo.reset()


def flex_at(keys: int) -> tuple[Tensor, Tensor]:
    qkv, bias = drawn(keys, keys), alibi(keys, keys)
    return attend(*qkv, bias=bias, impl="flex"), attend(*qkv, bias=bias, impl="reference")


@pytest.fixture
def graphs(compiled_anew, monkeypatch) -> list:
    """What torch.compile was asked to compile: kept, and run as it is."""
    kept, compile_of_torch = [], torch.compile

    def backend(graph, examples):
        kept.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda f, **how: compile_of_torch(f, **{"backend": backend, **how}))
    return kept


def test_flex_compiles_every_shape(graphs):
    """Beyond torch's limit of recompilations too, where it would go on with all logits at once."""
    with torch._dynamo.config.patch(recompile_limit=2):
        for keys in (100, 200, 300, 400, 400):
            torch.testing.assert_close(*flex_at(keys))
    assert len(graphs) == 4


def test_flex_says_when_it_can_compile_no_more(graphs, monkeypatch):
    monkeypatch.setattr(flex, "SHAPES", 1)
    flex_at(100)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        flex_at(200)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:flex_attention called without torch.compile")
def test_flex_stays_compiled_beyond_the_limit(compiled_anew, monkeypatch):
    """Torch says so, once in a process, when it holds all scores at once."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._WARNINGS_SHOWN", set())
    with torch._dynamo.config.patch(recompile_limit=1):
        for keys in (100, 200):
            torch.testing.assert_close(*flex_at(keys))


def test_an_infinite_coordinate_has_no_low_part():
    c = torch.tensor([0.0, 1e6 + 1e-6, -math.inf, math.inf], dtype=torch.float64).view(1, 1, -1)
    score = _slopes(SlopeBias((SlopeTerm(c, c, torch.ones(1, 4, 1)),)))
    for side in (score.query, score.key):
        high, low = side["high0"][0, 0], side["low0"][0, 0]
        assert torch.equal(high.isinf(), torch.tensor([False, False, True, True]))
        assert low[1] != 0 and (low[2:] == 0).all()


def test_the_first_keys_are_read_when_they_matter():
    """A bias that is largest at the first key: its keys are not a whole chunk of those that are skipped together."""
    q, k, v = (torch.randn(1, 4, n, 16, generator=torch.Generator().manual_seed(n)) for n in (1, 2100, 2101))
    v = v[:, :, :2100]
    c = torch.arange(2100.0, dtype=torch.float64).view(1, 1, -1)
    rate = torch.full((1, 4, 2100), 0.5)
    rate[..., 0] = 0.0
    bias = SlopeBias((SlopeTerm(c[..., -1:], c, None, rate),))
    bound = k.norm(dim=-1).amax(-1)
    got = attend(q, k, v, bias=bias, key_bound=bound, impl="decode")
    torch.testing.assert_close(got, attend(q, k, v, bias=bias, impl="reference"))
