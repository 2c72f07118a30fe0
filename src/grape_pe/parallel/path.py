"""Path biases between distant chunks: tokens that cost a path nothing, and the cost of crossing a whole chunk."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import attend
from ..bias import Bias, PathBias, parts_of
from ..precision import working_dtype

#: z of an edge that costs nothing: -log sigmoid(128) is 1e-56, which no dtype adds to anything
FREE = 128.0


def paths_of(bias: Bias) -> list[PathBias]:
    return [part for part in parts_of(bias) if isinstance(part, PathBias)]


def followed(bias: Bias, count: int) -> Bias:
    """The bias with `count` more keys, whose edges cost nothing; the caller hides them.

    `attend` places the last query at the last key. With as many keys more as there are queries, less one, every
    query stands behind all real keys, and the paths of all rows run over all of them.
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
    """One feature more, 0 for real keys: with it an edge of the new keys has z = FREE."""
    keys, width = path.probe_k.shape[2:]
    root = math.sqrt(FREE * (width + 1))
    probe_k = F.pad(path.probe_k, (0, 1, 0, count))
    probe_k[:, :, keys:, -1] = root
    # an edge is <p, P> / features: there is one more
    probe_q = F.pad(path.probe_q * ((width + 1) / width), (0, 1), value=root)
    return replace(path, probe_q=probe_q, probe_k=probe_k)


def crossing(paths: list[PathBias], batch: int, own: bool, impl: str) -> Tensor:
    """(B, H, Tq): what it adds to the logit of a key before the chunk that the path runs over the whole chunk.

    With `own` the queries are those of the chunk and the path ends at each query. It is the logsumexp of attention
    to one key in front of the chunk, all others hidden, with q = 0: so every kernel can compute it.
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
