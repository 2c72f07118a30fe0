"""Device functions that the kernels share: loads of rows, slopes, paths, masks, and the range of keys.

Letters: BM queries and BN keys make a tile; t is the token a query stands at, j a key. Keys run in descending
order, so a running sum along them is the path sum from the query down. Tiles are (BM, BN), and (BN, BM) where
KEYS, the axis of the keys, is 0. Logits are in units of log 2: log2(e) is in the scale and in the rates.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
#: queries that share one entry of FIRST, and keys that share one entry of BOUNDS
PATCH: tl.constexpr = tl.constexpr(64)


@triton.jit
def query_side(x, KEYS: tl.constexpr):
    """A vector over queries, broadcast along the keys of a tile."""
    if KEYS == 1:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def key_side(x, KEYS: tl.constexpr):
    if KEYS == 1:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def load_rows(
    base, start, offset, stride, keep, D: tl.constexpr, BLOCK_D: tl.constexpr, BOUNDED: tl.constexpr
):
    """Rows start + offset of a (T, D) matrix as (rows, BLOCK_D); zero where a row is not kept."""
    d = tl.arange(0, BLOCK_D)
    pointers = base + tl.cast(start, tl.int64) * stride + offset[:, None] * stride + d[None, :]
    if BOUNDED and D < BLOCK_D:
        return tl.load(pointers, mask=keep[:, None] & (d < D)[None, :], other=0.0)
    elif BOUNDED:
        return tl.load(pointers, mask=keep[:, None], other=0.0)
    elif D < BLOCK_D:
        return tl.load(pointers, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(base, start, offset, stride, keep, value, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    pointers = base + tl.cast(start, tl.int64) * stride + offset[:, None] * stride + d[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=keep[:, None] & (d < D)[None, :])


@triton.jit
def visible(
    PADDING, DOCS, ours, t, j, TK, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    HAS_DOCS: tl.constexpr, HAS_PADDING: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """True where the query at token t sees key j. `ours` are the documents of the queries."""
    tt, jj = query_side(t, KEYS), key_side(j, KEYS)
    seen = jj < TK
    if CAUSAL:
        seen = seen & (jj <= tt)
    if WINDOW:
        seen = seen & (tt - jj < window)
        if not CAUSAL:
            seen = seen & (jj - tt < window)
    if HAS_DOCS:
        theirs = tl.load(DOCS + j, mask=j < TK, other=-2)
        seen = seen & (query_side(ours, KEYS) == key_side(theirs, KEYS))
    if HAS_PADDING:
        seen = seen & key_side(tl.load(PADDING + j, mask=j < TK, other=1) == 0, KEYS)
    return seen


@triton.jit
def live_keys(PADDING, j, TK, HAS_PADDING: tl.constexpr):
    """Keys to load: a hidden key's numbers are never read, so a NaN there stays there."""
    live = j < TK
    if HAS_PADDING:
        live = live & (tl.load(PADDING + j, mask=live, other=1) == 0)
    return live


@triton.jit
def sound_keys(PADDING, POISON, j, TK, HAS_PADDING: tl.constexpr, MASKED: tl.constexpr):
    """Keys to load, and the poison of each. In a masked tile a key that is not finite is not loaded:

    0 * NaN would spread it to rows that do not see it. Its poison makes the logits of those that do NaN.
    """
    live = live_keys(PADDING, j, TK, HAS_PADDING)
    poison = tl.zeros_like(j).to(tl.float32)
    if MASKED:
        poison = tl.load(POISON + j, mask=live, other=0.0)
        live = live & (poison == 0.0)
    return live, poison


@triton.jit
def poison_of(POISON, begin, end):
    """NaN if one of the keys [begin, end) is not finite, else 0."""
    n = tl.arange(0, 256)
    total = tl.zeros((256,), tl.float32)
    for start in range(begin, end, 256):
        total += tl.load(POISON + start + n, mask=start + n < end, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def slope_offset(C_Q, C_K, r, i, j, live_q, live_k, TQ, TK, KEYS: tl.constexpr):
    """c[j] - c[t] of term r. c is a pair of float32; both parts are differenced apart, so nothing is lost."""
    offset = key_side(tl.load(C_K + 2 * r * TK + j, mask=live_k, other=0.0), KEYS) - query_side(
        tl.load(C_Q + 2 * r * TQ + i, mask=live_q, other=0.0), KEYS
    )
    fine = key_side(tl.load(C_K + (2 * r + 1) * TK + j, mask=live_k, other=0.0), KEYS) - query_side(
        tl.load(C_Q + (2 * r + 1) * TQ + i, mask=live_q, other=0.0), KEYS
    )
    return offset + fine


@triton.jit
def slope_rate(
    RATE_Q, RATE_K, r, i, j, live_q, live_k, TQ, TK,
    HAS_RATE_Q: tl.constexpr, HAS_RATE_K: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """rate_q[t] + rate_k[j] of term r, broadcastable to the tile."""
    if HAS_RATE_Q and HAS_RATE_K:
        ours = tl.load(RATE_Q + r * TQ + i, mask=live_q, other=0.0)
        theirs = tl.load(RATE_K + r * TK + j, mask=live_k, other=0.0)
        return query_side(ours, KEYS) + key_side(theirs, KEYS)
    elif HAS_RATE_Q:
        return query_side(tl.load(RATE_Q + r * TQ + i, mask=live_q, other=0.0), KEYS)
    else:
        return key_side(tl.load(RATE_K + r * TK + j, mask=live_k, other=0.0), KEYS)


@triton.jit
def add_slopes(
    x, RATE_Q, RATE_K, C_Q, C_K, i, j, live_q, live_k, TQ, TK, R: tl.constexpr,
    HAS_RATE_Q: tl.constexpr, HAS_RATE_K: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """x + sum over terms of rate * offset (Eq. A5)."""
    for r in tl.static_range(R):
        rate = slope_rate(RATE_Q, RATE_K, r, i, j, live_q, live_k, TQ, TK, HAS_RATE_Q, HAS_RATE_K, KEYS)
        x += (rate * LOG2E) * slope_offset(C_Q, C_K, r, i, j, live_q, live_k, TQ, TK, KEYS)
    return x


@triton.jit
def _log2_of_one_to_two(x):
    """By the special-function unit, right to 2^-22 for 1 <= x <= 2. The interpreter knows no libdevice."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)


@triton.jit
def logsumexp(peak, total):
    """In nats, given a maximum in units of log 2; -inf where nothing was seen, NaN where total is NaN."""
    sound = tl.where(total > 0.0, total, 1.0)
    return tl.where(total == 0.0, float("-inf"), (peak + tl.log2(sound)) * LN2 + 0.0 * total)


@triton.jit
def edges(z, BOUNDED: tl.constexpr):
    """log2(e) g(z) and g'(z), given log2(e) z."""
    u = tl.exp2(0.0 - tl.abs(z))
    tail = 1.0 / (1.0 + u)
    below = tl.where(z >= 0, u * tail, tail)  # sigmoid(-z), g' of log sigmoid
    if BOUNDED:
        return 0.0 - below * LOG2E, u * tail * tail
    else:
        return tl.minimum(z, 0.0) - _log2_of_one_to_two(1.0 + u), below


@triton.jit
def add_exactly(high, low, x):
    """(high + low) + x with the rounding error of the sum kept in `low` (Knuth's two-sum)."""
    total = high + x
    part = total - high
    return total, low + ((high - (total - part)) + (x - part))


@triton.jit
def key_range(
    DOCS, FIRST, row, i, t, TQ, TK, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    HAS_DOCS: tl.constexpr, HAS_FIRST: tl.constexpr, SIMPLE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BORDER: tl.constexpr,
):  # fmt: skip
    """Keys [begin, end) that rows [row, row + BM) see, and `whole`: tiles before it need no mask.

    begin and whole are multiples of BN, end is a multiple of BORDER.
    """
    shift = TK - TQ
    begin = 0
    end = TK
    if CAUSAL:
        end = tl.minimum(TK, tl.minimum(row + BM, TQ) + shift)
    if WINDOW:
        begin = tl.maximum(begin, row + shift - window + 1)
        if not CAUSAL:
            end = tl.minimum(end, row + BM - 1 + shift + window)
    if HAS_DOCS and CAUSAL:  # a document's name is its first token
        begin = tl.maximum(begin, tl.min(tl.load(DOCS + t, mask=(t >= 0) & (i < TQ), other=TK), 0))
    if HAS_FIRST:
        begin = tl.maximum(begin, tl.min(tl.load(FIRST + i // PATCH, mask=i < TQ, other=TK), 0))
    end = tl.maximum(end, 0)
    begin = tl.minimum(begin, end) // BN * BN
    end = tl.cdiv(end, BORDER) * BORDER
    whole = begin
    if SIMPLE:
        whole = TK // BN * BN
        if CAUSAL:
            whole = tl.minimum(whole, tl.maximum(row + shift, 0) // BN * BN)
        whole = tl.minimum(tl.maximum(whole, begin), end)
    return begin, whole, end
