"""The backward kernels: weights are recomputed from the logsumexp, and nothing is added atomically.

    delta_kernel    <dO, O> - d lse of every row
    query_kernel    dq and what belongs to queries: one program owns BM queries and walks their keys
    key_kernel      dk, dv and what belongs to keys: one program owns BN keys of one query head and walks rows

With dS the gradient of a logit, and keys walked from the last to the first (docs/kernels.md derives it):

    d rate_q[t] =  sum_j dS (c_j - c_t)              d rate_k[j] = sum_t dS (c_j - c_t)
    d c_q[t]    = -sum_j dS rate_k[j] - rate_q d lse  d c_k[j]   = sum_t dS (rate_q[t] + rate_k[j])
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

from .forward import LENGTHS
from .tile import (
    LN2,
    LOG2E,
    PATCH,
    add_exactly,
    add_slopes,
    edges,
    key_range,
    load_rows,
    slope_offset,
    slope_rate,
    sound_keys,
    store_rows,
    visible,
)


@triton.jit(do_not_specialize=LENGTHS)
def delta_kernel(
    OUT, FINE, D_OUT, D_LSE, DELTA, stride_ob, stride_oh, stride_ot, H, TQ,
    EXACT: tl.constexpr, HAS_D_LSE: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM
    bh = tl.program_id(1).to(tl.int64)
    m = tl.arange(0, BM)
    i = row + m
    live = i < TQ
    out = load_rows(OUT + bh * TQ * DV, row, m, DV, live, DV, BLOCK_DV, True).to(tl.float32)
    if EXACT:
        out += load_rows(FINE + bh * TQ * DV, row, m, DV, live, DV, BLOCK_DV, True).to(tl.float32)
    D_OUT += (bh // H) * stride_ob + (bh % H) * stride_oh
    d_out = load_rows(D_OUT, row, m, stride_ot, live, DV, BLOCK_DV, True).to(tl.float32)
    delta = tl.sum(out * d_out, 1)
    if HAS_D_LSE:
        delta -= tl.load(D_LSE + bh * TQ + i, mask=live, other=0.0)
    tl.store(DELTA + bh * TQ + i, delta, mask=live)


@triton.jit(do_not_specialize=LENGTHS)
def query_kernel(
    Q, K, V, D_OUT, LSE, DELTA, RATE_Q, RATE_K, C_Q, C_K, PROBE_Q, PROBE_K, PATH_RATE, DOCS, PADDING, POISON,
    FIRST, CARRY, RIGHT, TOTAL, DQ, D_RATE, D_C, D_PROBE, D_PATH_RATE,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot, rq_b, rq_h, rk_b, rk_h, cq_b, cq_h, ck_b, ck_h,
    H, HKV, HP, TQ, TK, window, patches, heads_from, borders, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_DOCS: tl.constexpr, HAS_PADDING: tl.constexpr,
    PRUNE: tl.constexpr, R: tl.constexpr, HAS_RATE_Q: tl.constexpr, HAS_RATE_K: tl.constexpr,
    NEED_RATE: tl.constexpr, NEED_C: tl.constexpr, HAS_PATH: tl.constexpr, BOUNDED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BORDER: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, d rate_q, d c_q, d probe_q and each row's share of d rate."""
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    place = tl.program_id(1).to(tl.int64)
    bh = heads_from + place
    b, h = bh // H, bh % H
    hk = h // (H // HKV)
    m = tl.arange(0, BM)
    i = row + m
    t = i + TK - TQ
    live_q = i < TQ
    K += b * stride_kb + hk * stride_kh
    V += b * stride_vb + hk * stride_vh
    DOCS += b * TK
    PADDING += b * TK
    POISON += (b * HKV + hk) * TK
    RATE_Q += b * rq_b + h * rq_h
    RATE_K += b * rk_b + h * rk_h
    C_Q += b * cq_b + h * cq_h
    C_K += b * ck_b + h * ck_h
    q = load_rows(Q + b * stride_qb + h * stride_qh, row, m, stride_qt, live_q, D, BLOCK_D, True)
    d_out = load_rows(D_OUT + b * stride_ob + h * stride_oh, row, m, stride_ot, live_q, DV, BLOCK_DV, True)
    lse = tl.load(LSE + bh * TQ + i, mask=live_q, other=float("-inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)  # then every weight is zero
    delta = tl.load(DELTA + bh * TQ + i, mask=live_q, other=0.0)
    p = q
    rate = 0.0
    if HAS_PATH:
        bp = b * HP + h // (H // HP)
        p = load_rows(PROBE_Q + bp * TQ * P, row, m, P, live_q, P, BLOCK_P, True) * (LOG2E / P)
        PROBE_K += bp * TK * P
        rate = tl.load(PATH_RATE + h)
        CARRY += place * borders * TQ + i
        RIGHT += place * borders * TQ + i
    ours = t
    if HAS_DOCS:
        ours = tl.load(DOCS + t, mask=live_q & (t >= 0), other=-1)

    SIMPLE: tl.constexpr = not (WINDOW or HAS_DOCS or HAS_PADDING)
    begin, whole, end = key_range(
        DOCS, FIRST + bh * tl.cdiv(TQ, PATCH), row, i, t, TQ, TK, window,
        CAUSAL, WINDOW, HAS_DOCS, PRUNE, SIMPLE, BM, BN, BORDER,
    )  # fmt: skip
    dq = tl.zeros((BM, BLOCK_D), tl.float32)
    dp = tl.zeros((BM, BLOCK_P), tl.float32)
    dp_all = tl.zeros((BM, BLOCK_P), tl.float32)
    carry = tl.zeros((BM,), tl.float32)
    carry_low = tl.zeros((BM,), tl.float32)
    right = tl.zeros((BM,), tl.float32)
    d_path_rate = tl.zeros((BM,), tl.float32)
    d_rate = ()
    d_c = ()
    for _ in tl.static_range(R):
        d_rate = d_rate + (tl.zeros((BM,), tl.float32),)
        d_c = d_c + (tl.zeros((BM,), tl.float32),)
    n = tl.arange(0, BN)
    hi = end
    for phase in tl.static_range(2 if SIMPLE else 1):  # phase 0: tiles that need a mask
        lo = begin
        if SIMPLE and phase == 0:
            lo = whole
        for done in range(0, hi - lo, BN):
            top = hi - done - 1
            j = top - n
            live = sound_keys(PADDING, POISON, j, TK, HAS_PADDING, phase == 0)[0]
            k = load_rows(K, top, -n, stride_kt, live, D, BLOCK_D, phase == 0)
            v = load_rows(V, top, -n, stride_vt, live, DV, BLOCK_DV, phase == 0)
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
            x = add_slopes(
                x, RATE_Q, RATE_K, C_Q, C_K, i, j, live_q, live, TQ, TK, R, HAS_RATE_Q, HAS_RATE_K, 1
            )
            if HAS_PATH:
                border = (top // BORDER) * TQ
                at_border = live_q & ((top + 1 + 0 * i) % BORDER == 0)  # a tensor, as in keys_kernel
                tl.store(CARRY + border, carry + carry_low, mask=at_border)
                tl.store(RIGHT + border, right, mask=at_border)
                probe = load_rows(PROBE_K, top + 1, -n, P, j + 1 < TK, P, BLOCK_P, phase == 0)
                edge, slope = edges(tl.dot(p, tl.trans(probe), input_precision="tf32x3"), BOUNDED)
                if phase == 0:
                    before = j[None, :] < t[:, None]
                    edge = tl.where(before, edge, 0.0)
                    slope = tl.where(before, slope, 0.0)
                path = tl.cumsum(edge, 1) + (carry + carry_low)[:, None]
                carry, carry_low = add_exactly(carry, carry_low, tl.sum(edge, 1))
                x += rate * path
            w = tl.exp2(x - lse[:, None])
            if phase == 0:
                seen = visible(
                    PADDING, DOCS, ours, t, j, TK, window, CAUSAL, WINDOW, HAS_DOCS, HAS_PADDING, 1
                )
                w = tl.where(seen, w, 0.0)
            ds = w * (tl.dot(d_out, tl.trans(v), input_precision=PRECISION) - delta[:, None])
            if phase == 0:  # 0 * NaN would spread a row that is not finite
                ds = tl.where(seen, ds, 0.0)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
            if NEED_RATE and HAS_RATE_Q:
                more = ()
                for r in tl.static_range(R):
                    offset = slope_offset(C_Q, C_K, r, i, j, live_q, live, TQ, TK, 1)
                    more = more + (d_rate[r] + tl.sum(ds * offset, 1),)
                d_rate = more
            if NEED_C and HAS_RATE_K:
                more_c = ()
                for r in tl.static_range(R):
                    theirs = slope_rate(RATE_Q, RATE_K, r, i, j, live_q, live, TQ, TK, False, True, 1)
                    more_c = more_c + (d_c[r] - tl.sum(ds * theirs, 1),)
                d_c = more_c
            if HAS_PATH:
                d_path_rate += tl.sum(ds * path, 1)
                after = tl.cumsum(ds, 1) - ds + right[:, None]  # over the keys after j
                right += tl.sum(ds, 1)
                dp = tl.dot(slope * after, probe, dp, input_precision="tf32x3")
                dp_all = tl.dot(slope, probe, dp_all, input_precision="tf32x3")
        hi = lo

    store_rows(DQ + bh * TQ * D, row, m, D, live_q, dq * scale, D, BLOCK_D)
    if HAS_PATH:
        dp = (right[:, None] * dp_all - dp) * (rate / P)
        store_rows(D_PROBE + bh * TQ * P, row, m, P, live_q, dp, P, BLOCK_P)
        tl.store(D_PATH_RATE + bh * TQ + i, d_path_rate * LN2, mask=live_q)
        tl.store(TOTAL + place * TQ + i, right, mask=live_q)
        last = begin // BORDER  # the walk ended in this block: nothing is left of it
        tl.store(RIGHT + (last - 1) * TQ, right, mask=live_q & (last + 0 * i > 0))
    for r in tl.static_range(R):
        if NEED_RATE and HAS_RATE_Q:
            tl.store(D_RATE + (bh * R + r) * TQ + i, d_rate[r], mask=live_q)
        if NEED_C and HAS_RATE_K:
            tl.store(D_C + (bh * R + r) * TQ + i, d_c[r], mask=live_q)


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


@triton.jit(do_not_specialize=LENGTHS)
def key_kernel(
    Q, K, V, D_OUT, LSE, DELTA, RATE_Q, RATE_K, C_Q, C_K, PROBE_Q, PROBE_K, PATH_RATE, DOCS, DOC_ENDS,
    PADDING, POISON, FIRST, CARRY, RIGHT, TOTAL, DK, D_V, D_RATE, D_C, D_PROBE,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot, rq_b, rq_h, rk_b, rk_h, cq_b, cq_h, ck_b, ck_h,
    H, HKV, HP, TQ, TK, window, patches, heads_from, borders, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_DOCS: tl.constexpr, HAS_PADDING: tl.constexpr,
    PRUNE: tl.constexpr, R: tl.constexpr, HAS_RATE_Q: tl.constexpr, HAS_RATE_K: tl.constexpr,
    NEED_RATE: tl.constexpr, NEED_C: tl.constexpr, HAS_PATH: tl.constexpr, BOUNDED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv, d rate_k, d c_k and d probe_k that one query head leaves at BN keys; tiles are (BN, BM)."""
    start = tl.program_id(0) * BN
    place = tl.program_id(1).to(tl.int64)
    bh = heads_from + place
    b, h = bh // H, bh % H
    hk = h // (H // HKV)
    n = tl.arange(0, BN)
    top = start + BN - 1
    j = top - n
    DOCS += b * TK
    PADDING += b * TK
    live = sound_keys(PADDING, POISON + (b * HKV + hk) * TK, j, TK, HAS_PADDING, True)[0]
    k = load_rows(K + b * stride_kb + hk * stride_kh, top, -n, stride_kt, live, D, BLOCK_D, True)
    v = load_rows(V + b * stride_vb + hk * stride_vh, top, -n, stride_vt, live, DV, BLOCK_DV, True)
    Q += b * stride_qb + h * stride_qh
    D_OUT += b * stride_ob + h * stride_oh
    LSE += bh * TQ
    DELTA += bh * TQ
    RATE_Q += b * rq_b + h * rq_h
    RATE_K += b * rk_b + h * rk_h
    C_Q += b * cq_b + h * cq_h
    C_K += b * ck_b + h * ck_h
    FIRST += bh * tl.cdiv(TQ, PATCH)
    probe = k
    rate = 0.0
    if HAS_PATH:
        bp = b * HP + h // (H // HP)
        probe = load_rows(PROBE_K + bp * TK * P, top + 1, -n, P, j + 1 < TK, P, BLOCK_P, True) * (LOG2E / P)
        PROBE_Q += bp * TQ * P
        rate = tl.load(PATH_RATE + h)
        CARRY += (place * borders + start // BN) * TQ
        RIGHT += (place * borders + start // BN - 1) * TQ  # the border below this block
        TOTAL += place * TQ

    # Rows [begin, end) that may see these keys; from `whole` on each sees all of them.
    shift = TK - TQ
    begin = 0
    end = TQ
    if CAUSAL:
        begin = tl.maximum(begin, start - shift)
    if WINDOW:
        end = tl.minimum(end, start + BN - 1 + window - shift)
        if not CAUSAL:
            begin = tl.maximum(begin, start - window + 1 - shift)
    if HAS_DOCS and CAUSAL:
        end = tl.minimum(end, tl.max(tl.load(DOC_ENDS + b * TK + j, mask=j < TK, other=0), 0) - shift)
    if PRUNE:
        end = _last_row(FIRST, end, start + BN, TQ, 256)
    begin = begin // BM * BM
    SIMPLE: tl.constexpr = not (WINDOW or HAS_DOCS or HAS_PADDING or PRUNE)
    whole = tl.maximum(end, begin)
    if SIMPLE:
        whole = begin
        if CAUSAL:
            whole = tl.cdiv(tl.maximum(start + BN - shift, 0), BM) * BM
        if start + BN > TK:  # the last block may have fewer keys than BN
            whole = tl.maximum(end, begin)
        whole = tl.minimum(whole, tl.maximum(end, begin))
    dk = tl.zeros((BN, BLOCK_D), tl.float32)
    dv = tl.zeros((BN, BLOCK_DV), tl.float32)
    dp = tl.zeros((BN, BLOCK_P), tl.float32)
    d_rate = ()
    d_c = ()
    for _ in tl.static_range(R):
        d_rate = d_rate + (tl.zeros((BN,), tl.float32),)
        d_c = d_c + (tl.zeros((BN,), tl.float32),)
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
            lse = tl.load(LSE + i, mask=live_q, other=float("-inf"))
            # A row that is not finite has a logsumexp of NaN. It must not reach keys that it does not see.
            q = load_rows(Q, row, m, stride_qt, live_q & (lse == lse), D, BLOCK_D, True)
            d_out = load_rows(D_OUT, row, m, stride_ot, live_q, DV, BLOCK_DV, True)
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            delta = tl.load(DELTA + i, mask=live_q, other=0.0)
            x = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2E)
            x = add_slopes(
                x, RATE_Q, RATE_K, C_Q, C_K, i, j, live_q, live, TQ, TK, R, HAS_RATE_Q, HAS_RATE_K, 0
            )
            if HAS_PATH:
                p = load_rows(PROBE_Q, row, m, P, live_q, P, BLOCK_P, True)
                edge, slope = edges(tl.dot(probe, tl.trans(p), input_precision="tf32x3"), BOUNDED)
                if phase == 0:
                    edge = tl.where(j[:, None] < t[None, :], edge, 0.0)
                x += rate * (tl.cumsum(edge, 0) + tl.load(CARRY + i, mask=live_q, other=0.0)[None, :])
            w = tl.exp2(x - lse[None, :])
            first = tl.zeros_like(i)  # before it the row has no key
            if phase == 0:
                ours = t
                if HAS_DOCS:
                    ours = tl.load(DOCS + t, mask=live_q & (t >= 0), other=-1)
                    first = tl.maximum(first, ours)
                if WINDOW:
                    first = tl.maximum(first, t - window + 1)
                if PRUNE:  # what the forward left out stays left out
                    first = tl.maximum(first, tl.load(FIRST + i // PATCH, mask=live_q, other=0))
                seen = visible(
                    PADDING, DOCS, ours, t, j, TK, window, CAUSAL, WINDOW, HAS_DOCS, HAS_PADDING, 0
                )
                if PRUNE:
                    seen = seen & (j[:, None] >= first[None, :])
                w = tl.where(seen, w, 0.0)
            dv = tl.dot(w.to(d_out.dtype), d_out, dv, input_precision=PRECISION)
            ds = w * (tl.dot(v, tl.trans(d_out), input_precision=PRECISION) - delta[None, :])
            if phase == 0:
                ds = tl.where(seen, ds, 0.0)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
            if NEED_RATE and HAS_RATE_K:
                more = ()
                for r in tl.static_range(R):
                    offset = slope_offset(C_Q, C_K, r, i, j, live_q, live, TQ, TK, 0)
                    more = more + (d_rate[r] + tl.sum(ds * offset, 1),)
                d_rate = more
            if NEED_C:
                more_c = ()
                for r in tl.static_range(R):
                    both = slope_rate(
                        RATE_Q, RATE_K, r, i, j, live_q, live, TQ, TK, HAS_RATE_Q, HAS_RATE_K, 0
                    )
                    more_c = more_c + (d_c[r] + tl.sum(ds * both, 1),)
                d_c = more_c
            if HAS_PATH:
                has_left = live_q & (start + 0 * i > 0)  # before the first block there are no keys
                before = tl.load(TOTAL + i, mask=has_left, other=0.0) - tl.load(
                    RIGHT + i, mask=has_left, other=0.0
                )
                dz = slope * ((before + tl.sum(ds, 0))[None, :] - (tl.cumsum(ds, 0) - ds))
                if phase == 0:  # where the walk never came, CARRY and RIGHT hold no numbers
                    dz = tl.where((j[:, None] < t[None, :]) & (j[:, None] >= first[None, :]), dz, 0.0)
                dp = tl.dot(dz, p, dp, input_precision="tf32x3")
    inside = j < TK
    store_rows(DK + bh * TK * D, top, -n, D, inside, dk * scale, D, BLOCK_D)
    store_rows(D_V + bh * TK * DV, top, -n, DV, inside, dv, DV, BLOCK_DV)
    if HAS_PATH:
        store_rows(D_PROBE + bh * TK * P, top + 1, -n, P, j + 1 < TK, dp * (rate / P), P, BLOCK_P)
    for r in tl.static_range(R):
        if NEED_RATE and HAS_RATE_K:
            tl.store(D_RATE + (bh * R + r) * TK + j, d_rate[r], mask=inside)
        if NEED_C:
            tl.store(D_C + (bh * R + r) * TK + j, d_c[r], mask=inside)
