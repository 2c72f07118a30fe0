"""The closed set of biases: tiles, cuts, extensions, sums, and the path integral by brute force."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grape_pe.bias import LINKS, Bias, NoBias, PathBias, SlopeBias, SlopeTerm, SumBias, TileBias

# Absolute tolerances: the same sum in the same dtype; float32 against float64; a sum regrouped.
TOL = {"exact": 1e-12, "float32": 1e-4, "regrouped": 1e-10}
LAW = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31 - 1)
B, H = 2, 4
KINDS = ["slope", "gated", "two terms", "fox", "path", "shared path", "tile", "sum"]


def close(actual: Tensor | None, expected: Tensor, tolerance: float = TOL["exact"]) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, expected.expand(actual.shape), atol=tolerance, rtol=0.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def distance_tile(rows: slice, cols: slice, query: Mapping[str, Tensor], key: Mapping[str, Tensor]) -> Tensor:
    apart = query["place"][:, :, rows].unsqueeze(-2) - key["place"][:, :, cols].unsqueeze(-3)
    return -query["slope"][:, :, rows] * apart.norm(dim=-1)


def build(kind: str, queries: int, keys: int, seed: int = 0) -> Bias:
    """A bias for the last `queries` of `keys` tokens."""
    position = torch.arange(keys, dtype=torch.float64).view(1, 1, -1)
    last = position[:, :, keys - queries :]
    slope = normal(1, H, 1, seed=seed).abs()
    if kind == "slope":  # ALiBi: a rate with no query axis of its own
        return SlopeBias((SlopeTerm(last, position, slope),))
    if kind == "gated":
        rates = normal(B, H, queries, seed=seed).abs(), normal(B, H, keys, seed=seed + 1).abs()
        return SlopeBias((SlopeTerm(last, position, *rates),))
    if kind == "two terms":
        return build("slope", queries, keys, seed) + build("gated", queries, keys, seed + 5)
    if kind == "fox":
        c = normal(B, H, keys, seed=seed).abs().cumsum(-1)
        return SlopeBias((SlopeTerm(c[:, :, keys - queries :], c, torch.ones(1, H, 1, dtype=torch.float64)),))
    if kind in ("path", "shared path"):
        probe = normal(B, H if kind == "path" else 2, keys, 3, seed=seed)
        turned = normal(*probe.shape, seed=seed + 1)
        return PathBias(probe[:, :, keys - queries :], turned, slope)
    if kind == "tile":
        place = normal(1, 1, keys, 2, seed=seed)
        query = {
            "place": place[:, :, keys - queries :],
            "slope": slope.unsqueeze(-1).expand(1, H, queries, 1),
        }
        return TileBias(distance_tile, query, {"place": place})
    parts = [build(part, queries, keys, seed + i) for i, part in enumerate(("gated", "path", "tile"))]
    return parts[0] + parts[1] + parts[2]


@st.composite
def tiles(draw: st.DrawFn) -> tuple[int, int, slice, slice]:
    keys = draw(st.integers(1, 9))
    queries = draw(st.integers(1, keys))
    r0, c0 = draw(st.integers(0, queries - 1)), draw(st.integers(0, keys - 1))
    return (
        queries,
        keys,
        slice(r0, draw(st.integers(r0 + 1, queries))),
        slice(c0, draw(st.integers(c0 + 1, keys))),
    )


@pytest.mark.parametrize("kind", KINDS)
@LAW
@given(shape=tiles(), seed=seeds)
def test_a_tile_is_a_piece_of_the_dense_bias(
    kind: str, shape: tuple[int, int, slice, slice], seed: int
) -> None:
    queries, keys, rows, cols = shape
    bias = build(kind, queries, keys, seed)
    dense = bias.dense()
    assert dense is not None and dense.shape[-2:] == (queries, keys)
    assert (bias.query_length, bias.key_length) == (queries, keys)
    tile = bias.tile(rows, cols)
    assert tile is not None and tile.shape[-2:] == (rows.stop - rows.start, cols.stop - cols.start)
    close(tile, dense[..., rows, cols])


@pytest.mark.parametrize("kind", KINDS)
@LAW
@given(shape=tiles(), seed=seeds)
def test_cutting_queries_and_keys(kind: str, shape: tuple[int, int, slice, slice], seed: int) -> None:
    """The last queries and the last keys; any other cut would lose the alignment and is refused."""
    queries, keys, rows, cols = shape
    bias = build(kind, queries, keys, seed)
    dense = bias.dense()
    assert dense is not None
    for cut, stop in ((bias.queries, queries - 1), (bias.keys, keys - 1)):
        with pytest.raises(ValueError, match="only the last"):
            cut(slice(0, stop))
    rows, cols = slice(rows.start, queries), slice(min(cols.start, keys - queries), keys)
    close(bias.queries(rows).dense(), dense[..., rows, :])
    close(bias.keys(cols).dense(), dense[..., :, cols])
    close(bias.queries(rows).keys(cols).dense(), dense[..., rows, cols])


@pytest.mark.parametrize("kind", KINDS)
@LAW
@given(keys=st.integers(2, 9), data=st.data(), seed=seeds)
def test_extending_keys_is_no_split(kind: str, keys: int, data: st.DataObject, seed: int) -> None:
    """Cache the first part's keys, extend by the second part: the second part's rows of the whole."""
    split = data.draw(st.integers(1, keys - 1))
    whole = build(kind, keys, keys, seed)
    early = whole.replaced({name: trace[:, :, :split] for name, trace in whole.key_tensors().items()})
    late = whole.queries(slice(split, keys)).keys(slice(split, keys))
    dense = whole.dense()
    assert dense is not None
    close(early.extend(late).dense(), dense[..., split:, :])


@pytest.mark.parametrize("kind", KINDS)
def test_map_changes_every_tensor(kind: str) -> None:
    bias = build(kind, 3, 5)
    dense = bias.dense()
    assert dense is not None
    low = bias.map(lambda t: t.float())
    assert low.dense().dtype == torch.float32  # type: ignore[union-attr]
    close(low.dense().double(), dense, TOL["float32"])  # type: ignore[union-attr]
    first = bias.map(lambda t: t[:1])  # batch selection
    close(first.dense(), dense[:1])


@pytest.mark.parametrize("one", KINDS)
@pytest.mark.parametrize("two", ["slope", "path", "tile", "sum"])
def test_plus_adds(one: str, two: str) -> None:
    a, b, c = build(one, 3, 5), build(two, 3, 5, seed=7), build("gated", 3, 5, seed=9)
    dense_a, dense_b, dense_c = a.dense(), b.dense(), c.dense()
    assert dense_a is not None and dense_b is not None and dense_c is not None
    close((a + b).dense(), dense_a + dense_b)
    close((b + a).dense(), dense_a + dense_b)
    close(((a + b) + c).dense(), dense_a + dense_b + dense_c)
    close((a + (b + c)).dense(), dense_a + dense_b + dense_c)
    close((a + NoBias()).dense(), dense_a)


def test_plus_merges_what_it_can() -> None:
    slopes = build("slope", 3, 5) + build("gated", 3, 5)
    assert isinstance(slopes, SlopeBias) and len(slopes.terms) == 2
    assert isinstance(NoBias() + NoBias(), NoBias)
    total = build("path", 3, 5) + slopes + build("fox", 3, 5) + NoBias()
    assert isinstance(total, SumBias)
    assert [type(part) for part in total.parts] == [SlopeBias, PathBias]
    assert len(total.parts[0].terms) == 3  # type: ignore[attr-defined]


def test_plus_merges_a_lone_term() -> None:
    """Terms that stand alone are slopes too: any other result would take the slow path of attention."""
    slopes = build("gated", 3, 5)
    assert isinstance(slopes, SlopeBias)
    term, whole = slopes.terms[0], slopes.dense()
    assert whole is not None
    for total in (term + slopes, slopes + term, term + term):
        assert isinstance(total, SlopeBias) and len(total.terms) == 2
        close(total.dense(), 2 * whole)
    both = build("path", 3, 5) + term
    assert isinstance(both, SumBias) and [type(part) for part in both.parts] == [SlopeBias, PathBias]


def test_a_scaled_tile_follows_the_scale_of_attention() -> None:
    free = build("tile", 3, 5)
    assert isinstance(free, TileBias) and free.at_scale(0.3) is free
    scaled = replace(free, scale=2.0)
    once = free.dense()
    assert once is not None
    close(scaled.dense(), 2 * once)
    moved = scaled.at_scale(0.3)
    for same in (moved, moved.map(Tensor.clone), moved.queries(slice(0, 3)), moved.keys(slice(0, 5))):
        close(same.dense(), 0.3 * once)
    slopes = build("gated", 3, 5)
    close((slopes + scaled).at_scale(0.3).dense(), slopes.dense() + 0.3 * once)  # type: ignore[operator]


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_probes_of_two_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    path = build("path", 3, 5)
    assert isinstance(path, PathBias)
    mixed = replace(path, probe_q=path.probe_q.to(dtypes[0]), probe_k=path.probe_k.to(dtypes[1]))
    torch.testing.assert_close(mixed.dense(), path.dense(), atol=TOL["float32"], rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.long])
@pytest.mark.parametrize("kind", ["gated", "path"])
def test_rates_and_probes_that_are_not_float32_are_computed_in_float32(kind: str, dtype: torch.dtype) -> None:
    """Else a distance of 1000 is rounded by up to 4 in bfloat16, and a coordinate to an integer by rates of int64."""
    narrow = ("0.rate_q", "0.rate_k", "probe_q", "probe_k", "rate")
    bias = build(kind, 1, 1000)
    tensors = {name: (4 * x).to(dtype) for name, x in bias.tensors().items() if name in narrow}
    if kind == "gated":
        tensors["0.c_q"] = bias.tensors()["0.c_q"] + 0.25
    low = bias.replaced(tensors)
    exact = bias.replaced({name: x.double() for name, x in tensors.items()}).dense()
    assert exact is not None
    for got in (low.dense(), low.row(1000)):
        assert got is not None and (got.double() - exact).norm() < 1e-5 * exact.norm()


def test_no_bias_fits_everything() -> None:
    none = NoBias()
    assert none.tile(slice(0, 3), slice(2, 5)) is None and none.dense() is None
    assert none.query_length is None and none.key_length is None
    for same in (
        none.queries(slice(0, 1)),
        none.keys(slice(1, 2)),
        none.extend(NoBias()),
        none.map(Tensor.float),
    ):
        assert isinstance(same, NoBias)


# What each kind computes


def test_slope_by_hand() -> None:
    bias = build("gated", 3, 5)
    assert isinstance(bias, SlopeBias)
    term, dense = bias.terms[0], bias.dense()
    assert term.rate_q is not None and term.rate_k is not None and dense is not None
    for row in range(3):
        for j in range(5):
            t = row + 2  # lower-right: the last query is the last token
            expected = (term.rate_q[:, :, row] + term.rate_k[:, :, j]) * (j - t)  # Eq. A5
            close(dense[:, :, row, j], expected)
    assert (dense.tril(2) <= 0).all()


def test_slope_takes_the_difference_before_the_product() -> None:
    """In float32 at a million: products first would be off by whole units."""
    c = torch.arange(2**20, 2**20 + 64, dtype=torch.float64).view(1, 1, -1) + 0.25
    rate = torch.full((1, 1, 1), 0.7)
    low = SlopeBias((SlopeTerm(c, c, rate),)).dense()
    exact = rate.double().unsqueeze(-1) * (c.unsqueeze(-2) - c.unsqueeze(-1))
    assert low is not None and low.dtype == torch.float32
    close(low.double(), exact, 1e-5)
    products = rate.unsqueeze(-1) * c.float().unsqueeze(-2) - rate.unsqueeze(-1) * c.float().unsqueeze(-1)
    assert (products.double() - exact).abs().max() > 1e-2


def brute_force_path(bias: PathBias) -> Tensor:
    """Eq. P2 as three loops over scalars."""
    queries, keys = bias.probe_q.shape[2], bias.probe_k.shape[2]
    heads, width = bias.rate.shape[1], bias.probe_k.shape[-1]
    group = heads // bias.probe_k.shape[1]
    out = torch.zeros(bias.probe_k.shape[0], heads, queries, keys, dtype=torch.float64)
    links = {
        "logsigmoid": lambda z: -math.log1p(math.exp(-z)),
        "bounded": lambda z: 1 / (1 + math.exp(-z)) - 1,
    }
    for b in range(out.shape[0]):
        for h in range(heads):
            for row in range(queries):
                t = row + keys - queries
                for j in range(keys):
                    for at in range(j + 1, t + 1):  # t included (Eq. P1)
                        z = bias.probe_q[b, h // group, row] @ bias.probe_k[b, h // group, at] / width
                        out[b, h, row, j] += bias.rate[0, h, 0] * links[bias.link](z.item())
    return out


@pytest.mark.parametrize("link", ["logsigmoid", "bounded"])
@pytest.mark.parametrize("kind", ["path", "shared path"])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (2, 5), (1, 4), (1, 1)])
def test_path_by_hand(kind: str, link: str, queries: int, keys: int) -> None:
    plain = build(kind, queries, keys)
    assert isinstance(plain, PathBias)
    bias = PathBias(plain.probe_q, plain.probe_k, plain.rate, link)  # type: ignore[arg-type]
    dense = bias.dense()
    assert dense is not None
    close(dense, brute_force_path(bias), TOL["regrouped"])
    assert (dense <= 0).all()
    future = torch.arange(keys) >= torch.arange(keys - queries, keys).unsqueeze(-1)
    assert (dense[..., future] == 0).all()  # an empty sum


@LAW
@given(shape=tiles(), seed=seeds)
def test_path_tiles_by_hand(shape: tuple[int, int, slice, slice], seed: int) -> None:
    queries, keys, rows, cols = shape
    bias = build("shared path", queries, keys, seed).map(lambda t: t[:1])
    assert isinstance(bias, PathBias)
    close(bias.tile(rows, cols), brute_force_path(bias)[..., rows, cols], TOL["regrouped"])


def test_path_composes_along_a_row() -> None:
    """b(t, i) = b(t, j) + (the part of row t between i and j): rows are semigroups, columns are not."""
    dense = build("path", 7, 7).dense()
    assert dense is not None
    steps = dense[..., 6, :-1] - dense[..., 6, 1:]
    assert (steps < 0).all()  # the penalty of a row only grows with distance
    assert (dense[..., 6, 2] - dense[..., 5, 2] - dense[..., 6, 5]).abs().max() > 1e-3  # no global law


@pytest.mark.parametrize("link", list(LINKS))
def test_links_are_increasing_negative_and_lipschitz(link: str) -> None:
    z = torch.linspace(-30, 30, 601, dtype=torch.float64, requires_grad=True)
    value = LINKS[link](z)  # type: ignore[index]
    (slope,) = torch.autograd.grad(value.sum(), z)
    assert (value < 0).all() and (slope > 0).all() and (slope <= 1).all()
    if link == "bounded":
        assert (value > -1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str) -> None:
    bias = build(kind, 2, 4)
    leaves: list[Tensor] = []
    bias.map(lambda t: leaves.append(t.clone().requires_grad_()) or t)  # type: ignore[func-returns-value]

    def dense(*tensors: Tensor) -> Tensor:
        queue = list(tensors)
        out = bias.map(lambda t: queue.pop(0)).tile(slice(0, 2), slice(0, 4))
        assert out is not None
        return out

    assert torch.autograd.gradcheck(dense, leaves)


# Refusals


def test_refusals() -> None:
    position = torch.arange(3.0).view(1, 1, -1)
    with pytest.raises(ValueError, match="needs rate_q or rate_k"):
        SlopeTerm(position, position)
    with pytest.raises(ValueError, match=r"use NoBias\(\)"):
        SlopeBias(())
    with pytest.raises(TypeError, match="abstract"):
        Bias().tile(slice(0, 1), slice(0, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_extend_refuses_another_kind(kind: str) -> None:
    other = build("tile" if kind != "tile" else "path", 2, 2)
    with pytest.raises(TypeError, match="can only be extended"):
        build(kind, 2, 2).extend(other)


def test_extend_refuses_another_number_of_terms() -> None:
    with pytest.raises(TypeError, match="can only be extended by the same kind"):
        build("slope", 2, 2).extend(build("two terms", 2, 2))


def test_extend_refuses_to_lose_a_trace() -> None:
    """A rate on the keys of one part only would otherwise be dropped without a word."""
    plain, gated = build("slope", 2, 2), build("gated", 2, 2)
    for first, second in ((plain, gated), (gated, plain)):
        with pytest.raises(TypeError, match="rate_k"):
            first.extend(second)


def test_extend_expands_what_the_batch_shares() -> None:
    shared, own = build("slope", 2, 3), build("slope", 2, 2).map(lambda t: t.expand(B, -1, -1))
    dense = shared.extend(own).dense()
    assert dense is not None and dense.shape == (B, H, 2, 5)


@pytest.mark.parametrize("kind", ["slope", "gated", "fox"])
def test_all_keys_can_be_dropped(kind: str) -> None:
    for keys in (1, 3):
        assert build(kind, 1, keys).keys(slice(keys, None)).key_length == 0
