"""Derivatives through every encoding: first and second, reverse and forward mode, torch.func."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

import grape_pe as grape

CASES = [*grape.encodings.names(), "rope+fox", "grape-m-basis+grape-ap"]
OPTIONS = {"grape-m-mix": {"rank": 4}}
BATCH, TOKENS, HEADS, HEAD_DIM, WIDTH = 1, 3, 2, 4, 6


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(name: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Dense attention with the encoding as a function of q, k, x and its parameters, and a point."""
    torch.manual_seed(0)
    sizes = {"heads": HEADS, "kv_heads": 1, "head_dim": HEAD_DIM, "width": WIDTH}
    encoding = grape.build(name, **sizes, **OPTIONS.get(name, {})).double()
    names = [parameter for parameter, _ in encoding.named_parameters()]
    v = normal(BATCH, 1, TOKENS, HEAD_DIM)

    def loss(q: Tensor, k: Tensor, x: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        code = functional_call(encoding, given, (q, k), {"x": x, "v": v})
        logits = 0.5 * code.q @ code.k.mT
        bias = code.bias.dense()
        logits = logits if bias is None else logits + bias
        return (logits.tril().softmax(-1) @ v).square().sum()

    moved = (p.detach() + 0.1 * normal(*p.shape, seed=i) for i, p in enumerate(encoding.parameters()))
    inputs = normal(BATCH, HEADS, TOKENS, HEAD_DIM), normal(BATCH, 1, TOKENS, HEAD_DIM, seed=1)
    return loss, [*inputs, normal(BATCH, TOKENS, WIDTH, seed=2), *moved]


def gradients(loss: Callable[..., Tensor], point: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in point]
    found = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_numerical_derivatives(name: str) -> None:
    loss, point = problem(name)
    leaves = [x.clone().requires_grad_() for x in point]
    assert torch.autograd.gradcheck(loss, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


@pytest.mark.parametrize("name", CASES)
def test_torch_func(name: str) -> None:
    loss, point = problem(name)
    known = gradients(loss, point)
    for ours, right in zip(grad(loss, tuple(range(len(point))))(*point), known, strict=True):
        close(ours, right)
    close(jacrev(loss)(*point), known[0])
    tangents = tuple(normal(*x.shape, seed=9) for x in point)
    _, along = jvp(loss, tuple(point), tangents)
    close(along, torch.stack([(t * g).sum() for t, g in zip(tangents, known, strict=True)]).sum())


@pytest.mark.parametrize("name", CASES)
def test_vmap(name: str) -> None:
    loss, (_, k, _, *parameters) = problem(name)
    q, x = normal(3, BATCH, HEADS, TOKENS, HEAD_DIM, seed=3), normal(3, BATCH, TOKENS, WIDTH, seed=4)

    def of_one(q: Tensor, x: Tensor) -> Tensor:
        return loss(q, k, x, *parameters)

    pairs = list(zip(q, x, strict=True))
    close(vmap(of_one)(q, x), torch.stack([of_one(*pair) for pair in pairs]))
    close(vmap(grad(of_one))(q, x), torch.stack([grad(of_one)(*pair) for pair in pairs]))


@pytest.mark.parametrize(
    "name",
    [
        *("alibi", "fox", "grape-a-qk"),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("rope+fox", "grape-ap", "grape-m-mix")),
    ],
)
def test_compiled_for_any_length(name: str) -> None:
    torch.manual_seed(0)
    enc = grape.build(name, heads=4, kv_heads=2, head_dim=8, width=16).double()

    def logits(q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        code = enc(q, k, x=x)
        code.bias.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        product, bias = code.q @ code.k.repeat_interleave(2, 1).mT, code.bias.dense()
        return product if bias is None else product + bias

    compiled = torch.compile(logits, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (7, 12):
        sizes = (2, 4, tokens, 8), (2, 2, tokens, 8), (2, tokens, 16)
        leaves = [normal(*size, seed=i).requires_grad_() for i, size in enumerate(sizes)]
        leaves += list(enc.parameters())
        totals = (f(*leaves[:3]).square().sum() for f in (compiled, logits))
        found = (torch.autograd.grad(total, leaves, allow_unused=True) for total in totals)
        for ours, right in zip(*found, strict=True):
            assert (ours is None) == (right is None)
            if ours is not None:
                close(ours, right)


@pytest.mark.parametrize("name", ["rope", "grape-m", "grape-m-ctx", "grape-m-basis", "grape-m-mix"])
def test_hessians(name: str) -> None:
    loss, (q, *rest) = problem(name)
    hessian = torch.autograd.functional.hessian(lambda q: loss(q, *rest), q)
    assert hessian.abs().max() > 1e-3
    close(jacfwd(jacrev(loss))(q, *rest), hessian)
