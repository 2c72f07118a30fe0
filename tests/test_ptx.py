"""The PTX emulator: instructions, a compiled Triton kernel, and detectors that find what they should."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ptx import launcher, warp
from ptx.instructions import logic3, permuted, shifted, truncated_division
from ptx.launcher import Report
from ptx.memory import BadAccess
from ptx.parser import parse

ROWS, INNER = 64, 128


@triton.jit
def product_kernel(A, B, OUT, INNER, rows, ROWS: tl.constexpr):
    """Row sums of A B^T, run along the columns: cp.async, ldmatrix, mma, shuffles and shared memory."""
    m = tl.arange(0, ROWS)
    k = tl.arange(0, 32)
    row = tl.program_id(0) * ROWS + m
    total = tl.zeros((ROWS, ROWS), tl.float32)
    for start in range(0, INNER, 32):
        a = tl.load(A + row[:, None] * INNER + start + k[None, :], mask=(row < rows)[:, None], other=0.0)
        b = tl.load(B + m[:, None] * INNER + start + k[None, :])
        total = tl.dot(a, tl.trans(b), total)
    summed = tl.cumsum(total, 1)
    summed = summed - tl.max(summed, 0)[None, :]  # over rows: between warps
    tl.store(OUT + row[:, None] * ROWS + m[None, :], summed, mask=(row < rows)[:, None])


@pytest.fixture(scope="module")
def compiled():
    types = {"A": "*bf16", "B": "*bf16", "OUT": "*fp32", "INNER": "i32", "rows": "i32", "ROWS": "constexpr"}
    multiples = {(n,): [["tt.divisibility", 16]] for n in range(4)}
    source = ASTSource(product_kernel, types, {(5,): ROWS}, multiples)
    options = {"num_warps": 4, "num_stages": 3}
    return triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)


def _run(
    compiled, change: Callable[[str], str] = str, rows: int = 100
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, INNER, generator=g).bfloat16() for n in (rows, ROWS))
    out, report = torch.zeros(rows, ROWS), Report()
    ptx = change(compiled.asm["ptx"])
    launcher.launch(ptx, compiled.metadata.shared, 4, (2,), [a, b, out, INNER, rows], report)
    want = torch.zeros(2 * ROWS, ROWS, dtype=torch.float64)
    want[:rows] = (a.double() @ b.double().T).cumsum(1)
    blocks = want.view(2, ROWS, ROWS)
    return out, (blocks - blocks.amax(1, keepdim=True)).view(-1, ROWS)[:rows], report


def test_a_compiled_kernel_gives_the_right_numbers(compiled) -> None:
    out, want, report = _run(compiled)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-4)
    assert report.launches == ["product_kernel"] and report.blocks == 2 and not report.faults.found


def _without(pattern: str, which: int) -> Callable[[str], str]:
    """Removes the n-th statement that matches."""

    def change(ptx: str) -> str:
        found = list(re.finditer(rf"^\s*{pattern}[^;]*;", ptx, re.M))
        assert which < len(found)
        return ptx[: found[which].start()] + ptx[found[which].end() :]

    return change


def _count(compiled, pattern: str) -> int:
    return len(re.findall(rf"^\s*{pattern}", compiled.asm["ptx"], re.M))


def test_a_removed_barrier_is_found(compiled) -> None:
    """Each barrier by itself, but for those that only guard the reuse of what was read long before."""
    found = []
    for which in range(_count(compiled, r"bar\.sync")):
        faults = _run(compiled, _without(r"bar\.sync", which))[2].faults.found
        found.append(any("race" in fault.kind for fault in faults))
    assert len(found) >= 4 and sum(found) >= len(found) - 1, found


def test_a_removed_wait_is_found(compiled) -> None:
    every = re.compile(r"cp\.async\.wait_group\s+\d+;")
    faults = _run(compiled, lambda ptx: every.sub("", ptx))[2].faults.found
    assert any("cp.async" in fault.kind for fault in faults)


def test_a_wait_that_is_too_short_is_found(compiled) -> None:
    def later(ptx: str) -> str:
        return re.sub(
            r"cp\.async\.wait_group(\s+)(\d+)", lambda m: f"cp.async.wait_group{m[1]}{int(m[2]) + 1}", ptx
        )

    faults = _run(compiled, later)[2].faults.found
    assert any("cp.async" in fault.kind for fault in faults)


def test_an_index_out_of_bounds_is_found(compiled) -> None:
    first = re.search(r"st\.global\S*\s+\[\s*%rd\d+\s*\+\s*0", compiled.asm["ptx"])
    assert first is not None

    def moved(ptx: str) -> str:
        return ptx.replace(first[0], re.sub(r"\+\s*0$", "+1048576", first[0]), 1)

    with pytest.raises(BadAccess, match="out of bounds"):
        _run(compiled, moved)


def test_a_missing_bounds_check_is_found(compiled) -> None:
    """Rows beyond the tensor: the stores of the second block are no longer predicated."""
    with pytest.raises(BadAccess, match="out of bounds"):
        _run(compiled, lambda ptx: re.sub(r"@!?%p\d+ (st\.global)", r"\1", ptx))


def test_a_misaligned_access_is_found(compiled) -> None:
    with pytest.raises(BadAccess, match="misaligned"):
        _run(
            compiled,
            lambda ptx: re.sub(r"(ld\.shared\S+\s+\{?[^\[]*\[\s*%r\d+)(\+\d+)?", r"\1+1", ptx, count=1),
        )


def test_blocks_that_write_the_same_place_are_found(compiled) -> None:
    """Both blocks take themselves for the first."""
    faults = _run(compiled, lambda ptx: re.sub(r"mov\.u32\s+(%r\d+), %ctaid\.x", r"mov.u32 \1, 0", ptx))[
        2
    ].faults
    assert any("another block" in fault.kind for fault in faults.found)


def test_threads_of_a_block_must_agree_on_a_branch() -> None:
    ptx = """
    .visible .entry kernel(.param .u64 .ptr kernel_param_0)
    {
        .reg .pred %p<2>;
        mov.u32 %r1, %tid.x;
        setp.lt.u32 %p1, %r1, 16;
        @%p1 bra $L__BB0_2;
        mov.b32 %r2, 1;
    $L__BB0_2:
        ret;
    $L__func_end0:
    }
    """
    with pytest.raises(NotImplementedError, match="different branches"):
        launcher.launch(ptx, 0, 1, (1,), [0], Report())


def test_an_unknown_instruction_is_named() -> None:
    ptx = ".visible .entry kernel()\n{\n tanh.approx.f32 %r1, %r2;\n ret;\n}"
    with pytest.raises(NotImplementedError, match=r"tanh\.approx"):
        launcher.translate(ptx)


def test_parser_reads_predicates_vectors_and_labels() -> None:
    kernel = parse(
        ".visible .entry k(\n .param .u64 .ptr .global .align 1 k_param_0,\n .param .f32 k_param_1)\n{\n"
        "$L__BB0_0:\n .loc 1 17 3\n @!%p3 ld.shared.v2.b32 {%r1, %r2}, [%r3+16];\n"
        " { .reg .b32 t; mov.b32 t, 1; }\n bra $L__BB0_0;\n}\n"
    )
    load = kernel.blocks[0].instructions[0]
    assert kernel.parameters == ["u64", "f32"] and kernel.labels == {"$L__BB0_0": 0}
    assert load.opcode == ("ld", "shared", "v2", "b32") and load.operands == ("{%r1, %r2}", "[%r3+16]")
    assert (load.predicate, load.negated, load.line) == ("%p3", True, "17")


def test_roundings() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=g) * 10.0 ** torch.randint(-8, 4, (1000,), generator=g)
    x[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    bits = x.numpy().view(np.uint32)
    bf16 = torch.from_numpy(warp.bf16_bits(bits).astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    f16 = torch.from_numpy(warp.f16_bits(bits).astype(np.uint16).view(np.int16)).view(torch.float16)
    torch.testing.assert_close(bf16, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(f16, x.half(), rtol=0, atol=0, equal_nan=True)
    tf32 = torch.from_numpy(warp.tf32_bits(bits).view(np.float32))
    assert ((tf32 - x).abs()[3:] <= x.abs()[3:] * 2.0**-11).all() and tf32[1] == x[1] and tf32[0].isnan()


def test_integers() -> None:
    a, b = np.array([-7, 7, -7, 7], np.int32), np.array([2, -2, -2, 2], np.int32)
    assert truncated_division(a, b).tolist() == [-3, -3, 3, 3]
    assert shifted(np.array([-8], np.int32), np.array([40], np.uint32), left=False).tolist() == [-1]
    assert shifted(np.array([8], np.uint32), np.array([32], np.uint32), left=True).tolist() == [0]
    word = np.array([0x44332211], np.uint32), np.array([0x88776655], np.uint32)
    assert permuted(*word, np.array([0x5410], np.uint32)).tolist() == [0x66552211]
    three = [np.array([x], np.uint32) for x in (0b1100, 0b1010, 0b0110)]
    assert logic3(*three, 0x96).tolist() == [0b1100 ^ 0b1010 ^ 0b0110]


def test_shuffles() -> None:
    x = np.arange(64, dtype=np.uint32)
    whole = np.uint32(31)
    assert warp.shuffle("bfly", x, np.uint32(1), whole)[:4].tolist() == [1, 0, 3, 2]
    assert warp.shuffle("idx", x, np.uint32(5), whole)[30:34].tolist() == [5, 5, 37, 37]
    assert warp.shuffle("up", x, np.uint32(2), np.uint32(0))[32:36].tolist() == [32, 33, 32, 33]
    assert warp.shuffle("down", x, np.uint32(2), whole)[29:33].tolist() == [31, 30, 31, 34]
