"""What the forward and backward kernels share: one tile of logits and the pieces it is made of.

Letters: BM queries and BN keys make a tile; t is the token a query row stands at, j a key. A tile is
(BM, BN), or (BN, BM) where TRANSPOSED: the key-side kernel keeps keys first, so that each of its
matrix products reads its operands in the order in which they already lie in registers.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def exp_difference(x, m):
    """exp(x - m). The difference comes first: scaling both by log2(e) would round each of them before."""
    return tl.exp2((x - m) * LOG2E)


@triton.jit
def per_query(x, TRANSPOSED: tl.constexpr):
    """A vector over queries, broadcast along the keys of a tile."""
    if TRANSPOSED:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def per_key(x, TRANSPOSED: tl.constexpr):
    if TRANSPOSED:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def load_rows(
    base, start, stride, limit, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    FLIP: tl.constexpr, BOUNDED: tl.constexpr, feature=0,
):  # fmt: skip
    """Rows start … start + ROWS of a (T, D) matrix, BLOCK_D features from `feature` on; zero outside.

    (ROWS, BLOCK_D), or flipped.
    """
    r = tl.arange(0, ROWS)
    d = feature + tl.arange(0, BLOCK_D)
    base += tl.cast(start, tl.int64) * stride
    if FLIP:
        pointers = base + r[None, :] * stride + d[:, None]
        inside = (start + r < limit)[None, :]
        real = (d < D)[:, None]
    else:
        pointers = base + r[:, None] * stride + d[None, :]
        inside = (start + r < limit)[:, None]
        real = (d < D)[None, :]
    if BOUNDED and D % BLOCK_D != 0:
        return tl.load(pointers, mask=inside & real, other=0.0)
    elif BOUNDED:
        return tl.load(pointers, mask=inside, other=0.0)
    elif D % BLOCK_D != 0:
        return tl.load(pointers, mask=real, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(
    base, start, stride, limit, value, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, feature=0
):  # fmt: skip
    r = tl.arange(0, ROWS)
    d = feature + tl.arange(0, BLOCK_D)
    base += tl.cast(start, tl.int64) * stride
    keep = (start + r < limit)[:, None] & (d < D)[None, :]
    pointers = base + r[:, None] * stride + d[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=keep)


@triton.jit
def products_by_chunk(
    A, a_start, a_stride, a_limit, B, b_start, b_stride, b_limit,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """<a, b> of every row of one block and every row of another, CHUNK features at a time.

    Rows a program owns are otherwise kept in registers from its first tile to its last. Where they do not
    fit there beside what is summed up, both sides are read again for each tile, from the nearest cache.
    """
    x = tl.zeros((A_ROWS, B_ROWS), tl.float32)
    for d in range(0, D, CHUNK):
        a = load_rows(A, a_start, a_stride, a_limit, A_ROWS, D, CHUNK, False, True, d)
        b = load_rows(B, b_start, b_stride, b_limit, B_ROWS, D, CHUNK, True, True, d)
        x = tl.dot(a, b, x, input_precision=PRECISION)
    return x


@triton.jit
def visible(
    DOCS, PADDING, t, j, TK, window, TRANSPOSED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_DOCS: tl.constexpr, HAS_PADDING: tl.constexpr,
):  # fmt: skip
    """True where the query at token t sees key j; the tile form of `Masks.tile`."""
    tt = per_query(t, TRANSPOSED)
    jj = per_key(j, TRANSPOSED)
    seen = jj < TK
    if CAUSAL:
        seen = seen & (jj <= tt)
    if WINDOW:
        seen = seen & (tt - jj < window)
        if not CAUSAL:
            seen = seen & (jj - tt < window)
    if HAS_DOCS:
        ours = tl.load(DOCS + t, mask=(t >= 0) & (t < TK), other=-1)
        theirs = tl.load(DOCS + j, mask=j < TK, other=-2)
        seen = seen & (per_query(ours, TRANSPOSED) == per_key(theirs, TRANSPOSED))
    if HAS_PADDING:
        hidden = tl.load(PADDING + j, mask=j < TK, other=1)
        seen = seen & per_key(hidden == 0, TRANSPOSED)
    return seen


@triton.jit
def slope_offset(CQ, CK, r, i, j, TQ, TK, R: tl.constexpr, SPLIT: tl.constexpr, TRANSPOSED: tl.constexpr):
    """c[j] - c[t] of term r. Coarse and fine parts are differenced apart, so nothing is rounded twice.

    CQ and CK hold R rows of coarse parts, followed, if SPLIT, by R rows of fine parts.
    """
    ours = tl.load(CQ + r * TQ + i, mask=i < TQ, other=0.0)
    theirs = tl.load(CK + r * TK + j, mask=j < TK, other=0.0)
    offset = per_key(theirs, TRANSPOSED) - per_query(ours, TRANSPOSED)
    if SPLIT:
        ours = tl.load(CQ + (R + r) * TQ + i, mask=i < TQ, other=0.0)
        theirs = tl.load(CK + (R + r) * TK + j, mask=j < TK, other=0.0)
        offset += per_key(theirs, TRANSPOSED) - per_query(ours, TRANSPOSED)
    return offset


@triton.jit
def slope_rate(
    RATE_Q, RATE_K, r, i, j, TQ, TK,
    HAS_RATE_Q: tl.constexpr, HAS_RATE_K: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """rate_q[t] + rate_k[j] of term r, broadcastable to the tile."""
    if HAS_RATE_Q:
        ours = per_query(tl.load(RATE_Q + r * TQ + i, mask=i < TQ, other=0.0), TRANSPOSED)
        if HAS_RATE_K:
            return ours + per_key(tl.load(RATE_K + r * TK + j, mask=j < TK, other=0.0), TRANSPOSED)
        else:
            return ours
    else:
        return per_key(tl.load(RATE_K + r * TK + j, mask=j < TK, other=0.0), TRANSPOSED)


@triton.jit
def add_slopes(
    x, RATE_Q, RATE_K, CQ, CK, i, j, TQ, TK, R: tl.constexpr, SPLIT: tl.constexpr,
    HAS_RATE_Q: tl.constexpr, HAS_RATE_K: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """x + sum over terms of rate * offset (Eq. A5)."""
    for r in tl.static_range(R):
        rate = slope_rate(RATE_Q, RATE_K, r, i, j, TQ, TK, HAS_RATE_Q, HAS_RATE_K, TRANSPOSED)
        x += rate * slope_offset(CQ, CK, r, i, j, TQ, TK, R, SPLIT, TRANSPOSED)
    return x


@triton.jit
def _log_of_one_to_two(x):
    """log(x) by the special-function unit, right to 2^-22 for 1 <= x <= 2.

    `tl.log` is a polynomial of some fifteen instructions, the most expensive part of an edge. The
    interpreter knows no libdevice.
    """
    if INTERPRETED:
        return tl.log(x)
    else:
        return libdevice.fast_logf(x)


@triton.jit
def path_edges(z, t, j, MASKED: tl.constexpr, BOUNDED_LINK: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Edges g(z) and slopes g'(z). Column j holds the edge of token l = j + 1, zero where l > t.

    Held one column to the left, an edge first counts for the key just before it, so the inclusive sum
    from the right at column j is the whole sum over l = j+1 … t: no subtraction, no cancellation.
    """
    u = tl.exp2(0.0 - tl.abs(z) * LOG2E)
    tail = 1.0 / (1.0 + u)
    below = tl.where(z >= 0, u * tail, tail)  # sigmoid(-z), g' of log sigmoid
    if BOUNDED_LINK:
        edge = -below
        slope = u * tail * tail
    else:
        edge = tl.minimum(z, 0.0) - _log_of_one_to_two(1.0 + u)
        slope = below
    if MASKED:
        before = per_key(j, TRANSPOSED) < per_query(t, TRANSPOSED)
        edge = tl.where(before, edge, 0.0)
        slope = tl.where(before, slope, 0.0)
    return edge, slope


@triton.jit
def add_exactly(high, low, x):
    """(high + low) + x with the rounding error of the sum kept in `low` (Knuth's two-sum)."""
    total = high + x
    part = total - high
    low += (high - (total - part)) + (x - part)
    return total, low


@triton.jit
def key_range(
    FIRST, row, bh, i, TQ, TK, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    HAS_FIRST: tl.constexpr, SIMPLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Keys [begin, end) the block of queries sees, and `whole`: before it no tile needs a mask."""
    shift = TK - TQ
    first = 0
    end = TK
    if CAUSAL:
        end = tl.minimum(TK, row + BM + shift)
    if WINDOW:
        first = tl.maximum(first, row + shift - window + 1)
        if not CAUSAL:
            end = tl.minimum(TK, row + BM - 1 + shift + window)
    if HAS_FIRST:
        first = tl.maximum(first, tl.min(tl.load(FIRST + bh * TQ + i, mask=i < TQ, other=TK), 0))
    end = tl.maximum(end, 0)
    begin = tl.minimum(first, end) // BN * BN
    end = tl.cdiv(end, BN) * BN
    whole = begin
    if SIMPLE:
        whole = TK // BN * BN
        if CAUSAL:
            whole = tl.minimum(whole, (row + shift) // BN * BN)
        whole = tl.minimum(tl.maximum(whole, begin), end)
    return first, begin, whole, end
