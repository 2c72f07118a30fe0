"""Path biases over several chunks: padding with keys that add nothing to a path, and the sum over a whole chunk."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import attend
from ..bias import Bias, PathBias, parts_of
from ..precision import working_dtype

#: argument of the link for an edge of practically 0: -log sigmoid(128) is 1e-56
FREE = 128.0


def paths_of(bias: Bias) -> list[PathBias]:
    """The paths in a bias."""
    return [part for part in parts_of(bias) if isinstance(part, PathBias)]


def followed(bias: Bias, count: int) -> Bias:
    """Append `count` keys with edges of 0 to a bias; the caller masks them.

    `attend` aligns the last query with the last key. With one key less appended than there are queries, every query
    comes after all real keys, so the paths of all rows go over all of them.
    """
    parts = [
        _path_followed(part, count) if isinstance(part, PathBias) else _repeated(part, count)
        for part in parts_of(bias)
    ]
    return sum(parts[1:], start=parts[0])


def _repeated(bias: Bias, count: int) -> Bias:
    return bias.replaced(
        {
            name: torch.cat([x, x[:, :, -1:].expand(-1, -1, count, *x.shape[3:])], 2)
            for name, x in bias.key_tensors().items()
        }
    )


def _path_followed(path: PathBias, count: int) -> PathBias:
    """Append keys by one more feature of the probes, 0 for real keys, that makes <p, P> / features = FREE."""
    keys, width = path.probe_k.shape[2:]
    root = math.sqrt(FREE * (width + 1))
    probe_k = F.pad(path.probe_k, (0, 1, 0, count))
    probe_k[:, :, keys:, -1] = root
    # the product is divided by the number of features, which is now one more
    probe_q = F.pad(path.probe_q * ((width + 1) / width), (0, 1), value=root)
    return replace(path, probe_q=probe_q, probe_k=probe_k)


def crossing(paths: list[PathBias], batch: int, own: bool, impl: str) -> Tensor:
    """The sum of the paths over a whole chunk, (B, H, Tq), which is added to the logits of all keys before it.

    With `own` the queries are those of the chunk, and the sum ends at each query. Computed as the logsumexp of
    attention with q = 0 to a single key before the chunk, so that all kernels support it.
    """
    probe, heads = paths[0].probe_q, paths[0].rate.shape[1]
    fronted: list[Bias] = [replace(path, probe_k=F.pad(path.probe_k, (0, 0, 1, 0))) for path in paths]
    bias = sum(fronted[1:], start=fronted[0])
    bias = bias if own else followed(bias, probe.shape[2] - 1)
    keys, dtype = bias.key_length or 0, working_dtype(probe.dtype)
    q = probe.new_zeros(batch, heads, probe.shape[2], 1, dtype=dtype)
    k = probe.new_zeros(batch, 1, keys, 1, dtype=dtype)
    hidden = torch.arange(keys, device=probe.device).expand(batch, -1) > 0
    return attend(q, k, k, bias=bias, key_padding=hidden, prune=None, impl=impl, return_lse=True)[1]
