"""FIRE (Li et al., 2024): a small network of the distance, relative to the query's position (Eq. B1)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bias import TileBias
from ..bias.base import of_rows
from ..checks import check_integer
from .base import Encoded, Encoding, HeadShape, State, Tokens, own_parameter
from .facts import Facts

#: added to the divisor, as in the paper
EPS = 1e-6


class FIRE(Encoding):
    """FIRE: the bias f_h(psi(|n_t - n_j|) / psi(max(L, n_t))), with psi(x) = log(1 + c x) and learned c and L.

    f is a network with one hidden layer, shared by all heads except for the output weights. It has no output bias,
    because softmax does not depend on it. Computed by `blocks`.

    Args:
        shape: heads, key heads, features of a head, and width.
        hidden: hidden units of the network.
        length: initial L. Queries at positions up to L have the same divisor.
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
            check_integer(f"{name} of fire", value)
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
    distance = (place - key["place"][:, :, cols].unsqueeze(-2)).abs().to(c.dtype)
    ratio = torch.log1p(c * distance) / (torch.log1p(c * place.to(c.dtype).maximum(length)) + EPS)
    hidden = F.relu(ratio.unsqueeze(-1) * inner[0] + inner[1])  # (B|1, 1, rows, cols, hidden)
    return torch.matmul(hidden[:, 0], outer.mT).permute(0, 3, 1, 2)
