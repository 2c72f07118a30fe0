"""Kernels for few queries: the keys are split over programs, and the query heads that share keys are packed.

A program holds PACK query heads x TQ queries as the rows of one tile and walks its part of the keys from
the last to the first. `combine_kernel` then merges the parts. The path sum of a part starts at zero; what
the later parts add to it is the same for all its keys, so it is added when the parts are merged.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from .forward import LENGTHS
from .tile import LOG2E, edges, live_keys, load_rows, logsumexp, visible

DECODE_LENGTHS = [*LENGTHS, "key_from", "part_keys"]


@triton.jit(do_not_specialize=DECODE_LENGTHS)
def decode_kernel(
    Q, K, V, PARTS, STATS, RATE_Q, RATE_K, C_Q, C_K, PROBE_Q, PROBE_K, PATH_RATE, DOCS, PADDING,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    rq_b, rq_h, rk_b, rk_h, cq_b, cq_h, ck_b, ck_h, H, HKV, HP, TQ, TK, window, key_from, part_keys, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_DOCS: tl.constexpr, HAS_PADDING: tl.constexpr,
    EXACT: tl.constexpr, R: tl.constexpr, HAS_RATE_Q: tl.constexpr, HAS_RATE_K: tl.constexpr,
    HAS_PATH: tl.constexpr, BOUNDED: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """PARTS[b, h, i, part] the sum of weighted values; STATS the maximum, the sum of weights and of edges."""
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    packs = H // PACK
    b = (tl.program_id(1) // packs).to(tl.int64)
    first_head = tl.program_id(1) % packs * PACK
    hk = first_head // (H // HKV)
    m = tl.arange(0, BM)
    live_q = m < PACK * TQ
    h = first_head + tl.where(live_q, m // TQ, 0)
    i = m % TQ
    t = i + TK - TQ
    d = tl.arange(0, BLOCK_D)
    q_rows = Q + b * stride_qb + h * stride_qh + i * stride_qt
    q = tl.load(q_rows[:, None] + d[None, :], mask=live_q[:, None] & (d < D)[None, :], other=0.0)
    K += b * stride_kb + hk * stride_kh
    V += b * stride_vb + hk * stride_vh
    DOCS += b * TK
    PADDING += b * TK
    p = q
    rate = tl.zeros((BM,), tl.float32)
    if HAS_PATH:
        bp = b * HP + first_head // (H // HP)
        p = load_rows(PROBE_Q + bp * TQ * P, 0, i, P, live_q, P, BLOCK_P, True) * (LOG2E / P)
        PROBE_K += bp * TK * P
        rate = tl.load(PATH_RATE + h, mask=live_q, other=0.0)
    ours = t
    if HAS_DOCS:
        ours = tl.load(DOCS + t, mask=live_q & (t >= 0), other=-1)
    acc = tl.zeros((BM, BLOCK_DV), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    carry = tl.zeros((BM,), tl.float32)
    n = tl.arange(0, BN)
    begin = key_from + part * part_keys
    end = begin + tl.cdiv(tl.maximum(tl.minimum(begin + part_keys, TK) - begin, 0), BN) * BN
    for done in range(0, end - begin, BN):
        top = end - done - 1
        j = top - n
        live = live_keys(PADDING, j, TK, HAS_PADDING)
        k = load_rows(K, top, -n, stride_kt, live, D, BLOCK_D, True)
        v = load_rows(V, top, -n, stride_vt, live, DV, BLOCK_DV, True)
        # What is not finite is taken out, and comes back as a logit of NaN where it is seen.
        poison = tl.sum(k.to(tl.float32) * 0.0, 1) + tl.sum(v.to(tl.float32) * 0.0, 1)
        k = tl.where((poison == 0.0)[:, None], k, 0.0)
        v = tl.where((poison == 0.0)[:, None], v, 0.0)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
        for r in tl.static_range(R):
            # A head may have coordinates of its own: one row of the tile for each.
            keys = (b * ck_b + h * ck_h + 2 * r * TK)[:, None] + j[None, :]
            queries = b * cq_b + h * cq_h + 2 * r * TQ + i
            both = live_q[:, None] & live[None, :]
            c = tl.load(C_Q + queries, mask=live_q, other=0.0)
            offset = tl.load(C_K + keys, mask=both, other=0.0) - c[:, None]
            c = tl.load(C_Q + queries + TQ, mask=live_q, other=0.0)
            offset += tl.load(C_K + keys + TK, mask=both, other=0.0) - c[:, None]
            slope = tl.zeros_like(x)
            if HAS_RATE_Q:
                slope += tl.load(RATE_Q + b * rq_b + h * rq_h + r * TQ + i, mask=live_q, other=0.0)[:, None]
            if HAS_RATE_K:
                keys = (b * rk_b + h * rk_h + r * TK)[:, None] + j[None, :]
                slope += tl.load(RATE_K + keys, mask=both, other=0.0)
            x += (slope * LOG2E) * offset
        if HAS_PATH:
            probe = load_rows(PROBE_K, top + 1, -n, P, j + 1 < TK, P, BLOCK_P, True)
            edge = edges(tl.dot(p, tl.trans(probe), input_precision="tf32x3"), BOUNDED)[0]
            edge = tl.where((j[None, :] < t[:, None]) & (j < TK)[None, :], edge, 0.0)
            x += rate[:, None] * (tl.cumsum(edge, 1) + carry[:, None])
            carry += tl.sum(edge, 1)
        seen = visible(PADDING, DOCS, ours, t, j, TK, window, CAUSAL, WINDOW, HAS_DOCS, HAS_PADDING, 1)
        x = tl.where(seen, x + poison[None, :], float("-inf"))
        higher = tl.maximum(peak, tl.max(x, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        w = tl.exp2(x - anchor[:, None])
        fade = tl.exp2(peak - anchor)
        total = total * fade + tl.sum(w, 1)
        coarse = w.to(v.dtype)
        acc = tl.dot(coarse, v, acc * fade[:, None], input_precision=PRECISION)
        if EXACT:
            acc = tl.dot((w - coarse.to(tl.float32)).to(v.dtype), v, acc, input_precision=PRECISION)
        peak = higher
    total += tl.sum(q.to(tl.float32) * 0.0, 1)
    row = ((b * H + h) * TQ + i) * parts + part
    dv = tl.arange(0, BLOCK_DV)
    tl.store(PARTS + row[:, None] * DV + dv[None, :], acc, mask=live_q[:, None] & (dv < DV)[None, :])
    tl.store(STATS + row * 3, peak, mask=live_q)
    tl.store(STATS + row * 3 + 1, total, mask=live_q)
    tl.store(STATS + row * 3 + 2, rate * carry, mask=live_q)


@triton.jit(do_not_specialize=["parts"])
def combine_kernel(
    PARTS, STATS, OUT, FINE, LSE, parts, EXACT: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr
):
    """One row's out and logsumexp from its parts, the last first: each is charged with the paths after it."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_DV)
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    total = 0.0
    peak = float("-inf")
    carry = 0.0
    for back in range(parts):
        at = row * parts + parts - 1 - back
        top = tl.load(STATS + at * 3) + carry
        higher = tl.maximum(peak, top)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        here, fade = tl.exp2(top - anchor), tl.exp2(peak - anchor)
        acc = acc * fade + here * tl.load(PARTS + at * DV + d, mask=d < DV, other=0.0)
        total = total * fade + here * tl.load(STATS + at * 3 + 1)
        carry += tl.load(STATS + at * 3 + 2)
        peak = higher
    tl.store(LSE + row, logsumexp(peak, total))
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(OUT + row * DV + d, out.to(OUT.dtype.element_ty), mask=d < DV)
    if EXACT:
        left = out - out.to(OUT.dtype.element_ty).to(tl.float32)
        tl.store(FINE + row * DV + d, left.to(FINE.dtype.element_ty), mask=d < DV)
