"""The Triton kernels, compiled for GPUs that are not here: they fit, and (nearly) nothing is spilled.

What is compiled is what would be launched, for tensors without data. The compiler keeps its results in
Triton's own cache folder in the user's home.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
import triton

from gpu_cases import Case, launches
from grape_pe.attention.gpu import compile as gpu
from grape_pe.attention.gpu.api import DEVICES
from grape_pe.attention.gpu.compile import Usage

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BIASES = ("none", "slope", "path", "slope+path", "mixed")
MASKED = {"documents": True, "padding": True, "window": 500}
LONG = {"queries": 1024, "keys": 1024, "prune": "auto"}
SOME = [(90, Case("path", BF16, **LONG)), (100, Case("none", FP16, **LONG))]
EVERY = [
    (arch, Case(bias, dtype, head_dim, **LONG, **masks))
    for arch, bias, dtype, head_dim, masks in itertools.product(
        (80, 90, 100), BIASES, (BF16, FP16, FP32), (32, 64, 128, 256), ({}, MASKED)
    )
    if (dtype, head_dim) != (FP32, 256)  # refused: see api.LARGEST_HEAD_FLOAT32
]
EVERY += [(arch, Case(bias, BF16, queries=4, keys=4096)) for arch in (80, 90, 100) for bias in BIASES]
EVERY += [(arch, Case(bias, BF16, **LONG)) for arch in (86, 89, 120) for bias in BIASES]
#: bytes a thread may keep outside its registers where no candidate does without; heads of 128 with a path
SPILL, SPILL_WIDE_PATH = 64, 320


def check(arch: int, case: Case) -> None:
    for step in launches(case, arch):
        use = Usage.of(gpu.compiled(step, arch))
        name = step.kernel.__name__
        assert use.why_not(arch) is None, f"{name}: {use.why_not(arch)}"
        if case.head_dim <= 128 and case.dtype != FP32:
            limit = SPILL_WIDE_PATH if case.head_dim == 128 and "path" in case.bias else SPILL
            assert use.spilled <= limit, f"{name}: {use}, {step.tile}"


@pytest.mark.parametrize(("arch", "case"), SOME, ids=str)
def test_fits_the_device(arch: int, case: Case) -> None:
    check(arch, case)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "case"), EVERY, ids=str)
def test_fits_every_device(arch: int, case: Case) -> None:
    check(arch, case)


def _smallest() -> gpu.Launch:
    case = Case("none", BF16, head_dim=16, queries=100, keys=100)
    return next(step for step in launches(case, 80) if step.kernel.__name__ == "delta_kernel")


def test_reads_a_cubin_as_the_toolkit_does() -> None:
    cubin = gpu.compiled(_smallest(), 80).asm["cubin"]
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None and gpu.read_cubin(cubin) == (int(found[1]), int(found[2]))


def test_what_does_not_fit_is_refused_when_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, 80, 1)  # KiB of shared memory
    monkeypatch.setattr(gpu, "_chosen", {})
    case = Case("none", BF16, head_dim=16, queries=100, keys=100)
    with pytest.raises(RuntimeError, match=r"no tile of forward_kernel fits sm_80.*shared memory"):
        list(launches(case, 80))


@pytest.mark.parametrize(
    ("usage", "reason"),
    [
        (Usage(255, 0, 200 * 1024, 0, False), "shared memory"),
        (Usage(100, 0, 0, 576, False), "576 columns"),
        (Usage(100, 0, 0, 0, True), "trap"),
        (Usage(255, 8, 1024, 512, False), None),
    ],
)
def test_reasons(usage: Usage, reason: str | None) -> None:
    found = usage.why_not(80)
    assert found is None if reason is None else reason in (found or "")
