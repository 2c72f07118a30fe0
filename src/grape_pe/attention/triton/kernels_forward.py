"""The forward kernel: one program owns BM queries of one head and walks its keys from right to left.

Right to left, because a path sum grows with distance: the only thing carried between key blocks is a
row's sum so far, and once every row's sum is low enough the walk can stop.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

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
    store_rows,
    visible,
)


@triton.jit
def _softmax_step(acc, total, peak, x, v, PRECISION: tl.constexpr):
    """Fold one tile of logits into the running output, sum of weights and maximum."""
    higher = tl.maximum(peak, tl.max(x, 1))
    # A row that has seen nothing yet has maximum -inf; any finite stand-in gives weights exp(-inf) = 0.
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    weights = exp_difference(x, anchor[:, None])
    fade = exp_difference(peak, anchor)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, total, higher


@triton.jit
def _walk(
    state, q, p, rate, q_base, k_base, v_base, probe_base, RATE_Q, RATE_K, CQ, CK, DOCS, PADDING,
    stride_qt, stride_kt, stride_vt, row, feature, i, t, begin, end, TQ, TK, window, scale, path_scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_DOCS: tl.constexpr,
    HAS_PADDING: tl.constexpr, R: tl.constexpr, HAS_RATE_Q: tl.constexpr, HAS_RATE_K: tl.constexpr,
    SPLIT: tl.constexpr, HAS_PATH: tl.constexpr, BOUNDED_LINK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, PART_DV: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
    HOIST: tl.constexpr, PRECISION: tl.constexpr, PATH_PRECISION: tl.constexpr,
):  # fmt: skip
    """Key blocks of [begin, end), both multiples of BN, from the right."""
    acc, total, peak, sum_high, sum_low = state
    for back in tl.range(begin, end, BN, disable_licm=not HOIST):
        start = begin + end - BN - back
        j = start + tl.arange(0, BN)
        if CHUNK > 0:
            x = products_by_chunk(
                q_base, row, stride_qt, TQ, k_base, start, stride_kt, TK, BM, BN, D, CHUNK, PRECISION
            )
        else:
            k = load_rows(k_base, start, stride_kt, TK, BN, D, BLOCK_D, True, MASKED)
            x = tl.dot(q, k, input_precision=PRECISION)
        x *= scale
        x = add_slopes(x, RATE_Q, RATE_K, CQ, CK, i, j, TQ, TK, R, SPLIT, HAS_RATE_Q, HAS_RATE_K, False)
        if HAS_PATH:
            probe = load_rows(probe_base, start + 1, P, TK, BN, P, BLOCK_P, True, MASKED)
            z = tl.dot(p, probe, input_precision=PATH_PRECISION) * path_scale
            edge = path_edges(z, t, j, MASKED, BOUNDED_LINK, False)[0]
            x += rate * (tl.cumsum(edge, 1, reverse=True) + (sum_high + sum_low)[:, None])
            sum_high, sum_low = add_exactly(sum_high, sum_low, tl.sum(edge, 1))
        if MASKED:
            seen = visible(DOCS, PADDING, t, j, TK, window, False, CAUSAL, WINDOW, HAS_DOCS, HAS_PADDING)
            x = tl.where(seen, x, float("-inf"))
        v = load_rows(v_base, start, stride_vt, TK, BN, DV, PART_DV, False, MASKED, feature)
        acc, total, peak = _softmax_step(acc, total, peak, x, v, PRECISION)
    return acc, total, peak, sum_high, sum_low


@triton.jit
def forward_kernel(
    Q, K, V, OUT, LSE, RATE_Q, RATE_K, CQ, CK, PROBE_Q, PROBE_K, PATH_RATE,
    DOCS, PADDING, FIRST, STOP, KEY_NORM,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    H, HKV, HP, TQ, TK, window, scale, path_scale, tau,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_DOCS: tl.constexpr, HAS_PADDING: tl.constexpr,
    HAS_FIRST: tl.constexpr, EARLY_STOP: tl.constexpr,
    R: tl.constexpr, HAS_RATE_Q: tl.constexpr, HAS_RATE_K: tl.constexpr, SPLIT: tl.constexpr,
    HAS_PATH: tl.constexpr, BOUNDED_LINK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, PART_DV: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STRIDE: tl.constexpr,
    CHUNK: tl.constexpr, HOIST: tl.constexpr, PRECISION: tl.constexpr, PATH_PRECISION: tl.constexpr,
):  # fmt: skip
    """out and logsumexp of BM queries; +inf marks a row that sees no key, so its weights are zero later.

    Programs that share BM queries own PART_DV features of the output each, and agree on everything else.
    """
    # The last rows have the most keys: start them first.
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // H
    h = bh % H
    hk = h // (H // HKV)
    row = m * BM
    feature = tl.program_id(2) * PART_DV
    i = row + tl.arange(0, BM)
    t = i + TK - TQ

    Q += b * stride_qb + h * stride_qh
    K += b * stride_kb + hk * stride_kh
    V += b * stride_vb + hk * stride_vh
    DOCS += b * TK
    PADDING += b * TK
    if R > 0:
        RATE_Q += bh * R * TQ
        RATE_K += bh * R * TK
        CQ += bh * R * (1 + SPLIT) * TQ
        CK += bh * R * (1 + SPLIT) * TK

    q = i
    if CHUNK == 0:
        q = load_rows(Q, row, stride_qt, TQ, BM, D, BLOCK_D, False, True)
    p = q
    rate = 0.0
    if HAS_PATH:
        bp = b * HP + h // (H // HP)
        p = load_rows(PROBE_Q + bp * TQ * P, row, P, TQ, BM, P, BLOCK_P, False, True)
        PROBE_K += bp * TK * P
        rate = tl.load(PATH_RATE + bh)

    SIMPLE: tl.constexpr = not (WINDOW or HAS_DOCS or HAS_PADDING)
    first, begin, whole, end = key_range(
        FIRST, row, bh, i, TQ, TK, window, CAUSAL, WINDOW, HAS_FIRST, SIMPLE, BM, BN
    )

    state = (
        tl.zeros((BM, PART_DV), tl.float32),
        tl.zeros((BM,), tl.float32),
        tl.full((BM,), float("-inf"), tl.float32),
        tl.zeros((BM,), tl.float32),
        tl.zeros((BM,), tl.float32),
    )
    if SIMPLE:
        state = _walk(
            state, q, p, rate, Q, K, V, PROBE_K, RATE_Q, RATE_K, CQ, CK, DOCS, PADDING,
            stride_qt, stride_kt, stride_vt, row, feature, i, t, whole, end, TQ, TK,
            window, scale, path_scale, True, CAUSAL, WINDOW, HAS_DOCS, HAS_PADDING, R, HAS_RATE_Q, HAS_RATE_K,
            SPLIT, HAS_PATH, BOUNDED_LINK, D, BLOCK_D, DV, PART_DV,
            P, BLOCK_P, BM, BN, CHUNK, HOIST, PRECISION, PATH_PRECISION,
        )  # fmt: skip
    else:
        whole = end  # any tile may need a mask
    if EARLY_STOP:
        if CHUNK > 0:
            square = tl.zeros((BM,), tl.float32)
            for d in range(0, D, CHUNK):
                piece = load_rows(Q, row, stride_qt, TQ, BM, D, CHUNK, False, True, d).to(tl.float32)
                square += tl.sum(piece * piece, 1)
        else:
            square = tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)
        reach = tl.sqrt(square) * tl.load(KEY_NORM + b * HKV + hk) * tl.abs(scale)
        stop = whole
        go = stop > begin
        while go:
            left = tl.maximum(begin, stop - STRIDE * BN)
            state = _walk(
                state, q, p, rate, Q, K, V, PROBE_K, RATE_Q, RATE_K, CQ, CK, DOCS, PADDING,
                stride_qt, stride_kt, stride_vt, row, feature, i, t, left, stop, TQ, TK,
                window, scale, path_scale, not SIMPLE, CAUSAL, WINDOW, HAS_DOCS, HAS_PADDING,
                R, HAS_RATE_Q, HAS_RATE_K, SPLIT, HAS_PATH, BOUNDED_LINK, D, BLOCK_D, DV, PART_DV,
                P, BLOCK_P, BM, BN, CHUNK, HOIST, PRECISION, PATH_PRECISION,
            )  # fmt: skip
            stop = left
            # No key further left can exceed this: edges are never positive, |q.k| <= |q| max|k|.
            best = reach + rate * (state[3] + state[4]) - state[2]
            worst = tl.max(tl.where(i < TQ, best, float("-inf")), 0)
            go = (stop > begin) & (worst > -tau)
        tl.store(STOP + bh * TQ + i, tl.maximum(first, stop) + tl.zeros((BM,), tl.int32), mask=i < TQ)
    else:
        state = _walk(
            state, q, p, rate, Q, K, V, PROBE_K, RATE_Q, RATE_K, CQ, CK, DOCS, PADDING,
            stride_qt, stride_kt, stride_vt, row, feature, i, t, begin, whole, TQ, TK,
            window, scale, path_scale, not SIMPLE, CAUSAL, WINDOW, HAS_DOCS, HAS_PADDING,
            R, HAS_RATE_Q, HAS_RATE_K, SPLIT, HAS_PATH, BOUNDED_LINK, D, BLOCK_D, DV, PART_DV,
            P, BLOCK_P, BM, BN, CHUNK, HOIST, PRECISION, PATH_PRECISION,
        )  # fmt: skip

    acc, total, peak = state[0], state[1], state[2]
    lse = tl.where(total == 0.0, float("inf"), peak + tl.log(total))
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(LSE + bh * TQ + i, lse, mask=i < TQ)
    store_rows(OUT + bh * TQ * DV, row, DV, TQ, out, BM, DV, PART_DV, feature)
