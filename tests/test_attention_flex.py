"""FlexAttention, compiled on the CPU: inference only, half a minute for each compilation."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from attention_cases import BIASES, SLOPES, _table, cast, compare, evaluate, inputs, one_thread, rounded  # noqa: F401
from grape_pe.attention import attend, flex
from grape_pe.attention.flex import _score_mod, _slopes, _visible
from grape_pe.attention.masks import Masks

ALL = {
    "window": 40,
    "documents": torch.arange(100) // 45,
    "key_padding": torch.arange(200).view(2, 100) % 7 == 3,
}


@pytest.fixture
def uncompiled(monkeypatch):
    """FlexAttention as torch runs it without a compiler: the same functions, all pairs at once."""
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)


def check(kind: str, length: int, dtype: torch.dtype, masks: dict) -> None:
    i = rounded(inputs(length, width=32, value_width=32), dtype)
    truth, dense = ({"y": evaluate(i, kind, "reference", to, masks)["y"]} for to in (torch.float64, dtype))
    low = cast(i, dtype, grad=False)
    y = attend(low["q"], low["k"], low["v"], bias=BIASES[kind](low), impl="flex", **masks)
    compare(truth, dense, {"y": y.double()}, f"{kind} by flex", dtype)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("length", (1, 63, 217, 1025))
@pytest.mark.parametrize("kind", SLOPES)
def test_by_length(uncompiled, kind, length):
    check(kind, length, torch.float32, {})


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("masks", (ALL, {"causal": False}, {"window": 9}), ids=("all", "full", "window"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("kind", SLOPES)
def test_by_mask_and_dtype(uncompiled, kind, dtype, masks):
    check(kind, 100, dtype, masks)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("masks", ({}, ALL, {"causal": False}), ids=("causal", "all", "full"))
@pytest.mark.parametrize("kind", ("table", "mixed", "profile", "beyond"))
def test_tables_over_distances(uncompiled, monkeypatch, kind, masks):
    monkeypatch.setitem(BIASES, "beyond", lambda i: _table(i, True, -30, "-inf"))
    check(kind, 100, torch.float32, masks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, masks", [("mixed", ALL), ("terms", {}), ("a-qk", ALL), ("none", {"causal": False})]
)
def test_compiled_inference(kind, masks):
    check(kind, 100, torch.float32, masks)


@pytest.mark.parametrize("kind", ["none", "fox"])
def test_a_last_block_of_keys_that_is_not_whole(kind):
    """At 40 keys torch's own CPU kernel reads past the end; ours hands it whole blocks."""
    i = rounded(inputs(40, 5), torch.float32)
    low = cast(i, torch.float32, grad=False)
    q, k, v, bias = low["q"], low["k"], low["v"], BIASES[kind](low)
    want = attend(q, k, v, bias=bias, impl="reference")
    assert (attend(q, k, v, bias=bias, impl="flex") - want).abs().max() < 1e-5


def test_score_mod_is_the_bias():
    """The functions handed to FlexAttention, called pair by pair: no compiler needed."""
    i = inputs(12, 7)
    bias = BIASES["terms"](i)
    score_mod, dense = _score_mod(_slopes(bias), i["q"], i["k"], 5), bias.dense()
    for b, h, row, j in ((0, 0, 0, 0), (1, 3, 6, 11), (1, 2, 3, 5)):
        index = (torch.tensor(x) for x in (b, h, row, j))
        torch.testing.assert_close(
            score_mod(torch.zeros(()), *index).double(), dense[b, h, row, j], atol=1e-5, rtol=1e-5
        )


def test_mask_mod_is_the_mask():
    documents = (torch.arange(12) // 5).expand(2, -1)
    padding = torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) < 0.3
    for ids in (documents, documents[:1], None):
        masks = Masks(7, 12, torch.device("cpu"), True, 4, ids, padding)
        visible, dense = _visible(masks), masks.tile(slice(0, 7), slice(0, 12)).expand(2, 1, 7, 12)
        for b in range(2):
            for row in range(7):
                for j in range(12):
                    index = (torch.tensor(x) for x in (b, 0, row, j))
                    assert visible(*index) == dense[b, 0, row, j]


def test_coordinates_keep_the_digits_of_float64():
    i = inputs(4)
    bias = BIASES["fox"]({**i, "c_q": i["c_q"] + 1e6, "c_k": i["c_k"] + 1e6})
    score = _slopes(bias)
    assert all(x.dtype == torch.float32 for x in score.tensors().values())
    (query, key), rate = (score.query, score.key), {"rate0": torch.ones(())}
    mine = {name: query[name][..., 3] for name in ("high0", "low0")}
    apart = score.function(None, None, {**mine, **rate}, {name: key[name][..., 0] for name in mine})
    torch.testing.assert_close(apart.double(), i["c_k"][..., 0] - i["c_q"][..., 3], atol=1e-6, rtol=1e-6)
