"""T5's relative bias: a learned number for each head and bucket of distances (Eq. D2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..bias import DistanceBias
from .base import Encoded, Encoding, HeadShape, State, Tokens, own_parameter
from .distance import whole_positions
from .facts import Facts


def t5_bucket(distance: Tensor, buckets: int, max_distance: int, both: bool) -> Tensor:
    """The bucket of each distance n_t - n_j.

    Half of the buckets have a single distance; the others have equal widths in the log of the distance. With `both`,
    half of all buckets are for keys after the query; without, these keys are at distance 0.
    """
    start: Tensor | int = 0
    if both:
        buckets //= 2
        start, distance = (distance < 0).long() * buckets, distance.abs()
    distance = distance.clamp(min=0)
    exact = buckets // 2
    steps = (distance.float().clamp(min=1) / exact).log() / math.log(max_distance / exact) * (buckets - exact)
    return start + torch.where(distance < exact, distance, (exact + steps.long()).clamp(max=buckets - 1))


class T5(Encoding):
    """T5's relative bias: b(t, j) = table[h, bucket(t - j)], with a learned table.

    T5 does not scale <q, k>; for the same scores pass scale=1 to `attend`.

    Args:
        shape: heads, key heads, features of a head, and width.
        buckets: number of buckets.
        max_distance: this and all larger distances share the last bucket.
        both: whether keys after the query have their own buckets, for encoders.
    """

    nonpositive = False
    facts = (
        Facts(
            name="t5",
            about="adds a learned number for each bucket of distances",
            formula="b(t, j) = T_h[bucket(t − j)]",
            group="none: a table obeys no composition law; it is a function of t − j, so scores keep the relative law",
            source="Raffel et al., 2020, T5, arXiv:1910.10683",
            recovers="T5's relative bias, exactly",
            learned="table",
        ),
    )

    def __init__(
        self, shape: HeadShape, *, buckets: int = 32, max_distance: int = 128, both: bool = False
    ) -> None:
        super().__init__(shape)
        parts = 4 if both else 2
        if not isinstance(buckets, int) or buckets < parts or buckets % parts:
            raise ValueError(
                f"buckets of t5 must be a positive multiple of {parts} with both={both}, got {buckets!r}"
            )
        exact = buckets // parts
        if not isinstance(max_distance, int) or max_distance <= exact:
            raise ValueError(
                f"max_distance of t5 must be an integer above {exact}, the number of distances with their own bucket, "
                f"got {max_distance!r}"
            )
        self.max_distance, self.both = max_distance, both
        self.table = own_parameter(shape.heads, buckets)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        positions, last = whole_positions(tokens), self.max_distance
        first = -last if self.both else 0
        distances = torch.arange(first, last + 1, device=self.table.device)
        buckets = t5_bucket(distances, self.table.shape[-1], last, self.both)
        table = self.table.to(tokens.working)[:, buckets][None, :, None, None]
        return Encoded(tokens.q, tokens.k, DistanceBias(positions, positions, table, first=first))
