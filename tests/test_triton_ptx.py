"""The compiled GPU kernels, run in the PTX emulator (tests/ptx) against the dense float64 computation.

Forward and every gradient, at the tile each kernel takes on sm_80. The emulator also reports races,
accesses out of bounds, and memory that is read before it was written (it then holds NaN). A few cases run
always, the matrix when slow tests are asked for.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from attention_cases import one_thread  # noqa: F401
from gpu_cases import Case, by_kernels, launches, ratios
from grape_pe.attention import attend, record_pruning
from grape_pe.attention import problem as problem_module
from grape_pe.attention.gpu import api
from grape_pe.attention.gpu import compile as gpu
from grape_pe.attention.masks import Masks
from ptx.device import emulated_device
from ptx.launcher import Report

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BIASES = ("none", "slope", "path", "slope+path")
#: every kernel, both half dtypes, each bias, and each mask once
QUICK = [
    Case("none", FP16, head_dim=32, causal=False, queries=70, keys=90),
    Case("slope", BF16, heads=4, key_heads=2, padding=True, lse=True, queries=100, keys=130),
    Case("path", BF16, documents=True, window=70),
    Case("alibi+path", BF16, head_dim=32, heads=1, prune="auto", steep=8.0, keys=300, queries=300),
    Case("slope+path", FP16, queries=3, keys=150, head_dim=32, padding=True),
    Case("mixed", BF16, head_dim=32, documents=True, gaps=True, beyond="zero"),
    Case("slope+table", FP16, queries=3, keys=150, head_dim=32, padding=True),
    Case("bounded", FP32, head_dim=20, value_dim=12, queries=65, keys=100, lse=True),
    Case("slope", FP32, head_dim=16, queries=70, keys=70, causal=False, window=20),
    Case("slope", FP32, head_dim=16, queries=1, keys=1),
]
MASKS = {
    "causal": {},
    "documents": {"documents": True},
    "padding": {"padding": True},
    "window": {"window": 50},
    "all": {"documents": True, "padding": True, "window": 70},
}
MATRIX = [
    Case(bias, dtype, batch=2, heads=2, key_heads=1 + bool(mask), **options)
    for bias, dtype, (mask, options) in itertools.product(BIASES, (BF16, FP16), MASKS.items())
]
MATRIX += [Case(bias, BF16, head_dim=d) for bias in BIASES for d in (16, 32, 80, 128, 256)]
MATRIX += [
    Case(bias, dtype, queries=n, keys=300) for bias in BIASES for dtype in (BF16, FP16) for n in (1, 5)
]
MATRIX += [Case(bias, BF16, queries=n, keys=200, lse=True) for bias in BIASES for n in (90, 200)]
MATRIX += [Case(bias, BF16, queries=200, keys=130) for bias in BIASES]
MATRIX += [Case(bias, BF16, causal=False, padding=p) for bias in ("none", "slope") for p in (False, True)]
MATRIX += [Case(bias, FP32, head_dim=d) for bias in BIASES for d in (32, 64)]
MATRIX += [
    Case(bias, BF16, heads=4, key_heads=2, probe_heads=hp, value_dim=48)
    for bias in ("slope2", "alibi", "bounded", "path")
    for hp in (1, 4)
]
MATRIX += [
    Case(bias, BF16, prune="auto", steep=8.0, queries=300, keys=300, **options)
    for bias in ("alibi", "slope", "path", "slope+path")
    for options in ({}, {"padding": True, "documents": True})
]
#: one key dominates every row, so the gradients of the path are sums of terms that nearly cancel
MATRIX += [
    Case("alibi+path", dtype, head_dim=32, steep=8.0, queries=300, keys=300) for dtype in (BF16, FP16, FP32)
]
#: tables over distances: alone and mixed, each rule outside them, positions that jump, and other biases beside them
MATRIX += [
    Case(bias, dtype, batch=2, key_heads=heads, beyond=beyond)
    for bias, dtype, heads in (("table", BF16, 1), ("table", FP16, 2), ("mixed", BF16, 2), ("mixed", FP16, 1))
    for beyond in ("last", "zero", "-inf")
]
MATRIX += [Case("mixed", BF16, batch=2, **options) for mask, options in MASKS.items() if mask != "causal"]
MATRIX += [Case("mixed", dtype, batch=2, gaps=True, beyond="zero") for dtype in (BF16, FP16)]
MATRIX += [
    Case(bias, BF16, queries=n, keys=300, heads=4) for bias in ("mixed", "slope+table") for n in (1, 5)
]
MATRIX += [Case("mixed", FP32, head_dim=d) for d in (32, 64)]
MATRIX += [Case(bias, BF16, gaps=True) for bias in ("slope+mixed", "path+mixed", "slope+path+table")]
MATRIX += [
    Case("table", BF16, causal=False),
    Case("mixed", BF16, queries=90, keys=200, lse=True, beyond="-inf"),
    Case("table", BF16, queries=200, keys=130),
    Case("mixed", BF16, head_dim=128),
]
#: few tokens, and four query heads that share two key heads and two heads of probes
MATRIX += [
    Case(bias, FP32, head_dim=16, queries=rows, keys=keys, heads=4, key_heads=2, probe_heads=2, **options)
    for bias in ("none", "alibi", "slope", "slope2", "path", "bounded", "slope+path", "mixed")
    for rows, keys, options in (
        (7, 7, {}),
        (70, 100, {"documents": True}),
        (90, 70, {"padding": True, "window": 30}),
    )
]


def check(case: Case) -> None:
    with emulated_device() as report:
        got, work = by_kernels(case)
    assert not report.faults.found, sorted(report.faults.found)[:5]
    found = ratios(case, got)
    bad = {name: f"{ratio:.2f}" for name, ratio in found.items() if not ratio <= 1}
    assert not bad, f"errors over what is allowed: {bad}"
    if case.prune and not case.documents:
        computed, visible = work.sum((0, 1)).tolist()
        assert computed < visible, "nothing was pruned"
    print(f"{case}: worst ratio {max(found.values()):.2f}, {report.blocks} blocks")


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_agrees_with_float64(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_agrees_with_float64_everywhere(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_nan_stays_with_the_rows_that_see_it(which: str) -> None:
    """Row or key 40 is not finite; key 100 is hidden by padding, and not finite too."""
    case = Case("slope", BF16, head_dim=16, heads=1, queries=130, keys=130)
    made = case.leaves()
    made[which][0, 0, 40, 3] = math.inf if which == "v" else math.nan
    made["k"][0, 0, 100] = made["v"][0, 0, 100] = math.nan
    leaves = case.cast(made, BF16)
    padding = torch.zeros(1, 130, dtype=torch.bool)
    padding[0, 100] = True
    masks = Masks(130, 130, torch.device("cpu"), True, None, None, padding)
    problem = problem_module.AttentionProblem.build(
        leaves["q"], leaves["k"], leaves["v"], case.build_bias(leaves), masks, case.scale, "auto"
    )
    with emulated_device() as report:
        out, lse, _ = problem_module.run(problem, "triton")
        (dq,) = torch.autograd.grad(out, leaves["q"], torch.ones_like(out))
    bad = out.isnan().any(-1)[0, 0]
    rows = torch.arange(130)
    assert torch.equal(bad, rows == 40 if which == "q" else rows >= 40)
    assert torch.equal(out.isnan().all(-1)[0, 0], bad) and torch.equal(lse.isnan()[0, 0], bad)
    assert torch.equal(dq.isnan().any(-1)[0, 0], bad)
    assert not report.faults.found


@pytest.fixture
def by_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[Report]:
    """`attend(impl="triton")` runs in the emulator."""
    monkeypatch.setattr(api, "why_not_device", lambda _: api._why_not_version())
    with emulated_device() as report:
        yield report


def test_attend_counts_what_it_skips(by_name: Report) -> None:
    case = Case("alibi", FP32, head_dim=16, heads=1, queries=700, keys=700, steep=16.0)
    leaves = case.cast(case.leaves(), FP32)
    with record_pruning() as counts:
        attend(leaves["q"], leaves["k"], leaves["v"], bias=case.build_bias(leaves), impl="triton")
    assert 0 < counts.computed < counts.visible


def test_a_walk_over_distances_is_never_stopped(by_name: Report) -> None:
    """Where the slope is lost, the table rises again."""
    case = Case("alibi+table", FP32, head_dim=16, heads=1, queries=700, keys=700, steep=16.0)
    leaves = case.cast(case.leaves(), FP32)
    with torch.no_grad():
        leaves["table"][..., -1] = 1e4  # of all distances beyond 49
    with record_pruning() as counts:
        out = attend(leaves["q"], leaves["k"], leaves["v"], bias=case.build_bias(leaves), impl="triton")
    assert counts.computed == counts.visible
    want = attend(leaves["q"], leaves["k"], leaves["v"], bias=case.build_bias(leaves), impl="reference")
    assert (
        out - want
    ).abs().max() < 1e-3  # float32 at 1e4 is rounded by as much; a walk that stops is off by one


def test_no_tokens(by_name: Report) -> None:
    empty = torch.zeros(1, 2, 0, 16, requires_grad=True)
    out = attend(empty, empty, empty, impl="triton")
    out.sum().backward()
    assert out.shape == (1, 2, 0, 16) and empty.grad is not None


def test_operator_contract(by_name: Report) -> None:
    """Schema, fake tensors, autograd registration, and the traced backward."""
    case = Case("slope", FP32, head_dim=16, heads=1, queries=20, keys=20)
    leaves = case.cast(case.leaves(), FP32)
    torch.library.opcheck(problem_module.attention, ("triton", *case.problem(leaves).packed()))


def test_compiles_as_one_graph(by_name: Report) -> None:
    case = Case("slope+path", FP32, head_dim=16, queries=33, keys=33)
    leaves = case.cast(case.leaves(), FP32)

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, bias=case.build_bias(leaves), impl="triton").square().sum()

    qkv = [leaves[name] for name in "qkv"]
    want = torch.autograd.grad(loss(*qkv), qkv)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*qkv), qkv)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_the_same_call_gives_the_same_bits() -> None:
    with emulated_device():
        first, second = by_kernels(QUICK[2])[0], by_kernels(QUICK[2])[0]
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_removed_barrier_is_found_in_our_kernels() -> None:
    with emulated_device(lambda ptx: re.sub(r"bar\.sync\s+0;", "", ptx)) as report:
        by_kernels(QUICK[2])
    assert any("race" in fault.kind for fault in report.faults.found)


def test_lengths_compile_one_set_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten lengths and windows: the compiler sees the same signatures."""
    monkeypatch.setattr(gpu, "_choose", lambda make, candidates, *_: candidates[0])
    monkeypatch.setattr(gpu, "_chosen", {})

    def kinds(length: int) -> set[str]:
        case = Case("slope+path", BF16, queries=length, keys=length, window=length // 2, documents=True)
        return {f"{step.kernel.__name__}{gpu.signature(step)}" for step in launches(case, 80)}

    seen = kinds(200)
    assert all(kinds(length) == seen for length in (201, 208, 256, 333, 512, 1000, 1001, 2048, 4097))


def test_a_far_key_that_dominates_is_not_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of what a walk has yet to see is that of all earlier keys, not of the next 64."""
    leaves = Case.leaves

    def with_a_large_key(case: Case) -> dict[str, torch.Tensor]:
        made = leaves(case)
        with torch.no_grad():
            made["k"][:, :, 0] *= 2.0**14  # more than the bias takes away at 700 keys
        return made

    monkeypatch.setattr(Case, "leaves", with_a_large_key)
    case = Case("alibi", BF16, head_dim=32, heads=1, prune="auto", steep=8.0, queries=70, keys=700)
    with emulated_device():
        found = ratios(case, by_kernels(case)[0])
    assert max(found.values()) <= 1, found
