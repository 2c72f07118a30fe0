"""The backward kernels: weights are recomputed from the logsumexp, and nothing is added atomically.

    delta_kernel    <dO, O> of every row
    carry_kernel    (path) every row's path sum to the right of every key block, from right to left
    query_kernel    dq and what belongs to queries: one program owns BM queries, walks keys left to right
    key_kernel      (kernels_key.py) dk, dv and what belongs to keys: one program owns BN keys, walks queries

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
    products_by_chunk,
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
    state, q, p, dout, lse, delta, rate, q_base, do_base, k_base, v_base, probe_base, CARRY, LEFT,
    RATE_Q, RATE_K, CQ, CK, DOCS, PADDING, stride_qt, stride_ot, stride_kt, stride_vt, row, feature, i, t,
    live, begin, end, TQ, TK, row_count, window, scale, path_scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_DOCS: tl.constexpr,
    HAS_PADDING: tl.constexpr, R: tl.constexpr, HAS_RATE_Q: tl.constexpr, HAS_RATE_K: tl.constexpr,
    SPLIT: tl.constexpr, NEED_RATE: tl.constexpr, NEED_C: tl.constexpr,
    HAS_PATH: tl.constexpr, BOUNDED_LINK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PART_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
    HOIST: tl.constexpr, PRECISION: tl.constexpr, PATH_PRECISION: tl.constexpr,
):  # fmt: skip
    """Key blocks of [begin, end) from the left; `left` is the sum of dS over the keys already passed."""
    dq, dp, d_path_rate, mean, left, d_rate, d_c = state
    for start in tl.range(begin, end, BN, disable_licm=not HOIST):
        j = start + tl.arange(0, BN)
        if CHUNK > 0:
            x = products_by_chunk(
                q_base, row, stride_qt, TQ, k_base, start, stride_kt, TK, BM, BN, D, CHUNK, PRECISION
            )
        else:
            k = load_rows(k_base, start, stride_kt, TK, BN, D, BLOCK_D, False, MASKED)
            v = load_rows(v_base, start, stride_vt, TK, BN, DV, BLOCK_DV, True, MASKED)
            x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        x *= scale
        x = add_slopes(x, RATE_Q, RATE_K, CQ, CK, i, j, TQ, TK, R, SPLIT, HAS_RATE_Q, HAS_RATE_K, False)
        if HAS_PATH:
            block = (start // BN) * row_count
            probe = load_rows(probe_base, start + 1, P, TK, BN, P, BLOCK_P, False, MASKED)
            z = tl.dot(p, tl.trans(probe), input_precision=PATH_PRECISION) * path_scale
            edge, slope = path_edges(z, t, j, MASKED, BOUNDED_LINK, False)
            carry = tl.load(CARRY + block, mask=live, other=0.0)
            path = tl.cumsum(edge, 1, reverse=True) + carry[:, None]
            x += rate * path
        w = exp_difference(x, lse[:, None])
        if MASKED:
            seen = visible(DOCS, PADDING, t, j, TK, window, False, CAUSAL, WINDOW, HAS_DOCS, HAS_PADDING)
            w = tl.where(seen, w, 0.0)
        if HAS_PATH:
            mean += tl.sum(w * path, 1)
        if CHUNK > 0:
            dw = products_by_chunk(
                do_base, row, stride_ot, TQ, v_base, start, stride_vt, TK, BM, BN, DV, CHUNK, PRECISION
            )
        else:
            dw = tl.dot(dout, v, input_precision=PRECISION)
        if CHUNK > 0 or PART_D < BLOCK_D:
            k = load_rows(k_base, start, stride_kt, TK, BN, D, PART_D, False, MASKED, feature)
        ds = w * (dw - delta[:, None])
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
    return dq, dp, d_path_rate, mean, left, d_rate, d_c


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
    D: tl.constexpr, BLOCK_D: tl.constexpr, PART_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
    HOIST: tl.constexpr, PRECISION: tl.constexpr, PATH_PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, d rate_q, d c_q, d probe_q and each row's share of d rate, for rows of one chunk.

    Programs that share BM queries own PART_D features of dq each; the rest they all compute and write alike.
    """
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // H
    h = bh % H
    hk = h // (H // HKV)
    row = row_begin + m * BM
    feature = tl.program_id(2) * PART_D
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
    Q += b * stride_qb + h * stride_qh
    DOUT += b * stride_ob + h * stride_oh
    q = i
    dout = i
    if CHUNK == 0:
        q = load_rows(Q, row, stride_qt, TQ, BM, D, BLOCK_D, False, True)
        dout = load_rows(DOUT, row, stride_ot, TQ, BM, DV, BLOCK_DV, False, True)
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
        tl.zeros((BM, PART_D), tl.float32),
        tl.zeros((BM, BLOCK_P), tl.float32),
        tl.zeros((BM,), tl.float32),
        tl.zeros((BM,), tl.float32),
        tl.zeros((BM,), tl.float32),
        d_rate,
        d_c,
    )
    if SIMPLE:
        state = _query_walk(
            state, q, p, dout, lse, delta, rate, Q, DOUT, K, V, PROBE_K, CARRY, LEFT,
            RATE_Q, RATE_K, CQ, CK, DOCS, PADDING, stride_qt, stride_ot, stride_kt, stride_vt, row, feature,
            i, t, live, begin, whole, TQ, TK, row_count, window, scale, path_scale, False, CAUSAL, WINDOW,
            HAS_DOCS, HAS_PADDING, R, HAS_RATE_Q, HAS_RATE_K, SPLIT, NEED_RATE, NEED_C, HAS_PATH,
            BOUNDED_LINK, D, BLOCK_D, PART_D, DV, BLOCK_DV, P, BLOCK_P, BM, BN, CHUNK, HOIST,
            PRECISION, PATH_PRECISION,
        )  # fmt: skip
    state = _query_walk(
        state, q, p, dout, lse, delta, rate, Q, DOUT, K, V, PROBE_K, CARRY, LEFT,
        RATE_Q, RATE_K, CQ, CK, DOCS, PADDING, stride_qt, stride_ot, stride_kt, stride_vt, row, feature, i, t,
        live, whole, end, TQ, TK, row_count, window, scale, path_scale, True, CAUSAL, WINDOW, HAS_DOCS,
        HAS_PADDING, R, HAS_RATE_Q, HAS_RATE_K, SPLIT, NEED_RATE, NEED_C, HAS_PATH, BOUNDED_LINK,
        D, BLOCK_D, PART_D, DV, BLOCK_DV, P, BLOCK_P, BM, BN, CHUNK, HOIST, PRECISION, PATH_PRECISION,
    )  # fmt: skip

    store_rows(DQ + bh * TQ * D, row, D, TQ, state[0] * scale, BM, D, PART_D, feature)
    if HAS_PATH:
        store_rows(D_PROBE + bh * TQ * P, row, P, TQ, state[1], BM, P, BLOCK_P)
        # a row's dS adds up to zero; what rounding leaves of it is taken back with the row's weights
        tl.store(D_PATH_RATE + bh * TQ + i, state[2] - state[4] * state[3], mask=live)
    for r in tl.static_range(R):
        if NEED_RATE:
            tl.store(D_RATE + (bh * R + r) * TQ + i, state[5][r], mask=live)
        if NEED_C:
            tl.store(D_C + (bh * R + r) * TQ + i, state[6][r], mask=live)
