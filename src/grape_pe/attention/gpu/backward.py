"""The backward kernels: weights are recomputed from the logsumexp, and nothing is added atomically.

    delta_kernel    <dO, O> - d lse of every row
    query_kernel    dq and what belongs to queries: one program owns BM queries and walks their keys
    key_kernel      dk, dv and what belongs to keys: one program owns BN keys of one query head and walks rows

With dS the gradient of a logit, and keys walked from the last to the first (docs/kernels.md derives it):

    d rate_q[t] =  sum_j dS (c_j - c_t)              d rate_k[j] = sum_t dS (c_j - c_t)
    d c_q[t]    = -sum_j dS rate_k[j] - rate_q d lse  d c_k[j]   = sum_t dS (rate_q[t] + rate_k[j])
    d mix[t, s] =  sum_j dS table[s, e(t, j)]        d table[s, e] = sum_t mix[t, s] sum of dS with e(t, j) = e
    d edge(t, l) = rate * sum_{j < l} dS(t, j) = rate * (TOTAL[t] - sum_{j >= l} dS(t, j))

The launch adds the rate_q part of d c_q. The sums over edges and over dS to the right of every BORDER keys
are kept in CARRY and RIGHT, which the key kernel reads. There the sum over j < l is TOTAL - RIGHT at the lower
border of the block, plus the block's own dS: a dS of one kernel is never subtracted from one of the other,
because rounding differs between them and where one key dominates a row the sum is much smaller than its terms.
"""

# ruff: noqa: RUF005  (Triton's tuples grow by +; it does not parse a star)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from . import tile as ops
from .tile import LN2, LOG2E, PATCH


@triton.jit(do_not_specialize=["SIZES"])
def delta_kernel(INPUTS, STRIDES, SIZES, OUT, FINE, D_LSE, DELTA, KIND: tl.constexpr):
    row = tl.program_id(0) * PATCH
    bh = tl.program_id(1).to(tl.int64)
    head = ops.of_head(INPUTS, STRIDES, SIZES, bh // SIZES.H, bh % SIZES.H, KIND)
    m = tl.arange(0, PATCH)
    i = row + m
    live = i < SIZES.TQ
    out = ops.load_rows(OUT, bh * SIZES.TQ + row, m, KIND.dv, live, KIND.dv, True).to(tl.float32)
    if KIND.exact:
        out += ops.load_rows(FINE, bh * SIZES.TQ + row, m, KIND.dv, live, KIND.dv, True).to(tl.float32)
    d_out = ops.load_rows(head.d_out, row, m, STRIDES.d_out[2], live, KIND.dv, True).to(tl.float32)
    delta = tl.sum(out * d_out, 1)
    if D_LSE is not None:
        delta -= tl.load(D_LSE + bh * SIZES.TQ + i, mask=live, other=0.0)
    tl.store(DELTA + bh * SIZES.TQ + i, delta, mask=live)


@triton.jit
def _add_d_rate(d_rate, ds, head, at, sizes, KIND: tl.constexpr, KEYS: tl.constexpr):
    """d_rate of each term plus the row sums of dS (c_j - c_t)."""
    TERMS: tl.constexpr = KIND.terms
    found = ()
    for r in tl.static_range(TERMS):
        found = found + (d_rate[r] + tl.sum(ds * ops.slope_offset(head, r, at, sizes, KEYS), 1),)
    return found


@triton.jit
def _table_step(
    D_TABLE, d_mix, ends, ds, head, at, sizes, KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Adds a tile of dS to this program's own d table, to d mix, and to each row's sums outside the table.

    Where positions are consecutive, m + n (keys descend) determines the entry: sums along it are enough. Else the
    loop handles each value of entry - (m + n) on its own: among pairs with one value, m + n determines the entry.
    """
    TABLES: tl.constexpr = KIND.tables
    L = sizes.L
    entry, near = ops.table_entry(head, at, sizes, 1)
    inside = entry == near
    if KIND.beyond == 0:
        ends = (
            ends[0] + tl.sum(tl.where(entry < near, ds, 0.0), 1),
            ends[1] + tl.sum(tl.where(entry > near, ds, 0.0), 1),
        )
    if KIND.mixed:
        reached = ds
        if KIND.beyond != 0:
            reached = tl.where(inside, ds, 0.0)
        more = ()
        for s in tl.static_range(TABLES):
            more = more + (d_mix[s] + tl.sum(reached * ops.table_value(head, s, near, at, sizes, 1), 1),)
        d_mix = more
    m, n = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    # Column n of a turned tile holds the pairs whose m + n is n, plus BN where it wrapped, plus whole blocks of BN.
    turn = (n - m) & (BN - 1)
    wrapped = n < (m & (BN - 1))
    block = tl.arange(0, BM // BN)[:, None] * BN + n
    inside = inside & (ds != 0.0)
    start = tl.where(inside, near - m - n, L)
    here = tl.min(start)  # by axes, triton 3.7.1 fails to compile it for sm_100
    while here < L:
        turned = tl.gather(tl.where(start == here, ds, 0.0), turn, 1)
        for s in tl.static_range(TABLES):
            y = turned
            if KIND.mixed:
                y *= ops.mix_of(head, s, at, KIND)[:, None]
            for wrap in tl.static_range(2):
                sums = tl.sum(tl.reshape(tl.where(wrapped == (wrap == 1), y, 0.0), (BM // BN, BN, BN)), 1)
                to = here + wrap * BN + block
                pointers = D_TABLE + s * (L + 2) + 1 + to
                real = (to >= 0) & (to < L)
                tl.store(pointers, tl.load(pointers, mask=real, other=0.0) + sums, mask=real)
                tl.debug_barrier()  # the next loads are of numbers that other threads stored
        here = tl.min(tl.where(start > here, start, L))
    return d_mix, ends


@triton.jit(do_not_specialize=["SIZES"])
def query_kernel(
    INPUTS, STRIDES, SIZES, GRADIENTS, CARRY, RIGHT, TOTAL, D_TABLE,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BORDER: tl.constexpr,
):  # fmt: skip
    """dq, d rate_q, d c_q, d probe_q and each row's share of d rate."""
    TERMS: tl.constexpr = KIND.terms
    TABLES: tl.constexpr = KIND.tables
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    place = tl.program_id(1).to(tl.int64)
    bh = SIZES.heads_from + place
    head = ops.of_head(INPUTS, STRIDES, SIZES, bh // SIZES.H, bh % SIZES.H, KIND)
    TQ = SIZES.TQ
    m = tl.arange(0, BM)
    i = row + m
    t = i + SIZES.TK - TQ
    live_q = i < TQ
    q = ops.load_rows(head.q, row, m, STRIDES.q[2], live_q, KIND.d, True)
    d_out = ops.load_rows(head.d_out, row, m, STRIDES.d_out[2], live_q, KIND.dv, True)
    lse = tl.load(head.lse + i, mask=live_q, other=float("-inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)  # then every weight is zero
    delta = tl.load(head.delta + i, mask=live_q, other=0.0)
    p, rate = ops.probes_of(head, q, row, m, live_q, KIND)
    ours = ops.documents_of(head, t, live_q, KIND)
    CARRY += place * SIZES.borders * TQ + i
    RIGHT += place * SIZES.borders * TQ + i

    begin, whole, end = ops.key_range(head, row, i, t, SIZES, KIND, KIND.prune, BM, BN, BORDER)
    dq = ops.zeros(BM, ops.padded(KIND.d))
    dp = ops.zeros(BM, ops.padded(KIND.p))
    dp_all = ops.zeros(BM, ops.padded(KIND.p))
    carry = (tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32))
    right = tl.zeros((BM,), tl.float32)
    d_path_rate = tl.zeros((BM,), tl.float32)
    d_rate = (tl.zeros((BM,), tl.float32),) * TERMS
    d_c = (tl.zeros((BM,), tl.float32),) * TERMS
    d_mix = (tl.zeros((BM,), tl.float32),) * TABLES
    ends = (tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32))
    D_TABLE += (place * tl.num_programs(0) + tl.program_id(0)) * TABLES * (SIZES.L + 2)
    n = tl.arange(0, BN)
    hi = end
    for phase in tl.static_range(2 if KIND.simple else 1):  # phase 0: tiles that need a mask
        lo = begin
        if KIND.simple and phase == 0:
            lo = whole
        for done in range(0, hi - lo, BN):
            top = hi - done - 1
            j = top - n
            live = ops.sound_keys(head, j, SIZES, KIND, phase == 0)[0]
            at = (i, j, live_q, live)
            k = ops.load_rows(head.k, top, -n, STRIDES.k[2], live, KIND.d, phase == 0)
            v = ops.load_rows(head.v, top, -n, STRIDES.v[2], live, KIND.dv, phase == 0)
            x = tl.dot(q, tl.trans(k), input_precision=KIND.precision) * (SIZES.scale * LOG2E)
            x = ops.add_biases(x, head, at, SIZES, KIND, 1)
            if KIND.path:
                border = (top // BORDER) * TQ
                at_border = live_q & ((top + 1) % BORDER == 0)
                tl.store(CARRY + border, carry[0] + carry[1], mask=at_border)
                tl.store(RIGHT + border, right, mask=at_border)
                probe, path, slope, carry = ops.path_step(head, p, carry, top, n, t, SIZES, KIND, phase == 0)
                x += rate * path
            w = tl.exp2(x - lse[:, None])
            if phase == 0:
                seen = ops.visible(head, ours, t, j, SIZES, KIND, 1)
                w = tl.where(seen, w, 0.0)
            ds = w * (tl.dot(d_out, tl.trans(v), input_precision=KIND.precision) - delta[:, None])
            if phase == 0:  # 0 * NaN would spread a row that is not finite
                ds = tl.where(seen, ds, 0.0)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=KIND.precision)
            if KIND.d_rate and KIND.rate_q:
                d_rate = _add_d_rate(d_rate, ds, head, at, SIZES, KIND, 1)
            if KIND.d_c and KIND.rate_k:
                more = ()
                for r in tl.static_range(TERMS):
                    theirs = ops.slope_rate(head, r, at, SIZES, False, True, 1)
                    more = more + (d_c[r] - tl.sum(ds * theirs, 1),)
                d_c = more
            if KIND.d_table:
                d_mix, ends = _table_step(D_TABLE, d_mix, ends, ds, head, at, SIZES, KIND, BM, BN)
            if KIND.path:
                d_path_rate += tl.sum(ds * path, 1)
                after = tl.cumsum(ds, 1) - ds + right[:, None]  # over the keys after j
                right += tl.sum(ds, 1)
                dp = tl.dot(slope * after, probe, dp, input_precision="tf32x3")
                dp_all = tl.dot(slope, probe, dp_all, input_precision="tf32x3")
        hi = lo

    ops.store_rows(GRADIENTS.q, bh * TQ + row, m, live_q, dq * SIZES.scale, KIND.d)
    if KIND.path:
        dp = (right[:, None] * dp_all - dp) * (rate / KIND.p)
        ops.store_rows(GRADIENTS.probe_q, bh * TQ + row, m, live_q, dp, KIND.p)
        tl.store(GRADIENTS.path_rate + bh * TQ + i, d_path_rate * LN2, mask=live_q)
        tl.store(TOTAL + place * TQ + i, right, mask=live_q)
        last = begin // BORDER  # the walk ended in this block: nothing is left of it
        tl.store(RIGHT + (last - 1) * TQ, right, mask=live_q & (last > 0))
    for r in tl.static_range(TERMS):
        if KIND.d_rate and KIND.rate_q:
            tl.store(GRADIENTS.rate_q + (bh * TERMS + r) * TQ + i, d_rate[r], mask=live_q)
        if KIND.d_c and KIND.rate_k:
            tl.store(GRADIENTS.c_q + (bh * TERMS + r) * TQ + i, d_c[r], mask=live_q)
    for s in tl.static_range(TABLES):
        if KIND.d_table:
            tl.store(GRADIENTS.mix + (bh * TABLES + s) * TQ + i, d_mix[s], mask=live_q)
            below, above = ends
            if KIND.mixed:
                mix = ops.mix_of(head, s, (i, i, live_q, live_q), KIND)
                below, above = below * mix, above * mix
            tl.store(D_TABLE + s * (SIZES.L + 2), tl.sum(below, 0))
            tl.store(D_TABLE + s * (SIZES.L + 2) + SIZES.L + 1, tl.sum(above, 0))


@triton.jit
def _last_row(FIRST, end, key_end, TQ, SPAN: tl.constexpr):
    """One more than the last row before `end` whose walk reached a key before `key_end`."""
    last = 0
    patches = tl.cdiv(TQ, PATCH)
    for start in range(0, patches, SPAN):
        n = start + tl.arange(0, SPAN)
        first = tl.load(FIRST + n, mask=n < patches, other=key_end)
        last = tl.maximum(last, tl.max(tl.where(first < key_end, (n + 1) * PATCH, 0), 0))
    return tl.minimum(end, last)


@triton.jit(do_not_specialize=["SIZES"])
def key_kernel(
    INPUTS, STRIDES, SIZES, GRADIENTS, CARRY, RIGHT, TOTAL, DOC_ENDS,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dk, dv, d rate_k, d c_k and d probe_k that one query head leaves at BN keys; tiles are (BN, BM)."""
    TERMS: tl.constexpr = KIND.terms
    start = tl.program_id(0) * BN
    place = tl.program_id(1).to(tl.int64)
    bh = SIZES.heads_from + place
    b = bh // SIZES.H
    head = ops.of_head(INPUTS, STRIDES, SIZES, b, bh % SIZES.H, KIND)
    TQ, TK = SIZES.TQ, SIZES.TK
    n = tl.arange(0, BN)
    top = start + BN - 1
    j = top - n
    live = ops.sound_keys(head, j, SIZES, KIND, True)[0]
    k = ops.load_rows(head.k, top, -n, STRIDES.k[2], live, KIND.d, True)
    v = ops.load_rows(head.v, top, -n, STRIDES.v[2], live, KIND.dv, True)
    probe = k
    rate = 0.0
    if KIND.path:
        probe = ops.load_rows(head.probe_k, top + 1, -n, KIND.p, j + 1 < TK, KIND.p, True)
        probe = probe * (LOG2E / KIND.p)
        rate = tl.load(head.path_rate)
        CARRY += (place * SIZES.borders + start // BN) * TQ
        RIGHT += (place * SIZES.borders + start // BN - 1) * TQ  # the border below this block
        TOTAL += place * TQ

    # Rows [begin, end) that may see these keys; from `whole` on each sees all of them.
    shift = TK - TQ
    begin = 0
    end = TQ
    if KIND.causal:
        begin = tl.maximum(begin, start - shift)
    if KIND.window:
        end = tl.minimum(end, start + BN - 1 + SIZES.window - shift)
        if not KIND.causal:
            begin = tl.maximum(begin, start - SIZES.window + 1 - shift)
    if KIND.documents and KIND.causal:
        end = tl.minimum(end, tl.max(tl.load(DOC_ENDS + b * TK + j, mask=j < TK, other=0), 0) - shift)
    if KIND.prune:
        end = _last_row(head.first, end, start + BN, TQ, 256)
    begin = begin // BM * BM
    SIMPLE: tl.constexpr = KIND.simple and not KIND.prune
    whole = tl.maximum(end, begin)
    if SIMPLE:
        whole = begin
        if KIND.causal:
            whole = tl.cdiv(tl.maximum(start + BN - shift, 0), BM) * BM
        if start + BN > TK:  # the last block may have fewer keys than BN
            whole = tl.maximum(end, begin)
        whole = tl.minimum(whole, tl.maximum(end, begin))
    dk = ops.zeros(BN, ops.padded(KIND.d))
    dv = ops.zeros(BN, ops.padded(KIND.dv))
    dp = ops.zeros(BN, ops.padded(KIND.p))
    d_rate = (tl.zeros((BN,), tl.float32),) * TERMS
    d_c = (tl.zeros((BN,), tl.float32),) * TERMS
    m = tl.arange(0, BM)
    for phase in tl.static_range(2 if SIMPLE else 1):  # phase 0: tiles that need a mask
        from_row = begin
        to_row = whole
        if SIMPLE and phase == 1:
            from_row = tl.cdiv(tl.maximum(whole - begin, 0), BM) * BM + begin
            to_row = end
        for row in range(from_row, to_row, BM):
            i = row + m
            t = i + shift
            live_q = i < TQ
            at = (i, j, live_q, live)
            lse = tl.load(head.lse + i, mask=live_q, other=float("-inf"))
            # A row that is not finite has a logsumexp of NaN. It must not reach keys that it does not see.
            q = ops.load_rows(head.q, row, m, STRIDES.q[2], live_q & (lse == lse), KIND.d, True)
            d_out = ops.load_rows(head.d_out, row, m, STRIDES.d_out[2], live_q, KIND.dv, True)
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            delta = tl.load(head.delta + i, mask=live_q, other=0.0)
            x = tl.dot(k, tl.trans(q), input_precision=KIND.precision) * (SIZES.scale * LOG2E)
            x = ops.add_biases(x, head, at, SIZES, KIND, 0)
            if KIND.path:
                p = ops.load_rows(head.probe_q, row, m, KIND.p, live_q, KIND.p, True)
                edge, slope = ops.edges(tl.dot(probe, tl.trans(p), input_precision="tf32x3"), KIND.bounded)
                if phase == 0:
                    edge = tl.where(j[:, None] < t[None, :], edge, 0.0)
                x += rate * (tl.cumsum(edge, 0) + tl.load(CARRY + i, mask=live_q, other=0.0)[None, :])
            w = tl.exp2(x - lse[None, :])
            first = tl.zeros_like(i)  # before it the row has no key
            if phase == 0:
                ours = ops.documents_of(head, t, live_q, KIND)
                if KIND.documents:
                    first = tl.maximum(first, ours)
                if KIND.window:
                    first = tl.maximum(first, t - SIZES.window + 1)
                if KIND.prune:  # what the forward left out stays left out
                    first = tl.maximum(first, tl.load(head.first + i // PATCH, mask=live_q, other=0))
                seen = ops.visible(head, ours, t, j, SIZES, KIND, 0)
                if KIND.prune:
                    seen = seen & (j[:, None] >= first[None, :])
                w = tl.where(seen, w, 0.0)
            dv = tl.dot(w.to(d_out.dtype), d_out, dv, input_precision=KIND.precision)
            ds = w * (tl.dot(v, tl.trans(d_out), input_precision=KIND.precision) - delta[None, :])
            if phase == 0:
                ds = tl.where(seen, ds, 0.0)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=KIND.precision)
            if KIND.d_rate and KIND.rate_k:
                d_rate = _add_d_rate(d_rate, ds, head, at, SIZES, KIND, 0)
            if KIND.d_c:
                more = ()
                for r in tl.static_range(TERMS):
                    both = ops.slope_rate(head, r, at, SIZES, KIND.rate_q, KIND.rate_k, 0)
                    more = more + (d_c[r] + tl.sum(ds * both, 1),)
                d_c = more
            if KIND.path:
                has_left = live_q & (start > 0)  # before the first block there are no keys
                left = tl.load(TOTAL + i, mask=has_left, other=0.0)
                left -= tl.load(RIGHT + i, mask=has_left, other=0.0)
                dz = slope * ((left + tl.sum(ds, 0))[None, :] - (tl.cumsum(ds, 0) - ds))
                if phase == 0:  # where the walk never came, CARRY and RIGHT hold no numbers
                    dz = tl.where((j[:, None] < t[None, :]) & (j[:, None] >= first[None, :]), dz, 0.0)
                dp = tl.dot(dz, p, dp, input_precision="tf32x3")
    inside = j < TK
    ops.store_rows(GRADIENTS.k, bh * TK + top, -n, inside, dk * SIZES.scale, KIND.d)
    ops.store_rows(GRADIENTS.v, bh * TK + top, -n, inside, dv, KIND.dv)
    if KIND.path:
        dp = dp * (rate / KIND.p)
        ops.store_rows(GRADIENTS.probe_k, bh * TK + top + 1, -n, j + 1 < TK, dp, KIND.p)
    for r in tl.static_range(TERMS):
        if KIND.d_rate and KIND.rate_k:
            tl.store(GRADIENTS.rate_k + (bh * TERMS + r) * TK + j, d_rate[r], mask=inside)
        if KIND.d_c:
            tl.store(GRADIENTS.c_k + (bh * TERMS + r) * TK + j, d_c[r], mask=inside)
