"""Absolute positions, added to the embeddings: sinusoids or a learned table."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..cache import Layout
from ..precision import exact_dtype, readable

#: the standard deviation of embeddings at the start
EMBEDDING_STD = 0.02
KINDS = ("sinusoidal", "learned")


class AbsolutePositions(nn.Module):
    """x + p(n), n the position of a token in its sequence or document.

    "sinusoidal": p has sin(n w_i) and cos(n w_i) at features 2i and 2i + 1, w_i = 10000^(-2i / width), times the
    standard deviation with which embeddings start (Vaswani et al., 2017, multiply the embeddings instead).
    "learned": row n of a table of `length` rows; positions beyond it are refused.
    """

    def __init__(self, kind: str, width: int, length: int) -> None:
        super().__init__()
        self.width, self.length = width, length
        self.weight = nn.Parameter(torch.empty(length, width)) if kind == "learned" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.normal_(self.weight, std=EMBEDDING_STD)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x (B, T, width) as the call gave it, with padding anywhere."""
        places = layout.positions
        if places is None:
            places = torch.arange(x.shape[1], device=x.device)[None]
        if places.dim() == 3:
            raise ValueError("absolute positions need one coordinate; use absolute=None with coords=2 or 3")
        found = self._sinusoids(places) if self.weight is None else self._rows(places, layout)
        return x + layout.unpack(found.to(x.dtype).expand_as(x))

    def _sinusoids(self, places: Tensor) -> Tensor:
        exact = exact_dtype(places.device)
        plane = torch.arange(0, self.width, 2, device=places.device, dtype=exact)
        angle = places.to(exact).unsqueeze(-1) * 10_000 ** (-plane / self.width)
        both = torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)
        return EMBEDDING_STD * both[..., : self.width]

    def _rows(self, places: Tensor, layout: Layout) -> Tensor:
        assert self.weight is not None
        if places.is_floating_point():
            raise ValueError(f'absolute="learned" has rows for whole positions only, got {places.dtype}')
        wrong = (places < 0) | (places >= self.length)
        if layout.padding is not None:
            wrong = wrong & ~layout.pack(layout.padding)
        message = (
            f'positions must be from 0 to below max_positions={self.length}, the rows of absolute="learned"; '
            'set a larger max_positions and train it, or use absolute="sinusoidal"'
        )
        if places.is_cuda or not readable(places):
            torch._assert_async(~wrong.any(), message)
        elif bool(wrong.any()):
            raise ValueError(f"{message} (got positions from {int(places.min())} to {int(places.max())})")
        return self.weight[places.clamp(0, self.length - 1)]
