"""DAPE (Zheng et al., 2024): a KERPLE bias plus a small network of the scores and biases of all heads (Eq. B3)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bias import LogitFunction, ProductBias
from ..bias.distance import Profile
from ..checks import check_integer
from .base import Encoded, Encoding, HeadShape, State, Tokens, own_parameter
from .distance import whole_positions
from .facts import Facts
from .kerple import Kerple


class DAPE(Encoding):
    """DAPE: the bias B + f(scale <q, k>, B), with B the bias of `kerple-log` or `kerple-power`.

    f is a network with one hidden layer and LeakyReLU, from the scores and biases B of all heads to one output for
    each head. It has no output bias, because softmax does not depend on it. It reads the scores before any rotation,
    so a cache stores k twice. Computed by `blocks`.

    Args:
        shape: heads, key heads, features of a head, and width.
        kernel: "log" or "power".
        hidden: hidden units of the network.
    """

    nonpositive = False
    facts = (
        Facts(
            name="dape",
            about="adds a network's function of all heads' scores",
            formula="b(t, j) = B(t, j) + f(⟨q_t, k_j⟩/√D, B(t, j)), B as `kerple-log`, f over the heads",
            group="none: a network of scores and of a kernel of the distance",
            source="Zheng et al., 2024, DAPE, arXiv:2405.14722",
            learned="network, r_1, r_2",
        ),
    )

    def __init__(
        self, shape: HeadShape, *, kernel: Literal["log", "power"] = "log", hidden: int = 32
    ) -> None:
        check_integer("hidden of dape", hidden)
        super().__init__(shape)
        self.kernel = Kerple(shape, kernel=kernel)
        self.inner, self.constant = own_parameter(hidden, 2 * shape.heads), own_parameter(hidden, 1)
        self.outer = own_parameter(shape.heads, hidden)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.kernel.reset_parameters()
        for weight, inputs in (
            (self.inner, self.inner),
            (self.constant, self.inner),
            (self.outer, self.outer),
        ):
            limit = inputs.shape[1] ** -0.5
            nn.init.uniform_(weight, -limit, limit)

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        place, working = whole_positions(tokens), tokens.working
        network = {"inner": self.inner, "constant": self.constant, "outer": self.outer}
        query = {name: x.to(working)[None, None, None] for name, x in network.items()}
        query |= {"q": tokens.q, "place": place, "numbers": self.kernel.numbers(tokens)[None, :, None]}
        function, key = functools.partial(_tile, self.kernel.profile()), {"k": tokens.k, "place": place}
        bias = ProductBias(
            function, query, key, self.shape.head_dim**-0.5, pairwise=True, positions=("place",)
        )
        return Encoded(tokens.q, tokens.k, bias)


def _tile(
    profile: Profile,
    products: LogitFunction,
    rows: slice,
    cols: slice,
    query: Mapping[str, Tensor],
    key: Mapping[str, Tensor],
) -> Tensor:
    inner, constant, outer = (query[name][0, 0, 0] for name in ("inner", "constant", "outer"))
    distance = query["place"][:, 0, rows].unsqueeze(-1) - key["place"][:, 0, cols].unsqueeze(-2)
    scores = products(rows, cols)
    kernel = profile(distance, query["numbers"][0, :, 0])[:, 0].transpose(0, 1).expand_as(scores)
    both = torch.cat([scores, kernel], 1).flatten(2)  # (B, 2H, rows * cols)
    hidden = F.leaky_relu(inner @ both + constant)
    return kernel + (outer @ hidden).view_as(kernel)
