"""Device functions that the kernels share: loads of rows, each kind of bias, masks, and the range of keys.

Letters: BM queries and BN keys make a tile; t is the token a query stands at, j a key. Keys run in descending
order, so a running sum along them is the path sum from the query down. Logits are in units of log 2: log2(e) is
in the scale and in the rates. Tiles are (BM, BN), and (BN, BM) where KEYS, the axis of the keys, is 0: a vector
over queries is expanded at axis KEYS, one over keys at 1 - KEYS.

Arguments that go together are tuples: `slopes` (RATE_Q, RATE_K, C_Q, C_K of one head), `distances` (TABLE, MIX of
one head, PLACE_Q, PLACE_K of one sequence, L: entries of a table), `masks` (DOCS, PADDING of one sequence), `at`
(i, j, live_q, live_k, TQ, TK: rows, keys, which of them to read, how many there are).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
#: queries that share one entry of FIRST, and keys that share one entry of BOUNDS
PATCH: tl.constexpr = tl.constexpr(64)
#: arguments that change from call to call and must not compile a kernel each
LENGTHS = [
    "H",
    "HKV",
    "HP",
    "TQ",
    "TK",
    "L",
    "table_h",
    "window",
    "patches",
    "heads_from",
    "borders",
    "parts",
]
LENGTHS += ["key_from", "part_keys", *(f"{x}_{axis}" for x in ("rq", "rk", "cq", "ck") for axis in "bh")]


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for, besides dtypes and tile. Triton's cache keys on the repr of all fields."""

    d: int  # features of q and k, of v, of probes; and each as padded
    dv: int
    p: int
    block_d: int
    block_dv: int
    block_p: int
    precision: str  # of products of q, k and v
    causal: bool
    window: bool
    documents: bool
    padding: bool
    prune: bool  # whether walks may stop early
    exact: bool  # whether row sums are to be better than the output's dtype
    terms: int  # of slopes
    rate_q: bool
    rate_k: bool
    path: bool
    bounded: bool
    tables: int  # of distances
    mixed: bool
    beyond: int  # outside the tables: 0 the last entry, 1 zero, 2 -inf
    d_rate: bool = False  # wanted gradients
    d_c: bool = False
    d_table: bool = False


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros((ROWS, COLUMNS), tl.float32)


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
def visible(masks, ours, t, j, TK, window, KIND: tl.constexpr, KEYS: tl.constexpr):
    """True where the query at token t sees key j. `ours` are the documents of the queries."""
    tt, jj = tl.expand_dims(t, KEYS), tl.expand_dims(j, 1 - KEYS)
    seen = jj < TK
    if KIND.causal:
        seen = seen & (jj <= tt)
    if KIND.window:
        seen = seen & (tt - jj < window)
        if not KIND.causal:
            seen = seen & (jj - tt < window)
    if KIND.documents:
        theirs = tl.load(masks[0] + j, mask=j < TK, other=-2)
        seen = seen & (tl.expand_dims(ours, KEYS) == tl.expand_dims(theirs, 1 - KEYS))
    if KIND.padding:
        seen = seen & tl.expand_dims(tl.load(masks[1] + j, mask=j < TK, other=1) == 0, 1 - KEYS)
    return seen


@triton.jit
def live_keys(PADDING, j, TK, KIND: tl.constexpr):
    """Keys to load: a hidden key's numbers are never read, so a NaN there stays there."""
    live = j < TK
    if KIND.padding:
        live = live & (tl.load(PADDING + j, mask=live, other=1) == 0)
    return live


@triton.jit
def sound_keys(masks, POISON, j, TK, KIND: tl.constexpr, MASKED: tl.constexpr):
    """Keys to load, and the poison of each. In a masked tile a key that is not finite is not loaded:

    0 * NaN would spread it to rows that do not see it. Its poison makes the logits of those that do NaN.
    """
    live = live_keys(masks[1], j, TK, KIND)
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
def _difference(C_Q, C_K, row, at, KEYS: tl.constexpr):
    """Row `row` of C_K minus that of C_Q, for every key and query."""
    i, j, live_q, live_k, TQ, TK = at
    theirs = tl.expand_dims(tl.load(C_K + row * TK + j, mask=live_k, other=0.0), 1 - KEYS)
    return theirs - tl.expand_dims(tl.load(C_Q + row * TQ + i, mask=live_q, other=0.0), KEYS)


@triton.jit
def slope_offset(slopes, r, at, KEYS: tl.constexpr):
    """c[j] - c[t] of term r. c is a pair of float32; both parts are differenced apart, so nothing is lost."""
    offset = _difference(slopes[2], slopes[3], 2 * r, at, KEYS)
    return offset + _difference(slopes[2], slopes[3], 2 * r + 1, at, KEYS)


@triton.jit
def slope_rate(slopes, r, at, RATE_Q: tl.constexpr, RATE_K: tl.constexpr, KEYS: tl.constexpr):
    """rate_q[t] + rate_k[j] of term r, or the one that is asked for, broadcastable to the tile."""
    i, j, live_q, live_k, TQ, TK = at
    if RATE_Q:
        ours = tl.expand_dims(tl.load(slopes[0] + r * TQ + i, mask=live_q, other=0.0), KEYS)
    if RATE_K:
        theirs = tl.expand_dims(tl.load(slopes[1] + r * TK + j, mask=live_k, other=0.0), 1 - KEYS)
    if RATE_Q and RATE_K:
        return ours + theirs
    elif RATE_Q:
        return ours
    else:
        return theirs


@triton.jit
def add_slopes(x, slopes, at, KIND: tl.constexpr, KEYS: tl.constexpr):
    """x + sum over terms of rate * offset (Eq. A5)."""
    TERMS: tl.constexpr = KIND.terms
    for r in tl.static_range(TERMS):
        rate = slope_rate(slopes, r, at, KIND.rate_q, KIND.rate_k, KEYS)
        x += (rate * LOG2E) * slope_offset(slopes, r, at, KEYS)
    return x


@triton.jit
def table_entry(distances, at, KEYS: tl.constexpr):
    """The entry of a table at each distance, and the nearest one that there is. PLACE_Q is less the first distance."""
    ours = tl.load(distances[2] + at[0], mask=at[2], other=0)
    theirs = tl.load(distances[3] + at[1], mask=at[3], other=0)
    entry = tl.expand_dims(ours, KEYS) - tl.expand_dims(theirs, 1 - KEYS)
    return entry, tl.minimum(tl.maximum(entry, 0), distances[4] - 1).to(tl.int32)


@triton.jit
def table_value(distances, s, near, at, KEYS: tl.constexpr):
    """Table s at these entries. TABLE is one pointer or, as where heads are packed, one for each query."""
    return tl.load(tl.expand_dims(distances[0] + 0 * at[0], KEYS) + s * distances[4] + near)


@triton.jit
def mix_of(distances, s, at, KIND: tl.constexpr):
    """Each query's weight of table s; not zero where there is no query, because 0 * inf would be NaN."""
    return tl.load(distances[1] + at[0] * KIND.tables + s, mask=at[2], other=1.0)


@triton.jit
def add_distances(x, distances, at, KIND: tl.constexpr, KEYS: tl.constexpr):
    """x + sum over tables of mix * table[entry] (Eq. D1)."""
    TABLES: tl.constexpr = KIND.tables
    if TABLES > 0:
        entry, near = table_entry(distances, at, KEYS)
        total = tl.zeros_like(x)
        for s in tl.static_range(TABLES):
            value = table_value(distances, s, near, at, KEYS)
            if KIND.mixed:
                value *= tl.expand_dims(mix_of(distances, s, at, KIND), KEYS)
            total += value
        if KIND.beyond == 1:
            total = tl.where(entry == near, total, 0.0)
        if KIND.beyond == 2:
            total = tl.where(entry == near, total, float("-inf"))
        x += total * LOG2E
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
def path_step(PROBE_K, p, carry, top, n, t, TK, KIND: tl.constexpr, MASKED: tl.constexpr):
    """Probes of the keys top - n, path sums to them, slopes of their edges, and the carry after them.

    Column j holds the edge of token j + 1, which key j is the first to be charged for.
    """
    j = top - n
    probe = load_rows(PROBE_K, top + 1, -n, KIND.p, j + 1 < TK, KIND.p, KIND.block_p, MASKED)
    edge, slope = edges(tl.dot(p, tl.trans(probe), input_precision="tf32x3"), KIND.bounded)
    if MASKED:
        before = j[None, :] < t[:, None]
        edge = tl.where(before, edge, 0.0)
        slope = tl.where(before, slope, 0.0)
    path = tl.cumsum(edge, 1) + (carry[0] + carry[1])[:, None]
    return probe, path, slope, add_exactly(carry[0], carry[1], tl.sum(edge, 1))


@triton.jit
def softmax_step(x, v, acc, total, peak, KIND: tl.constexpr):
    """The sums of values and weights, and the maximum, after a tile of logits x with values v.

    KIND.exact: weights enter the product as two numbers of v's dtype.
    """
    higher = tl.maximum(peak, tl.max(x, 1))
    # A row that has seen nothing has maximum -inf; any finite number then gives weights of zero.
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    w = tl.exp2(x - anchor[:, None])
    fade = tl.exp2(peak - anchor)
    total = total * fade + tl.sum(w, 1)
    coarse = w.to(v.dtype)
    acc = tl.dot(coarse, v, acc * fade[:, None], input_precision=KIND.precision)
    if KIND.exact:
        fine = (w - coarse.to(tl.float32)).to(v.dtype)
        acc = tl.dot(fine, v, acc, input_precision=KIND.precision)
    return acc, total, higher


@triton.jit
def key_range(
    masks, FIRST, row, i, t, TQ, TK, window, KIND: tl.constexpr, PRUNED: tl.constexpr, SIMPLE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BORDER: tl.constexpr,
):  # fmt: skip
    """Keys [begin, end) that rows [row, row + BM) see, and `whole`: tiles before it need no mask.

    begin and whole are multiples of BN, end is a multiple of BORDER.
    """
    shift = TK - TQ
    begin = 0
    end = TK
    if KIND.causal:
        end = tl.minimum(TK, tl.minimum(row + BM, TQ) + shift)
    if KIND.window:
        begin = tl.maximum(begin, row + shift - window + 1)
        if not KIND.causal:
            end = tl.minimum(end, row + BM - 1 + shift + window)
    if KIND.documents and KIND.causal:  # a document's name is its first token
        begin = tl.maximum(begin, tl.min(tl.load(masks[0] + t, mask=(t >= 0) & (i < TQ), other=TK), 0))
    if PRUNED:
        begin = tl.maximum(begin, tl.min(tl.load(FIRST + i // PATCH, mask=i < TQ, other=TK), 0))
    end = tl.maximum(end, 0)
    begin = tl.minimum(begin, end) // BN * BN
    end = tl.cdiv(end, BORDER) * BORDER
    whole = begin
    if SIMPLE:
        whole = TK // BN * BN
        if KIND.causal:
            whole = tl.minimum(whole, tl.maximum(row + shift, 0) // BN * BN)
        whole = tl.minimum(tl.maximum(whole, begin), end)
    return begin, whole, end
