"""What the kernels cost on devices that need not be there: registers, spills and shared memory.

    python -m grape_pe.attention.triton.resources --arch 80 90 100 --head-dim 64 128

compiles the very launches `launch.py` would make, for tensors without data, and reads the result:
every bias, with and without masks.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import launch, ops
from .launch import Launch, Problem

#: bytes of shared memory one block may have, by compute capability times ten
SHARED_LIMIT = {
    arch: kib * 1024 for arch, kib in ((80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99))
}
#: columns of tensor memory a block may have; a kernel that wants more compiles, to a trap
TENSOR_MEMORY_LIMIT = 512
_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Usage:
    registers: int
    stack: int  # bytes a thread keeps outside registers: what was spilled
    shared: int
    tensor_memory: int  # columns, on sm_100

    def fits(self, arch: int) -> bool:
        return (
            not self.stack and self.shared <= SHARED_LIMIT[arch] and self.tensor_memory <= TENSOR_MEMORY_LIMIT
        )


def example(
    head_dim: int,
    dtype: torch.dtype,
    slopes: int,
    path: bool,
    probe_dtype: torch.dtype | None = None,
    masked: bool = False,
) -> Problem:
    """A causal call of 8 heads and 4096 tokens without data; masked: documents, padding and a window."""
    shape = (2, 8, 4096, head_dim)

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    stack, probes = (2, 8, slopes, 4096), (2, 8, 4096, 8)
    rate = empty(*stack) if slopes else None
    c = empty(*stack, dtype=torch.float64) if slopes else None
    probe = empty(*probes, dtype=probe_dtype or dtype) if path else None
    options: dict[str, Any] = {
        "documents": empty(2, 4096, dtype=torch.int32) if masked else None,
        "padding": empty(2, 4096, dtype=torch.uint8) if masked else None,
        "causal": True, "window": 1000 if masked else 0, "scale": 0.1, "tau": 30.0, "bounded": False,
    }  # fmt: skip
    q, k, v = (empty(*shape, dtype=dtype) for _ in range(3))
    path_rate = empty(2, 8) if path else None
    return Problem(q, k, v, rate, rate, c, c, probe, probe, path_rate, **options)


def launches(problem: Problem, arch: int) -> Iterator[tuple[str, Launch]]:
    """The attention kernels of a forward and a backward call, by name."""
    p, rows = problem, problem.q.shape[:3]
    out = p.q.new_empty((*rows, p.v.shape[-1]))
    lse = p.q.new_empty(rows, dtype=torch.float32)
    index = p.q.new_empty(rows, dtype=torch.int32)
    early = p.has_path and not p.terms and p.tau >= 0
    first = index if p.documents is not None or (p.terms and p.tau >= 0) else None
    yield "forward", launch.plan_forward(p, out, lse, first, index if early else None, arch)
    yield "delta", launch.plan_delta(out, out, lse)
    gradients = ops.empty_gradients(p, p.terms > 0, p.terms > 0, False)
    reached = index if early else first
    steps = launch.plan_backward(p, out, lse, lse, reached, gradients, arch)
    for step in steps:
        name = step.kernel.__name__.removesuffix("_kernel")
        split = not (step.arguments.get("WANT_DK", True) and step.arguments.get("WANT_DV", True))
        yield f"{name} ({'dk' if step.arguments['WANT_DK'] else 'dv'})" if split else name, step


def _signature(step: Launch) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Types, constants and known multiples of 16, as Triton would infer them from the arguments."""
    types: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    multiples: dict[tuple[int, ...], Any] = {}
    for place, parameter in enumerate(step.kernel.params):
        value = step.arguments[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or (special and type(value) is int and value == 1):
            types[parameter.name] = "constexpr"
            constants[(place,)] = value
            continue
        if isinstance(value, Tensor):
            types[parameter.name] = _TYPES[value.dtype]
        elif isinstance(value, int):
            types[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            types[parameter.name] = "fp32"
        if isinstance(value, Tensor) or (special and isinstance(value, int) and value % 16 == 0):
            multiples[(place,)] = [["tt.divisibility", 16]]
    return types, constants, multiples


def measure(step: Launch, arch: int) -> Usage:
    """Compile one launch for sm_<arch> and read what it uses."""
    source = ASTSource(step.kernel, *_signature(step))
    options = {**step.tile.options(), "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, stack = _read_cubin(compiled.asm["cubin"])
    meta = compiled.metadata
    return Usage(registers, stack, meta.shared, getattr(meta, "tmem_size", None) or 0)


def _read_cubin(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage said nothing readable: {text.stdout!r}")
    return int(found[1]), int(found[2]) + int(found[3])


BIASES = {"none": (0, False), "slope": (1, False), "path": (0, True), "both": (1, True)}


COLUMNS = "arch D dtype bias masks kernel queries keys warps stages chunk parts registers spilled shared"


@dataclass(frozen=True)
class Case:
    """One call to compile: what `example` makes of it, for one device."""

    arch: int
    head_dim: int
    dtype: torch.dtype
    bias: str
    masked: bool = False
    probe_dtype: torch.dtype | None = None

    def launches(self) -> Iterator[tuple[str, Launch]]:
        slopes, path = BIASES[self.bias]
        return launches(
            example(self.head_dim, self.dtype, slopes, path, self.probe_dtype, self.masked), self.arch
        )

    def __str__(self) -> str:
        dtype = _TYPES[self.dtype][1:] + (f"+{_TYPES[self.probe_dtype][1:]}" if self.probe_dtype else "")
        masks = "masked" if self.masked else "causal"
        return f"sm_{self.arch}-{self.head_dim}-{dtype}-{self.bias}-{masks}"


def every_case(archs: Iterable[int], head_dims: Iterable[int], dtypes: Iterable[torch.dtype]) -> list[Case]:
    """Every bias and mask; beside half-precision q, k, v probes come in their dtype and in float32."""
    cases = []
    for head_dim, dtype, arch, bias, masked in itertools.product(
        head_dims, dtypes, archs, BIASES, (False, True)
    ):
        wide = [torch.float32] if BIASES[bias][1] and dtype != torch.float32 else []
        cases += [Case(arch, head_dim, dtype, bias, masked, probe) for probe in (None, *wide)]
    return cases


def table(cases: Iterable[Case]) -> Iterator[str]:
    """Rows of a Markdown table, one for each kernel."""
    names = COLUMNS.split()
    yield "| " + " | ".join(names) + " |"
    yield "|---" * len(names) + "|"
    for case in cases:
        arch, head_dim, dtype, bias, masks = str(case).split("-")
        for name, step in case.launches():
            use, tile = measure(step, case.arch), step.tile
            cells = [arch, head_dim, dtype, bias, masks, name, tile.queries, tile.keys, tile.warps]
            cells += [tile.stages, tile.chunk, tile.parts, use.registers, use.stack, use.shared]
            yield "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--bias", nargs="+", default=list(BIASES), choices=list(BIASES))
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    chosen = parser.parse_args()
    cases = every_case(chosen.arch, chosen.head_dim, [getattr(torch, name) for name in chosen.dtype])
    for row in table(case for case in cases if case.bias in chosen.bias):
        print(row, flush=True)


if __name__ == "__main__":
    main()
