"""The Triton kernels: what they refuse, and that they agree with the reference.

The agreement is checked in `test_triton_interpreted.py`, which must run with TRITON_INTERPRET=1 from
the start; each of its tests runs here in a process of its own, so nothing else in this one is interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grape_pe.attention.masks import Masks
from grape_pe.attention.triton.api import attend_triton, why_not_triton
from grape_pe.attention.triton.inputs import first_of_document
from grape_pe.bias import Bias, NoBias, PathBias, SlopeBias, SlopeTerm, TileBias

HERE = Path(__file__).parent
PARTS = {
    "biases": "test_every_bias",
    "masks of slopes": "test_every_mask and slope",
    "masks of paths": "test_every_mask and path",
    "masks without order": "test_every_mask_without_order",
    "sizes": "test_every_head_size or test_value or test_half",
    "rest": "not test_every and not test_value and not test_half",
}


def _interpreted(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    env.pop("PYTEST_ADDOPTS", None)
    target = str(HERE / "test_triton_interpreted.py")
    return subprocess.run([*command, target], env=env, cwd=HERE.parent, capture_output=True, text=True)


@pytest.mark.parametrize("part", PARTS)
def test_agrees_with_the_reference(part: str) -> None:
    pytest.importorskip("triton")
    done = _interpreted("-k", PARTS[part], "-m", "not slow")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_agrees_with_the_reference_on_every_combination() -> None:
    pytest.importorskip("triton")
    done = _interpreted("-m", "slow")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def _call(dtype: torch.dtype = torch.float32, head_dim: int = 16, causal: bool = True):
    q = torch.zeros(1, 2, 4, head_dim, dtype=dtype)
    return q, q, q, Masks(4, 4, q.device, causal)


def _slope() -> SlopeBias:
    c = torch.arange(4.0, dtype=torch.float64)[None, None]
    return SlopeBias((SlopeTerm(c, c, rate_q=torch.ones(1, 2, 1)),))


def _path() -> PathBias:
    return PathBias(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8), torch.ones(1, 2, 1))


def test_refuses_the_cpu_and_says_so() -> None:
    q, k, v, masks = _call()
    assert "CUDA" in (why_not_triton(q, k, v, NoBias(), masks) or "")
    with pytest.raises(ValueError, match="CUDA"):
        attend_triton(q, k, v, NoBias(), masks, 1.0, None)


@pytest.mark.parametrize(
    ("bias", "call", "reason"),
    [
        (TileBias(lambda *_: torch.zeros(1), {}, {}), _call(), "TileBias"),
        (_path(), _call(causal=False), "causal"),
        (_slope(), _call(torch.float64), "float64"),
        (_slope(), _call(head_dim=512), "256"),
        (_slope(), _call(torch.bfloat16), "bfloat16"),
    ],
    ids=["tile", "path-without-order", "float64", "wide-head", "bfloat16-interpreted"],
)
def test_refuses_with_the_reason(
    bias: Bias, call: tuple, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k, v, masks = call
    assert reason in (why_not_triton(q, k, v, bias, masks) or "")


def test_refuses_sinks_beside_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k, v, _ = _call()
    masks = Masks(4, 4, q.device, window=2, sinks=1)
    assert "sinks" in (why_not_triton(q, k, v, NoBias(), masks) or "")


def test_imports_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, grape_pe\n"
        "from grape_pe.attention.triton import why_not_triton\n"
        "from grape_pe.attention.masks import Masks\n"
        "from grape_pe.bias import NoBias\n"
        "q = torch.zeros(1, 1, 2, 16)\n"
        "print(why_not_triton(q, q, q, NoBias(), Masks(2, 2, q.device)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ.copy())
    assert done.returncode == 0, done.stderr
    assert "not installed" in done.stdout


def test_first_token_of_each_document() -> None:
    ids = torch.tensor([[7, 7, 2, 2, 7, 9], [1, 1, 1, 0, 0, 5]])
    assert first_of_document(ids).tolist() == [[0, 0, 2, 2, 0, 5], [0, 0, 0, 3, 3, 5]]
