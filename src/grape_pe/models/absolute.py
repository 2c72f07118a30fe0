"""Absolute position embeddings: sinusoids or a learned table, added to the token embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..cache import Layout
from ..precision import exact_dtype, readable

#: initial standard deviation of embeddings
EMBEDDING_STD = 0.02
KINDS = ("sinusoidal", "learned")


class AbsolutePositions(nn.Module):
    """Adds an embedding of the position to x.

    Args:
        kind: "sinusoidal" or "learned". Sinusoids of position n are sin(n w_i) and cos(n w_i) at features 2i and
            2i + 1, with w_i = 10000^(-2i / width), times the initial standard deviation of token embeddings
            (Vaswani et al., 2017, scale the token embeddings instead).
        width: features of x.
        length: number of positions of a learned table; larger positions raise an error.
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
        """Add the embeddings to x, (B, T, width), in the order of the call, before packing."""
        places = layout.positions
        if places is None:
            places = torch.arange(x.shape[1], device=x.device)[None]
        if places.dim() == 3:
            raise ValueError(
                f"absolute positions need one coordinate, got {places.shape[2]}; use absolute=None for this encoding"
            )
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
            raise ValueError(
                f'absolute="learned" needs integer positions, got {places.dtype}; use absolute="sinusoidal"'
            )
        wrong = (places < 0) | (places >= self.length)
        if layout.padding is not None:
            wrong = wrong & ~layout.pack(layout.padding)
        message = (
            f'positions must be from 0 to {self.length - 1} for absolute="learned" with max_positions={self.length}; '
            'train with a larger max_positions, or use absolute="sinusoidal"'
        )
        if places.is_cuda or not readable(places):
            torch._assert_async(~wrong.any(), message)
        elif bool(wrong.any()):
            raise ValueError(f"{message} (got positions from {int(places.min())} to {int(places.max())})")
        return self.weight[places.clamp(0, self.length - 1)]
