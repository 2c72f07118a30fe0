"""`attend_triton`, and why it cannot do a call. Triton is imported only when a kernel runs."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from ...bias import Bias, PathBias, parts_of
from .. import problem, pruning
from ..masks import Masks
from ..problem import AttentionProblem
from ..pruning import Prune
from .store import release, triton_version

#: compute capabilities (times ten) that the kernels are written for, with the KiB of shared memory of a block
DEVICES = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
#: older versions compile wrong gradients for Hopper
OLDEST_TRITON = (3, 7, 1)
LARGEST_HEAD = 256
#: float32 tiles of wider heads do not fit into shared memory, or spill thousands of bytes
LARGEST_HEAD_FLOAT32 = 128
MOST_HEADS = 65535
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def why_not_triton(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks) -> str | None:
    """The reason the Triton kernels cannot do this call, or None when they can."""
    return (
        problem.why_not(bias)
        or why_not_device(q.device)
        or _why_not_shapes(q, v, masks)
        or _why_not_path(bias, masks)
    )


def why_not_device(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device, or None."""
    if device.type != "cuda":
        return f"it needs CUDA tensors, got {device.type}"
    if torch.version.hip is not None:
        return f"it is written for NVIDIA GPUs, and {torch.cuda.get_device_name(device)} is driven by ROCm"
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor not in DEVICES:
        known = ", ".join(f"{arch // 10}.{arch % 10}" for arch in DEVICES)
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {major}.{minor}; the kernels are written for {known}"
    return _why_not_version()


def _why_not_version() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    version = triton_version()  # None for a build under another name
    if version is not None and release(version) < OLDEST_TRITON:
        return f"it needs triton {'.'.join(map(str, OLDEST_TRITON))} or later, found {version}"
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y"):
        return "TRITON_INTERPRET is set, and these kernels must be compiled; unset it"
    return None


def _why_not_shapes(q: Tensor, v: Tensor, masks: Masks) -> str | None:
    if q.dtype not in _DTYPES:
        return f"it computes in float16, bfloat16 and float32, got {q.dtype}"
    width = max(q.shape[-1], v.shape[-1])
    limit = LARGEST_HEAD_FLOAT32 if q.dtype == torch.float32 else LARGEST_HEAD
    if width > limit:
        return f"it has tiles for heads of at most {limit} features in {q.dtype}, got {width}"
    if q.shape[0] * q.shape[1] > MOST_HEADS:
        return f"a grid has room for {MOST_HEADS} heads over the batch, got {q.shape[0] * q.shape[1]}"
    if masks.sinks and masks.window is not None:
        return "it has no attention sinks: a window hides every key outside it"
    if masks.documents is not None and masks.shift < 0:
        return "documents name keys, so it needs at least as many keys as queries"
    return None


def _why_not_path(bias: Bias, masks: Masks) -> str | None:
    for path in (part for part in parts_of(bias) if isinstance(part, PathBias)):
        if not masks.causal:
            return "a PathBias sums over the tokens between key and query: its scan is causal"
        if path.probe_q.shape[-1] > LARGEST_HEAD:
            return f"it has tiles for probes of at most {LARGEST_HEAD} features, got {path.probe_q.shape[-1]}"
    return None


def attend_triton(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float, prune: Prune
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T + bias) v and its logsumexp; differentiable in q, k, v and the bias's tensors."""
    out, lse, work = problem.run(AttentionProblem.build(q, k, v, bias, masks, scale, prune), "triton")
    pruning.note(work)
    return out.to(v.dtype), lse
