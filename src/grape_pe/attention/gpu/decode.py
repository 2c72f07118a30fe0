"""Kernels for few queries: the keys are split over programs, and the query heads that share keys are packed.

A program holds PACK query heads x TQ queries as the rows of one tile and walks its part of the keys from
the last to the first. `combine_kernel` then merges the parts. The path sum of a part starts at zero; what
the later parts add to it is the same for all its keys, so it is added when the parts are merged.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from .tile import (
    LENGTHS,
    LOG2E,
    add_distances,
    edges,
    live_keys,
    load_rows,
    logsumexp,
    softmax_step,
    visible,
    zeros,
)


@triton.jit(do_not_specialize=LENGTHS)
def decode_kernel(
    Q, K, V, PARTS, STATS, RATE_Q, RATE_K, C_Q, C_K, PROBE_Q, PROBE_K, PATH_RATE, TABLE, MIX,
    PLACE_Q, PLACE_K, DOCS, PADDING,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    rq_b, rq_h, rk_b, rk_h, cq_b, cq_h, ck_b, ck_h, table_h, L,
    H, HKV, HP, TQ, TK, window, key_from, part_keys, scale,
    KIND: tl.constexpr, PACK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """PARTS[b, h, i, part] the sum of weighted values; STATS the maximum, the sum of weights and of edges."""
    TERMS: tl.constexpr = KIND.terms
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
    d = tl.arange(0, KIND.block_d)
    q_rows = Q + b * stride_qb + h * stride_qh + i * stride_qt
    q = tl.load(q_rows[:, None] + d[None, :], mask=live_q[:, None] & (d < KIND.d)[None, :], other=0.0)
    K += b * stride_kb + hk * stride_kh
    V += b * stride_vb + hk * stride_vh
    masks = (DOCS + b * TK, PADDING + b * TK)
    mix = MIX + (b * H + h) * TQ * KIND.tables
    distances = (TABLE + h.to(tl.int64) * table_h, mix, PLACE_Q + b * TQ, PLACE_K + b * TK, L)
    p = q
    rate = tl.zeros((BM,), tl.float32)
    if KIND.path:
        bp = b * HP + first_head // (H // HP)
        p = load_rows(PROBE_Q + bp * TQ * KIND.p, 0, i, KIND.p, live_q, KIND.p, KIND.block_p, True)
        p = p * (LOG2E / KIND.p)
        PROBE_K += bp * TK * KIND.p
        rate = tl.load(PATH_RATE + h, mask=live_q, other=0.0)
    ours = t
    if KIND.documents:
        ours = tl.load(masks[0] + t, mask=live_q & (t >= 0), other=-1)
    acc = zeros(BM, KIND.block_dv)
    total = tl.zeros((BM,), tl.float32)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    carry = tl.zeros((BM,), tl.float32)
    n = tl.arange(0, BN)
    begin = key_from + part * part_keys
    end = begin + tl.cdiv(tl.maximum(tl.minimum(begin + part_keys, TK) - begin, 0), BN) * BN
    for done in range(0, end - begin, BN):
        top = end - done - 1
        j = top - n
        live = live_keys(masks[1], j, TK, KIND)
        k = load_rows(K, top, -n, stride_kt, live, KIND.d, KIND.block_d, True)
        v = load_rows(V, top, -n, stride_vt, live, KIND.dv, KIND.block_dv, True)
        # What is not finite is taken out, and comes back as a logit of NaN where it is seen.
        poison = tl.sum(k.to(tl.float32) * 0.0, 1) + tl.sum(v.to(tl.float32) * 0.0, 1)
        k = tl.where((poison == 0.0)[:, None], k, 0.0)
        v = tl.where((poison == 0.0)[:, None], v, 0.0)
        x = tl.dot(q, tl.trans(k), input_precision=KIND.precision) * (scale * LOG2E)
        for r in tl.static_range(TERMS):
            # A head may have coordinates of its own: one row of the tile for each.
            keys = (b * ck_b + h * ck_h + 2 * r * TK)[:, None] + j[None, :]
            queries = b * cq_b + h * cq_h + 2 * r * TQ + i
            both = live_q[:, None] & live[None, :]
            c = tl.load(C_Q + queries, mask=live_q, other=0.0)
            offset = tl.load(C_K + keys, mask=both, other=0.0) - c[:, None]
            c = tl.load(C_Q + queries + TQ, mask=live_q, other=0.0)
            offset += tl.load(C_K + keys + TK, mask=both, other=0.0) - c[:, None]
            slope = tl.zeros_like(x)
            if KIND.rate_q:
                slope += tl.load(RATE_Q + b * rq_b + h * rq_h + r * TQ + i, mask=live_q, other=0.0)[:, None]
            if KIND.rate_k:
                keys = (b * rk_b + h * rk_h + r * TK)[:, None] + j[None, :]
                slope += tl.load(RATE_K + keys, mask=both, other=0.0)
            x += (slope * LOG2E) * offset
        x = add_distances(x, distances, (i, j, live_q, live, TQ, TK), KIND, 1)
        if KIND.path:
            probe = load_rows(PROBE_K, top + 1, -n, KIND.p, j + 1 < TK, KIND.p, KIND.block_p, True)
            edge = edges(tl.dot(p, tl.trans(probe), input_precision="tf32x3"), KIND.bounded)[0]
            edge = tl.where((j[None, :] < t[:, None]) & (j < TK)[None, :], edge, 0.0)
            x += rate[:, None] * (tl.cumsum(edge, 1) + carry[:, None])
            carry += tl.sum(edge, 1)
        seen = visible(masks, ours, t, j, TK, window, KIND, 1)
        x = tl.where(seen, x + poison[None, :], float("-inf"))
        acc, total, peak = softmax_step(x, v, acc, total, peak, KIND)
    total += tl.sum(q.to(tl.float32) * 0.0, 1)
    row = ((b * H + h) * TQ + i) * parts + part
    dv = tl.arange(0, KIND.block_dv)
    inside = live_q[:, None] & (dv < KIND.dv)[None, :]
    tl.store(PARTS + row[:, None] * KIND.dv + dv[None, :], acc, mask=inside)
    tl.store(STATS + row * 3, peak, mask=live_q)
    tl.store(STATS + row * 3 + 1, total, mask=live_q)
    tl.store(STATS + row * 3 + 2, rate * carry, mask=live_q)


@triton.jit(do_not_specialize=LENGTHS)
def combine_kernel(PARTS, STATS, OUT, FINE, LSE, parts, KIND: tl.constexpr):
    """One row's out and logsumexp from its parts, the last first: each is charged with the paths after it."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, KIND.block_dv)
    acc = tl.zeros_like(d).to(tl.float32)
    total = 0.0
    peak = float("-inf")
    carry = 0.0
    for back in range(parts):
        at = row * parts + parts - 1 - back
        top = tl.load(STATS + at * 3) + carry
        higher = tl.maximum(peak, top)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        here, fade = tl.exp2(top - anchor), tl.exp2(peak - anchor)
        acc = acc * fade + here * tl.load(PARTS + at * KIND.dv + d, mask=d < KIND.dv, other=0.0)
        total = total * fade + here * tl.load(STATS + at * 3 + 1)
        carry += tl.load(STATS + at * 3 + 2)
        peak = higher
    tl.store(LSE + row, logsumexp(peak, total))
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(OUT + row * KIND.dv + d, out.to(OUT.dtype.element_ty), mask=d < KIND.dv)
    if KIND.exact:
        left = out - out.to(OUT.dtype.element_ty).to(tl.float32)
        tl.store(FINE + row * KIND.dv + d, left.to(FINE.dtype.element_ty), mask=d < KIND.dv)
