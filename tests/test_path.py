"""PaTH by chunks, against the product of its factors taken one at a time, and its keys in a cache.

Letters: B batch, H query heads, T tokens, D features of a head.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import grape_pe as grape
from grape_pe import testing
from grape_pe.attention import blocks
from grape_pe.encodings import path
from grape_pe.encodings.path import PaTHBias, path_products
from grape_pe.testing.fuzz.dense import path_product

EXACT = testing.TOL[torch.float64]
KEY = ("k", "w", "beta")


def draw(queries: int, keys: int, group: int = 1, dim: int = 5, seed: int = 0) -> list[Tensor]:
    """q (2, 2 group, Tq, D), k and unit w (2, 2, Tk, D), beta (2, 2, Tk) in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    q, k, w = normal(2, 2 * group, queries, dim), normal(2, 2, keys, dim), normal(2, 2, keys, dim)
    return [q, k, F.normalize(w, dim=-1), 2 * torch.sigmoid(normal(2, 2, keys))]


def one_factor_at_a_time(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    group, shift = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    k, w, beta = (x.repeat_interleave(group, 1) for x in (k, w, beta))
    rows = []
    for row in range(q.shape[2]):
        products = list((k @ q[:, :, row, :, None])[..., 0].unbind(-1))
        moved = q[:, :, row]
        for j in range(min(row + shift, k.shape[2] - 1), -1, -1):
            products[j] = (moved * k[:, :, j]).sum(-1)
            along = (moved * w[:, :, j]).sum(-1, keepdim=True)
            moved = moved - beta[:, :, j, None] * along * w[:, :, j]
        rows.append(torch.stack(products, -1))
    return torch.stack(rows, 2)


def by_chunks(q: Tensor, *key: Tensor, rows: slice | None = None, cols: slice | None = None) -> Tensor:
    product = path_products({"q": q}, dict(zip(KEY, key, strict=True)))
    return product(rows or slice(0, q.shape[2]), cols or slice(0, key[0].shape[2]))


@pytest.fixture(params=[(1, 1), (2, 8), (4, 4), (32, 128)], ids=lambda sizes: f"chunks of {sizes}")
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = request.param
    monkeypatch.setattr(path, "SMALL", small)
    monkeypatch.setattr(path, "LARGE", large)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("seed", range(12))
def test_chunks_give_the_product_of_the_factors(seed: int) -> None:
    """Any tile, fewer or more queries than keys, grouped queries; with gradients of q, k, w and beta."""
    rng = random.Random(seed)
    keys = rng.randint(1, 20)
    queries = rng.randint(1, keys + 3)
    leaves = [x.requires_grad_() for x in draw(queries, keys, rng.choice((1, 2)), seed=seed)]
    rows = slice(*sorted(rng.sample(range(queries + 1), 2)))
    cols = slice(*sorted(rng.sample(range(keys + 1), 2)))
    want, got = one_factor_at_a_time(*leaves)[:, :, rows, cols], by_chunks(*leaves, rows=rows, cols=cols)
    testing.assert_close(got, want, torch.float64, "products")
    weight = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    found, right = (
        torch.autograd.grad((y * weight).sum(), leaves, materialize_grads=True) for y in (got, want)
    )
    for name, mine, theirs in zip(("q", *KEY), found, right, strict=True):
        testing.assert_close(mine, theirs, torch.float64, f"gradient of {name}")


def test_the_triangular_system_of_all_tokens_agrees() -> None:
    """The dense form that the fuzzers compare with."""
    for queries, keys in ((7, 7), (3, 9), (1, 5)):
        tensors = draw(queries, keys, 2)
        testing.assert_close(path_product(*tensors), one_factor_at_a_time(*tensors), torch.float64, "system")


MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "everything": {"causal": False},
    "window": {"window": 70},
    "documents": {"documents": (torch.arange(300) // 97)},
    "padding": {"key_padding": torch.arange(300).expand(2, -1) % 7 == 3},
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("queries", [300, 171])
def test_blocks_with_masks(masks: str, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 50)  # not a multiple of a chunk
    leaves = [x.requires_grad_() for x in draw(queries, 300, 2, dim=8)]
    v = torch.randn(2, 2, 300, 8, dtype=torch.float64, requires_grad=True)
    bias = PaTHBias(path._path_tile, {"q": leaves[0]}, dict(zip(KEY, leaves[1:], strict=True)), 0.3)
    got = grape.attend(0.0 * leaves[0], leaves[1], v, bias=bias, scale=0.3, impl="blocks", **MASKS[masks])
    dense = 0.3 * path_product(*leaves)
    tile = grape.TileBias(
        lambda rows, cols, q, k: dense[:, :, rows, cols], {"q": leaves[0]}, {"k": leaves[1]}
    )
    want = grape.attend(0.0 * leaves[0], leaves[1], v, bias=tile, impl="reference", **MASKS[masks])
    testing.assert_close(got, want, torch.float64, "output")
    weight = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, right = (torch.autograd.grad((y * weight).sum(), [*leaves, v]) for y in (got, want))
    for name, mine, theirs in zip(("q", *KEY, "v"), found, right, strict=True):
        testing.assert_close(mine, theirs, torch.float64, f"gradient of {name}", slack=10)


def test_float32_at_length() -> None:
    """Directions that hardly change and reflections (beta near 2) are the hardest for the systems."""
    q, k, w, beta = draw(64, 2000, dim=32)
    w = F.normalize(w[:, :, :1] + 0.1 * w, dim=-1)
    for strength in (beta, torch.full_like(beta, 2.0), torch.full_like(beta, 1.0)):
        want = path_product(q, k, w, strength)
        got = by_chunks(*(x.float() for x in (q, k, w, strength)))
        norms = q.norm(dim=-1)[..., None] * k.norm(dim=-1).unsqueeze(-2)
        assert ((got - want).abs() / norms).max() < 5 * testing.TOL[torch.float32]


def test_training_keeps_no_square_of_the_length() -> None:
    """Saved for the backward pass: a few numbers for a token and each token of its chunk."""
    enc = grape.build("path", heads=1, head_dim=8, width=8)
    tokens = 2048
    data = testing.sample(enc, batch=1, tokens=tokens)
    sizes: list[int] = []

    def record(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        code = enc(data.q.requires_grad_(), data.k, x=data.x)
        grape.attend(code.q, code.k, data.v, bias=code.bias, impl="blocks")
    assert max(sizes) <= 2 * tokens * path.LARGE


def test_an_untouched_token_changes_nothing() -> None:
    """With beta = 0 everywhere the score is the plain product."""
    q, k, w, beta = draw(40, 40)
    testing.assert_close(by_chunks(q, k, w, 0 * beta), q @ k.mT, torch.float64, "plain product")


# In a cache -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("seed", range(6))
def test_settled_keys_give_later_queries_the_same_scores(seed: int) -> None:
    rng = random.Random(seed)
    tokens, last = 30, rng.randint(0, 12)
    _, *key = draw(0, tokens, seed=seed)
    bias = PaTHBias(path._path_tile, {"q": draw(0, 1)[0]}, dict(zip(KEY, key, strict=True)), 1.0)
    settled = bias.settled(last).settled(last)
    assert (settled is bias) == (tokens - last < path.LARGE)
    assert all(
        torch.equal(settled.key[n][:, :, tokens - last :], bias.key[n][:, :, tokens - last :]) for n in KEY
    )
    q, *new = draw(3, 3, 2, seed=seed + 100)
    want = one_factor_at_a_time(q, *(torch.cat(pair, 2) for pair in zip(key, new, strict=True)))
    got = by_chunks(q, *(torch.cat([settled.key[n], x], 2) for n, x in zip(KEY, new, strict=True)))
    testing.assert_close(got, want, torch.float64, f"after all but {last}")


@pytest.mark.parametrize("conv", [0, 3])
@pytest.mark.parametrize("window", [None, 20])
def test_decoding_settles_old_keys_and_can_still_go_back(
    conv: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path, "SMALL", 4)
    monkeypatch.setattr(path, "LARGE", 8)
    torch.manual_seed(0)
    enc = grape.build("path", heads=4, kv_heads=2, head_dim=6, width=5, conv=conv).double()
    data = testing.sample(enc, tokens=120, dtype=torch.float64)
    code = enc(data.q, data.k, x=data.x)
    want = grape.attend(code.q, code.k, data.v, bias=code.bias, impl="reference", window=window)
    cache, at, kept, rng = grape.StreamingCache(enc, window=window, rollback=5), 0, 0, random.Random(0)
    with torch.no_grad():
        while at < 120:
            piece = data.cut(slice(at, at + rng.choice((1, 1, 2, 9))))
            got = cache.attend(piece.q, piece.k, piece.v, x=piece.x)
            testing.assert_close(got, want[:, :, at : at + got.shape[2]], torch.float64, f"from {at}")
            at += got.shape[2]
            if at >= kept + 10 and rng.random() < 0.3:
                cache.crop(5)
                at = kept = at - 5
    beta = cache.tokens.stored()["bias.key.beta"]
    assert (beta[:, :, :8] == 0).all() and (beta[:, :, -6:] != 0).all()
    with pytest.raises(ValueError, match="no longer cached"):
        cache.crop(110)
