"""The door: what auto chooses, what a named implementation refuses, odd input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from attention_cases import BIASES, cast, inputs, one_thread  # noqa: F401
from grape_pe.attention import attend
from grape_pe.attention.cpu import build as native

IMPLS = ("reference", "lifted", "blockwise", "rows", "flex", "triton")


def tensors(length: int = 20, **shape):
    i = cast(inputs(length, **shape), torch.float32)
    return i, (i["q"], i["k"], i["v"])


def test_explain_names_a_choice_and_a_reason_for_each_other():
    i, qkv = tensors()
    for kind in BIASES:
        told = attend.explain(*qkv, bias=BIASES[kind](i), window=5)
        assert {told.impl, *told.why_not} == set(IMPLS)
        assert all(told.why_not.values())
        assert told.impl in str(told)


def test_auto_on_cpu(monkeypatch):
    i, qkv = tensors()
    with torch.no_grad():
        assert attend.explain(*qkv).impl == "lifted"
    if native.available():
        assert attend.explain(*qkv).impl == "blockwise"  # it trains
        assert attend.explain(*qkv, bias=BIASES["alibi"](i)).impl == "blockwise"
    monkeypatch.setenv("GRAPE_PE_NATIVE", "0")
    assert attend.explain(*qkv, bias=BIASES["alibi"](i)).impl == "reference"
    i, qkv = tensors(400)
    assert attend.explain(*qkv, bias=BIASES["alibi"](i)).impl == "lifted"
    assert attend.explain(*qkv, bias=BIASES["a-q"](i)).impl == "blockwise"
    with torch.no_grad():
        assert attend.explain(*qkv, bias=BIASES["a-q"](i)).impl == "lifted"
    assert attend.explain(*qkv, bias=BIASES["path"](i)).impl == "blockwise"
    monkeypatch.undo()
    i = cast(inputs(400, 3), torch.float32)
    with torch.no_grad():
        assert attend.explain(i["q"], i["k"], i["v"], bias=BIASES["path"](i)).impl == "rows"


@pytest.mark.parametrize(
    "impl, kind, masks, words",
    [
        ("lifted", "path", {}, "no finite lift"),
        ("lifted", "alibi", {"window": 3}, "dense T x T mask"),
        ("lifted", "alibi", {"causal": False}, "rounds at its size"),
        ("lifted", "a-q", {}, "gradients of rates"),
        ("rows", "alibi", {}, "at most 16 queries"),
        ("flex", "path", {}, "one pair of tokens"),
        ("flex", "alibi", {}, "no backward pass"),
        ("triton", "alibi", {}, "CUDA"),
    ],
)
def test_a_named_one_refuses_with_reason_and_remedy(impl, kind, masks, words, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    i, qkv = tensors()
    with pytest.raises(ValueError, match=words) as error:
        attend(*qkv, bias=BIASES[kind](i), impl=impl, **masks)
    assert "these can: reference" in str(error.value)
    assert "blockwise" in str(error.value)


def test_lifted_refuses_a_later_chunk():
    i = cast(inputs(20, 5), torch.float32)
    with pytest.raises(ValueError, match="aligns the first query"):
        attend(i["q"], i["k"], i["v"], impl="lifted")


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"impl": "fast"}, "impl must be one of auto, reference"),
        ({"prune": -1.0}, "prune must be"),
        ({"prune": "yes"}, "prune must be"),
        ({"prune": float("nan")}, "prune must be"),
        ({"window": 0}, "at least 1"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "must rise from 0 to the 20 keys"),
        ({"cu_seqlens": torch.tensor([0.0, 20.0])}, "1-D integer"),
        ({"cu_seqlens": torch.tensor([0, 20]), "documents": torch.zeros(20, dtype=torch.long)}, "give one"),
        ({"documents": torch.zeros(3, dtype=torch.long)}, "integer ids of shape"),
        ({"key_padding": torch.zeros(2, 20)}, "must be bool"),
    ],
)
def test_bad_arguments(wrong, words):
    _, qkv = tensors()
    with pytest.raises(ValueError, match=words):
        attend(*qkv, **wrong)


def test_documents_need_a_key_for_each_query():
    i = cast(inputs(5, 9), torch.float32)
    with pytest.raises(ValueError, match="attention over documents needs"):
        attend(i["q"], i["k"], i["v"], causal=False, documents=torch.zeros(5, dtype=torch.long))


def test_integers_are_refused():
    q = torch.ones(1, 1, 2, 4, dtype=torch.long)
    with pytest.raises(TypeError, match="floating"):
        attend(q, q, q)


@pytest.mark.parametrize("impl", ("reference", "lifted", "blockwise"))
@pytest.mark.parametrize("queries, keys", ((0, 0), (0, 7)))
def test_no_tokens(impl, queries, keys):
    i = cast(inputs(keys, queries), torch.float32)
    y = attend(i["q"], i["k"], i["v"], impl=impl)
    assert y.shape == (2, 4, queries, 20)
    y.sum().backward()


@pytest.mark.parametrize("kind", ("none", "a-qk", "path", "tile"))
def test_queries_without_keys_get_zeros(kind):
    i = cast(inputs(0, 5), torch.float32)
    y = attend(i["q"], i["k"], i["v"], bias=BIASES[kind](i), causal=False, impl="blockwise")
    assert y.shape == (2, 4, 5, 20)
    assert (y == 0).all()


@pytest.mark.parametrize("kind", ("none", "a-qk", "path", "tile"))
def test_a_query_that_sees_nothing_gets_zeros_and_passes_nothing_on(kind):
    i, (q, k, v) = tensors()
    padding = torch.zeros(2, 20, dtype=torch.bool)
    padding[0, :3] = True
    y = attend(q, k, v, bias=BIASES[kind](i), key_padding=padding, impl="blockwise")
    assert (y[0, :, :3] == 0).all()
    assert (y[0, :, 3:] != 0).any()
    y.sum().backward()
    assert (q.grad[0, :, :3] == 0).all()
    assert all(x.grad.isfinite().all() for x in i.values() if x.grad is not None)


@pytest.mark.parametrize("width, value_width", ((1, 1), (1, 33), (63, 2), (256, 256)))
def test_odd_widths(width, value_width):
    i, (q, k, v) = tensors(30, width=width, value_width=value_width)
    bias = BIASES["a-qk"](i)
    got, right = (attend(q, k, v, bias=bias, impl=impl) for impl in ("blockwise", "reference"))
    torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
@pytest.mark.parametrize("which", range(3))
def test_bad_numbers_spread_as_in_torch(bad, which):
    """Rows that see the token are what torch makes of them: finite or not, in the same places."""
    g = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, 2, 200, 16, generator=g) for _ in range(3)]
    qkv[which][0, 0, 70] = bad
    ours = attend(*qkv, impl="blockwise").isfinite().all(-1)
    theirs = F.scaled_dot_product_attention(*qkv, is_causal=True).isfinite().all(-1)
    seen = torch.arange(200) >= 70 if which else torch.arange(200) == 70
    assert torch.equal(ours[0, 0, seen], theirs[0, 0, seen])
    assert ours[0, 1].all()
    assert not ours[0, 0, 70]


def test_a_scale_of_ones_own():
    _, (q, k, v) = tensors()
    got, right = (attend(q, k, v, scale=0.3, impl=impl) for impl in ("blockwise", "reference"))
    torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)


def test_gradients_are_the_same_every_time():
    runs = []
    for _ in range(2):
        torch.set_num_threads(2)
        i, qkv = tensors(300)
        attend(*qkv, bias=BIASES["slope+path"](i), impl="blockwise").square().sum().backward()
        runs.append({name: x.grad for name, x in i.items() if x.grad is not None})
    for name in runs[0]:
        assert torch.equal(runs[0][name], runs[1][name]), name
