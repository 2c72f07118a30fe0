"""The backward kernel that owns keys: dk, dv and what belongs to keys (see kernels_backward.py)."""

# ruff: noqa: RUF005  (Triton's tuples grow by +; it does not parse a star)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from .tile_math import (
    add_slopes,
    exp_difference,
    load_rows,
    path_edges,
    products_by_chunk,
    slope_offset,
    slope_rate,
    store_rows,
    visible,
)


@triton.jit
def _key_walk(
    state, k, v, probe, rate, q_base, do_base, k_base, v_base, probe_base, LSE, DELTA, CARRY, LEFT,
    RATE_Q, RATE_K, CQ, CK, DOCS, PADDING, stride_qt, stride_ot, stride_kt, stride_vt, start, j, part,
    begin, end, TQ, TK, row_begin, row_end, window, scale, path_scale,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, HAS_DOCS: tl.constexpr, HAS_PADDING: tl.constexpr,
    R: tl.constexpr, HAS_RATE_Q: tl.constexpr, HAS_RATE_K: tl.constexpr,
    SPLIT: tl.constexpr, NEED_RATE: tl.constexpr, NEED_C: tl.constexpr,
    HAS_PATH: tl.constexpr, BOUNDED_LINK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PART_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PART_DV: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
    HOIST: tl.constexpr, PRECISION: tl.constexpr, PATH_PRECISION: tl.constexpr,
):  # fmt: skip
    """Query blocks of [begin, end) against one block of keys; tiles are (BN, BM)."""
    dk, dv, dp, d_rate, d_c = state
    for row in tl.range(begin, end, BM, disable_licm=not HOIST):
        i = row + tl.arange(0, BM)
        t = i + TK - TQ
        live = i < row_end
        lse = tl.load(LSE + i, mask=live, other=float("inf"))
        if CHUNK > 0:
            x = products_by_chunk(
                k_base, start, stride_kt, TK, q_base, row, stride_qt, row_end, BN, BM, D, CHUNK, PRECISION
            )
        else:
            q = load_rows(q_base, row, stride_qt, row_end, BM, D, BLOCK_D, False, True)
            dout = load_rows(do_base, row, stride_ot, row_end, BM, DV, BLOCK_DV, False, True)
            x = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        x *= scale
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
            if CHUNK > 0 or PART_DV < BLOCK_DV:
                dout = load_rows(
                    do_base, row, stride_ot, row_end, BM, DV, PART_DV, False, True, part * PART_DV
                )
            dv = tl.dot(w.to(dout.dtype), dout, dv, input_precision=PRECISION)
        ds = w
        if WANT_DK:
            delta = tl.load(DELTA + i, mask=live, other=0.0)
            if CHUNK > 0:
                dw = products_by_chunk(
                    v_base, start, stride_vt, TK, do_base, row, stride_ot, row_end,
                    BN, BM, DV, CHUNK, PRECISION,
                )  # fmt: skip
            else:
                dw = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
            if CHUNK > 0 or PART_D < BLOCK_D:
                q = load_rows(q_base, row, stride_qt, row_end, BM, D, PART_D, False, True, part * PART_D)
            ds = w * (dw - delta[None, :])
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
    D: tl.constexpr, BLOCK_D: tl.constexpr, PART_D: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PART_DV: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RATIO: tl.constexpr,
    CHUNK: tl.constexpr, HOIST: tl.constexpr, PRECISION: tl.constexpr, PATH_PRECISION: tl.constexpr,
):  # fmt: skip
    """What one query head of each group (`member`) leaves at BN keys: dk, dv, d rate_k, d c_k, d probe_k.

    ADD: dk and dv continue what the group's earlier members or earlier chunks of queries wrote, one
    launch after another, so sums have one order (a loop over the group in here costs 100 registers).
    ADD_BIAS: the same for what belongs to a query head, where only chunks follow one another.
    Where registers do not hold both accumulators, one launch WANTs dk (and all of the bias), another dv;
    where they do not even hold one, programs that share BN keys own PART_D (PART_DV) features of it each.
    """
    n = tl.program_id(0)
    part = tl.program_id(2)
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
    K += b * stride_kb + hk * stride_kh
    V += b * stride_vb + hk * stride_vh
    k = j
    if CHUNK == 0:
        k = load_rows(K, start, stride_kt, TK, BN, D, BLOCK_D, False, True)
    v = k
    if WANT_DK and CHUNK == 0:
        v = load_rows(V, start, stride_vt, TK, BN, DV, BLOCK_DV, False, True)

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
        tl.zeros((BN, PART_D), tl.float32),
        tl.zeros((BN, PART_DV), tl.float32),
        tl.zeros((BN, BLOCK_P), tl.float32),
        d_rate,
        d_c,
    )
    right = (bh * borders + n * RATIO + RATIO - 1) * row_count
    left = (bh * borders + n * RATIO) * row_count
    state = _key_walk(
        state, k, v, probe, rate, q_base, do_base, K, V, probe_base, LSE + bh * TQ, DELTA + bh * TQ,
        CARRY + right, LEFT + left, RATE_Q + bh * R * TQ, RATE_K + bh * R * TK,
        CQ + bh * R * (1 + SPLIT) * TQ, CK + bh * R * (1 + SPLIT) * TK, DOCS, PADDING,
        stride_qt, stride_ot, stride_kt, stride_vt, start, j, part, begin, whole, TQ, TK, row_begin,
        row_end, window, scale, path_scale,
        WANT_DK, WANT_DV, True, CAUSAL, WINDOW, HAS_DOCS, HAS_PADDING, R, HAS_RATE_Q, HAS_RATE_K, SPLIT,
        NEED_RATE, NEED_C, HAS_PATH, BOUNDED_LINK, D, BLOCK_D, PART_D, DV, BLOCK_DV, PART_DV, P, BLOCK_P,
        BM, BN, CHUNK, HOIST, PRECISION, PATH_PRECISION,
    )  # fmt: skip
    if SIMPLE:
        state = _key_walk(
            state, k, v, probe, rate, q_base, do_base, K, V, probe_base, LSE + bh * TQ, DELTA + bh * TQ,
            CARRY + right, LEFT + left, RATE_Q + bh * R * TQ, RATE_K + bh * R * TK,
            CQ + bh * R * (1 + SPLIT) * TQ, CK + bh * R * (1 + SPLIT) * TK, DOCS, PADDING,
            stride_qt, stride_ot, stride_kt, stride_vt, start, j, part, whole, stop, TQ, TK, row_begin,
            row_end, window, scale, path_scale,
            WANT_DK, WANT_DV, False, CAUSAL, WINDOW, HAS_DOCS, HAS_PADDING, R, HAS_RATE_Q, HAS_RATE_K,
            SPLIT, NEED_RATE, NEED_C, HAS_PATH, BOUNDED_LINK, D, BLOCK_D, PART_D, DV, BLOCK_DV, PART_DV,
            P, BLOCK_P, BM, BN, CHUNK, HOIST, PRECISION, PATH_PRECISION,
        )  # fmt: skip
    dk = state[0]
    dv = state[1]
    if WANT_DK:
        if part == 0:
            if HAS_PATH:
                dp = state[2]
                if ADD_BIAS:
                    dp += load_rows(D_PROBE + bh * TK * P, start + 1, P, TK, BN, P, BLOCK_P, False, True)
                store_rows(D_PROBE + bh * TK * P, start + 1, P, TK, dp, BN, P, BLOCK_P)
            for r in tl.static_range(R):
                if NEED_RATE:
                    _store_sum(D_RATE + (bh * R + r) * TK + j, state[3][r], j < TK, ADD_BIAS)
                if NEED_C:
                    _store_sum(D_C + (bh * R + r) * TK + j, state[4][r], j < TK, ADD_BIAS)
        dk *= scale
        feature = part * PART_D
        if ADD:
            dk += load_rows(DK + bk * TK * D, start, D, TK, BN, D, PART_D, False, True, feature)
        store_rows(DK + bk * TK * D, start, D, TK, dk, BN, D, PART_D, feature)
    if WANT_DV:
        feature_v = part * PART_DV
        if ADD:
            dv += load_rows(DV_OUT + bk * TK * DV, start, DV, TK, BN, DV, PART_DV, False, True, feature_v)
        store_rows(DV_OUT + bk * TK * DV, start, DV, TK, dv, BN, DV, PART_DV, feature_v)


@triton.jit
def _store_sum(pointers, value, keep, ADD: tl.constexpr):
    if ADD:
        value += tl.load(pointers, mask=keep, other=0.0)
    tl.store(pointers, value, mask=keep)
