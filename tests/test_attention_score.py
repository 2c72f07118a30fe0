"""A user's own pairwise bias: `ScoreBias` by blocks, decode and FlexAttention, against the dense computation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from attention_cases import inputs, one_thread  # noqa: F401
from grape_pe.attention import attend, flex
from grape_pe.bias import ScoreBias


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
    with pytest.raises(ValueError, match="needs a feature"):
        ScoreBias(own, {}, {"far": torch.zeros(1, 1, 4)})
