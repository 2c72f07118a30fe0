"""A user's own pairwise bias: `ScoreBias` by blocks, decode and FlexAttention, against the dense computation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from attention_cases import inputs, one_thread  # noqa: F401
from grape_pe.attention import attend, flex
from grape_pe.bias import ScoreBias, TileBias


def own(t: Tensor, j: Tensor, query: dict[str, Tensor], key: dict[str, Tensor]) -> Tensor:
    """A clipped distance, with a rate of the query and a threshold of the key."""
    return -query["rate"] * torch.log1p((t - j).abs() + key["far"].abs())


def case(queries: int, grad: bool) -> tuple[list[Tensor], ScoreBias]:
    i = inputs(150, queries)
    rate, far, *qkv = (i[n].float().requires_grad_(grad) for n in ("rate_q", "c_k", "q", "k", "v"))
    return qkv, ScoreBias(own, {"rate": rate}, {"far": far})


def test_the_definition():
    _, bias = case(20, False)
    dense = bias.dense()
    t, j = 7, 91
    one = own(
        torch.tensor(t + 130),
        torch.tensor(j),
        {"rate": bias.query["rate"][1, 2, t]},
        {"far": bias.key["far"][1, 2, j]},
    )
    assert dense.shape == (2, 4, 20, 150)
    torch.testing.assert_close(dense[1, 2, t, j], one)


@pytest.mark.parametrize("masks", ({}, {"window": 40, "sinks": 2}), ids=("causal", "sinks"))
def test_by_blocks_with_gradients(masks):
    results = []
    for impl in ("reference", "blocks", "auto"):
        qkv, bias = case(150, True)
        y = attend(*qkv, bias=bias, impl=impl, **masks)
        y.square().sum().backward()
        results.append([y.detach(), *(x.grad for x in (*qkv, bias.query["rate"], bias.key["far"]))])
    for got in results[1:]:
        for a, b in zip(got, results[0], strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_decoding():
    qkv, bias = case(3, False)
    torch.testing.assert_close(
        attend(*qkv, bias=bias, impl="decode"), attend(*qkv, bias=bias, impl="reference")
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_takes_the_same_function(monkeypatch):
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    qkv, bias = case(150, False)
    got, want = (attend(*qkv, bias=bias, window=60, impl=impl) for impl in ("flex", "reference"))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_it_needs_features():
    with pytest.raises(ValueError, match="needs at least one query feature"):
        ScoreBias(own, {}, {"far": torch.zeros(1, 1, 4)})


def radial(rows: slice, cols: slice, query: dict[str, Tensor], key: dict[str, Tensor]) -> Tensor:
    return -(query["x"][:, :, rows].unsqueeze(-1) - key["x"][:, :, cols].unsqueeze(-2)).abs()


@pytest.mark.parametrize("impl", ("reference", "blocks", "flex"))
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_number_for_each_head_beside_a_feature_of_tokens(impl, monkeypatch):
    """More than one block of queries: a feature of length 1 must not be cut with the queries."""
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    qkv, _ = case(150, False)
    slope, x = torch.tensor([0.1, 0.2, 0.3, 0.4]).view(1, 4, 1), torch.arange(150.0).view(1, 1, -1)

    def function(t: Tensor, j: Tensor, query: dict[str, Tensor], key: dict[str, Tensor]) -> Tensor:
        return -query["slope"] * (query["x"] - key["x"]).abs()

    shared = ScoreBias(function, {"slope": slope, "x": x}, {"x": x})
    whole = ScoreBias(function, {"slope": slope.expand(1, 4, 150), "x": x}, {"x": x})
    torch.testing.assert_close(
        attend(*qkv, bias=shared, impl=impl), attend(*qkv, bias=whole, impl="reference")
    )


@pytest.mark.parametrize("impl", ("reference", "blocks"))
def test_a_function_may_return_a_number(impl):
    qkv, _ = case(150, False)
    x = torch.zeros(1, 1, 150)
    bias = ScoreBias(lambda t, j, query, key: 0.0, {"x": x}, {"x": x})
    torch.testing.assert_close(attend(*qkv, bias=bias, impl=impl), attend(*qkv))


@pytest.mark.parametrize("kind", (ScoreBias, TileBias))
@pytest.mark.parametrize("feature", (torch.zeros(150), 0.5), ids=("1-D", "number"))
def test_features_are_tensors_of_tokens(kind, feature):
    with pytest.raises(ValueError, match=r"query feature 'x' of a .*Bias must be a tensor"):
        kind(own, {"x": feature}, {"x": torch.zeros(1, 1, 150)})


@pytest.mark.parametrize("impl", ("reference", "blocks"))
@pytest.mark.parametrize("kind", (ScoreBias, TileBias))
def test_features_of_another_batch_are_refused(kind, impl):
    """They would broadcast, and the output would have the batch of the bias."""
    (q, k, v), _ = case(150, False)
    function = radial if kind is TileBias else lambda t, j, query, key: query["x"] - key["x"]
    bias = kind(function, {"x": torch.zeros(3, 1, 150)}, {"x": torch.zeros(1, 1, 150)})
    with pytest.raises(ValueError, match=r"query\.x of the bias must have shape"):
        attend(q[:1], k[:1], v[:1], bias=bias, impl=impl)


@pytest.mark.parametrize("impl", ("reference", "blocks"))
def test_tiles_of_a_wrong_shape_are_refused(impl):
    (q, k, v), _ = case(150, False)
    x = {"x": torch.zeros(1, 1, 150)}
    wide = TileBias(lambda rows, cols, query, key: torch.zeros(2, 1, 150, 3), x, x)
    with pytest.raises(ValueError, match="the function of a TileBias must return"):
        attend(q, k, v, bias=wide, impl=impl)
    batch = TileBias(lambda *a: radial(*a).expand(3, -1, -1, -1), x, x)
    with pytest.raises(ValueError, match="the bias must broadcast to"):
        attend(q[:1], k[:1], v[:1], bias=batch, impl=impl)


def test_a_number_for_all_pairs_is_not_rounded_to_torchs_default_dtype():
    (q, k, v), _ = case(150, False)
    x = {"x": torch.zeros(1, 1, 150)}
    bias = ScoreBias(lambda t, j, query, key: 0.1, x, x)
    want = attend(q, k, v, bias=bias, impl="blocks", return_lse=True)[1]
    try:
        torch.set_default_dtype(torch.bfloat16)
        got = attend(q, k, v, bias=bias, impl="blocks", return_lse=True)[1]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, want)
