"""The Triton kernels, compiled for GPUs that are not here: no spilled register, shared memory that fits.

What is compiled is what would be launched: `launch.py` plans it for tensors without data, and the
figures come from the compiler's output. Results are cached in the temporary folder between runs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("an interpreted kernel cannot be compiled", allow_module_level=True)

from grape_pe.attention.triton import resources

ARCHS = (80, 90, 100)
#: bytes known to be spilled (docs/kernels.md): features 96 … 127 are masked, which takes registers
KNOWN = {(80, 96, "path"): 8}


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "grape-pe-triton"))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        yield


def check(arch: int, head_dim: int, bias: str, dtype: torch.dtype) -> None:
    seen = set()
    for name, step in resources.launches(resources.example(head_dim, dtype, *resources.BIASES[bias]), arch):
        use = resources.measure(step, arch)
        what = f"{name} kernel, {bias}, D={head_dim}, {dtype}, sm_{arch}, {step.tile}"
        assert use.stack <= KNOWN.get((arch, head_dim, bias), 0), f"{what} spills {use.stack} bytes"
        assert use.shared <= resources.SHARED_LIMIT[arch], f"{what} needs {use.shared} bytes of shared memory"
        assert use.tensor_memory <= resources.TENSOR_MEMORY_LIMIT, f"{what} needs {use.tensor_memory} columns"
        seen.add(name.split()[0])
    assert {"forward", "query", "key"} <= seen


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("bias", "head_dim", "dtype"), [("slope", 64, torch.bfloat16), ("path", 128, torch.bfloat16)]
)
def test_fits_the_device(arch: int, bias: str, head_dim: int, dtype: torch.dtype) -> None:
    check(arch, head_dim, bias, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("bias", ["none", "slope", "path"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fits_every_device(arch: int, bias: str, head_dim: int, dtype: torch.dtype) -> None:
    check(arch, head_dim, bias, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("head_dim", "bias", "dtype"),
    [
        (256, "slope", torch.bfloat16),
        (256, "path", torch.bfloat16),
        (64, "both", torch.bfloat16),
        (128, "both", torch.bfloat16),
        (128, "slope", torch.float32),
        (64, "path", torch.float32),
        (256, "slope", torch.float32),
    ],
)
def test_can_be_launched(arch: int, head_dim: int, bias: str, dtype: torch.dtype) -> None:
    """Head size 256, slopes with a path, and float32 may spill (docs/kernels.md), but must fit in memory."""
    for name, step in resources.launches(resources.example(head_dim, dtype, *resources.BIASES[bias]), arch):
        use = resources.measure(step, arch)
        assert use.shared <= resources.SHARED_LIMIT[arch], (name, use)
        assert use.tensor_memory <= resources.TENSOR_MEMORY_LIMIT, (name, use)
