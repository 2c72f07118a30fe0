"""Log-n attention against the formula, in sums, in layers, and where it is refused."""

from __future__ import annotations

import math

import pytest
import torch

import grape_pe as grape
from grape_pe import testing

SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 8, "width": 16}


def expected(enc, rest, data, length: int):
    """Eq. Q1 row by row: the product of the other parts times the factor, and their bias as it is."""
    code = rest(data.q, data.k, x=data.x, positions=data.positions)
    bias = code.bias.dense()
    product = testing.scores(rest, data) - (0 if bias is None else bias)
    factor = [max(1.0, math.log(n + 1) / math.log(length)) for n in data.positions.tolist()]
    product = product * torch.tensor(factor, dtype=torch.float64).view(1, 1, -1, 1)
    return product if bias is None else product + bias


@pytest.mark.parametrize(
    "rest", ["nope", "rope", "grape-m-basis", "alibi", "fox", "grape-ap", "rope+grape-a-qk"]
)
def test_the_factor_multiplies_products_and_no_bias(rest: str):
    name = "logn" if rest == "nope" else f"{rest}+logn"
    torch.manual_seed(0)
    enc = grape.build(name, length=8, **SIZES).double()
    torch.manual_seed(0)
    alone = grape.build(rest, **SIZES).double()
    data = testing.sample(enc, tokens=40, dtype=torch.float64)
    testing.assert_close(testing.scores(enc, data), expected(enc, alone, data, 8), torch.float64, name)


def test_path_is_multiplied_inside_its_bias():
    torch.manual_seed(0)
    enc = grape.build("path+logn", length=4, **SIZES).double()
    data = testing.sample(enc, tokens=30, dtype=torch.float64)
    path = testing.scores(enc.parts["path"], data)
    factor = ((torch.arange(30, dtype=torch.float64) + 1).log() / math.log(4)).clamp_min(1.0)
    got = testing.scores(enc, data)
    testing.assert_close(got, path * factor.view(1, 1, -1, 1), torch.float64, "path+logn")


def test_nothing_changes_up_to_the_length():
    enc, plain = grape.build("rope+logn", length=32, **SIZES), grape.build("rope", **SIZES)
    data = testing.sample(enc, tokens=32)
    assert torch.equal(testing.scores(enc, data), testing.scores(plain, data))


def test_a_wrong_length_and_a_norm_after_are_refused():
    for length in (1, 0, 2.5, True):
        with pytest.raises(ValueError, match="length must be an integer of at least 2"):
            grape.build("logn", length=length, **SIZES)
    layer = grape.Attention(16, 4, encoding="rope+logn", qk_norm="after")
    with pytest.raises(ValueError, match="qk_norm=True"):
        layer(torch.randn(1, 3, 16))


def test_it_is_not_added_to_a_pretrained_model():
    from grape_pe.hf.fade import fade_in

    with pytest.raises(ValueError, match="logn cannot be added"):
        fade_in(grape.build("rope+logn", **SIZES))
