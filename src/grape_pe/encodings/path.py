"""PaTH (Yang et al., 2025): scores through a product of Householder-like factors along the path.

    logit(t, j) = scale * k_j^T H_{j+1} … H_t q_t,      H_s = I - beta_s w_s w_s^T

It is no rotation (Eq. S7) and no function of two traces, so it is given as a `TileBias`: the plain
product plus what the path changes. A baseline: exact, dense in T, not fast.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bias import TileBias
from ..precision import WideLinear
from .base import Encoded, Encoding, HeadShape, State, Tokens


class PaTH(Encoding):
    """Directions w and strengths beta = 2 sigmoid(.) from the input, for each key head.

    `rank` of the direction's projection, `conv` the width of the short causal convolution on it, which a
    SiLU follows (0 for neither).
    """

    transforms = True
    contextual = True
    nonpositive = False

    def __init__(self, shape: HeadShape, *, rank: int = 32, conv: int = 3) -> None:
        super().__init__(shape)
        if rank < 1 or conv < 0:
            raise ValueError(f"rank must be positive and conv >= 0, got rank={rank}, conv={conv}")
        assert shape.width is not None
        features = shape.kv_heads * shape.head_dim
        self.down = WideLinear(shape.width, rank, bias=False)
        self.up = WideLinear(rank, features, bias=False)
        self.conv = nn.Conv1d(features, features, conv, groups=features, bias=False) if conv else None
        self.strength = WideLinear(shape.width, shape.kv_heads)
        self.lookback = max(1, conv - 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in (self.down, self.up, self.conv, self.strength):
            if module is not None:
                module.reset_parameters()

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        assert tokens.x is not None
        direction, state = self._convolve(self.up(self.down(tokens.x)).transpose(1, 2), state)
        direction = direction.unflatten(1, (self.shape.kv_heads, -1)).transpose(2, 3)
        w = F.normalize(direction.to(tokens.working), dim=-1)
        beta = 2 * torch.sigmoid(self.strength(tokens.x).to(tokens.working)).transpose(1, 2)
        query = {"q": tokens.q.to(tokens.working)}
        key = {"k": tokens.k.to(tokens.working), "w": w, "beta": beta}
        bias = TileBias(_path_tile, query, key, scale=self.shape.head_dim**-0.5)
        return Encoded(tokens.q, tokens.k, bias, state)

    def _convolve(self, features: Tensor, state: State) -> tuple[Tensor, State]:
        """Depthwise, causal, zero before the first token; the state is the tail it still needs."""
        if self.conv is None:
            return features, None
        tail = self.conv.kernel_size[0] - 1
        before = F.pad(features, (tail, 0))
        if state is not None:
            before = torch.cat([F.pad(state, (tail, 0))[..., state.shape[-1] :].to(features), features], -1)
        if features.shape[-1] == 0:
            return features, before
        convolved = F.conv1d(before, self.conv.weight.to(before.dtype), groups=self.conv.groups)
        return F.silu(convolved), before


def _path_tile(rows: slice, cols: slice, query: Mapping[str, Tensor], key: Mapping[str, Tensor]) -> Tensor:
    """k_j^T H_{j+1} … H_t q_t - k_j^T q_t for all rows and columns of a tile; not yet scaled.

    Walking back from t, y_s = beta_s <w_s, q> and q <- q - y_s w_s. Written out for all s at once this
    is one triangular system, (I + diag(beta) striu(W W^T)) y = beta * (W q), and the score loses
    sum over j < s <= t of y_s <w_s, k_j>.
    """
    shift = key["k"].shape[2] - query["q"].shape[2]
    first, last = cols.start + 1, max(rows.stop + shift, cols.start + 1)
    q = query["q"][:, :, rows]
    group = q.shape[1] // key["k"].shape[1]
    k, w = key["k"][:, :, cols], key["w"][:, :, first:last]
    beta = key["beta"][:, :, first:last].unsqueeze(-1)
    k, w, beta = (t.repeat_interleave(group, 1) for t in (k, w, beta))
    s = torch.arange(first, last, device=q.device)
    t = torch.arange(rows.start + shift, rows.stop + shift, device=q.device)
    j = torch.arange(cols.start, cols.stop, device=q.device)
    system = beta * (w @ w.transpose(-1, -2)).triu(1)
    right = (beta * (w @ q.transpose(-1, -2))).masked_fill(s.unsqueeze(-1) > t, 0.0)
    steps = torch.linalg.solve_triangular(
        system + torch.eye(len(s), dtype=q.dtype, device=q.device), right, upper=True, unitriangular=True
    )
    lost = (w @ k.transpose(-1, -2)).masked_fill(s.unsqueeze(-1) <= j, 0.0)
    return -(steps.transpose(-1, -2) @ lost)
