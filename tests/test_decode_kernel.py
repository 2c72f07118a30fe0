"""Decoding by the compiled CPU kernel: against the dense computation, whatever is hidden, skipped or not finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grape_pe.attention import attend, key_bound, record_pruning
from grape_pe.attention.cpu import build
from grape_pe.attention.cpu.decode import attend_rows
from grape_pe.bias import SlopeBias, SlopeTerm, TileBias

pytestmark = pytest.mark.skipif(not build.available(), reason="there is no compiled kernel")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: batch, heads, key heads, queries, keys, width of keys and of values
SIZES = (
    (1, 8, 8, 1, 700, 64, 64),
    (2, 6, 2, 3, 300, 20, 7),
    (3, 4, 1, 16, 513, 5, 33),
    (1, 1, 1, 1, 1, 1, 1),
)


def drawn(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, kv_heads, queries, keys, width, value_width = sizes
    generator = torch.Generator().manual_seed(keys)
    shapes = (heads, queries, width), (kv_heads, keys, width), (kv_heads, keys, value_width)
    return tuple(torch.randn(batch, *shape, generator=generator).to(dtype) for shape in shapes)  # type: ignore


def slopes(heads: int, queries: int, keys: int, steepest: float = 0.5) -> SlopeBias:
    at = torch.arange(keys, dtype=torch.float64)[None, None]
    rate = (steepest ** torch.arange(1.0, heads + 1)).view(1, heads, 1)
    return SlopeBias((SlopeTerm(at[..., -queries:], at, rate_q=rate),))


def error(got: Tensor, right: Tensor) -> float:
    return ((got.double() - right).norm() / right.norm()).item()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masks", ("causal", "window", "padding", "none"))
def test_equals_the_dense_computation(sizes, dtype, masks):
    qkv = drawn(sizes, dtype)
    options: dict = {"bias": slopes(sizes[1], sizes[3], sizes[4]), "causal": masks != "none"}
    if masks == "window":
        options["window"] = 9
    if masks == "padding":
        options["key_padding"] = torch.arange(sizes[4]).expand(sizes[0], -1) < sizes[4] // 3
    exact = attend(*(x.double() for x in qkv), impl="reference", **options)
    got = attend(*qkv, impl="decode", **options)
    assert got.dtype == dtype
    assert error(got, exact) < (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_are_read_where_they_lie(dtype):
    """Views of a cache's storage: the tokens of a head are adjacent, heads and sequences are not."""
    q, k, v = drawn((2, 4, 2, 1, 90, 16, 16), dtype)
    stored = [torch.full((2, 2, 200, 16), float("nan"), dtype=dtype) for _ in range(2)]
    views = [storage[:, :, 50:140].copy_(x) for storage, x in zip(stored, (k, v), strict=True)]
    transposed = [x.mT.contiguous().mT for x in (k, v)]
    want = attend(q, k, v, bias=slopes(4, 1, 90), impl="decode")
    for given in (views, transposed):
        assert torch.equal(attend(q, *given, bias=slopes(4, 1, 90), impl="decode"), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", (8, 2))
def test_distant_keys_are_not_read(dtype, kv_heads):
    q, k, v = drawn((2, 8, kv_heads, 1, 4001, 16, 16), dtype)
    bias = slopes(8, 1, 4001)
    with record_pruning() as report:
        got = attend(q, k, v, bias=bias, impl="decode", key_bound=key_bound(k))
    assert 0.1 < report.fraction < 0.9 and report.visible == 2 * kv_heads * 4001
    with record_pruning() as report:
        everything = attend(q, k, v, bias=bias, impl="decode", key_bound=key_bound(k), prune=None)
    assert report.fraction == 0
    torch.testing.assert_close(got, everything, rtol=2e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)


def test_a_distant_key_that_matters_is_read():
    """The longest key and the largest bias stand far away, in another head each."""
    q, k, v = drawn((1, 2, 2, 1, 4001, 8, 8))
    k[0, 0, 7] = 1e4 * q[0, 0, 0]
    bias = slopes(2, 1, 4001)
    rate_k = torch.zeros(1, 2, 4001)
    rate_k[0, 1, 11] = -1.0
    term = bias.terms[0]
    bias = SlopeBias((SlopeTerm(term.c_q, term.c_k, term.rate_q, rate_k),))
    got = attend(q, k, v, bias=bias, impl="decode", key_bound=key_bound(k))
    torch.testing.assert_close(got, attend(q, k, v, bias=bias, impl="reference"), rtol=2e-6, atol=2e-6)
    assert torch.allclose(got[0, 0, 0], v[0, 0, 7]) and torch.allclose(got[0, 1, 0], v[0, 1, 11])


@pytest.mark.parametrize("where", ("q", "k", "v"))
@pytest.mark.parametrize("number", (float("nan"), float("inf")))
def test_what_is_not_finite_spreads_to_who_sees_it(where, number):
    q, k, v = drawn((2, 2, 2, 2, 600, 8, 8))
    hidden = torch.zeros(2, 600, dtype=torch.bool)
    hidden[1, :5] = True
    {"q": q, "k": k, "v": v}[where][1, 1, 1, 0] = number
    got = attend(q, k, v, bias=slopes(2, 2, 600), impl="decode", key_padding=hidden)
    want = attend(q, k, v, bias=slopes(2, 2, 600), impl="reference", key_padding=hidden)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6, equal_nan=True)
    assert got.isnan().any() == (where == "q")


def test_the_number_of_threads_changes_no_bit(monkeypatch):
    q, k, v = drawn((1, 4, 4, 1, 5000, 32, 32))
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(attend(q, k, v, bias=slopes(4, 1, 5000), impl="decode"))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_compiler_torch_does_the_same(monkeypatch, dtype):
    q, k, v = drawn((2, 8, 4, 2, 300, 16, 16), dtype)
    ours = attend(q, k, v, bias=slopes(8, 2, 300), impl="decode")
    monkeypatch.setenv("GRAPE_PE_NATIVE", "0")
    theirs = attend(q, k, v, bias=slopes(8, 2, 300), impl="decode")
    assert error(theirs, ours.double()) < (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)


ROWS = torch.randn(2, 4, 3, 600, generator=torch.Generator().manual_seed(1))
#: what a function of one's own may return: (B, H, Tq, Tk) or whatever broadcasts to it
FIT = {
    "one row for all queries": ROWS[:, :, :1].contiguous(),
    "one number for all keys": ROWS[..., :1].contiguous(),
    "one number": ROWS[0, 0, 0, 0],
    "queries and keys only": ROWS[0, 0],
    "no batch": ROWS[0],
    "one head": ROWS[:, :1],
    "expanded over queries": ROWS[:, :, :1].expand(-1, -1, 3, -1),
    "expanded over keys": ROWS[..., :1].expand(-1, -1, -1, 600),
    "every other number": torch.cat([ROWS, ROWS], -1).reshape(2, 4, 3, 600, 2)[..., 0],
    "keys before queries": ROWS.mT.contiguous().mT,
    "float64": ROWS.double(),
    "integers": ROWS.long(),
    "a negation left to do": torch._neg_view(ROWS),
}
UNFIT = {
    "three heads of four": (ROWS[:, :3], "must broadcast to"),
    "more heads": (torch.cat([ROWS, ROWS], 1), "must broadcast to"),
    "another batch": (torch.cat([ROWS, ROWS], 0), "must broadcast to"),
    "fewer keys": (ROWS[..., :500], "must return"),
    "fewer queries": (ROWS[:, :, :2], "must return"),
    "five axes": (ROWS[None], "must return"),
    "complex": (ROWS + 0j, r"must return .* got torch.complex64"),
    "nothing": (None, "must return .* got NoneType"),
    "a float": (1.0, "must return .* got float"),
    "on another device": (ROWS.to("meta"), "computed on meta but q is on cpu"),
}


def own(tile) -> TileBias:
    return TileBias(lambda *_: tile, {"x": torch.zeros(1, 1, 3)}, {"x": torch.zeros(1, 1, 600)})


@pytest.mark.parametrize("name", FIT)
def test_a_tile_of_ones_own_is_read_as_it_broadcasts(name):
    q, k, v = drawn((2, 4, 2, 3, 600, 16, 16))
    exact = attend(*(x.double() for x in (q, k, v)), bias=own(FIT[name]), causal=False, impl="reference")
    assert error(attend(q, k, v, bias=own(FIT[name]), causal=False, impl="decode"), exact) < 1e-6


@pytest.mark.parametrize("impl", ("decode", "reference", "blocks"))
@pytest.mark.parametrize("name", UNFIT)
def test_a_tile_of_ones_own_that_does_not_fit_is_refused(name, impl):
    q, k, v = drawn((2, 4, 2, 3, 600, 16, 16))
    tile, words = UNFIT[name]
    with pytest.raises(ValueError, match=words):
        attend(q, k, v, bias=own(tile), causal=False, impl=impl)


def test_the_kernel_reads_nothing_of_another_kind():
    """What comes past `attend`, from a cache."""
    q, k, v = drawn((2, 4, 2, 1, 90, 16, 16))
    wrong = (v.double(), v[:, :1], v[:1], v[:, :, :80], v.to("meta"))
    for values in wrong:
        with pytest.raises(ValueError, match="the CPU attention kernel reads v as"):
            attend_rows(q, k, values, None, 0.25, -1.0, None)
    for keys in (k.double(), k[..., :8]):
        with pytest.raises(ValueError, match="the CPU attention kernel reads k as"):
            attend_rows(q, keys, v, None, 0.25, -1.0, None)
    with pytest.raises(ValueError, match="the CPU attention kernel reads key_bound as"):
        attend_rows(q, k, v, torch.zeros(1, 1, 1, 90), 0.25, 1.0, torch.ones(2, 1))
