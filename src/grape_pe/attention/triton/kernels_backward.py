"""The backward kernels: weights are recomputed from the logsumexp, and nothing is added atomically.

    delta_kernel    <dO, O> of every row
    carry_kernel    (path) every row's path sum to the right of every key block, from right to left
    query_kernel    dq and what belongs to queries: one program owns BM queries, walks keys left to right
    key_kernel      dk, dv and what belongs to keys: one program owns BN keys, walks queries and the group

With dS the gradient of a logit (docs/kernels.md derives each line):

    d rate_q[t] =  sum_j dS (c_j - c_t)          d rate_k[j] = sum_t dS (c_j - c_t)
    d c_q[t]    = -sum_j dS rate_k[j]            d c_k[j]    = sum_t dS (rate_q[t] + rate_k[j])
    d edge(t, l) = rate * sum_{j < l} dS(t, j)

(the rate_q part of d c_q is rate_q * sum_j dS = 0: a softmax does not feel a shift of its row).
"""

# ruff: noqa: RUF005  (Triton's tuples grow by +; it does not parse a star)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from .tile_math import (
    add_exactly,
    add_slopes,
    exp_difference,
    key_range,
    load_rows,
    path_edges,
    slope_offset,
    slope_rate,
    store_rows,
    visible,
)


@triton.jit
def delta_kernel(
    OUT, DOUT, DELTA, stride_b, stride_h, stride_t, H, TQ,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM
    bh = tl.program_id(1).to(tl.int64)
    i = row + tl.arange(0, BM)
    out = load_rows(OUT + bh * TQ * DV, row, DV, TQ, BM, DV, BLOCK_DV, False, True)
    DOUT += (bh // H) * stride_b + (bh % H) * stride_h
    dout = load_rows(DOUT, row, stride_t, TQ, BM, DV, BLOCK_DV, False, True)
    tl.store(DELTA + bh * TQ + i, tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1), mask=i < TQ)


@triton.jit
def carry_kernel(
    PROBE_Q, PROBE_K, FIRST, CARRY, H, HP, TQ, TK, row_begin, row_count, borders, window, path_scale,
    WINDOW: tl.constexpr, HAS_FIRST: tl.constexpr, BOUNDED_LINK: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RATIO: tl.constexpr,
    PATH_PRECISION: tl.constexpr,
):  # fmt: skip
    """CARRY[b, h, n, row]: sum of the row's edges held right of key block n (rows of one chunk).

    Blocks are those of the query kernel; RATIO of them make one of the key kernel's, which reads the
    last of its RATIO, so the scan starts at one of the key kernel's borders.
    """
    bh = tl.program_id(1).to(tl.int64)
    row = row_begin + tl.program_id(0) * BM
    i = row + tl.arange(0, BM)
    t = i + TK - TQ
    bp = (bh // H) * HP + (bh % H) // (H // HP)
    p = load_rows(PROBE_Q + bp * TQ * P, row, P, TQ, BM, P, BLOCK_P, False, True)
    PROBE_K += bp * TK * P
    keys = key_range(FIRST, row, bh, i, TQ, TK, window, True, WINDOW, HAS_FIRST, False, BM, BN)
    begin = keys[1]
    end = tl.cdiv(keys[3], RATIO * BN) * (RATIO * BN)
    CARRY += bh * borders * row_count + i - row_begin
    high = tl.zeros((BM,), tl.float32)
    low = tl.zeros((BM,), tl.float32)
    for back in range(begin, end, BN):
        start = begin + end - BN - back
        tl.store(CARRY + (start // BN) * row_count, high + low, mask=i < row_begin + row_count)
        probe = load_rows(PROBE_K, start + 1, P, TK, BN, P, BLOCK_P, True, True)
        z = tl.dot(p, probe, input_precision=PATH_PRECISION) * path_scale
        edges = path_edges(z, t, start + tl.arange(0, BN), True, BOUNDED_LINK, False)
        high, low = add_exactly(high, low, tl.sum(edges[0], 1))


@triton.jit
def _query_walk(
    state, q, p, dout, lse, delta, rate, k_base, v_base, probe_base, CARRY, LEFT,
    RATE_Q, RATE_K, CQ, CK, DOCS, PADDING, stride_kt, stride_vt, i, t, live, begin, end, TQ, TK,
    row_count, window, scale, path_scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_DOCS: tl.constexpr,
    HAS_PADDING: tl.constexpr, R: tl.constexpr, HAS_RATE_Q: tl.constexpr, HAS_RATE_K: tl.constexpr,
    SPLIT: tl.constexpr, NEED_RATE: tl.constexpr, NEED_C: tl.constexpr,
    HAS_PATH: tl.constexpr, BOUNDED_LINK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, PATH_PRECISION: tl.constexpr,
):  # fmt: skip
    """Key blocks of [begin, end) from the left; `left` is the sum of dS over the keys already passed."""
    dq, dp, d_path_rate, left, d_rate, d_c = state
    for start in range(begin, end, BN):
        j = start + tl.arange(0, BN)
        k = load_rows(k_base, start, stride_kt, TK, BN, D, BLOCK_D, False, MASKED)
        v = load_rows(v_base, start, stride_vt, TK, BN, DV, BLOCK_DV, True, MASKED)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        x = add_slopes(x, RATE_Q, RATE_K, CQ, CK, i, j, TQ, TK, R, SPLIT, HAS_RATE_Q, HAS_RATE_K, False)
        if HAS_PATH:
            block = (start // BN) * row_count
            probe = load_rows(probe_base, start + 1, P, TK, BN, P, BLOCK_P, False, MASKED)
            z = tl.dot(p, tl.trans(probe), input_precision=PATH_PRECISION) * path_scale
            edge, slope = path_edges(z, t, j, MASKED, BOUNDED_LINK, False)
            carry = tl.load(CARRY + block, mask=live, other=0.0)
            x += rate * (tl.cumsum(edge, 1, reverse=True) + carry[:, None])
        w = exp_difference(x, lse[:, None])
        if MASKED:
            seen = visible(DOCS, PADDING, t, j, TK, window, False, CAUSAL, WINDOW, HAS_DOCS, HAS_PADDING)
            w = tl.where(seen, w, 0.0)
        ds = w * (tl.dot(dout, v, input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        if R > 0 and NEED_RATE:
            more = ()
            for r in tl.static_range(R):
                offset = slope_offset(CQ, CK, r, i, j, TQ, TK, R, SPLIT, False)
                more = more + (d_rate[r] + tl.sum(ds * offset, 1),)
            d_rate = more
        if R > 0 and NEED_C:
            more_c = ()
            for r in tl.static_range(R):
                key_rate = slope_rate(RATE_Q, RATE_K, r, i, j, TQ, TK, False, True, False)
                more_c = more_c + (d_c[r] - tl.sum(ds * key_rate, 1),)
            d_c = more_c
        if HAS_PATH:
            tl.store(LEFT + block, left, mask=live)
            passed = tl.cumsum(ds, 1) + left[:, None]
            left += tl.sum(ds, 1)
            d_path_rate += tl.sum(passed * edge, 1)
            dz = (passed * slope * (rate * path_scale)).to(probe.dtype)
            dp = tl.dot(dz, probe, dp, input_precision=PATH_PRECISION)
    return dq, dp, d_path_rate, left, d_rate, d_c


@triton.jit
def query_kernel(
    Q, K, V, DOUT, LSE, DELTA, RATE_Q, RATE_K, CQ, CK, PROBE_Q, PROBE_K, PATH_RATE, CARRY, LEFT,
    DOCS, PADDING, FIRST, DQ, D_RATE, D_C, D_PROBE, D_PATH_RATE,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot, H, HKV, HP, TQ, TK, row_begin, row_count, borders, window, scale,
    path_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_DOCS: tl.constexpr, HAS_PADDING: tl.constexpr,
    HAS_FIRST: tl.constexpr, R: tl.constexpr, HAS_RATE_Q: tl.constexpr, HAS_RATE_K: tl.constexpr,
    SPLIT: tl.constexpr, NEED_RATE: tl.constexpr, NEED_C: tl.constexpr,
    HAS_PATH: tl.constexpr, BOUNDED_LINK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, PATH_PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, d rate_q, d c_q, d probe_q and each row's share of d rate, for rows of one chunk."""
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // H
    h = bh % H
    hk = h // (H // HKV)
    row = row_begin + m * BM
    i = row + tl.arange(0, BM)
    live = i < row_begin + row_count
    t = i + TK - TQ

    K += b * stride_kb + hk * stride_kh
    V += b * stride_vb + hk * stride_vh
    DOCS += b * TK
    PADDING += b * TK
    if R > 0:
        RATE_Q += bh * R * TQ
        RATE_K += bh * R * TK
        CQ += bh * R * (1 + SPLIT) * TQ
        CK += bh * R * (1 + SPLIT) * TK
    q = load_rows(Q + b * stride_qb + h * stride_qh, row, stride_qt, TQ, BM, D, BLOCK_D, False, True)
    dout = load_rows(DOUT + b * stride_ob + h * stride_oh, row, stride_ot, TQ, BM, DV, BLOCK_DV, False, True)
    lse = tl.load(LSE + bh * TQ + i, mask=live, other=float("inf"))
    delta = tl.load(DELTA + bh * TQ + i, mask=live, other=0.0)
    p = q
    rate = 0.0
    if HAS_PATH:
        bp = b * HP + h // (H // HP)
        p = load_rows(PROBE_Q + bp * TQ * P, row, P, TQ, BM, P, BLOCK_P, False, True)
        PROBE_K += bp * TK * P
        rate = tl.load(PATH_RATE + bh)
        CARRY += bh * borders * row_count + i - row_begin
        LEFT += bh * borders * row_count + i - row_begin

    SIMPLE: tl.constexpr = not (WINDOW or HAS_DOCS or HAS_PADDING)
    _, begin, whole, end = key_range(
        FIRST, row, bh, i, TQ, TK, window, CAUSAL, WINDOW, HAS_FIRST, SIMPLE, BM, BN
    )
    d_rate = ()
    d_c = ()
    for _ in tl.static_range(R):
        d_rate = d_rate + (tl.zeros((BM,), tl.float32),)
        d_c = d_c + (tl.zeros((BM,), tl.float32),)
    state = (
        tl.zeros((BM, BLOCK_D), tl.float32),
        tl.zeros((BM, BLOCK_P), tl.float32),
        tl.zeros((BM,), tl.float32),
        tl.zeros((BM,), tl.float32),
        d_rate,
        d_c,
    )
    if SIMPLE:
        state = _query_walk(
            state, q, p, dout, lse, delta, rate, K, V, PROBE_K, CARRY, LEFT,
            RATE_Q, RATE_K, CQ, CK, DOCS, PADDING, stride_kt, stride_vt, i, t, live, begin, whole, TQ, TK,
            row_count, window, scale, path_scale, False, CAUSAL, WINDOW, HAS_DOCS, HAS_PADDING,
            R, HAS_RATE_Q, HAS_RATE_K, SPLIT, NEED_RATE, NEED_C, HAS_PATH, BOUNDED_LINK,
            D, BLOCK_D, DV, BLOCK_DV, P, BLOCK_P, BN, PRECISION, PATH_PRECISION,
        )  # fmt: skip
    state = _query_walk(
        state, q, p, dout, lse, delta, rate, K, V, PROBE_K, CARRY, LEFT,
        RATE_Q, RATE_K, CQ, CK, DOCS, PADDING, stride_kt, stride_vt, i, t, live, whole, end, TQ, TK,
        row_count, window, scale, path_scale, True, CAUSAL, WINDOW, HAS_DOCS, HAS_PADDING,
        R, HAS_RATE_Q, HAS_RATE_K, SPLIT, NEED_RATE, NEED_C, HAS_PATH, BOUNDED_LINK,
        D, BLOCK_D, DV, BLOCK_DV, P, BLOCK_P, BN, PRECISION, PATH_PRECISION,
    )  # fmt: skip

    store_rows(DQ + bh * TQ * D, row, D, TQ, state[0] * scale, BM, D, BLOCK_D)
    if HAS_PATH:
        store_rows(D_PROBE + bh * TQ * P, row, P, TQ, state[1], BM, P, BLOCK_P)
        tl.store(D_PATH_RATE + bh * TQ + i, state[2], mask=live)
    for r in tl.static_range(R):
        if NEED_RATE:
            tl.store(D_RATE + (bh * R + r) * TQ + i, state[4][r], mask=live)
        if NEED_C:
            tl.store(D_C + (bh * R + r) * TQ + i, state[5][r], mask=live)


@triton.jit
def _key_walk(
    state, k, v, probe, rate, q_base, do_base, probe_base, LSE, DELTA, CARRY, LEFT,
    RATE_Q, RATE_K, CQ, CK, DOCS, PADDING, stride_qt, stride_ot, j, begin, end, TQ, TK,
    row_begin, row_end, window, scale, path_scale,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, HAS_DOCS: tl.constexpr, HAS_PADDING: tl.constexpr,
    R: tl.constexpr, HAS_RATE_Q: tl.constexpr, HAS_RATE_K: tl.constexpr,
    SPLIT: tl.constexpr, NEED_RATE: tl.constexpr, NEED_C: tl.constexpr,
    HAS_PATH: tl.constexpr, BOUNDED_LINK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BM: tl.constexpr,
    PRECISION: tl.constexpr, PATH_PRECISION: tl.constexpr,
):  # fmt: skip
    """Query blocks of [begin, end) against one block of keys; tiles are (BN, BM)."""
    dk, dv, dp, d_rate, d_c = state
    for row in range(begin, end, BM):
        i = row + tl.arange(0, BM)
        t = i + TK - TQ
        live = i < row_end
        q = load_rows(q_base, row, stride_qt, row_end, BM, D, BLOCK_D, False, True)
        dout = load_rows(do_base, row, stride_ot, row_end, BM, DV, BLOCK_DV, False, True)
        lse = tl.load(LSE + i, mask=live, other=float("inf"))
        x = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
        x = add_slopes(x, RATE_Q, RATE_K, CQ, CK, i, j, TQ, TK, R, SPLIT, HAS_RATE_Q, HAS_RATE_K, True)
        if HAS_PATH:
            p = load_rows(probe_base, row, P, row_end, BM, P, BLOCK_P, False, True)
            z = tl.dot(probe, tl.trans(p), input_precision=PATH_PRECISION) * path_scale
            edge, slope = path_edges(z, t, j, MASKED, BOUNDED_LINK, True)
            x += rate * tl.cumsum(edge, 0, reverse=True)
            # One vector over queries instead of two: registers are what this kernel is short of.
            lse -= rate * tl.load(CARRY + i - row_begin, mask=live, other=0.0)
        w = exp_difference(x, lse[None, :])
        if MASKED:
            seen = visible(DOCS, PADDING, t, j, TK, window, True, CAUSAL, WINDOW, HAS_DOCS, HAS_PADDING)
            w = tl.where(seen, w, 0.0)
        if WANT_DV:
            dv = tl.dot(w.to(dout.dtype), dout, dv, input_precision=PRECISION)
        ds = w
        if WANT_DK:
            delta = tl.load(DELTA + i, mask=live, other=0.0)
            ds = w * (tl.dot(v, tl.trans(dout), input_precision=PRECISION) - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        if WANT_DK and R > 0 and NEED_RATE:
            more = ()
            for r in tl.static_range(R):
                offset = slope_offset(CQ, CK, r, i, j, TQ, TK, R, SPLIT, True)
                more = more + (d_rate[r] + tl.sum(ds * offset, 1),)
            d_rate = more
        if WANT_DK and R > 0 and NEED_C:
            more_c = ()
            for r in tl.static_range(R):
                any_rate = slope_rate(RATE_Q, RATE_K, r, i, j, TQ, TK, HAS_RATE_Q, HAS_RATE_K, True)
                more_c = more_c + (d_c[r] + tl.sum(ds * any_rate, 1),)
            d_c = more_c
        if WANT_DK and HAS_PATH:
            left = tl.load(LEFT + i - row_begin, mask=live, other=0.0)
            passed = tl.cumsum(ds, 0) + left[None, :]
            dz = (passed * slope * (rate * path_scale)).to(p.dtype)
            dp = tl.dot(dz, p, dp, input_precision=PATH_PRECISION)
    return dk, dv, dp, d_rate, d_c


@triton.jit(do_not_specialize=["member"])
def key_kernel(
    Q, K, V, DOUT, LSE, DELTA, RATE_Q, RATE_K, CQ, CK, PROBE_Q, PROBE_K, PATH_RATE, CARRY, LEFT,
    DOCS, PADDING, LAST, DK, DV_OUT, D_RATE, D_C, D_PROBE,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot, H, HKV, HP, member, TQ, TK, row_begin, row_count, borders, window,
    scale, path_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_DOCS: tl.constexpr, HAS_PADDING: tl.constexpr,
    HAS_LAST: tl.constexpr, ADD: tl.constexpr, ADD_BIAS: tl.constexpr,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
    R: tl.constexpr, HAS_RATE_Q: tl.constexpr, HAS_RATE_K: tl.constexpr,
    SPLIT: tl.constexpr, NEED_RATE: tl.constexpr, NEED_C: tl.constexpr,
    HAS_PATH: tl.constexpr, BOUNDED_LINK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RATIO: tl.constexpr,
    PRECISION: tl.constexpr, PATH_PRECISION: tl.constexpr,
):  # fmt: skip
    """What one query head of each group (`member`) leaves at BN keys: dk, dv, d rate_k, d c_k, d probe_k.

    ADD: dk and dv continue what the group's earlier members or earlier chunks of queries wrote, one
    launch after another, so sums have one order (a loop over the group in here costs 100 registers).
    ADD_BIAS: the same for what belongs to a query head, where only chunks follow one another.
    Where registers do not hold both accumulators, one launch WANTs dk (and all of the bias), another dv.
    """
    n = tl.program_id(0)
    bk = tl.program_id(1).to(tl.int64)
    b = bk // HKV
    hk = bk % HKV
    start = n * BN
    j = start + tl.arange(0, BN)
    shift = TK - TQ
    row_end = row_begin + row_count
    blocks = tl.cdiv(TK, BN)
    DOCS += b * TK
    PADDING += b * TK
    k = load_rows(K + b * stride_kb + hk * stride_kh, start, stride_kt, TK, BN, D, BLOCK_D, False, True)
    v = k
    if WANT_DK:
        v = load_rows(V + b * stride_vb + hk * stride_vh, start, stride_vt, TK, BN, DV, BLOCK_DV, False, True)

    # Rows [begin, end) that may see these keys; from `whole` on every one sees all of them.
    begin = 0
    end = TQ
    if CAUSAL:
        begin = tl.maximum(begin, start - shift)
    if WINDOW:
        end = tl.minimum(end, start + BN - 1 + window - shift)
        if not CAUSAL:
            begin = tl.maximum(begin, start - window + 1 - shift)
    begin = tl.maximum(begin, row_begin) // BM * BM
    end = tl.minimum(end, row_end)
    SIMPLE: tl.constexpr = not (WINDOW or HAS_DOCS or HAS_PADDING)

    h = hk * (H // HKV) + member
    bh = b * H + h
    stop = end
    if HAS_LAST:
        stop = tl.minimum(stop, tl.load(LAST + bh * blocks + n))
    whole = stop
    if SIMPLE:
        whole = begin
        if CAUSAL:
            whole = tl.cdiv(tl.maximum(start + BN - shift, 0), BM) * BM
        whole = tl.minimum(tl.maximum(whole, begin), tl.cdiv(tl.maximum(stop, begin), BM) * BM)
    q_base = Q + b * stride_qb + h * stride_qh
    do_base = DOUT + b * stride_ob + h * stride_oh
    probe = k
    probe_base = PROBE_Q
    rate = 0.0
    if HAS_PATH:
        bp = b * HP + h // (H // HP)
        probe = load_rows(PROBE_K + bp * TK * P, start + 1, P, TK, BN, P, BLOCK_P, False, True)
        probe_base = PROBE_Q + bp * TQ * P
        rate = tl.load(PATH_RATE + bh)
    d_rate = ()
    d_c = ()
    for _ in tl.static_range(R):
        d_rate = d_rate + (tl.zeros((BN,), tl.float32),)
        d_c = d_c + (tl.zeros((BN,), tl.float32),)
    state = (
        tl.zeros((BN, BLOCK_D), tl.float32),
        tl.zeros((BN, BLOCK_DV), tl.float32),
        tl.zeros((BN, BLOCK_P), tl.float32),
        d_rate,
        d_c,
    )
    right = (bh * borders + n * RATIO + RATIO - 1) * row_count
    left = (bh * borders + n * RATIO) * row_count
    state = _key_walk(
        state, k, v, probe, rate, q_base, do_base, probe_base, LSE + bh * TQ, DELTA + bh * TQ,
        CARRY + right, LEFT + left, RATE_Q + bh * R * TQ, RATE_K + bh * R * TK,
        CQ + bh * R * (1 + SPLIT) * TQ, CK + bh * R * (1 + SPLIT) * TK, DOCS, PADDING,
        stride_qt, stride_ot, j, begin, whole, TQ, TK, row_begin, row_end, window, scale, path_scale,
        WANT_DK, WANT_DV, True, CAUSAL, WINDOW, HAS_DOCS, HAS_PADDING, R, HAS_RATE_Q, HAS_RATE_K, SPLIT,
        NEED_RATE, NEED_C, HAS_PATH, BOUNDED_LINK, D, BLOCK_D, DV, BLOCK_DV, P, BLOCK_P, BM,
        PRECISION, PATH_PRECISION,
    )  # fmt: skip
    if SIMPLE:
        state = _key_walk(
            state, k, v, probe, rate, q_base, do_base, probe_base, LSE + bh * TQ, DELTA + bh * TQ,
            CARRY + right, LEFT + left, RATE_Q + bh * R * TQ, RATE_K + bh * R * TK,
            CQ + bh * R * (1 + SPLIT) * TQ, CK + bh * R * (1 + SPLIT) * TK, DOCS, PADDING,
            stride_qt, stride_ot, j, whole, stop, TQ, TK, row_begin, row_end, window, scale, path_scale,
            WANT_DK, WANT_DV, False, CAUSAL, WINDOW, HAS_DOCS, HAS_PADDING, R, HAS_RATE_Q, HAS_RATE_K,
            SPLIT, NEED_RATE, NEED_C, HAS_PATH, BOUNDED_LINK, D, BLOCK_D, DV, BLOCK_DV, P, BLOCK_P, BM,
            PRECISION, PATH_PRECISION,
        )  # fmt: skip
    dk = state[0]
    dv = state[1]
    if WANT_DK and HAS_PATH:
        dp = state[2]
        if ADD_BIAS:
            dp += load_rows(D_PROBE + bh * TK * P, start + 1, P, TK, BN, P, BLOCK_P, False, True)
        store_rows(D_PROBE + bh * TK * P, start + 1, P, TK, dp, BN, P, BLOCK_P)
    for r in tl.static_range(R):
        if WANT_DK and NEED_RATE:
            _store_sum(D_RATE + (bh * R + r) * TK + j, state[3][r], j < TK, ADD_BIAS)
        if WANT_DK and NEED_C:
            _store_sum(D_C + (bh * R + r) * TK + j, state[4][r], j < TK, ADD_BIAS)
    if WANT_DK:
        dk *= scale
        if ADD:
            dk += load_rows(DK + bk * TK * D, start, D, TK, BN, D, BLOCK_D, False, True)
        store_rows(DK + bk * TK * D, start, D, TK, dk, BN, D, BLOCK_D)
    if WANT_DV:
        if ADD:
            dv += load_rows(DV_OUT + bk * TK * DV, start, DV, TK, BN, DV, BLOCK_DV, False, True)
        store_rows(DV_OUT + bk * TK * DV, start, DV, TK, dv, BN, DV, BLOCK_DV)


@triton.jit
def _store_sum(pointers, value, keep, ADD: tl.constexpr):
    if ADD:
        value += tl.load(pointers, mask=keep, other=0.0)
    tl.store(pointers, value, mask=keep)
