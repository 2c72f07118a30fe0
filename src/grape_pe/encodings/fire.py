"""FIRE: a small network of the distance relative to the length of the context so far (Eq. B1)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bias import TileBias
from ..bias.base import of_rows
from .base import Encoded, Encoding, HeadShape, State, Tokens, own_parameter
from .facts import Facts

#: added to the divisor, as in the paper
EPS = 1e-6


class FIRE(Encoding):
    """b(t, j) = f_h(psi(|n_t - n_j|) / psi(max(L, n_t))), psi(x) = log(1 + c x); computed by blocks.

    f is a network of one hidden layer, shared by the heads up to its last weights; its last constants are left out,
    because softmax ignores them. c and L are learned.

    Args:
        shape: heads, key heads, features of a head, and width.
        hidden: units of the network.
        length: initial L, the length up to which all queries divide by the same number.
    """

    nonpositive = False
    facts = (
        Facts(
            name="fire",
            about="adds a learned function of the relative distance",
            formula="b(t, j) = f_h(log(1 + c |t − j|) / log(1 + c max(L, t)))",
            group="none: a function of the distance and, beyond L, of the query's position",
            source="Li et al., 2024, FIRE, arXiv:2310.04418",
            learned="network, c, L",
        ),
    )

    def __init__(self, shape: HeadShape, *, hidden: int = 32, length: int = 512) -> None:
        super().__init__(shape)
        for name, value in (("hidden", hidden), ("length", length)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} of fire must be a positive integer, got {value!r}")
        self.length = length
        self.c, self.stretch = own_parameter(1), own_parameter(1)
        self.inner = own_parameter(2, hidden)
        self.outer = own_parameter(shape.heads, hidden)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.c, 0.1)
        nn.init.ones_(self.stretch)
        nn.init.uniform_(self.inner, -1, 1)
        limit = self.outer.shape[-1] ** -0.5
        nn.init.uniform_(self.outer, -limit, limit)

    @property
    def breaks_relative_law(self) -> str:
        return f"the distance is divided by a function of the query's position (beyond about {self.length})"

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        place = tokens.positions[..., 0].unsqueeze(1)
        numbers = {"c": self.c.abs(), "length": self.length * self.stretch.abs()}
        numbers |= {"inner": self.inner, "outer": self.outer}
        query = {name: x.to(tokens.working)[None, None, None] for name, x in numbers.items()}
        bias = TileBias(_tile, {"place": place, **query}, {"place": place}, pairwise=True)
        return Encoded(tokens.q, tokens.k, bias)


def _tile(rows: slice, cols: slice, query: Mapping[str, Tensor], key: Mapping[str, Tensor]) -> Tensor:
    c, length, inner, outer = (query[name][0, 0, 0] for name in ("c", "length", "inner", "outer"))
    place = of_rows(query["place"], rows).unsqueeze(-1)
    apart = (place - key["place"][:, :, cols].unsqueeze(-2)).abs().to(c.dtype)
    share = torch.log1p(c * apart) / (torch.log1p(c * place.to(c.dtype).maximum(length)) + EPS)
    hidden = F.relu(share.unsqueeze(-1) * inner[0] + inner[1])  # (B|1, 1, rows, cols, hidden)
    return torch.matmul(hidden[:, 0], outer.mT).permute(0, 3, 1, 2)
