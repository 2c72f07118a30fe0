"""The Triton kernels against the float64 reference, run by Triton's interpreter on the CPU.

The interpreter is chosen once a process, so `test_triton.py` runs this file in processes of its own;
directly: TRITON_INTERPRET=1 pytest tests/test_triton_interpreted.py. Bfloat16 is wrong in the
interpreter (raw bits are added), so float32 and float16 stand for all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import Errors, assert_rule, errors_of
from grape_pe.attention.masks import Masks
from grape_pe.attention.reference import attend_reference
from grape_pe.bias import Bias, NoBias, PathBias, SlopeBias, SlopeTerm

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start: test_triton.py runs it", allow_module_level=True)

pytest.importorskip("triton")

from grape_pe.attention.triton import launch, ops, prune
from grape_pe.attention.triton.api import attend_triton, pruned_fraction
from grape_pe.attention.triton.tiles import Tile, force_tile

#: between pruned and not: what is left out weighs less than a rounding
FLOOR = {torch.float32: 2e-6, torch.float16: 1e-3}
#: A row's logsumexp is one float32, and its weights are off by what that rounds: a lone row has no others to
#: average it with (2.7 times the dense error was seen, in dv).
ONE_QUERY = 3.0
SMALL = Tile(32, 32)
UNEQUAL = {"forward": Tile(16, 32), "query": Tile(32, 16), "key": Tile(16, 32)}
CHUNKED, PARTED = Tile(32, 32, chunk=16), Tile(32, 32, split=True, parts=2)
BOTH = {"forward": Tile(32, 16, chunk=16, parts=4), "query": Tile(16, 16, chunk=16, parts=2)}
BOTH["key"] = Tile(16, 32, split=True, chunk=32, parts=4)
SPLIT = {"forward": Tile(32, 16), "query": Tile(32, 16), "key": Tile(32, 32, split=True)}


@dataclass(frozen=True)
class Case:
    bias: str = "none"
    batch: int = 1
    heads: int = 2
    key_heads: int = 2
    queries: int = 70
    keys: int = 70
    head_dim: int = 32
    value_dim: int | None = None
    causal: bool = True
    window: int | None = None
    documents: bool = False
    padding: bool = False
    dtype: torch.dtype = torch.float32
    tile: Any = SMALL
    prune: Any = None
    seed: int = 0
    steep: float = 1.0

    def __str__(self) -> str:
        default = vars(Case())
        return "-".join(f"{k}={v}" for k, v in vars(self).items() if k != "tile" and v != default[k])


def _inputs(case: Case) -> tuple[dict[str, Tensor], Masks]:
    """Named float64 leaves, already representable in the case's dtype, and the masks."""
    g = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(case.dtype).double()

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g, dtype=torch.float64).float().double()

    def rate(*shape: int) -> Tensor:  # steep ones are never near zero, which would keep every key
        return (uniform(*shape) + (case.steep > 1)) * case.steep

    b, h, hk, tq, tk = case.batch, case.heads, case.key_heads, case.queries, case.keys
    leaves = {
        "q": normal(b, h, tq, case.head_dim),
        "k": normal(b, hk, tk, case.head_dim),
        "v": normal(b, hk, tk, case.value_dim or case.head_dim),
    }
    c = 3.0 + (uniform(b, h, tk) * 0.4).cumsum(-1)
    for r in range(3 if "slope3" in case.bias else 1 if "slope" in case.bias else 0):
        leaves[f"c_q{r}"], leaves[f"c_k{r}"] = c[..., max(0, tk - tq) :] * (r + 1), c * (r + 1)
        if tq > tk:
            leaves[f"c_q{r}"] = 3.0 + uniform(b, h, tq) * tk / 5
        if r != 1:
            leaves[f"rate_q{r}"] = rate(b, h, tq)
        if r != 0:
            leaves[f"rate_k{r}"] = rate(b, h, tk)
    if "alibi" in case.bias:
        leaves["c_q0"] = torch.arange(tk - tq, tk, dtype=torch.float64)[None, None]
        leaves["c_k0"] = torch.arange(tk, dtype=torch.float64)[None, None]
        leaves["rate_q0"] = (0.5 * case.steep) ** torch.arange(1.0, h + 1, dtype=torch.float64)[None, :, None]
    if "path" in case.bias:
        hp = h if "wide" in case.bias else hk
        leaves["probe_q"], leaves["probe_k"] = normal(b, hp, tq, 8), 2 * normal(b, hp, tk, 8)
        leaves["rate"] = rate(1, h, 1)
    documents = (torch.arange(tk) // 23 % 2 * 7).expand(b, tk) if case.documents else None
    hidden = None
    if case.padding:
        hidden = torch.zeros(b, tk, dtype=torch.bool)
        hidden[0, :5] = hidden[-1, tk // 2] = True  # rows 0-4 of the first sequence see nothing at all
    return leaves, Masks(tq, tk, torch.device("cpu"), case.causal, case.window, documents, hidden)


def _bias(case: Case, leaves: dict[str, Tensor]) -> Bias:
    bias: Bias = NoBias()
    terms = [
        SlopeTerm(leaves[f"c_q{r}"], leaves[f"c_k{r}"], leaves.get(f"rate_q{r}"), leaves.get(f"rate_k{r}"))
        for r in range(3)
        if f"c_q{r}" in leaves
    ]
    if terms:
        bias = bias + SlopeBias(tuple(terms))
    if "rate" in leaves:
        link: Any = "bounded" if "bounded" in case.bias else "logsigmoid"
        bias = bias + PathBias(leaves["probe_q"], leaves["probe_k"], leaves["rate"], link)
    return bias


def _eager(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float) -> Tensor:
    """Dense attention as eager half-precision models do it: products in the dtype, softmax in float32."""
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = (scale * (q @ keys.transpose(-1, -2))).float()
    extra = bias.tile(slice(0, q.shape[2]), slice(0, k.shape[2]))
    logits = logits if extra is None else logits + extra.float()
    logits = logits.masked_fill(~masks.tile(slice(0, q.shape[2]), slice(0, k.shape[2])), float("-inf"))
    return logits.softmax(-1).to(v.dtype) @ values


Attention = Callable[[Tensor, Tensor, Tensor, Bias, Masks, float], Tensor]


def _run(case: Case, attention: Attention, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and every gradient, in float64. Coordinates stay float64, rates never go below float32."""
    made, masks = _inputs(case)
    leaves = {}
    for name, value in made.items():
        at_least = torch.float64 if name.startswith("c_") else torch.promote_types(dtype, torch.float32)
        kind = dtype if name in "qkv" else at_least
        leaves[name] = value.to(kind).detach().requires_grad_()
    bias, scale = _bias(case, leaves), case.head_dim**-0.5
    out = attention(leaves["q"], leaves["k"], leaves["v"], bias, masks, scale)
    g = torch.Generator().manual_seed(case.seed + 1)
    towards = torch.randn(out.shape, generator=g, dtype=torch.float64).to(case.dtype).to(dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), towards)
    results = {"out": out, **{f"d {n}": grad for n, grad in zip(leaves, grads, strict=True)}}
    return {name: value.detach().double() for name, value in results.items()}


def _triton(case: Case) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float) -> Tensor:
        return attend_triton(q, k, v, bias, masks, scale, case.prune)

    return attention


def check(case: Case) -> None:
    """At most twice the error of the dense computation: the rule of every implementation."""

    def errors(draw: int) -> Errors:
        drawn = replace(case, seed=case.seed + 10 * draw)
        with force_tile(case.tile):
            ours = _run(drawn, _triton(drawn), case.dtype)
        exact = _run(drawn, attend_reference, torch.float64)
        dense = _run(drawn, _eager if case.dtype == torch.float16 else attend_reference, case.dtype)
        return errors_of(exact, dense, ours, str(case))

    assert_rule(errors, str(case), ONE_QUERY if case.queries == 1 else 2.0)


BIASES = ["none", "alibi", "slope", "slope3", "path", "path-bounded-wide", "slope+path"]


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("everything", [False, True], ids=["causal", "all-masks"])
def test_every_bias(bias: str, everything: bool) -> None:
    if everything:
        shape: dict[str, Any] = {"keys": 50, "queries": 30, "batch": 2, "key_heads": 1}
        check(Case(bias, tile=UNEQUAL, window=29, documents=True, padding=True, **shape))
    else:
        check(Case(bias, queries=65, keys=65))


MASKS: dict[str, dict[str, Any]] = {
    "window": {"window": 20},
    "documents": {"documents": True},
    "padding": {"padding": True, "batch": 2, "queries": 40, "keys": 40},
    "fewer-queries": {"queries": 23},
    "grouped": {"heads": 4, "key_heads": 2, "keys": 40, "queries": 40},
    "one-token": {"queries": 1, "keys": 1},
    "one-query": {"queries": 1},
    "split-launches": {"tile": SPLIT, "queries": 40, "keys": 40},
    "features-in-chunks": {"tile": CHUNKED, "head_dim": 40, "value_dim": 33},
    "features-in-parts": {"tile": PARTED, "head_dim": 48, "value_dim": 64},
    "chunks-and-parts": {"tile": BOTH, "head_dim": 48, "value_dim": 20, "key_heads": 1, "padding": True},
}
OPEN: dict[str, dict[str, Any]] = {
    "bidirectional": {"causal": False},
    "bidirectional-window": {"causal": False, "window": 9, "documents": True},
    "more-queries": {"causal": False, "queries": 50, "keys": 31},
}


@pytest.mark.parametrize("bias", ["slope", "path"])
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(bias: str, mask: str) -> None:
    check(Case(bias, **MASKS[mask]))


@pytest.mark.parametrize("mask", OPEN)
def test_every_mask_without_order(mask: str) -> None:
    check(Case("slope", **OPEN[mask]))


@pytest.mark.slow
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", [17, 64, 100])
def test_every_combination(bias: str, mask: str, length: int) -> None:
    masks = {"queries": length, "keys": length, **MASKS[mask]}
    check(Case(bias, tile=masks.pop("tile", UNEQUAL), **masks))


@pytest.mark.parametrize("head_dim", [1, 48, 64, 96, 128, 256])
def test_every_head_size(head_dim: int) -> None:
    bias = "slope" if head_dim in (64, 128) else "path"
    check(Case(bias, head_dim=head_dim, queries=40, keys=40))


def test_value_size_of_its_own() -> None:
    check(Case("slope", head_dim=48, value_dim=20, queries=33, keys=40))


@pytest.mark.parametrize("bias", ["none", "slope", "path", "slope+path"])
def test_half_precision(bias: str) -> None:
    check(Case(bias, head_dim=64, dtype=torch.float16, key_heads=1))


def test_long_coordinates_keep_their_difference() -> None:
    """At c near 2^30 a float32 would be off by 64; the pair of float32 is not."""

    def far(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float) -> Tensor:
        assert isinstance(bias, SlopeBias)
        (term,) = bias.terms
        moved = SlopeBias((replace(term, c_q=term.c_q + 2.0**30, c_k=term.c_k + 2.0**30),))
        return attend_triton(q, k, v, moved, masks, scale, None)

    case = Case("slope", queries=40, keys=40)
    with force_tile(SMALL):
        near, far_away = _run(case, _triton(case), torch.float32), _run(case, far, torch.float32)
    for name, want in near.items():
        torch.testing.assert_close(far_away[name], want, rtol=1e-4, atol=1e-4)


def test_path_in_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "CARRY_BYTES", 1)
    monkeypatch.setattr(launch, "CHUNK_ROWS", 32)
    check(Case("path", key_heads=1, queries=40, keys=40))


def test_gradients_are_deterministic() -> None:
    case = Case("slope+path", key_heads=1, queries=33, keys=33)
    with force_tile(SMALL):
        once, again = (_run(case, _triton(case), torch.float32) for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


PRUNED: dict[str, dict[str, Any]] = {
    "alibi": {"bias": "alibi", "steep": 4.0},
    "gated": {"bias": "slope", "steep": 20.0, "key_heads": 1},
    "gated-padded": {"bias": "slope", "steep": 20.0, "padding": True},
    "path": {"bias": "path", "steep": 4.0},
    "path-padded": {"bias": "path", "steep": 4.0, "padding": True, "key_heads": 1},
    "both": {"bias": "slope+path", "steep": 40.0},
    "path-in-chunks": {"bias": "path", "steep": 4.0, "tile": Tile(16, 16, chunk=16, split=True, parts=2)},
}


@pytest.mark.parametrize("name", PRUNED)
def test_pruning_agrees_and_prunes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune, "PATCH", 16)
    monkeypatch.setattr(launch, "STRIDE", 1)
    options = {"heads": 2, "queries": 64, "keys": 64, "head_dim": 16, "tile": Tile(16, 16), **PRUNED[name]}
    case = Case(**options, prune="auto")
    leaves, masks = _inputs(case)
    bias = _bias(case, {name: value.float() for name, value in leaves.items()})
    q, k, v = (leaves[name].float() for name in "qkv")
    with force_tile(case.tile):
        skipped = pruned_fraction(q, k, v, bias, masks, 0.25, "auto")
    assert skipped > 0.1, f"only {skipped:.0%} of the pairs were skipped"
    with force_tile(case.tile):
        pruned, whole = (_run(c, _triton(c), case.dtype) for c in (case, replace(case, prune=None)))
    for key, want in whole.items():
        allowed = FLOOR[case.dtype] + 4 * torch.finfo(case.dtype).eps * want.abs().max()
        assert (pruned[key] - want).abs().max() <= allowed, key


def test_a_bias_that_grows_with_distance_is_not_pruned() -> None:
    case = Case("alibi", steep=4.0, queries=96, keys=96, prune="auto")
    leaves, masks = _inputs(case)
    leaves["rate_q0"] = -leaves["rate_q0"]
    q, k, v = (leaves[name].float() for name in "qkv")
    with force_tile(SMALL):
        assert pruned_fraction(q, k, v, _bias(case, leaves), masks, 0.2, "auto") == 0.0


def test_nan_stays_in_its_row() -> None:
    case = Case("slope", queries=20, keys=20)
    leaves, masks = _inputs(case)
    q, k, v = (leaves[name].float() for name in "qkv")
    q[0, 0, 3] = math.nan
    with force_tile(SMALL):
        out = attend_triton(q, k, v, _bias(case, leaves), masks, 0.2, "auto")
    bad = out.isnan().any(-1)
    assert bad[0, 0, 3] and bad.sum() == 1


def test_no_tokens() -> None:
    empty = torch.zeros(1, 2, 0, 16, requires_grad=True)
    masks = Masks(0, 0, torch.device("cpu"))
    out = attend_triton(empty, empty, empty, NoBias(), masks, 1.0, None)
    out.sum().backward()
    assert out.shape == (1, 2, 0, 16) and empty.grad is not None


def _operator_arguments(case: Case) -> tuple[Any, ...]:
    leaves, masks = _inputs(case)
    q, k, v = (leaves[name].float().requires_grad_() for name in "qkv")
    c_q, c_k = leaves["c_q0"][:, :, None], leaves["c_k0"][:, :, None]
    rate = leaves["rate_q0"][:, :, None].float().contiguous().requires_grad_()
    nothing = [None] * 5
    return (q, k, v, rate, None, c_q, c_k, *nothing, masks.causal, 0, 0.2, 20.0, False)


def test_operator_contract() -> None:
    """Schema, fake tensors, autograd registration, and the traced backward."""
    with force_tile(SMALL):
        torch.library.opcheck(ops.triton_forward, _operator_arguments(Case("slope", queries=20, keys=20)))


def test_compiles_as_one_graph() -> None:
    case = Case("slope+path", queries=33, keys=33)
    with force_tile(SMALL):
        eager = _run(case, _triton(case), torch.float32)

        def attention(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float) -> Tensor:
            traced = torch.compile(
                lambda q, k, v: attend_triton(q, k, v, bias, masks, scale, None),
                fullgraph=True,
                backend="aot_eager",
            )
            return traced(q, k, v)

        compiled = _run(case, attention, torch.float32)
    for name, want in eager.items():
        torch.testing.assert_close(compiled[name], want)
