"""The reference attention against a loop over tokens, for every mask at once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grape_pe as grape
from grape_pe import testing


def by_hand(q, k, v, bias, causal, window, documents, padding, scale):
    """One query at a time, in float64, from the definition."""
    batch, heads, tq, _ = q.shape
    tk, group = k.shape[2], heads // k.shape[1]
    dense = bias.dense()
    out = torch.zeros(batch, heads, tq, v.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for row in range(tq):
                t = row + tk - tq
                seen = [
                    j
                    for j in range(tk)
                    if (not causal or j <= t)
                    and (window is None or abs(t - j) < window)
                    and (documents is None or documents[b, t] == documents[b, j])
                    and (padding is None or not padding[b, j])
                ]
                if not seen:
                    continue
                logit = scale * (k[b, h // group, seen].double() @ q[b, h, row].double())
                if dense is not None:
                    extra = dense.expand(batch, heads, tq, tk)
                    logit = logit + extra[b, h, row, seen].double()
                out[b, h, row] = logit.softmax(0) @ v[b, h // group, seen].double()
    return out


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_against_a_loop(data):
    name = data.draw(st.sampled_from(["nope", "rope", "fox", "grape-a-qk", "grape-ap", "path", "rope+fox"]))
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    length, batch = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 2))
    queries = data.draw(st.integers(1, length))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    enc = grape.build(name, heads=kv_heads * group, kv_heads=kv_heads, head_dim=4, width=5).double()
    tokens = testing.sample(enc, batch=batch, tokens=length, dtype=torch.float64)
    code = enc(tokens.q, tokens.k, x=tokens.x)
    masks = {
        "causal": data.draw(st.booleans()),
        "window": data.draw(st.none() | st.integers(1, 6)),
        "documents": data.draw(st.sampled_from([None, torch.randint(0, 2, (batch, length)).sort(-1).values])),
        "key_padding": data.draw(st.sampled_from([None, torch.rand(batch, length) < 0.4])),
    }
    rows = slice(length - queries, length)
    q, bias = code.q[:, :, rows], code.bias.queries(rows)
    scale = data.draw(st.sampled_from([None, 0.3]))
    got = grape.attend(q, code.k, tokens.v, bias=bias, scale=scale, impl="reference", **masks)
    used = 0.5 if scale is None else scale
    want = by_hand(q, code.k, tokens.v, bias.at_scale(used), *masks.values(), used)
    assert (got - want).abs().max() < testing.TOL[torch.float64]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_keeps_its_own(dtype):
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    v = torch.randn(1, 2, 6, 3)
    exact = grape.attend(q.double(), k.double(), v.double(), impl="reference")
    got = grape.attend(q.to(dtype), k.to(dtype), v.to(dtype), impl="reference")
    assert got.dtype == dtype and got.shape == (1, 2, 6, 3)
    testing.assert_close(got, exact, dtype, "dtype")


def test_a_query_that_sees_nothing_gives_zeros_and_zero_gradients():
    q, k, v = (torch.randn(1, 1, 4, 2, requires_grad=True) for _ in range(3))
    padding = torch.tensor([[True, True, False, False]])
    y = grape.attend(q, k, v, key_padding=padding, impl="reference")
    assert torch.equal(y[0, 0, :2], torch.zeros(2, 2)) and y.isfinite().all()
    y.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    assert torch.equal(q.grad[0, 0, :2], torch.zeros(2, 2))


def test_matches_torch_on_plain_causal_attention():
    q, k, v = (torch.randn(2, 4, 9, 8, dtype=torch.float64) for _ in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (grape.attend(q, k, v, impl="reference") - want).abs().max() < testing.TOL[torch.float64]
    wide = grape.attend(q, k, v, scale=1 / math.sqrt(2), impl="reference")
    assert (wide - want).abs().max() > 1e-3
