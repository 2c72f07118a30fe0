"""Every implementation x every bias x masks x dtypes against the dense computation in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_cases import (
    BIASES,
    assert_accurate,
    cast,
    compare,
    evaluate,
    inputs,
    one_thread,  # noqa: F401
    rounded,
)
from grape_pe.attention import attend
from grape_pe.attention.cpu import build as native
from grape_pe.bias import PathBias, SlopeBias, SlopeTerm

LENGTHS = (1, 63, 217, 1025)


@pytest.fixture(params=["cpu", "blocks"])
def impl(request):
    """What computes every bias with gradients on the CPU."""
    if request.param == "cpu" and not native.available():
        pytest.skip(str(native.why_not()))
    return request.param


def skip_if_not_compiled(impl: str, kind: str) -> None:
    if impl == "cpu" and kind == "tile":
        pytest.skip("no kernel computes a TileBias")


def masks_of(name: str, keys: int, batch: int = 2) -> dict:
    """Every mask, alone and all at once."""
    packed = (torch.arange(keys) // max(1, keys // 3)).expand(batch, -1)
    padding = torch.zeros(batch, keys, dtype=torch.bool)
    padding[0, : keys // 4] = True
    padding[-1, keys // 2 : keys // 2 + keys // 5] = True
    table = {
        "causal": {},
        "full": {"causal": False},
        "window": {"window": 1 + keys // 5},
        "documents": {"documents": packed[0]},
        "cu_seqlens": {"cu_seqlens": torch.tensor([0, keys // 3, keys // 3, keys])},
        "padding": {"key_padding": padding},
        "all": {"window": 1 + keys // 2, "documents": packed, "key_padding": padding},
        "sinks": {"window": 1 + keys // 5, "sinks": 3},
        "all, both ways": {
            "causal": False,
            "window": 1 + keys // 3,
            "sinks": keys // 2,
            "documents": packed,
            "key_padding": padding,
        },
    }
    return table[name]


MASKS = ("causal", "full", "window", "sinks", "documents", "cu_seqlens", "padding", "all", "all, both ways")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", BIASES)
def test_by_length(impl, kind, length):
    skip_if_not_compiled(impl, kind)
    small = {"batch": 1, "heads": 2, "kv_heads": 1} if length > 1000 else {}
    assert_accurate(inputs(length, **small), kind, impl, torch.float32, {})


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", BIASES)
def test_by_mask(impl, kind, mask):
    skip_if_not_compiled(impl, kind)
    assert_accurate(inputs(150), kind, impl, torch.float32, masks_of(mask, 150))


@pytest.mark.parametrize("mask", ("causal", "full", "all"))
@pytest.mark.parametrize("kind", ("a-qk", "slope+path", "mixed", "tile"))
def test_fewer_queries_than_keys(impl, kind, mask):
    skip_if_not_compiled(impl, kind)
    assert_accurate(inputs(170, 70), kind, impl, torch.float32, masks_of(mask, 170))


@pytest.mark.parametrize("kind", ("a-qk", "slope+path", "table"))
def test_more_queries_than_keys(impl, kind):
    assert_accurate(inputs(40, 100), kind, impl, torch.float32, {"causal": False})


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float64))
@pytest.mark.parametrize("kind", BIASES)
def test_by_dtype(impl, kind, dtype):
    skip_if_not_compiled(impl, kind)
    if impl == "cpu" and dtype == torch.float64:
        pytest.skip("the compiled kernel computes in float32")
    assert_accurate(inputs(130), kind, impl, dtype, masks_of("all", 130))


@pytest.mark.parametrize("masks", ({}, {"causal": False}), ids=("causal", "full"))
@pytest.mark.parametrize("length", LENGTHS)
def test_torchs_own_attention(length, masks):
    assert_accurate(inputs(length, batch=1, heads=2, kv_heads=1), "none", "sdpa", torch.float32, masks)


@pytest.mark.parametrize("kind", ("a-qk", "slope+path", "mixed"))
def test_more_threads_than_heads(kind):
    """Then the backward pass cuts the queries into parts with gradients of their own."""
    torch.set_num_threads(5)
    assert_accurate(inputs(300, heads=2, batch=1), kind, "cpu", torch.float32, {})


@pytest.mark.parametrize("mask", ("causal", "full", "all"))
@pytest.mark.parametrize("queries", (1, 5))
@pytest.mark.parametrize("kind", BIASES)
def test_decoding(kind, queries, mask):
    i, masks = rounded(inputs(150, queries), torch.float32), masks_of(mask, 150)
    truth, dense = (
        {"y": evaluate(i, kind, "reference", dtype, masks)["y"]} for dtype in (torch.float64, torch.float32)
    )
    few = cast(i, torch.float32, grad=False)
    y = attend(few["q"], few["k"], few["v"], bias=BIASES[kind](few), impl="decode", **masks)
    compare(truth, dense, {"y": y.double()}, f"{kind} by decode")


@pytest.mark.parametrize("kind", ("none", "fox", "slope+path"))
@pytest.mark.parametrize("mask", ("causal", "padding", "all, both ways"))
def test_logsumexp_and_its_gradient(impl, kind, mask):
    """return_lse: the value, -inf where a row sees nothing, and gradients through out and lse together."""
    masks = masks_of(mask, 150)

    def run(dtype: torch.dtype, name: str) -> dict[str, torch.Tensor]:
        leaves = cast(rounded(inputs(150), torch.float32), dtype)
        qkv = (leaves[n] for n in "qkv")
        y, lse = attend(*qkv, bias=BIASES[kind](leaves), impl=name, return_lse=True, **masks)
        assert lse.dtype == dtype and lse.shape == y.shape[:3]
        seen = lse.isfinite()
        (y.double().square().sum() + lse.double()[seen].sin().sum()).backward()
        grads = {n: x.grad.double() for n, x in leaves.items() if x.grad is not None}
        return {"lse": lse.detach().double().masked_fill(~seen, -1.0), **grads}

    truth, dense = (run(dtype, "reference") for dtype in (torch.float64, torch.float32))
    compare(truth, dense, run(torch.float32, impl), f"{kind} by {impl}")


@pytest.mark.parametrize("causal", (True, False))
def test_gradient_of_the_logsumexp_of_nearly_equal_logits(impl, causal):
    """The largest weights are equal where the largest logits are not: they may not take turns as the maximum."""
    i = inputs(70)
    q, k, v = 1e-6 * i["q"], i["k"], i["v"]

    def gradient(dtype: torch.dtype, name: str) -> torch.Tensor:
        leaf = q.float().to(dtype).requires_grad_()
        rest = (x.float().to(dtype) for x in (k, v))
        _, lse = attend(leaf, *rest, causal=causal, impl=name, return_lse=True)
        return torch.autograd.grad(lse.sum(), leaf)[0].double()

    truth = gradient(torch.float64, "reference")
    assert (gradient(torch.float32, impl) - truth).norm() < 1e-5 * truth.norm()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_drawn_shapes_and_masks(data):
    causal = data.draw(st.booleans())
    kind = data.draw(st.sampled_from(list(BIASES)))
    keys = data.draw(st.integers(1, 140))
    queries = data.draw(st.integers(1, keys))
    batch, kv_heads, group = (data.draw(st.integers(1, 3)) for _ in range(3))
    shape = {
        "batch": batch,
        "kv_heads": kv_heads,
        "heads": kv_heads * group,
        "probe": data.draw(st.integers(1, 19)),
    }
    widths = {"width": data.draw(st.integers(1, 40)), "value_width": data.draw(st.integers(1, 40))}
    i = inputs(keys, queries, seed=data.draw(st.integers(0, 9)), **shape, **widths)
    masks = {
        "causal": causal,
        "window": data.draw(st.none() | st.integers(1, 90)),
        "documents": data.draw(st.sampled_from([None, torch.randint(0, 3, (batch, keys)).sort(-1).values])),
        "key_padding": data.draw(st.sampled_from([None, torch.rand(batch, keys) < 0.3])),
    }
    for impl in ("blocks", *(["cpu"] if kind != "tile" and native.available() else [])):
        assert_accurate(i, kind, impl, torch.float32, masks)


def test_document_ids_need_no_order_and_no_size(impl):
    """Ids that wrap in 32 bits, and documents interleaved: equality is all that counts."""
    ids = torch.tensor([0, 1 << 32, 5, -(1 << 40)]).repeat(30)
    for kind in ("a-qk", "path"):
        assert_accurate(inputs(120), kind, impl, torch.float32, {"documents": ids})


def test_probes_for_every_head():
    i = rounded(inputs(90, kv_heads=2), torch.float32)
    full = {name: i[name].repeat_interleave(2, 1) for name in ("probe_q", "probe_k")}
    q, k, v = (i[name].float() for name in "qkv")
    shared, own = (
        attend(q, k, v, bias=PathBias(p["probe_q"].float(), p["probe_k"].float(), i["slope"].float()))
        for p in (i, full)
    )
    assert torch.equal(shared, own)


FAR = 32768


def few_rows(logits_of, v, rows) -> dict[str, dict[str, torch.Tensor]]:
    """Those rows of causal attention, densely: in float64 (the truth) and in float32."""

    def dense(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        hidden = torch.arange(v.shape[2]) > rows.unsqueeze(-1)
        y = logits_of(dtype).masked_fill(hidden, -torch.inf).softmax(-1) @ v.to(dtype)
        return {"y": y.double()}

    return {"truth": dense(torch.float64), "dense": dense(torch.float32)}


@pytest.mark.parametrize("impl", ("cpu", "decode"))
@pytest.mark.parametrize("rate", (1e-6, 1e-3, 0.1, 8.0))
def test_accuracy_at_length(impl, rate):
    """T = 32768, a few rows against float64: what a query and a key both add to the rate, at long range."""
    rows = torch.arange(FAR - 4, FAR) if impl == "decode" else torch.tensor([5, 1000, 20001, FAR - 1])
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, FAR, 8, generator=g) for _ in range(3))
    c = (2 * torch.rand(1, 1, FAR, generator=g, dtype=torch.float64)).cumsum(-1)
    rate_q, rate_k = (rate * torch.rand(1, 1, FAR, generator=g) for _ in range(2))

    def logits(dtype: torch.dtype) -> torch.Tensor:
        offset = (c.unsqueeze(-2) - c[:, :, rows].unsqueeze(-1)).to(dtype)
        slope = rate_q[:, :, rows].to(dtype).unsqueeze(-1) + rate_k.to(dtype).unsqueeze(-2)
        return q[:, :, rows].to(dtype) @ k.to(dtype).transpose(-1, -2) * 8**-0.5 + slope * offset

    asked = rows if impl == "decode" else slice(None)
    bias = SlopeBias((SlopeTerm(c[..., asked], c, rate_q[..., asked], rate_k),))
    y = attend(q[:, :, asked], k, v, bias=bias, impl=impl)
    got = {"y": (y if impl == "decode" else y[:, :, rows]).double()}
    compare(**few_rows(logits, v, rows), got=got, what=f"{impl} at rate {rate}")


@pytest.mark.parametrize("rate", (1e-6, 1e-3, 0.1, 8.0))
def test_accuracy_of_a_path_at_length(rate):
    """T = 32768: what tens of thousands of edges add up to, against their sum in float64."""
    rows = torch.tensor([5, 1000, 20001, FAR - 1])
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, FAR, 8, generator=g) for _ in range(3))
    probe_q, probe_k = (2 * torch.randn(1, 1, FAR, 6, generator=g) for _ in range(2))
    slope = torch.full((1, 1, 1), rate)

    def logits(dtype: torch.dtype) -> torch.Tensor:
        z = probe_q[:, :, rows].to(dtype) @ probe_k.to(dtype).transpose(-1, -2) / 6
        edge = F.logsigmoid(z).masked_fill(torch.arange(FAR) > rows.unsqueeze(-1), 0.0)
        after = edge.flip(-1).cumsum(-1).flip(-1) - edge  # of the tokens after j, up to the query
        return q[:, :, rows].to(dtype) @ k.to(dtype).transpose(-1, -2) * 8**-0.5 + rate * after

    y = attend(q, k, v, bias=PathBias(probe_q, probe_k, slope), impl="cpu")
    compare(**few_rows(logits, v, rows), got={"y": y[:, :, rows].double()}, what=f"path at rate {rate}")


@pytest.mark.parametrize("length", (300, 2000))
def test_gradient_through_a_cumulative_sum(impl, length):
    """FoX: what a pair adds at its key it must take away at its query, or the sum behind c piles it up."""
    i = rounded(inputs(length, batch=1, heads=2, kv_heads=2), torch.float32)
    log_f = -torch.rand(1, 2, length, generator=torch.Generator().manual_seed(1))

    def gradient(dtype: torch.dtype, name: str) -> dict[str, torch.Tensor]:
        leaf = log_f.detach().clone().to(dtype).requires_grad_()
        c = -leaf.double().cumsum(-1)
        bias = SlopeBias((SlopeTerm(c, c, torch.ones(1, 2, 1, dtype=dtype)),))
        y = attend(*(i[n].to(dtype) for n in "qkv"), bias=bias, impl=name)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        (y * weight.to(dtype)).sum().backward()
        return {"log_f": leaf.grad.double()}

    truth, dense = gradient(torch.float64, "reference"), gradient(torch.float32, "reference")
    compare(truth, dense, gradient(torch.float32, impl), "fox")
