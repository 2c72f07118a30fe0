"""The Triton kernels: what they refuse.

That they compute the right numbers is tested in `test_triton_ptx.py`, on the compiled code.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from grape_pe.attention import attend
from grape_pe.attention.gpu import api
from grape_pe.attention.gpu.api import why_not_device, why_not_triton
from grape_pe.attention.masks import Masks
from grape_pe.bias import Bias, NoBias, PathBias, SlopeBias, SlopeTerm, TileBias


def _call(dtype: torch.dtype = torch.float32, head_dim: int = 16, causal: bool = True, **masks):
    q = torch.zeros(1, 2, 4, head_dim, dtype=dtype)
    return q, q, q, Masks(4, 4, q.device, causal, **masks)


def _slope() -> SlopeBias:
    c = torch.arange(4.0, dtype=torch.float64)[None, None]
    return SlopeBias((SlopeTerm(c, c, rate_q=torch.ones(1, 2, 1)),))


def _path() -> PathBias:
    return PathBias(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8), torch.ones(1, 2, 1))


def test_refuses_the_cpu_and_says_so() -> None:
    q, k, v, masks = _call()
    assert "CUDA" in (why_not_triton(q, k, v, NoBias(), masks) or "")
    with pytest.raises(ValueError, match="CUDA"):
        attend(q, k, v, impl="triton")


@pytest.mark.parametrize(
    ("bias", "call", "reason"),
    [
        (TileBias(lambda *_: torch.zeros(1), {}, {}), _call(), "TileBias"),
        (_path(), _call(causal=False), "causal"),
        (_slope(), _call(torch.float64), "float64"),
        (_slope(), _call(torch.float16, head_dim=512), "256"),
        (_slope(), _call(head_dim=256), "at most 128 features in torch.float32, got 256"),
        (_slope(), _call(window=2, sinks=1), "sinks"),
    ],
    ids=[
        "tile",
        "path-without-order",
        "float64",
        "wide-head",
        "wide-float32-head",
        "sinks",
    ],
)
def test_refuses_with_the_reason(
    bias: Bias, call: tuple, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "why_not_device", lambda _: None)
    q, k, v, masks = call
    assert reason in (why_not_triton(q, k, v, bias, masks) or "")


def _pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str = "Some GPU") -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)


@pytest.mark.parametrize(
    ("capability", "fine"), [((8, 0), True), ((9, 0), True), ((7, 5), False), ((13, 0), False)]
)
def test_knows_its_devices(capability: tuple[int, int], fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    _pretend(monkeypatch, capability)
    reason = why_not_device(torch.device("cuda"))
    assert reason is None if fine else "Some GPU has compute capability" in (reason or "")


def test_refuses_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, (9, 0), "AMD Instinct")
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "AMD Instinct is driven by ROCm" in (why_not_device(torch.device("cuda")) or "")


def test_refuses_an_old_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    _pretend(monkeypatch, (9, 0))
    monkeypatch.setattr(api, "triton_version", lambda: "3.6.0")
    assert "3.7.1" in (why_not_device(torch.device("cuda")) or "")


def test_refuses_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    _pretend(monkeypatch, (9, 0))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "must be compiled" in (why_not_device(torch.device("cuda")) or "")


def test_imports_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, grape_pe\n"
        "from grape_pe.attention.gpu import api\n"
        "torch.cuda.get_device_capability = lambda device=None: (9, 0)\n"
        "print(api.why_not_device(torch.device('cuda')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ.copy())
    assert done.returncode == 0, done.stderr
    assert "not installed" in done.stdout


def test_names_and_ends_of_documents() -> None:
    pytest.importorskip("triton")
    from grape_pe.attention.gpu.launch import end_of_document, first_of_document

    ids = torch.tensor([[7, 7, 2, 2, 7, 9], [1, 1, 1, 0, 0, 5]])
    first = first_of_document(ids)
    assert first.tolist() == [[0, 0, 2, 2, 0, 5], [0, 0, 0, 3, 3, 5]]
    assert end_of_document(first).tolist() == [[5, 5, 4, 4, 5, 6], [3, 3, 3, 5, 5, 6]]
