"""The forward kernel: one program owns BM queries of one head and walks its keys from the last to the first.

In this order the sum of a path grows with every key, and all that is carried from tile to tile is each
row's sum. Where the bias only falls with distance the walk can stop early, by a bound that `keys_kernel`
prepares.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from .tile import (
    LENGTHS,
    LN2,
    LOG2E,
    PATCH,
    add_distances,
    add_slopes,
    key_range,
    live_keys,
    load_rows,
    logsumexp,
    path_step,
    poison_of,
    softmax_step,
    sound_keys,
    store_rows,
    visible,
    zeros,
)


@triton.jit(do_not_specialize=LENGTHS)
def keys_kernel(
    K, V, RATE_K, C_K, PADDING, POISON, BOUNDS,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    rk_b, rk_h, ck_b, ck_h, H, HKV, TK, patches, KIND: tl.constexpr,
):  # fmt: skip
    """POISON[b, hk, j]: NaN where a key or its value is not finite, else 0. And, for pruning:

    BOUNDS[b, h, f, n] of PATCH keys: the largest |k|, then for each term the largest -c, c, -rate and rate.
    What is not finite gives infinity, which prunes nothing. Hidden keys do not count.
    """
    TERMS: tl.constexpr = KIND.terms
    n = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    hk = h // (H // HKV)
    step = tl.arange(0, PATCH)
    start = n * PATCH
    j = start + step
    live = live_keys(PADDING + b * TK, j, TK, KIND)
    K += b * stride_kb + hk * stride_kh
    V += b * stride_vb + hk * stride_vh
    k = load_rows(K, start, step, stride_kt, live, KIND.d, KIND.block_d, True).to(tl.float32)
    v = load_rows(V, start, step, stride_vt, live, KIND.dv, KIND.block_dv, True).to(tl.float32)
    poison = tl.sum(k * 0.0, 1) + tl.sum(v * 0.0, 1)
    member = h % (H // HKV) + 0 * j  # a tensor: the interpreter takes no mask made from a number
    tl.store(POISON + (b * HKV + hk) * TK + j, poison, mask=(j < TK) & (member == 0))
    if KIND.prune:
        BOUNDS += bh * (1 + 4 * TERMS) * patches + n
        norm = tl.where(poison == 0.0, tl.sqrt(tl.sum(k * k, 1)), float("inf"))
        tl.store(BOUNDS, tl.max(norm, 0))
        for r in tl.static_range(TERMS):
            c = tl.load(C_K + b * ck_b + h * ck_h + 2 * r * TK + j, mask=live, other=0.0)
            rate = tl.zeros((PATCH,), tl.float32)
            if KIND.rate_k:
                rate = tl.load(RATE_K + b * rk_b + h * rk_h + r * TK + j, mask=live, other=0.0)
            tl.store(BOUNDS + (4 * r + 1) * patches, _largest(-c, live))
            tl.store(BOUNDS + (4 * r + 2) * patches, _largest(c, live))
            tl.store(BOUNDS + (4 * r + 3) * patches, _largest(-rate, live))
            tl.store(BOUNDS + (4 * r + 4) * patches, _largest(rate, live))


@triton.jit
def _largest(x, live):
    """The largest number that is live, infinity if one is NaN."""
    return tl.max(tl.where(live, tl.where(x == x, x, float("inf")), float("-inf")), 0)


@triton.jit
def _bound(BOUNDS, slopes, reach, path, i, live, hi, TQ, patches, KIND: tl.constexpr):
    """For each row more than any logit with a key before `hi`, in nats (see pruning.logit_bounds).

    BOUNDS holds the largest of all patches up to each. A product over a rectangle is largest at a corner.
    """
    TERMS: tl.constexpr = KIND.terms
    BOUNDS += tl.cdiv(hi, PATCH) - 1
    best = reach * tl.load(BOUNDS)
    for r in tl.static_range(TERMS):
        c = tl.load(slopes[2] + 2 * r * TQ + i, mask=live, other=0.0)
        low_c = -tl.load(BOUNDS + (4 * r + 1) * patches)
        high_c = tl.load(BOUNDS + (4 * r + 2) * patches)
        # Coarse parts only: what they leave out is less than 2^-24 of each.
        slack = (tl.abs(c) + tl.maximum(tl.abs(low_c), tl.abs(high_c))) * 1.2e-7
        low, high = low_c - c - slack, high_c - c + slack
        low_rate = -tl.load(BOUNDS + (4 * r + 3) * patches)
        high_rate = tl.load(BOUNDS + (4 * r + 4) * patches)
        rate = tl.zeros_like(c)
        if KIND.rate_q:
            rate = tl.load(slopes[0] + r * TQ + i, mask=live, other=0.0)
        first = tl.maximum((rate + low_rate) * low, (rate + low_rate) * high)
        second = tl.maximum((rate + high_rate) * low, (rate + high_rate) * high)
        best += tl.maximum(first, second)
    if KIND.path:
        best += path
    return best + tl.abs(best) * 1e-5 + 1e-3


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    Q, K, V, OUT, FINE, LSE, FIRST, WORK, RATE_Q, RATE_K, C_Q, C_K, PROBE_Q, PROBE_K, PATH_RATE,
    TABLE, MIX, PLACE_Q, PLACE_K, DOCS, PADDING, POISON, BOUNDS, TAU,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    rq_b, rq_h, rk_b, rk_h, cq_b, cq_h, ck_b, ck_h, table_h, L,
    H, HKV, HP, TQ, TK, window, patches, scale,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """out, logsumexp, the first key each PATCH rows reached, tiles computed and tiles visible.

    KIND.exact: FINE keeps what the output's dtype leaves out. The row sums of the backward, and with them the
    gradients of the bias, are then as in float32.
    """
    TERMS: tl.constexpr = KIND.terms
    # The last rows have the most keys: start them first.
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    hk = h // (H // HKV)
    m = tl.arange(0, BM)
    i = row + m
    t = i + TK - TQ
    live_q = i < TQ
    K += b * stride_kb + hk * stride_kh
    V += b * stride_vb + hk * stride_vh
    POISON += (b * HKV + hk) * TK
    masks = (DOCS + b * TK, PADDING + b * TK)
    slopes = (
        RATE_Q + b * rq_b + h * rq_h, RATE_K + b * rk_b + h * rk_h,
        C_Q + b * cq_b + h * cq_h, C_K + b * ck_b + h * ck_h,
    )  # fmt: skip
    distances = (TABLE + h * table_h, MIX + bh * TQ * KIND.tables, PLACE_Q + b * TQ, PLACE_K + b * TK, L)
    Q += b * stride_qb + h * stride_qh
    q = load_rows(Q, row, m, stride_qt, live_q, KIND.d, KIND.block_d, True)
    p = q
    rate = 0.0
    if KIND.path:
        bp = b * HP + h // (H // HP)
        p = load_rows(PROBE_Q + bp * TQ * KIND.p, row, m, KIND.p, live_q, KIND.p, KIND.block_p, True)
        p = p * (LOG2E / KIND.p)
        PROBE_K += bp * TK * KIND.p
        rate = tl.load(PATH_RATE + h)
    ours = t
    if KIND.documents:
        ours = tl.load(masks[0] + t, mask=live_q & (t >= 0), other=-1)

    SIMPLE: tl.constexpr = not (KIND.window or KIND.documents or KIND.padding)
    begin, whole, end = key_range(masks, FIRST, row, i, t, TQ, TK, window, KIND, False, SIMPLE, BM, BN, BN)
    tiles = (end - begin) // BN
    acc = zeros(BM, KIND.block_dv)
    total = tl.zeros((BM,), tl.float32)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    carry = (tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32))
    # Tiles that need no mask are seen by all rows: what is not finite there spoils them all.
    spoiled = tl.sum(q.to(tl.float32) * 0.0, 1) + poison_of(POISON, begin, whole)
    reach = spoiled
    if KIND.prune:
        reach = tl.sqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)) * tl.abs(scale)
        BOUNDS += bh * (1 + 4 * TERMS) * patches
    n = tl.arange(0, BN)
    hi = end
    for phase in tl.static_range(2 if SIMPLE else 1):  # phase 0: tiles that need a mask
        lo = begin
        if SIMPLE and phase == 0:
            lo = whole
        while hi > lo:
            stop = lo
            if KIND.prune:
                stop = tl.maximum(lo, hi - STRIDE * BN)
            for done in range(0, hi - stop, BN):
                top = hi - done - 1
                j = top - n
                live, poison = sound_keys(masks, POISON, j, TK, KIND, phase == 0)
                k = load_rows(K, top, -n, stride_kt, live, KIND.d, KIND.block_d, phase == 0)
                x = tl.dot(q, tl.trans(k), input_precision=KIND.precision) * (scale * LOG2E)
                at = (i, j, live_q, live, TQ, TK)
                x = add_distances(add_slopes(x, slopes, at, KIND, 1), distances, at, KIND, 1)
                if KIND.path:
                    _, path, _, carry = path_step(PROBE_K, p, carry, top, n, t, TK, KIND, phase == 0)
                    x += rate * path
                if phase == 0:
                    seen = visible(masks, ours, t, j, TK, window, KIND, 1)
                    x = tl.where(seen, x + poison[None, :], float("-inf"))
                v = load_rows(V, top, -n, stride_vt, live, KIND.dv, KIND.block_dv, phase == 0)
                acc, total, peak = softmax_step(x, v, acc, total, peak, KIND)
            hi = stop
            if KIND.prune:  # noqa: SIM102  (one is known to the compiler, the other to the program)
                if hi > begin:
                    # A path of a negative rate may rise again: then nothing is known.
                    path = tl.where(rate >= 0, rate * (carry[0] + carry[1]) * LN2, float("inf"))
                    best = _bound(BOUNDS, slopes, reach, path, i, live_q, hi, TQ, patches, KIND)
                    # Written so that a NaN keeps the row going.
                    over = (best < peak * LN2 - tl.load(TAU)) | ~live_q
                    begin = tl.where(tl.min(over.to(tl.int32), 0) == 1, hi, begin)
                    lo = tl.maximum(lo, begin)
    total += spoiled
    tl.store(LSE + bh * TQ + i, logsumexp(peak, total), mask=live_q)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    store_rows(OUT + bh * TQ * KIND.dv, row, m, KIND.dv, live_q, out, KIND.dv, KIND.block_dv)
    if KIND.exact:
        left = out - out.to(OUT.dtype.element_ty).to(tl.float32)
        store_rows(FINE + bh * TQ * KIND.dv, row, m, KIND.dv, live_q, left, KIND.dv, KIND.block_dv)
    if KIND.prune:
        tl.store(FIRST + bh * tl.cdiv(TQ, PATCH) + i // PATCH, hi + 0 * i, mask=live_q & (i % PATCH == 0))
    WORK += (bh * tl.num_programs(0) + row // BM) * 2
    tl.store(WORK, (end - hi) // BN)
    tl.store(WORK + 1, tiles)
