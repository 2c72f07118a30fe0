"""What the kernels share: their arguments as tuples, and device functions for loads, biases, masks and softmax.

Letters: BM queries and BN keys make a tile; t is the token a query stands at, j a key. Keys are read in descending
order, so that a running sum along them is the path sum from the query down. Logits are in units of log 2: the scale
and the rates contain log2(e). Tiles are (BM, BN), or (BN, BM) where KEYS, the axis of the keys, is 0: a vector
over queries is expanded at axis KEYS, one over keys at axis 1 - KEYS.

Every kernel takes `Inputs`, `Strides` and `Sizes`; `of_head` moves the pointers to one head of one sequence. `at` is
(i, j, live_q, live_k): rows, keys, and which of them to read.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from . import store

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
#: queries that share one entry of `first`, and keys that share one entry of BOUNDS
PATCH: tl.constexpr = tl.constexpr(64)
padded = triton.constexpr_function(store.padded)
#: Tensors: those of a problem, in the layouts of launch.py; then, for each key, NaN where it or its value is not
#: finite, else 0; then those of the backward. q replaces an absent one, which is never read.
Inputs = namedtuple(
    "Inputs",
    "q k v c_q c_k rate_q rate_k probe_q probe_k path_rate table mix place_q place_k documents key_padding "
    "poison d_out lse delta first",
)
#: Strides of batch, head and token. Features are adjacent.
Strides = namedtuple("Strides", ("q", "k", "v", "d_out"))
#: Numbers that compile no kernel of their own: heads of queries, keys and probes; lengths, entries of a table, window,
#: patches of keys; strides of batch and head (0 where shared) of rates and c, of the head of the table; of the
#: backward, the first head of a launch and the number of blocks of keys; of decoding, the first key and keys of a part.
Sizes = namedtuple(
    "Sizes",
    "H HKV HP TQ TK L window patches scale rate_q rate_k c_q c_k table heads_from borders key_from part_keys",
    defaults=(0, 0, 0, 0),
)
#: Outputs of the backward kernels, one for each query head.
Gradients = namedtuple("Gradients", "q k v c_q c_k rate_q rate_k probe_q probe_k path_rate table mix")


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for, besides dtypes and tile. Triton's cache keys on the repr of all fields."""

    d: int  # features of q and k, of v, of probes
    dv: int
    p: int
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

    @property
    def simple(self) -> bool:
        """Whether only causal order hides keys: then most tiles need no mask."""
        return not (self.window or self.documents or self.padding)


@triton.jit
def of_head(x, strides, sizes, b, h, KIND: tl.constexpr):
    """The pointers of sequence b and query head h; where h is a vector, those of its own are vectors too."""
    hk, hp = h // (sizes.H // sizes.HKV), h // (sizes.H // sizes.HP)
    bh, bk, bp = b * sizes.H + h, b * sizes.HKV + hk, b * sizes.HP + hp
    return Inputs(
        q=x.q + b * strides.q[0] + h * strides.q[1],
        k=x.k + b * strides.k[0] + hk * strides.k[1],
        v=x.v + b * strides.v[0] + hk * strides.v[1],
        rate_q=x.rate_q + b * sizes.rate_q[0] + h * sizes.rate_q[1],
        rate_k=x.rate_k + b * sizes.rate_k[0] + h * sizes.rate_k[1],
        c_q=x.c_q + b * sizes.c_q[0] + h * sizes.c_q[1],
        c_k=x.c_k + b * sizes.c_k[0] + h * sizes.c_k[1],
        probe_q=x.probe_q + bp * sizes.TQ * KIND.p,
        probe_k=x.probe_k + bp * sizes.TK * KIND.p,
        path_rate=x.path_rate + h,
        table=x.table + h * sizes.table,
        mix=x.mix + bh * sizes.TQ * KIND.tables,
        place_q=x.place_q + b * sizes.TQ,
        place_k=x.place_k + b * sizes.TK,
        documents=x.documents + b * sizes.TK,
        key_padding=x.key_padding + b * sizes.TK,
        poison=x.poison + bk * sizes.TK,
        d_out=x.d_out + b * strides.d_out[0] + h * strides.d_out[1],
        lse=x.lse + bh * sizes.TQ,
        delta=x.delta + bh * sizes.TQ,
        first=x.first + bh * tl.cdiv(sizes.TQ, PATCH),
    )


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros((ROWS, COLUMNS), tl.float32)


@triton.jit
def load_rows(base, start, offset, stride, keep, D: tl.constexpr, BOUNDED: tl.constexpr):
    """Rows start + offset of a (T, D) matrix, zero where a row is not kept; D is padded."""
    BLOCK_D: tl.constexpr = padded(D)
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
def store_rows(base, start, offset, keep, value, D: tl.constexpr):
    """Into rows start + offset of a contiguous (T, D) matrix."""
    d = tl.arange(0, value.shape[1])
    pointers = base + tl.cast(start, tl.int64) * D + offset[:, None] * D + d[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=keep[:, None] & (d < D)[None, :])


# Masks


@triton.jit
def documents_of(head, t, live, KIND: tl.constexpr):
    """The document of each query, or t where there are none."""
    if KIND.documents:
        return tl.load(head.documents + t, mask=live & (t >= 0), other=-1)
    else:
        return t


@triton.jit
def visible(head, ours, t, j, sizes, KIND: tl.constexpr, KEYS: tl.constexpr):
    """True where the query at token t sees key j. `ours` are the documents of the queries."""
    tt, jj = tl.expand_dims(t, KEYS), tl.expand_dims(j, 1 - KEYS)
    seen = jj < sizes.TK
    if KIND.causal:
        seen = seen & (jj <= tt)
    if KIND.window:
        seen = seen & (tt - jj < sizes.window)
        if not KIND.causal:
            seen = seen & (jj - tt < sizes.window)
    if KIND.documents:
        theirs = tl.load(head.documents + j, mask=j < sizes.TK, other=-2)
        seen = seen & (tl.expand_dims(ours, KEYS) == tl.expand_dims(theirs, 1 - KEYS))
    if KIND.padding:
        seen = seen & tl.expand_dims(tl.load(head.key_padding + j, mask=j < sizes.TK, other=1) == 0, 1 - KEYS)
    return seen


@triton.jit
def live_keys(head, j, sizes, KIND: tl.constexpr):
    """Keys to load: a hidden key's numbers are never read, so a NaN there stays there."""
    live = j < sizes.TK
    if KIND.padding:
        live = live & (tl.load(head.key_padding + j, mask=live, other=1) == 0)
    return live


@triton.jit
def sound_keys(head, j, sizes, KIND: tl.constexpr, MASKED: tl.constexpr):
    """Keys to load, and the poison of each. In a masked tile a key that is not finite is not loaded:

    0 * NaN would spread it to rows that do not see it. Its poison makes the logits of those that do NaN.
    """
    live = live_keys(head, j, sizes, KIND)
    poison = tl.zeros_like(j).to(tl.float32)
    if MASKED:
        poison = tl.load(head.poison + j, mask=live, other=0.0)
        live = live & (poison == 0.0)
    return live, poison


@triton.jit
def poison_of(head, begin, end):
    """NaN if one of the keys [begin, end) is not finite, else 0."""
    n = tl.arange(0, 256)
    total = tl.zeros((256,), tl.float32)
    for start in range(begin, end, 256):
        total += tl.load(head.poison + start + n, mask=start + n < end, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def key_range(
    head, row, i, t, sizes, KIND: tl.constexpr, PRUNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BORDER: tl.constexpr,
):  # fmt: skip
    """Keys [begin, end) that rows [row, row + BM) see, and `whole`: tiles before it need no mask.

    begin and whole are multiples of BN, end is a multiple of BORDER.
    """
    TQ, TK = sizes.TQ, sizes.TK
    shift = TK - TQ
    begin = 0
    end = TK
    if KIND.causal:
        end = tl.minimum(TK, tl.minimum(row + BM, TQ) + shift)
    if KIND.window:
        begin = tl.maximum(begin, row + shift - sizes.window + 1)
        if not KIND.causal:
            end = tl.minimum(end, row + BM - 1 + shift + sizes.window)
    if KIND.documents and KIND.causal:  # a document's name is its first token
        begin = tl.maximum(begin, tl.min(tl.load(head.documents + t, mask=(t >= 0) & (i < TQ), other=TK), 0))
    if PRUNED:
        begin = tl.maximum(begin, tl.min(tl.load(head.first + i // PATCH, mask=i < TQ, other=TK), 0))
    end = tl.maximum(end, 0)
    begin = tl.minimum(begin, end) // BN * BN
    end = tl.cdiv(end, BORDER) * BORDER
    whole = begin
    if KIND.simple:
        whole = TK // BN * BN
        if KIND.causal:
            whole = tl.minimum(whole, tl.maximum(row + shift, 0) // BN * BN)
        whole = tl.minimum(tl.maximum(whole, begin), end)
    return begin, whole, end


# Slopes and distances


@triton.jit
def of_queries(pointer, at, KEYS: tl.constexpr):
    """One number for each query, broadcastable to the tile."""
    return tl.expand_dims(tl.load(pointer + at[0], mask=at[2], other=0), KEYS)


@triton.jit
def of_keys(pointer, at, KEYS: tl.constexpr):
    """One number for each key, broadcastable to the tile; of packed heads each has a pointer of its own."""
    if pointer.type.is_block():
        return tl.load(pointer[:, None] + at[1][None, :], mask=at[3][None, :], other=0)
    else:
        return tl.expand_dims(tl.load(pointer + at[1], mask=at[3], other=0), 1 - KEYS)


@triton.jit
def slope_offset(head, r, at, sizes, KEYS: tl.constexpr):
    """c[j] - c[t] of term r. c is a pair of float32; both parts are differenced apart, so nothing is lost."""
    c_q, c_k = head.c_q + 2 * r * sizes.TQ, head.c_k + 2 * r * sizes.TK
    high = of_keys(c_k, at, KEYS) - of_queries(c_q, at, KEYS)
    return high + (of_keys(c_k + sizes.TK, at, KEYS) - of_queries(c_q + sizes.TQ, at, KEYS))


@triton.jit
def slope_rate(head, r, at, sizes, RATE_Q: tl.constexpr, RATE_K: tl.constexpr, KEYS: tl.constexpr):
    """rate_q[t] + rate_k[j] of term r, or the one that is asked for, broadcastable to the tile."""
    if RATE_Q and RATE_K:
        ours = of_queries(head.rate_q + r * sizes.TQ, at, KEYS)
        return ours + of_keys(head.rate_k + r * sizes.TK, at, KEYS)
    elif RATE_Q:
        return of_queries(head.rate_q + r * sizes.TQ, at, KEYS)
    else:
        return of_keys(head.rate_k + r * sizes.TK, at, KEYS)


@triton.jit
def add_biases(x, head, at, sizes, KIND: tl.constexpr, KEYS: tl.constexpr):
    """x + sum over terms of rate * offset (Eq. A5) + sum over tables of mix * table[entry] (Eq. D1)."""
    TERMS: tl.constexpr = KIND.terms
    TABLES: tl.constexpr = KIND.tables
    for r in tl.static_range(TERMS):
        rate = slope_rate(head, r, at, sizes, KIND.rate_q, KIND.rate_k, KEYS)
        x += (rate * LOG2E) * slope_offset(head, r, at, sizes, KEYS)
    if TABLES > 0:
        entry, near = table_entry(head, at, sizes, KEYS)
        total = tl.zeros_like(x)
        for s in tl.static_range(TABLES):
            value = table_value(head, s, near, at, sizes, KEYS)
            if KIND.mixed:
                value *= tl.expand_dims(mix_of(head, s, at, KIND), KEYS)
            total += value
        if KIND.beyond == 1:
            total = tl.where(entry == near, total, 0.0)
        if KIND.beyond == 2:
            total = tl.where(entry == near, total, float("-inf"))
        x += total * LOG2E
    return x


@triton.jit
def table_entry(head, at, sizes, KEYS: tl.constexpr):
    """The entry of a table at each distance, and the nearest one that there is."""
    entry = of_queries(head.place_q, at, KEYS) - of_keys(head.place_k, at, KEYS)
    return entry, tl.minimum(tl.maximum(entry, 0), sizes.L - 1).to(tl.int32)


@triton.jit
def table_value(head, s, near, at, sizes, KEYS: tl.constexpr):
    """Table s at these entries. The table is one pointer or, where heads are packed, one for each query."""
    return tl.load(tl.expand_dims(head.table + 0 * at[0], KEYS) + s * sizes.L + near)


@triton.jit
def mix_of(head, s, at, KIND: tl.constexpr):
    """Each query's weight of table s; not zero where there is no query, because 0 * inf would be NaN."""
    return tl.load(head.mix + at[0] * KIND.tables + s, mask=at[2], other=1.0)


# Paths


@triton.jit
def probes_of(head, q, row, m, live, KIND: tl.constexpr):
    """Probes of the rows, times log2(e) / P, and the rate of their path; without a path q and 0."""
    if KIND.path:
        p = load_rows(head.probe_q, row, m, KIND.p, live, KIND.p, True)
        return p * (LOG2E / KIND.p), tl.load(head.path_rate)
    else:
        return q, 0.0


@triton.jit
def edges(z, BOUNDED: tl.constexpr):
    """log2(e) g(z) and g'(z), given log2(e) z. fast_log2f is right to 2^-22 between 1 and 2."""
    u = tl.exp2(0.0 - tl.abs(z))
    tail = 1.0 / (1.0 + u)
    below = tl.where(z >= 0, u * tail, tail)  # sigmoid(-z), g' of log sigmoid
    if BOUNDED:
        return 0.0 - below * LOG2E, u * tail * tail
    else:
        return tl.minimum(z, 0.0) - libdevice.fast_log2f(1.0 + u), below


@triton.jit
def add_exactly(high, low, x):
    """(high + low) + x with the rounding error of the sum kept in `low` (Knuth's two-sum)."""
    total = high + x
    part = total - high
    return total, low + ((high - (total - part)) + (x - part))


@triton.jit
def path_step(head, p, carry, top, n, t, sizes, KIND: tl.constexpr, MASKED: tl.constexpr):
    """Probes of the keys top - n, path sums to them, slopes of their edges, and the carry after them.

    Column j holds the edge of token j + 1, which key j is the first to be charged for.
    """
    j = top - n
    probe = load_rows(head.probe_k, top + 1, -n, KIND.p, j + 1 < sizes.TK, KIND.p, MASKED)
    edge, slope = edges(tl.dot(p, tl.trans(probe), input_precision="tf32x3"), KIND.bounded)
    if MASKED:
        before = j[None, :] < t[:, None]
        edge = tl.where(before, edge, 0.0)
        slope = tl.where(before, slope, 0.0)
    path = tl.cumsum(edge, 1) + (carry[0] + carry[1])[:, None]
    return probe, path, slope, add_exactly(carry[0], carry[1], tl.sum(edge, 1))


# Softmax


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
def logsumexp(peak, total):
    """In nats, given a maximum in units of log 2; -inf where nothing was seen, NaN where total is NaN."""
    sound = tl.where(total > 0.0, total, 1.0)
    return tl.where(total == 0.0, float("-inf"), (peak + tl.log2(sound)) * LN2 + 0.0 * total)


@triton.jit
def store_out(OUT, FINE, start, offset, live, out, KIND: tl.constexpr):
    """The rows of the output. KIND.exact: FINE keeps what the output's dtype leaves out."""
    store_rows(OUT, start, offset, live, out, KIND.dv)
    if KIND.exact:
        store_rows(FINE, start, offset, live, out - out.to(OUT.dtype.element_ty).to(tl.float32), KIND.dv)
