"""The custom op: opcheck, gradcheck, torch.compile, torch.export; and the kernel that is built for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from grape_pe.attention.tile_op import tiles

from attention_cases import BIASES, inputs, one_thread  # noqa: F401
from grape_pe.attention import attend
from grape_pe.attention.cpu import build as native


def op_arguments(dtype: torch.dtype, kind: str):
    g = torch.Generator().manual_seed(0)

    def leaf(*size, to=dtype):
        return torch.randn(*size, generator=g, dtype=torch.float64).to(to).requires_grad_()

    q, k, v = leaf(1, 2, 9, 4), leaf(1, 1, 11, 4), leaf(1, 1, 11, 3)
    none = (None,) * 4
    slopes = none
    if kind != "path":
        c = [leaf(1, 1, 2, n, to=torch.float64) for n in (9, 11)]
        slopes = (*c, leaf(1, 1, 2, 9), leaf(1, 1, 2, 11))
    path = (None,) * 3 if kind == "slope" else (leaf(1, 2, 9, 3), leaf(1, 2, 11, 3), leaf(2))
    documents = torch.tensor([[0] * 5 + [1] * 6])
    padding = torch.zeros(1, 11, dtype=torch.bool)
    padding[0, 2] = True
    return (q, k, v, *slopes, *path, documents, padding, True, 8, 0.5, kind == "both", 0.0, True)


@pytest.mark.parametrize("kind", ("slope", "path", "both"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_opcheck(kind, dtype):
    torch.library.opcheck(tiles, op_arguments(dtype, kind))


@pytest.mark.parametrize("kind", ("slope", "path", "both"))
def test_gradcheck(kind):
    arguments = op_arguments(torch.float64, kind)
    leaves = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]

    def output(*values):
        found = iter(values)
        return tiles(
            *(next(found) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in arguments)
        )[0]

    assert torch.autograd.gradcheck(output, leaves)


class Layer(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, i: dict[str, torch.Tensor]) -> torch.Tensor:
        return attend(i["q"], i["k"], i["v"], bias=BIASES[self.kind](i), window=40, impl="blockwise")


@pytest.mark.parametrize("kind", ("a-qk", "slope+path"))
def test_compiles_whole(kind):
    i = {name: x.float() if name[:2] not in ("c_", "d_") else x for name, x in inputs(70).items()}
    for x in i.values():
        x.requires_grad_()
    layer = Layer(kind)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for call in (layer, compiled):
        for x in i.values():
            x.grad = None
        y = call(i)
        y.square().sum().backward()
        results.append([y.detach(), *(x.grad for x in i.values() if x.grad is not None)])
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_exports():
    i = {name: x.float() if name[:2] not in ("c_", "d_") else x for name, x in inputs(70).items()}
    program = torch.export.export(Layer("slope+path"), (i,))
    torch.testing.assert_close(program.module()(i), Layer("slope+path")(i))


def test_second_order_gradient_says_no():
    arguments = op_arguments(torch.float64, "slope")
    (first,) = torch.autograd.grad(tiles(*arguments)[0].sum(), arguments[0], create_graph=True)
    with pytest.raises(RuntimeError):
        first.sum().backward()


BUILD = """
import torch
from grape_pe.attention import attend
from grape_pe.attention.cpu import build as native
assert native.available(), native.why_not()
q = torch.randn(1, 1, 5, 4)
attend(q, q, q, impl="blockwise")
"""


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
def test_many_processes_may_be_the_first(tmp_path):
    import os

    environment = {**os.environ, "GRAPE_PE_CACHE": str(tmp_path / "a b;c"), "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen([sys.executable, "-c", BUILD], env=environment) for _ in range(3)]
    assert [process.wait(timeout=120) for process in started] == [0, 0, 0]
    left = list((tmp_path / "a b;c").iterdir())
    assert [path.suffix for path in left] == [".so"]


def test_import_compiles_nothing(tmp_path):
    import os

    environment = {**os.environ, "GRAPE_PE_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", "import grape_pe"], env=environment, check=True, timeout=120)
    assert list(tmp_path.iterdir()) == []


def test_without_the_kernel_plain_torch_serves(monkeypatch):
    monkeypatch.setenv("GRAPE_PE_NATIVE", "0")
    assert native.library() is None
    assert "GRAPE_PE_NATIVE" in str(native.why_not())
    q = torch.randn(1, 2, 5, 4)
    assert attend(q, q, q, impl="blockwise").shape == q.shape
