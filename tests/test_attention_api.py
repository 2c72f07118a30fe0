"""What `auto` chooses, what a named implementation refuses, odd input."""

from __future__ import annotations

import inspect

import pytest
import torch

from attention_cases import BIASES, cast, inputs, one_thread  # noqa: F401
from grape_pe.attention import attend
from grape_pe.attention.cpu import build as native

IMPLS = ("reference", "sdpa", "cpu", "decode", "blocks", "flex", "triton")


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
        assert attend.explain(*qkv).impl == "sdpa"
    if native.available():
        assert attend.explain(*qkv).impl == "cpu"  # it trains
        assert attend.explain(*qkv, bias=BIASES["alibi"](i)).impl == "cpu"
        assert attend.explain(*qkv, return_lse=True).impl == "cpu"
    monkeypatch.setenv("GRAPE_PE_NATIVE", "0")
    assert attend.explain(*qkv, bias=BIASES["alibi"](i)).impl == "reference"
    i, qkv = tensors(400)
    for kind in ("alibi", "a-q", "path", "tile"):
        assert attend.explain(*qkv, bias=BIASES[kind](i)).impl == "blocks"
    assert attend.explain(*qkv).impl == "sdpa"
    monkeypatch.undo()
    i = cast(inputs(400, 3), torch.float32)
    with torch.no_grad():
        assert attend.explain(i["q"], i["k"], i["v"], bias=BIASES["path"](i)).impl == "decode"


def test_attend_is_a_plain_function():
    assert inspect.isfunction(attend)
    assert inspect.getdoc(attend).startswith("Attention with a bias: softmax(scale * q k^T + bias) v")
    signature = inspect.signature(attend)
    assert list(signature.parameters)[:4] == ["q", "k", "v", "bias"]
    assert signature.return_annotation == torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    assert inspect.signature(attend.explain).parameters == signature.parameters


def test_an_unknown_option_is_an_error():
    _, qkv = tensors()
    for function in (attend, attend.explain):
        with pytest.raises(TypeError, match="unexpected keyword argument 'dropout'"):
            function(*qkv, dropout=0.1)


@pytest.mark.parametrize(
    "impl, kind, masks, words",
    [
        ("sdpa", "alibi", {}, "SlopeBias only as a dense T x T mask"),
        ("sdpa", "none", {"window": 3}, "dense T x T mask"),
        ("sdpa", "none", {"return_lse": True}, "logsumexp"),
        ("cpu", "tile", {}, "not TileBias"),
        ("decode", "alibi", {}, "at most 16 queries"),
        ("flex", "path", {}, "one pair of tokens"),
        ("flex", "alibi", {}, "no backward pass"),
        ("triton", "alibi", {}, "CUDA|not installed"),
    ],
)
def test_a_named_one_refuses_with_reason_and_remedy(impl, kind, masks, words):
    i, qkv = tensors()
    with pytest.raises(ValueError, match=words) as error:
        attend(*qkv, bias=BIASES[kind](i), impl=impl, **masks)
    assert "these can: reference" in str(error.value)
    assert "blocks" in str(error.value)


def test_torchs_own_attention_refuses_a_later_chunk():
    i = cast(inputs(20, 5), torch.float32)
    with pytest.raises(ValueError, match="aligns the first query"):
        attend(i["q"], i["k"], i["v"], impl="sdpa")


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
        ({"window": 3, "sinks": 1.5}, "sinks must be a number of first tokens, an integer"),
        ({"key_bound": torch.ones(2, 2, dtype=torch.long)}, "key_bound must be floating"),
        ({"documents": [0] * 20}, "documents must be a torch.Tensor, got list"),
        ({"cu_seqlens": [0, 20]}, "cu_seqlens must be a torch.Tensor, got list"),
        ({"key_padding": [[False] * 20] * 2}, "key_padding must be a torch.Tensor, got list"),
    ],
)
def test_bad_arguments(wrong, words):
    _, qkv = tensors()
    with pytest.raises((ValueError, TypeError), match=words):
        attend(*qkv, **wrong)


def test_documents_need_a_key_for_each_query():
    i = cast(inputs(5, 9), torch.float32)
    with pytest.raises(ValueError, match="attention over documents needs"):
        attend(i["q"], i["k"], i["v"], causal=False, documents=torch.zeros(5, dtype=torch.long))


@pytest.mark.parametrize("dtype", (torch.long, torch.float8_e4m3fn))
def test_dtypes_that_are_refused(dtype):
    q = torch.ones(1, 1, 2, 4).to(dtype)
    with pytest.raises(TypeError, match="floating dtype of at least 16 bits"):
        attend(q, q, q)


def test_more_sinks_than_any_integer_holds():
    _, qkv = tensors()
    for impl in ("reference", "blocks", "auto"):
        torch.testing.assert_close(attend(*qkv, window=2, sinks=1 << 70, impl=impl), attend(*qkv, impl=impl))


def test_lengths_whose_values_cannot_be_read():
    q = torch.ones(1, 1, 6, 4, device="meta")
    ends = torch.tensor([0, 2, 6], device="meta")
    assert attend(q, q, q, cu_seqlens=ends).shape == q.shape


@pytest.mark.parametrize("impl", ("reference", "sdpa", "cpu", "blocks"))
@pytest.mark.parametrize("queries, keys", ((0, 0), (0, 7)))
def test_no_tokens(impl, queries, keys):
    i = cast(inputs(keys, queries), torch.float32)
    y = attend(i["q"], i["k"], i["v"], impl=impl)
    assert y.shape == (2, 4, queries, 20)
    y.sum().backward()


@pytest.mark.parametrize("impl, kind", [(i, k) for i in ("cpu", "blocks") for k in ("none", "a-qk", "path")])
def test_queries_without_keys_get_zeros(impl, kind):
    i = cast(inputs(0, 5), torch.float32)
    y = attend(i["q"], i["k"], i["v"], bias=BIASES[kind](i), causal=False, impl=impl)
    assert y.shape == (2, 4, 5, 20)
    assert (y == 0).all()


@pytest.mark.parametrize("impl, kind", [(i, k) for i in ("cpu", "blocks") for k in ("none", "a-qk", "path")])
def test_a_query_that_sees_nothing_gets_zeros_and_passes_nothing_on(impl, kind):
    i, (q, k, v) = tensors()
    padding = torch.zeros(2, 20, dtype=torch.bool)
    padding[0, :3] = True
    y = attend(q, k, v, bias=BIASES[kind](i), key_padding=padding, impl=impl)
    assert (y[0, :, :3] == 0).all()
    assert (y[0, :, 3:] != 0).any()
    y.sum().backward()
    assert (q.grad[0, :, :3] == 0).all()
    assert all(x.grad.isfinite().all() for x in i.values() if x.grad is not None)


@pytest.mark.parametrize("width, value_width", ((1, 1), (1, 33), (63, 2), (256, 256)))
def test_odd_widths(width, value_width):
    i, (q, k, v) = tensors(30, width=width, value_width=value_width)
    bias = BIASES["a-qk"](i)
    got, right = (attend(q, k, v, bias=bias, impl=impl) for impl in ("cpu", "reference"))
    torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)


def call(impl: str, bad: float, where: tuple[str, int], masks: dict, grad: bool) -> tuple[list, torch.Tensor]:
    """20 tokens (decode: the last 3 of them as queries) with one bad number."""
    queries = 3 if impl == "decode" else 20
    i = cast(inputs(20, queries), torch.float32, grad=False)
    name, at = where
    i[name][0, :, at - 20, 1] = bad
    qkv = [i[n].requires_grad_(grad) for n in "qkv"]
    bias = None if impl == "sdpa" else BIASES["a-qk"](i)
    return qkv, attend(*qkv, bias=bias, impl=impl, **masks)


NAN_IMPLS = ("reference", "sdpa", "cpu", "decode", "blocks")


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
@pytest.mark.parametrize("name", ("q", "k", "v"))
@pytest.mark.parametrize("impl", NAN_IMPLS)
def test_rows_that_use_a_bad_number_are_nan_and_no_others(impl, name, bad):
    _, y = call(impl, bad, (name, 18), {}, grad=False)
    rows = torch.arange(20 - y.shape[2], 20)
    spoiled = rows == 18 if name == "q" else rows >= 18
    assert y[0, :, spoiled].isnan().all()
    assert y[0, :, ~spoiled].isfinite().all() and y[1].isfinite().all()


@pytest.mark.parametrize("impl", NAN_IMPLS)
def test_nothing_but_nan_is_nan(impl):
    nan = torch.full((1, 2, 3, 4), float("nan"))
    some = torch.randn(1, 2, 3, 4)
    for qkv in ((nan, some, some), (some, nan, some), (some, some, nan)):
        assert attend(*qkv, impl=impl).isnan().all()


@pytest.mark.parametrize("name", ("k", "v"))
@pytest.mark.parametrize("impl", ("reference", "cpu", "decode", "blocks"))
def test_a_hidden_bad_number_changes_nothing(impl, name):
    """Padding that holds NaN: output and gradients are as if it held zeros."""
    padding = torch.zeros(2, 20, dtype=torch.bool)
    padding[0, 18] = True
    results = []
    for bad in (float("nan"), 0.0):
        qkv, y = call(impl, bad, (name, 18), {"key_padding": padding}, grad=impl != "decode")
        if impl != "decode":
            y.square().sum().backward()
        results.append([y.detach(), *(x.grad for x in qkv if x.grad is not None)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("impl", ("reference", "cpu", "blocks"))
def test_a_padded_token_of_nans_does_not_spoil_gradients(impl):
    """Left padding whose q, k and v are all NaN: its rows see no key."""
    i = cast(inputs(20), torch.float32, grad=False)
    for name in "qkv":
        i[name][0, :, :3] = float("nan")
        i[name].requires_grad_()
    padding = torch.zeros(2, 20, dtype=torch.bool)
    padding[0, :3] = True
    y = attend(i["q"], i["k"], i["v"], bias=BIASES["a-qk"](i), key_padding=padding, impl=impl)
    assert (y[0, :, :3] == 0).all() and y.isfinite().all()
    y.square().sum().backward()
    assert all(i[name].grad.isfinite().all() for name in "qkv")


def test_a_scale_of_ones_own():
    _, (q, k, v) = tensors()
    got, right = (attend(q, k, v, scale=0.3, impl=impl) for impl in ("cpu", "reference"))
    torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)


def test_gradients_are_the_same_every_time():
    runs = []
    for _ in range(2):
        torch.set_num_threads(2)
        i, qkv = tensors(300)
        attend(*qkv, bias=BIASES["slope+path"](i), impl="cpu").square().sum().backward()
        runs.append({name: x.grad for name, x in i.items() if x.grad is not None})
    for name in runs[0]:
        assert torch.equal(runs[0][name], runs[1][name]), name
