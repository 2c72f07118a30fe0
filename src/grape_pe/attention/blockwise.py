"""Any bias, any mask, any device: a block of queries at a time, never T x T, forward or backward.

Slopes and a path go through one custom op (`tile_op`): compiled on the CPU, plain torch elsewhere. A
`TileBias` is a Python function, which no op can hold: its blocks are recomputed through autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..bias import Bias, NoBias, PathBias, SlopeBias, SlopeTerm, SumBias
from . import pruning
from .masks import Masks
from .pruning import Prune
from .tile_op import tiles

#: elements of one block's logits when all heads are computed together (float32: 64 MB)
BLOCK_ELEMENTS = 1 << 24


def why_not_blockwise(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks) -> str | None:
    return None


def attend_blockwise(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float, prune: Prune = "auto"
) -> Tensor:
    split = _split(bias)
    if split is None or masks.sinks:
        return _attend_by_rows(q, k, v, bias, masks, scale)
    terms, path = split
    working = torch.promote_types(q.dtype, torch.float32)
    tensors = [x.to(working) for x in (q, k, v)]
    slopes = _stacked_terms(terms, q, k, working)
    probes = _probes(path, q, working)
    out, _, work = tiles(
        *tensors,
        *slopes,
        *probes,
        masks.documents_of(q.shape[0]),
        masks.key_padding,
        masks.causal,
        masks.window or 0,
        scale,
        path is not None and path.link == "bounded",
        pruning.as_number(prune),
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*slopes, *probes)),
    )
    pruning.note(work)
    return out.to(v.dtype)


def _split(bias: Bias) -> tuple[tuple[SlopeTerm, ...], PathBias | None] | None:
    """Slope terms and at most one path; None when the bias holds anything else."""
    terms: tuple[SlopeTerm, ...] = ()
    paths: list[PathBias] = []
    for part in bias.parts if isinstance(bias, SumBias) else (bias,):
        if isinstance(part, SlopeBias):
            terms += part.terms
        elif isinstance(part, PathBias):
            paths.append(part)
        elif not isinstance(part, NoBias):
            return None
    return None if len(paths) > 1 else (terms, paths[0] if paths else None)


def _stacked_terms(
    terms: tuple[SlopeTerm, ...], q: Tensor, k: Tensor, working: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """c_q, c_k, rate_q, rate_k with every head and batch spelled out: (R, B, H, T) each."""
    if not terms:
        return None, None, None, None
    queries, keys = q.shape[:3], (*q.shape[:2], k.shape[2])

    def rates(values: list[Tensor | None], shape: tuple[int, ...]) -> Tensor:
        zero = q.new_zeros((), dtype=working)
        return _stack([(zero if r is None else r.to(working)).expand(shape) for r in values])

    rate_k = None
    if any(term.rate_k is not None for term in terms):
        rate_k = rates([term.rate_k for term in terms], keys)
    return (
        _stack([term.c_q.to(torch.float64).expand(queries) for term in terms]),
        _stack([term.c_k.to(torch.float64).expand(keys) for term in terms]),
        rates([term.rate_q for term in terms], queries),
        rate_k,
    )


def _stack(values: list[Tensor]) -> Tensor:
    return values[0].unsqueeze(0) if len(values) == 1 else torch.stack(values)


def _probes(
    path: PathBias | None, q: Tensor, working: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if path is None:
        return None, None, None
    group = q.shape[1] // path.probe_q.shape[1]
    probe_q, probe_k = (
        x.to(working).repeat_interleave(group, 1).expand(q.shape[0], -1, -1, -1)
        for x in (path.probe_q, path.probe_k)
    )
    return probe_q, probe_k, path.rate.to(working).reshape(-1).expand(q.shape[1])


def _attend_by_rows(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float) -> Tensor:
    """All heads at once, a block of rows at a time, each block recomputed in the backward pass."""
    working = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    queries = q.to(working)
    keys, values = (x.to(working).repeat_interleave(group, 1) for x in (k, v))
    size = max(1, BLOCK_ELEMENTS // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    blocks = [slice(t, min(t + size, q.shape[2])) for t in range(0, q.shape[2], size)]

    def block(rows: slice) -> Tensor:
        cols = masks.columns(rows)
        logits = scale * (queries[:, :, rows] @ keys[:, :, cols].transpose(-1, -2))
        extra = bias.tile(rows, cols)
        if extra is not None:
            logits = logits + extra.to(working)
        hidden = ~masks.tile(rows, cols)
        blind = hidden.all(-1, keepdim=True)
        logits = logits.masked_fill(hidden & ~blind, float("-inf"))
        return logits.softmax(-1).masked_fill(blind, 0.0) @ values[:, :, cols]

    if not blocks or k.shape[2] == 0:
        return v.new_zeros(*q.shape[:3], v.shape[-1]) + sum(x[..., :0].sum() for x in (q, k, v))
    if torch.is_grad_enabled():
        outputs = [checkpoint(block, rows, use_reentrant=False) for rows in blocks]
    else:
        outputs = [block(rows) for rows in blocks]
    return torch.cat(outputs, 2).to(v.dtype)  # type: ignore[arg-type]
