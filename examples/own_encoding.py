"""Your own encoding, registered under a name and checked by the public law checkers.

A learned log-distance penalty, b(t, j) = -rate_h * log(1 + |n_t - n_j|), as in KERPLE.
"""

import torch
from torch import nn

import grape_pe as grape
from grape_pe import testing


class LogDistance(grape.Encoding):
    facts = (
        grape.Facts(
            name="log-distance",
            about="subtracts a learned rate times the log of the distance",
            formula="b(t, j) = −r_h log(1 + |n_t − n_j|)",
            group="none: log(1 + m) does not add when distances do",
            source="Chi et al., 2022, KERPLE, arXiv:2205.09921",
            learned="rates",
        ),
    )

    def __init__(self, shape: grape.HeadShape, *, rate: float = 0.5) -> None:
        super().__init__(shape)
        self.start = rate
        self.rate = nn.Parameter(torch.empty(shape.heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.rate, self.start)

    def encode(self, tokens: grape.Tokens, state: None) -> grape.Encoded:
        place = tokens.positions.unsqueeze(1)  # (B|1, 1, T, 1)
        rate = self.rate.abs().view(1, -1, 1, 1).expand(1, -1, tokens.q.shape[2], 1)  # (1, H, T, 1)
        features = {"place": place, "rate": rate}, {"place": place}  # of queries and of keys
        bias = grape.TileBias(log_distance, *features, pairwise=True, positions=("place",))
        return grape.Encoded(tokens.q, tokens.k, bias)


def log_distance(rows, cols, query, key):
    """The tile b[rows, cols]: (B, H, rows, cols)."""
    offset = key["place"][:, :, cols].transpose(-1, -2) - query["place"][:, :, rows]
    rate = query["rate"][:, :, rows]
    return -rate * torch.log1p(offset.abs()).to(rate.dtype)


grape.register("log-distance", LogDistance)

if __name__ == "__main__":
    enc = grape.build("rope+log-distance", heads=4, head_dim=16).double()
    testing.assert_relative_law(enc, shift=1000)
    testing.assert_streaming(enc, cuts=[1, 3, 7])
    testing.assert_nonpositive(enc)
    testing.assert_norm(enc)
    print(f"{enc!r}\n  keeps the relative law, streams exactly, favours no distant key, changes no length")
