"""PaTH (Yang et al., 2025): scores through a product of Householder-like factors along the path.

    logit(t, j) = scale * k_j^T H_{j+1} … H_t q_t,      H_s = I - beta_s w_s w_s^T

It is not a rotation (Eq. S7) and depends on the tokens between key and query. So the encoded queries are zero, and a
`TileBias` computes the whole score, exactly and in O(T^2 D), by chunks of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import is_fake

from ..bias import LogitFunction, TileBias
from ..precision import WideLinear
from .base import Encoded, Encoding, HeadShape, State, Tokens
from .facts import Facts

#: tokens of a chunk that is solved as one triangular system, and of the largest merged chunk; powers of 2
SMALL, LARGE = 32, 128


class PaTH(Encoding):
    """PaTH: multiplies q by factors H_s = I - beta_s w_s w_s^T of the tokens between key and query.

    The unit directions w and the strengths beta in (0, 2) are functions of the attention block's input, for each key
    head.

    Args:
        shape: heads, key heads, features of a head, and width.
        rank: rank of the projection from the input to the directions.
        conv: width of a causal convolution over the projected input, followed by a SiLU; 0 for neither.
    """

    facts = (
        Facts(
            name="path",
            about="multiplies by Householder-like factors of the tokens in between",
            formula="logit(t, j) = k_j^T H_{j+1} … H_t q_t / √D,  H_l = I − β_l w_l w_l^T",
            group="none: a product of factors of the tokens in between, which are not orthogonal unless β = 0 or 2",
            source="Yang et al., 2025, PaTH Attention, arXiv:2505.16381",
            recovers="baseline (PaTH)",
            learned="directions, strengths",
        ),
    )

    transforms = True
    contextual = True
    settles = True
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
        bias = PaTHBias(_path_tile, query, key, scale=self.shape.head_dim**-0.5)
        return Encoded(0.0 * tokens.q, tokens.k, bias, state)  # not zeros_like, which would drop NaNs

    def multiplied(self, code: Encoded, factor: Tensor) -> Encoded:
        assert isinstance(code.bias, PaTHBias)  # computes the whole score
        query = {"q": code.bias.query["q"] * factor}
        return replace(code, bias=replace(code.bias, query=query))

    def _convolve(self, features: Tensor, state: State) -> tuple[Tensor, State]:
        """A depthwise causal convolution, with zeros before the first token, and its last inputs as the state."""
        if self.conv is None:
            # nothing reads this state, but encodings with `settles` have one: it limits how far a cache can roll back
            return features, features[:, :1]
        tail = self.conv.kernel_size[0] - 1
        before = F.pad(features, (tail, 0))
        if state is not None:
            before = torch.cat([F.pad(state, (tail, 0))[..., state.shape[-1] :].to(features), features], -1)
        if features.shape[-1] == 0:
            return features, before
        convolved = F.conv1d(before, self.conv.weight.to(before.dtype), groups=self.conv.groups)
        return F.silu(convolved), before


class PaTHBias(TileBias):
    """The whole score of PaTH, from q and from k, w and beta of the keys. The encoded q must be zero."""

    def logits(self) -> LogitFunction:
        assert self.scale is not None
        return path_products(self.query, self.key, self.scale)

    def settled(self, last: int) -> PaTHBias:
        """Replace k_j by H_e … H_{j+1} k_j, with e the last token before the `last` ones, and set beta = 0 up to e."""
        k, w, beta = (self.key[name] for name in ("k", "w", "beta"))
        end = k.shape[2] - last
        start = _unit_factors(beta) if end >= LARGE else None
        if start is None or end - start < LARGE:
            return self
        parts = _Products(k[:, :, :0], *(x[:, :, start:end] for x in (k, w, beta)))
        through, seen = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device), []
        for past, step in zip(parts.past[::-1], parts.step[::-1], strict=True):
            seen.append(past @ through.mT)
            through = through @ step
        middle = torch.cat(seen[::-1], 2)[:, :, parts.front :]
        k = torch.cat([k[:, :, :start] @ through.mT, middle, k[:, :, end:]], 2)
        beta = torch.cat([torch.zeros_like(beta[:, :, :end]), beta[:, :, end:]], 2)
        return replace(self, key={"k": k, "w": w, "beta": beta})


def path_products(
    query: Mapping[str, Tensor], key: Mapping[str, Tensor], scale: float = 1.0
) -> LogitFunction:
    """A function of (rows, cols) that returns scale * k_j^T H_{j+1} … H_t q_t, and scale * k_j^T q_t for j > t."""
    return _Products(scale * query["q"], key["k"], key["w"], key["beta"]).tile


def _path_tile(rows: slice, cols: slice, query: Mapping[str, Tensor], key: Mapping[str, Tensor]) -> Tensor:
    return path_products(query, key)(rows, cols)


def _unit_factors(beta: Tensor) -> int | None:
    """Number of first tokens with beta = 0, so that H = I; None if values cannot be read cheaply."""
    hidden = torch.compiler.is_compiling() or is_fake(beta) or is_functorch_wrapped_tensor(beta)
    if hidden or beta.requires_grad or beta.device.type != "cpu" or beta.shape[2] == 0:
        return None
    other = (beta != 0).flatten(0, 1).any(0)
    return int(other.to(torch.uint8).argmax()) if bool(other.any()) else beta.shape[2]


class _Products:
    """Products of queries and keys along their paths, by chunks of C tokens.

    Query row 0 is the first token of its chunk. The first and the last chunk are padded with zeros; a token with
    w = 0 has H = I. Each chunk has

    - `step` (D, D): moves queries, as rows, from the end of the chunk to the end of the chunk before;
    - `past` (C, D): its keys, moved to the end of the chunk;
    - `inside` (C, C): the products of its queries and its keys;
    - `left` (C, D): its queries, moved to the end of the chunk before.

    Small chunks are solved directly, then merged in pairs. The `old` keys at the start, before the first query and
    with beta = 0, are in no chunk: queries that were moved through all chunks multiply them directly.
    """

    def __init__(self, q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> None:
        group, before = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
        settled = min(before, _unit_factors(beta) or 0) if before > LARGE else 0
        self.settled = settled if settled > LARGE else 0
        self.old = k[:, :, : self.settled].repeat_interleave(group, 1)
        k, w, beta = (x[:, :, self.settled :] for x in (k, w, beta))
        self.size = SMALL
        while self.size < min(LARGE, k.shape[2]):
            self.size *= 2
        shift, self.shape = k.shape[2] - q.shape[2], q.shape[:2]
        self.front = -shift % self.size if shift > 0 else -shift  # zeros before the first key
        self.lead = (shift + self.front) // self.size  # chunks before the first query
        back = -(k.shape[2] + self.front) % self.size
        q = _chunks(q, 0, back)
        k, w, beta = (
            _chunks(x, self.front, back).repeat_interleave(group, 1) for x in (k, w, beta.unsqueeze(-1))
        )
        past, step, left, inside = _solve_chunks(q, k, w, beta)
        while past.shape[3] < self.size:
            past, step, left, inside, q, k = _merge_pairs(past, step, left, inside, q, k)
        self.past, self.step, self.k = past.unbind(2), step.unbind(2), k.unbind(2)
        self.left, self.inside, self.q = left.unbind(2), inside.unbind(2), q.unbind(2)

    def tile(self, rows: slice, cols: slice) -> Tensor:
        """Go through the chunks of keys from right to left and move the queries along."""
        size, height, width = self.size, rows.stop - rows.start, cols.stop - cols.start
        if height <= 0 or width <= 0:
            return self.old.new_zeros(*self.shape, max(0, height), max(0, width))
        top, low = rows.start // size, -(-rows.stop // size)  # chunks of queries
        start, stop = (max(0, at - self.settled) + self.front for at in (cols.start, cols.stop))
        old = self.old[:, :, cols.start : cols.stop]
        first, last = start // size if old.shape[2] == 0 else 0, -(-stop // size)  # chunks of keys
        columns: list[Tensor] = []
        moving: list[Tensor] = []  # the queries of all chunks after c, at the end of c
        for c in reversed(range(first, max(last, self.lead + low))):
            own = c - self.lead
            if c < last:
                ahead = [torch.cat(self.q[top : min(own, low)], 2) @ self.k[c].mT] if top < own else []
                here = [self.inside[own]] if top <= own < low else []
                columns.append(_cat(ahead + here + [x @ self.past[c].mT for x in moving], 2))
            if c > first or old.shape[2]:
                moved = [x @ self.step[c] for x in moving]
                moving = [_cat([self.left[own], *moved], 2)] if top <= own < low else moved
        below = slice(rows.start - top * size, rows.start - top * size + height)
        columns = [_cat(columns[::-1], 3)[:, :, below, start - first * size :]] if columns else []
        seen = [moving[0][:, :, below] @ old.mT] if old.shape[2] else []
        return _cat(seen + columns, 3)[..., :width]


def _solve_chunks(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """past, step, left and inside of small chunks (B, H, n, C, D), of which the last ones have queries.

    From t back to j, each token s sets y_s = beta_s <w_s, q> and q <- q - y_s w_s. For all s of a chunk this is a
    triangular system, (I + diag(beta) striu(W W^T)) y = diag(beta) W q. U is its solution for the right side
    diag(beta) W. For queries inside the chunk the right side is zero for s > t.
    """
    right = beta * w
    system, crossed = (right @ w.mT).triu(1), (w @ k.mT).tril(-1)
    u = _solve(system, right)
    past = k - crossed.mT @ u
    step = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device) - u.mT @ w
    own = slice(k.shape[2] - q.shape[2], None)
    k, w, right, system, crossed = (x[:, :, own] for x in (k, w, right, system, crossed))
    y = _solve(system, (right @ q.mT).triu()).mT
    return past, step, q - y @ w, q @ k.mT - y @ crossed


def _merge_pairs(
    past: Tensor, step: Tensor, left: Tensor, inside: Tensor, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Merge neighbours into chunks twice as long."""
    (past_a, past_b), (step_a, step_b) = _pairs(past), _pairs(step)
    (left_a, left_b), (inside_a, inside_b) = _pairs(left), _pairs(inside)
    own = slice(past_a.shape[2] - left_a.shape[2], None)
    ahead = _pairs(q)[0] @ _pairs(k)[1][:, :, own].mT
    rows = torch.cat([inside_a, ahead], -1), torch.cat([left_b @ past_a[:, :, own].mT, inside_b], -1)
    return (
        torch.cat([past_a @ step_b.mT, past_b], 3),
        step_b @ step_a,
        torch.cat([left_a, left_b @ step_a[:, :, own]], 3),
        torch.cat(rows, 3),
        _paired(q).flatten(3, 4),
        _paired(k).flatten(3, 4),
    )


def _paired(x: Tensor) -> Tensor:
    return x.unflatten(2, (x.shape[2] // 2, 2))


def _pairs(x: Tensor) -> tuple[Tensor, ...]:
    return _paired(x).unbind(3)


def _chunks(x: Tensor, front: int, back: int) -> Tensor:
    """Pad the tokens with zeros and split them into small chunks: (B, H, n, C, features)."""
    padded = F.pad(x, (0, 0, front, back)) if front or back else x
    return padded.unflatten(2, (padded.shape[2] // SMALL, SMALL))


def _solve(system: Tensor, right: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(system, right, upper=True, unitriangular=True)


def _cat(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
