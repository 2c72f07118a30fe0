"""PaTH (Yang et al., 2025): scores through a product of Householder-like factors along the path.

    logit(t, j) = scale * k_j^T H_{j+1} … H_t q_t,      H_s = I - beta_s w_s w_s^T

It is no rotation (Eq. S7) and no function of two traces, so it is given as a `TileBias`: the plain
product plus what the path changes. The products are computed exactly in O(T^2 D), by chunks of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bias import LogitFunction, TileBias
from ..precision import WideLinear
from .base import Encoded, Encoding, HeadShape, State, Tokens

#: tokens whose factors are multiplied by one triangular system
CHUNK = 32


class PaTH(Encoding):
    """Directions w and strengths beta = 2 sigmoid(.) from the input, for each key head.

    `rank` of the direction's projection, `conv` the width of the short causal convolution on it
    (0 for none).
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
        bias = TileBias(_path_tile, query, key, self.shape.head_dim**-0.5, path_products)
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
        return F.conv1d(before, self.conv.weight.to(before.dtype), groups=self.conv.groups), before


def path_products(
    query: Mapping[str, Tensor], key: Mapping[str, Tensor], scale: float = 1.0
) -> LogitFunction:
    """A function of (rows, cols) that gives scale * k_j^T H_{j+1} … H_t q_t, and scale * k_j^T q_t for j > t."""
    return _Products(scale * query["q"], key["k"], key["w"], key["beta"]).tile


def _path_tile(rows: slice, cols: slice, query: Mapping[str, Tensor], key: Mapping[str, Tensor]) -> Tensor:
    """What the path changes: the tile of `path_products` less that of the plain product; not scaled."""
    q, k = query["q"][:, :, rows], key["k"][:, :, cols]
    plain = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    return path_products(query, key)(rows, cols) - plain


class _Products:
    """Products of queries and keys along their paths: O(C + D) a token once, then O(D) a pair of tokens.

    Tokens are cut into chunks of C, so that query row 0 is the first of its chunk; the first and last chunk
    are filled with zeros (a token with w = 0 changes nothing). Walking back from t, y_s = beta_s <w_s, q> and
    q <- q - y_s w_s. For all s of a chunk this is one triangular system,

        (I + diag(beta) striu(W W^T)) y = diag(beta) W q.

    With U its solution for the right side diag(beta) W,

    - `step` I - U^T W takes queries (rows) from the end of the chunk to the end of the one before;
    - `past` K - striu(K W^T) U are the keys as queries at the end of the chunk see them;
    - for queries of the chunk itself the right side is zero where s > t: `inside` are their products with its
      keys, `left` the queries at the end of the chunk before.
    """

    def __init__(self, q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> None:
        shift, self.empty = k.shape[2] - q.shape[2], q[:, :, :0] @ k[:, :1, :0].mT
        self.front = -shift % CHUNK if shift > 0 else -shift  # zeros before the first key
        self.lead = (shift + self.front) // CHUNK  # chunks before the first query
        back = -(k.shape[2] + self.front) % CHUNK
        q = _chunks(q, 0, back)
        group = q.shape[1] // k.shape[1]
        k, w, beta = (
            _chunks(x, self.front, back).repeat_interleave(group, 1) for x in (k, w, beta.unsqueeze(-1))
        )
        self.q, self.k = q.unbind(2), k.unbind(2)
        right = beta * w
        system, crossed = (right @ w.mT).triu(1), (w @ k.mT).tril(-1)
        u = _solve(system, right)
        self.past = (k - crossed.mT @ u).unbind(2)
        self.step = (torch.eye(q.shape[-1], dtype=q.dtype, device=q.device) - u.mT @ w).unbind(2)
        k, w, right, system, crossed = (x[:, :, self.lead :] for x in (k, w, right, system, crossed))
        y = _solve(system, (right @ q.mT).triu()).mT
        self.left = (q - y @ w).unbind(2)
        self.inside = (q @ k.mT - y @ crossed).unbind(2)

    def tile(self, rows: slice, cols: slice) -> Tensor:
        """Walk the chunks of keys from right to left with the queries that have reached them."""
        if rows.start >= rows.stop or cols.start >= cols.stop:
            return self.empty.new_zeros(*self.empty.shape[:2], rows.stop - rows.start, cols.stop - cols.start)
        top, low = rows.start // CHUNK, -(-rows.stop // CHUNK)  # chunks of queries
        first, last = (cols.start + self.front) // CHUNK, -(-(cols.stop + self.front) // CHUNK)  # of keys
        columns: list[Tensor] = []
        moving: list[Tensor] = []  # the queries of all chunks after c, at the end of c
        for c in reversed(range(first, max(last, self.lead + low))):
            own = c - self.lead
            if c < last:
                ahead = [torch.cat(self.q[top : min(own, low)], 2) @ self.k[c].mT] if top < own else []
                here = [self.inside[own]] if top <= own < low else []
                columns.append(_cat(ahead + here + [x @ self.past[c].mT for x in moving], 2))
            if c > first:
                moved = [x @ self.step[c] for x in moving]
                moving = [_cat([self.left[own], *moved], 2)] if top <= own < low else moved
        tile = _cat(columns[::-1], 3)
        below, right = rows.start - top * CHUNK, cols.start + self.front - first * CHUNK
        return tile[:, :, below : below + rows.stop - rows.start, right : right + cols.stop - cols.start]


def _chunks(x: Tensor, front: int, back: int) -> Tensor:
    """(B, H, n, C, features), with zeros before and after."""
    padded = F.pad(x, (0, 0, front, back)) if front or back else x
    return padded.unflatten(2, (padded.shape[2] // CHUNK, CHUNK))


def _solve(system: Tensor, right: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(system, right, upper=True, unitriangular=True)


def _cat(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
