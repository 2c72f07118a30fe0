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
from grape_pe.attention.triton.resources import Case

ARCHS = (80, 90, 100)
HEAD_DIMS = (32, 64, 96, 128, 256)
HALF, SINGLE = (torch.bfloat16, torch.float16), (torch.float32,)
#: Each device, dtype, bias and kind of tile once, at about a minute of compiling.
SOME = [
    Case(80, 256, torch.bfloat16, "both", masked=True, probe_dtype=torch.float32),
    Case(80, 64, torch.float32, "slope", masked=True),
    Case(90, 128, torch.float16, "path"),
    Case(100, 64, torch.bfloat16, "slope"),
]
#: Devices with less shared memory: the cells that differ from sm_80's, and one that does not.
SMALL = [
    Case(arch, head_dim, torch.bfloat16, bias, probe_dtype=torch.float32 if bias != "slope" else None)
    for arch in (86, 89, 120)
    for head_dim, bias in ((64, "both"), (128, "path"), (128, "both"), (256, "slope"), (256, "both"))
]
#: every head size, bias, mask, dtype of q and of the probes, on every device: a few thousand kernels
EVERY = resources.every_case(ARCHS, HEAD_DIMS, (*HALF, *SINGLE))


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "grape-pe-triton"))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        yield


def check(case: Case) -> None:
    seen, wrong = set(), []
    for name, step in case.launches():
        use = resources.measure(step, case.arch)
        if not use.fits(case.arch):
            wrong.append(f"{name} kernel: {use}, {step.tile}")
        seen.add(name.split()[0])
    assert not wrong, f"{case}: " + "; ".join(wrong)
    path = {"carry"} if resources.BIASES[case.bias][1] else set()
    assert seen == {"forward", "delta", "query", "key"} | path


@pytest.mark.parametrize("case", SOME, ids=str)
def test_fits_the_device(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_fits_every_device(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_shared_memory_of_smaller_devices(case: Case) -> None:
    """They run with sm_80's tiles but for a few; registers were not looked after there."""
    for name, step in case.launches():
        use = resources.measure(step, case.arch)
        assert use.shared <= resources.SHARED_LIMIT[case.arch], f"{name} kernel: {use}, {step.tile}"


def test_every_case_is_there() -> None:
    half = sum(case.dtype in HALF for case in EVERY)
    # none and slope once, path and both also with float32 probes; each with and without masks
    assert (half, len(EVERY) - half) == (3 * 5 * 2 * 6 * 2, 3 * 5 * 4 * 2)
