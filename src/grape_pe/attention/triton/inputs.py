"""From a Bias and Masks to the flat tensors the kernels read, and back.

Everything here is ordinary differentiable torch: terms are stacked and expanded to (B, H, R, T), so
autograd sums the gradients back to the shapes the bias came in. Letters: R slope terms, P probe features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...bias import Bias, NoBias, PathBias, SlopeBias, SumBias
from ..coordinates import as_two_floats
from ..masks import Masks


@dataclass(frozen=True)
class Parts:
    """A bias taken apart: at most one slope and one path."""

    slope: SlopeBias | None = None
    path: PathBias | None = None


def take_apart(bias: Bias) -> Parts | str:
    """The parts the kernels know, or the reason there is something they do not know."""
    parts = bias.parts if isinstance(bias, SumBias) else (bias,)
    slopes = [part for part in parts if isinstance(part, SlopeBias)]
    paths = [part for part in parts if isinstance(part, PathBias)]
    others = [part for part in parts if not isinstance(part, (NoBias, SlopeBias, PathBias))]
    if others:
        return f"it has kernels for SlopeBias and PathBias, not for {type(others[0]).__name__}"
    if len(slopes) > 1 or len(paths) > 1:
        return "it takes at most one SlopeBias (of any number of terms) and one PathBias"
    return Parts(slopes[0] if slopes else None, paths[0] if paths else None)


@dataclass(frozen=True)
class SlopeInputs:
    """(B, H, R, T) stacks; a rate is None when no term has it. Coordinates keep their dtype."""

    rate_q: Tensor | None
    rate_k: Tensor | None
    c_q: Tensor
    c_k: Tensor


def stack_slope(slope: SlopeBias, batch: int, heads: int, queries: int, keys: int) -> SlopeInputs:
    def stack(tensors: list[Tensor | None], length: int, dtype: torch.dtype) -> Tensor | None:
        given = [tensor for tensor in tensors if tensor is not None]
        if not given:
            return None
        zero = given[0].new_zeros((1, 1, 1))
        full = [
            (zero if tensor is None else tensor).to(dtype).expand(batch, heads, length) for tensor in tensors
        ]
        return torch.stack(full, 2)

    def coordinates(tensors: list[Tensor], length: int) -> Tensor:
        wide = any(tensor.dtype == torch.float64 for tensor in tensors)
        stacked = stack(list(tensors), length, torch.float64 if wide else torch.float32)
        assert stacked is not None
        return stacked

    terms = slope.terms
    return SlopeInputs(
        stack([term.rate_q for term in terms], queries, torch.float32),
        stack([term.rate_k for term in terms], keys, torch.float32),
        coordinates([term.c_q for term in terms], queries),
        coordinates([term.c_k for term in terms], keys),
    )


@dataclass(frozen=True)
class PathInputs:
    """probe_q (B, Hp, Tq, P), probe_k (B, Hp, Tk, P), rate (B, H)."""

    probe_q: Tensor
    probe_k: Tensor
    rate: Tensor
    bounded: bool


def expand_path(path: PathBias, batch: int, heads: int) -> PathInputs:
    return PathInputs(
        path.probe_q.expand(batch, -1, -1, -1),
        path.probe_k.expand(batch, -1, -1, -1),
        path.rate.float().squeeze(-1).expand(batch, heads),
        path.link == "bounded",
    )


def split_coordinate(c: Tensor) -> Tensor:
    """(B, H, R, T) float64 as (B, H, 2R, T) float32: coarse parts, then what they leave out.

    A float32 holds 24 bits; the pair holds 48, so the difference of two coordinates of size 2^30 is
    still right to 2^-18 after both differences were taken in float32.
    """
    if c.dtype != torch.float64:
        return c.float().contiguous()
    return torch.cat(as_two_floats(c), 2)


def first_of_document(documents: Tensor) -> Tensor:
    """For each token the first token with its id (B|1, T) int32: an id of its own, and a bound.

    Ids need not be sorted or contiguous. No T x T comparison and no synchronisation with the host.
    """
    order = documents.sort(dim=-1, stable=True)
    place = torch.arange(documents.shape[-1], device=documents.device).expand_as(documents)
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = order.values[:, 1:] != order.values[:, :-1]
    leader = torch.where(new, place, 0).cummax(-1).values
    return torch.empty_like(order.indices).scatter_(-1, order.indices, order.indices.gather(-1, leader)).int()


def document_ids(masks: Masks, batch: int) -> Tensor | None:
    if masks.documents is None:
        return None
    return first_of_document(masks.documents).expand(batch, -1).contiguous()
