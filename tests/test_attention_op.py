"""The custom op: opcheck, gradcheck, torch.compile, torch.export; and the kernel that is built for it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from attention_cases import BIASES, cast, inputs, one_thread  # noqa: F401
from grape_pe.attention import attend
from grape_pe.attention.cpu import build as native
from grape_pe.attention.cpu import launch
from grape_pe.attention.cpu.launch import prepared
from grape_pe.attention.masks import Masks
from grape_pe.attention.problem import AttentionProblem, _results, attention


def op_arguments(kind: str) -> tuple:
    """Arguments of grape::attention; every tensor that can learn does."""
    i = cast(inputs(11, 9, batch=1, heads=2, kv_heads=1, width=4, value_width=3), torch.float32)
    padding = torch.zeros(1, 11, dtype=torch.bool)
    padding[0, 2] = True
    masks = Masks(9, 11, torch.device("cpu"), True, 8, torch.tensor([[0] * 5 + [1] * 6]), padding)
    problem = AttentionProblem.build(i["q"], i["k"], i["v"], BIASES[kind](i), masks, 0.5, "auto")
    return "cpu", *prepared(problem).packed()


KINDS = ("a-qk", "path", "slope+path")
compiled_only = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))


@compiled_only
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind):
    torch.library.opcheck(attention, op_arguments(kind))


def test_packing_loses_nothing():
    _, tensors, numbers = op_arguments("slope+path")
    again = AttentionProblem.unpacked(tensors, numbers).packed()
    assert again[1] == numbers
    assert all(x is y for x, y in zip(again[0], tensors, strict=True))


WRONG = {
    "another dtype": ("v", lambda x: x.double()),
    "half precision": ("q", lambda x: x.bfloat16()),
    "strides": ("k", lambda x: x.mT.contiguous().mT),
    "another size": ("probe_k", lambda x: x[:, :, 1:].contiguous()),
    "fewer rates": ("rate_q", lambda x: x[..., 1:]),
    "another device": ("c_k", lambda x: x.to("meta")),
    "ids of 32 bits": ("documents", lambda x: x.int()),
}


@compiled_only
@pytest.mark.parametrize("name", WRONG)
def test_what_the_kernel_does_not_expect_never_reaches_it(name):
    """The compiled kernel reads addresses: any other dtype, device, size or layout is an error."""
    field, spoil = WRONG[name]
    problem = AttentionProblem.unpacked(*op_arguments("slope+path")[1:])
    results = _results("cpu", problem)
    with pytest.raises(ValueError, match=f"the CPU attention kernel reads {field} as"):
        launch.forward(replace(problem, **{field: spoil(getattr(problem, field).detach())}), results)


class Layer(torch.nn.Module):
    def __init__(self, kind: str, impl: str = "cpu") -> None:
        super().__init__()
        self.kind, self.impl = kind, impl

    def forward(self, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return attend(i["q"], i["k"], i["v"], bias=BIASES[self.kind](i), window=40, impl=self.impl)


def leaves(length: int) -> dict[str, torch.Tensor]:
    return cast(inputs(length), torch.float32)


@compiled_only
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize(
    "kind, impl", [("fox", "cpu"), ("slope+path", "cpu"), ("a-qk", "blocks"), ("a-qk", "auto")]
)
def test_compiles_whole(kind, impl, dynamic):
    torch._dynamo.reset()
    layer = Layer(kind, impl)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (70, 90) if dynamic else (70,):
        results = []
        for call in (layer, compiled):
            i = leaves(length)
            y = call(i)
            y.square().sum().backward()
            results.append([y.detach(), *(x.grad for x in i.values() if x.grad is not None)])
        assert len(results[0]) == len(results[1])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


@compiled_only
def test_exports():
    i = {name: x.detach() for name, x in leaves(70).items()}
    program = torch.export.export(Layer("slope+path"), (i,))
    torch.testing.assert_close(program.module()(i), Layer("slope+path")(i))


KERNEL_REFUSES = "no second derivative by its fused kernels; use impl='reference'"


@pytest.mark.parametrize("impl, words", [("cpu", KERNEL_REFUSES), ("sdpa", "derivative")])
def test_a_second_derivative_is_refused_by_kernels(impl, words):
    if impl == "cpu" and not native.available():
        pytest.skip(str(native.why_not()))
    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    (first,) = torch.autograd.grad(attend(q, q, q, impl=impl).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=words):
        first.square().sum().backward()


@pytest.mark.parametrize("kind", ("none", "a-q"))
def test_a_small_hessian_in_float64_by_auto(kind):
    i = inputs(5, batch=1, heads=2, kv_heads=1, width=3, value_width=3)
    bias = BIASES[kind](i)

    def loss(q: torch.Tensor, impl: str) -> torch.Tensor:
        return attend(q, i["k"], i["v"], bias=bias, impl=impl).square().sum()

    got, want = (
        torch.autograd.functional.hessian(lambda q, impl=impl: loss(q, impl), i["q"])
        for impl in ("auto", "reference")
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("impl", ("reference", "blocks"))
def test_a_hessian_by_plain_torch(impl):
    i = inputs(5, batch=1, heads=2, kv_heads=1, width=3, value_width=2)
    bias = BIASES["a-q"](i)

    def loss(q: torch.Tensor, name: str) -> torch.Tensor:
        return attend(q, i["k"], i["v"], bias=bias, impl=name).square().sum()

    got = torch.autograd.functional.hessian(lambda q: loss(q, impl), i["q"])
    assert torch.autograd.gradgradcheck(lambda q: loss(q, impl), i["q"].clone().requires_grad_())
    assert got.abs().max() > 1e-3


@pytest.mark.parametrize("kind", ("none", "fox", "path"))
def test_torch_func_takes_plain_torch(kind):
    """grad, vmap, jacrev and jvp: `auto` takes the reference, a kernel asked for by name refuses."""
    i = inputs(6, batch=1, heads=2, kv_heads=1, width=3, value_width=2)
    bias = BIASES[kind](i)

    def output(q: torch.Tensor, impl: str = "auto") -> torch.Tensor:
        return attend(q, i["k"], i["v"], bias=bias, impl=impl)

    want = torch.autograd.functional.jacobian(lambda q: output(q, "reference"), i["q"])
    torch.testing.assert_close(torch.func.jacrev(output)(i["q"]), want)
    torch.testing.assert_close(torch.func.jacfwd(output)(i["q"]), want)
    stacked = torch.stack([i["q"], 2 * i["q"]])
    torch.testing.assert_close(torch.func.vmap(output)(stacked), torch.stack([output(q) for q in stacked]))
    with pytest.raises(ValueError, match=r"torch\.func.*these can: reference"):
        torch.func.grad(lambda q: output(q, "decode").sum())(i["q"])


def test_import_compiles_nothing(tmp_path):
    import os

    environment = {**os.environ, "GRAPE_PE_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", "import grape_pe"], env=environment, check=True, timeout=120)
    assert list(tmp_path.iterdir()) == []


def test_without_the_kernel_plain_torch_serves(monkeypatch):
    monkeypatch.setenv("GRAPE_PE_NATIVE", "0")
    assert not native.available()
    assert "GRAPE_PE_NATIVE" in str(native.why_not())
    q = torch.randn(1, 2, 5, 4)
    assert attend.explain(q, q, q, bias=None, window=3).impl == "reference"
    with pytest.raises(ValueError, match="GRAPE_PE_NATIVE"):
        attend(q, q, q, impl="cpu")
