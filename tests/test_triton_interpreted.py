"""The Triton kernels in Triton's interpreter: the operator, torch.compile, and many small shapes.

The interpreter is chosen once a process, so `test_triton.py` runs this file in a process of its own;
directly: TRITON_INTERPRET=1 pytest tests/test_triton_interpreted.py. Bfloat16 is wrong in the interpreter:
see test_triton_ptx.py for that.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from gpu_cases import Case, by_kernels, ratios
from grape_pe.attention import attend, record_pruning
from grape_pe.attention.problem import attention

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 from the start: test_triton.py runs it", allow_module_level=True)

pytest.importorskip("triton")

FP16, FP32 = torch.float16, torch.float32
SMALL = {"head_dim": 16, "queries": 70, "keys": 70}
CASES = [
    Case("slope+path", FP32, **SMALL, heads=4, key_heads=2, probe_heads=4),
    Case("slope2", FP16, **SMALL, batch=2, documents=True, padding=True, window=40),
    Case("bounded", FP32, head_dim=20, value_dim=12, queries=65, keys=100, lse=True),
    Case("slope", FP32, head_dim=16, queries=70, keys=70, causal=False, window=20),
    Case("slope", FP32, head_dim=16, queries=1, keys=1),
    Case("mixed", FP32, head_dim=16, queries=40, keys=60, heads=4, key_heads=2, gaps=True, beyond="zero"),
    Case("slope+table", FP16, **SMALL, padding=True),
    Case("mixed", FP32, head_dim=16, queries=2, keys=90, heads=4, beyond="-inf"),
]
MANY = [
    Case(bias, dtype, head_dim=16, queries=rows, keys=keys, heads=4, key_heads=2, probe_heads=2, **masks)
    for bias in ("none", "alibi", "slope", "slope2", "path", "bounded", "slope+path", "mixed")
    for dtype in (FP32, FP16)
    for rows, keys in ((1, 40), (7, 7), (70, 100), (100, 100), (90, 70))
    for masks in ({}, {"documents": True}, {"padding": True, "window": 30})
    if not (dtype == FP16 and masks) and not ("documents" in masks and rows > keys)
]


def check(case: Case) -> None:
    bad = {name: ratio for name, ratio in ratios(case, by_kernels(case)[0]).items() if not ratio <= 1}
    assert not bad, f"errors over what is allowed: {bad}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_float64(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MANY, ids=str)
def test_agrees_with_float64_everywhere(case: Case) -> None:
    check(case)


def test_attend_counts_what_it_skips() -> None:
    case = Case("alibi", FP32, head_dim=16, heads=1, queries=300, keys=300, steep=16.0)
    leaves = case.cast(case.leaves(), FP32)
    with record_pruning() as report:
        attend(leaves["q"], leaves["k"], leaves["v"], bias=case.build_bias(leaves), impl="triton")
    assert 0 < report.computed < report.visible


def test_a_walk_over_distances_is_never_stopped() -> None:
    """Where the slope is lost, the table rises again."""
    case = Case("alibi+table", FP32, head_dim=16, heads=1, queries=300, keys=300, steep=16.0)
    leaves = case.cast(case.leaves(), FP32)
    with torch.no_grad():
        leaves["table"][..., -1] = 1e4  # of all distances beyond 49
    with record_pruning() as report:
        out = attend(leaves["q"], leaves["k"], leaves["v"], bias=case.build_bias(leaves), impl="triton")
    assert report.computed == report.visible
    want = attend(leaves["q"], leaves["k"], leaves["v"], bias=case.build_bias(leaves), impl="reference")
    assert (
        out - want
    ).abs().max() < 1e-3  # float32 at 1e4 is rounded by as much; a walk that stops is off by one


def test_no_tokens() -> None:
    empty = torch.zeros(1, 2, 0, 16, requires_grad=True)
    out = attend(empty, empty, empty, impl="triton")
    out.sum().backward()
    assert out.shape == (1, 2, 0, 16) and empty.grad is not None


def test_operator_contract() -> None:
    """Schema, fake tensors, autograd registration, and the traced backward."""
    case = Case("slope", FP32, head_dim=16, heads=1, queries=20, keys=20)
    leaves = case.cast(case.leaves(), FP32)
    torch.library.opcheck(attention, ("triton", *case.problem(leaves).packed()))


def test_compiles_as_one_graph() -> None:
    case = Case("slope+path", FP32, head_dim=16, queries=33, keys=33)
    leaves = case.cast(case.leaves(), FP32)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, bias=case.build_bias(leaves), impl="triton").square().sum()

    qkv = [leaves[name] for name in "qkv"]
    want = torch.autograd.grad(loss(*qkv), qkv)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*qkv), qkv)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
