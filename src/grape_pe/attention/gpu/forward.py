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
    LN2,
    LOG2E,
    PATCH,
    add_exactly,
    add_slopes,
    edges,
    key_range,
    live_keys,
    load_rows,
    logsumexp,
    poison_of,
    sound_keys,
    store_rows,
    visible,
)

#: arguments that change from call to call and must not compile a kernel each
LENGTHS = ["H", "HKV", "HP", "TQ", "TK", "window", "patches", "heads_from", "borders", "splits", "span"]
LENGTHS += [f"{name}_{axis}" for name in ("rq", "rk", "cq", "ck") for axis in "bh"]


@triton.jit(do_not_specialize=LENGTHS)
def keys_kernel(
    K, V, RATE_K, C_K, PADDING, POISON, BOUNDS,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    rk_b, rk_h, ck_b, ck_h, H, HKV, TK, patches,
    HAS_PADDING: tl.constexpr, PRUNE: tl.constexpr, R: tl.constexpr, HAS_RATE_K: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """POISON[b, hk, j]: NaN where a key or its value is not finite, else 0. And, for pruning:

    BOUNDS[b, h, f, n] of PATCH keys: the largest |k|, then for each term the largest -c, c, -rate and rate.
    What is not finite gives infinity, which prunes nothing. Hidden keys do not count.
    """
    n = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    hk = h // (H // HKV)
    step = tl.arange(0, PATCH)
    start = n * PATCH
    j = start + step
    live = live_keys(PADDING + b * TK, j, TK, HAS_PADDING)
    k = load_rows(K + b * stride_kb + hk * stride_kh, start, step, stride_kt, live, D, BLOCK_D, True)
    v = load_rows(V + b * stride_vb + hk * stride_vh, start, step, stride_vt, live, DV, BLOCK_DV, True)
    k = k.to(tl.float32)
    poison = tl.sum(k * 0.0, 1) + tl.sum(v.to(tl.float32) * 0.0, 1)
    member = h % (H // HKV) + 0 * j  # a tensor: the interpreter takes no mask made from a number
    tl.store(POISON + (b * HKV + hk) * TK + j, poison, mask=(j < TK) & (member == 0))
    if PRUNE:
        BOUNDS += bh * (1 + 4 * R) * patches + n
        norm = tl.where(poison == 0.0, tl.sqrt(tl.sum(k * k, 1)), float("inf"))
        tl.store(BOUNDS, tl.max(norm, 0))
        for r in tl.static_range(R):
            c = tl.load(C_K + b * ck_b + h * ck_h + 2 * r * TK + j, mask=live, other=0.0)
            rate = tl.zeros((PATCH,), tl.float32)
            if HAS_RATE_K:
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
def _bound(
    BOUNDS, RATE_Q, C_Q, reach, carry, i, live, hi, TQ, patches,
    R: tl.constexpr, HAS_RATE_Q: tl.constexpr, HAS_PATH: tl.constexpr,
):  # fmt: skip
    """For each row more than any logit with a key before `hi`, in nats (see pruning.logit_bounds).

    BOUNDS holds the largest of all patches up to each. A product over a rectangle is largest at a corner.
    """
    BOUNDS += tl.cdiv(hi, PATCH) - 1
    best = reach * tl.load(BOUNDS)
    for r in tl.static_range(R):
        c = tl.load(C_Q + 2 * r * TQ + i, mask=live, other=0.0)
        low_c = -tl.load(BOUNDS + (4 * r + 1) * patches)
        high_c = tl.load(BOUNDS + (4 * r + 2) * patches)
        # Coarse parts only: what they leave out is less than 2^-24 of each.
        slack = (tl.abs(c) + tl.maximum(tl.abs(low_c), tl.abs(high_c))) * 1.2e-7
        low, high = low_c - c - slack, high_c - c + slack
        low_rate = -tl.load(BOUNDS + (4 * r + 3) * patches)
        high_rate = tl.load(BOUNDS + (4 * r + 4) * patches)
        rate = tl.zeros_like(c)
        if HAS_RATE_Q:
            rate = tl.load(RATE_Q + r * TQ + i, mask=live, other=0.0)
        first = tl.maximum((rate + low_rate) * low, (rate + low_rate) * high)
        second = tl.maximum((rate + high_rate) * low, (rate + high_rate) * high)
        best += tl.maximum(first, second)
    if HAS_PATH:
        best += carry
    return best + tl.abs(best) * 1e-5 + 1e-3


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    Q, K, V, OUT, FINE, LSE, FIRST, WORK, RATE_Q, RATE_K, C_Q, C_K, PROBE_Q, PROBE_K, PATH_RATE,
    DOCS, PADDING, POISON, BOUNDS, TAU,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    rq_b, rq_h, rk_b, rk_h, cq_b, cq_h, ck_b, ck_h, H, HKV, HP, TQ, TK, window, patches, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_DOCS: tl.constexpr, HAS_PADDING: tl.constexpr,
    PRUNE: tl.constexpr, EXACT: tl.constexpr, R: tl.constexpr, HAS_RATE_Q: tl.constexpr,
    HAS_RATE_K: tl.constexpr, HAS_PATH: tl.constexpr, BOUNDED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    P: tl.constexpr, BLOCK_P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out, logsumexp, the first key each PATCH rows reached, tiles computed and tiles visible.

    EXACT: weights enter the second product as two numbers of v's dtype, and FINE keeps what the output's
    dtype leaves out. The row sums of the backward, and with them the gradients of the bias, are then as in
    float32.
    """
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
    DOCS += b * TK
    PADDING += b * TK
    POISON += (b * HKV + hk) * TK
    RATE_Q += b * rq_b + h * rq_h
    RATE_K += b * rk_b + h * rk_h
    C_Q += b * cq_b + h * cq_h
    C_K += b * ck_b + h * ck_h
    q = load_rows(Q + b * stride_qb + h * stride_qh, row, m, stride_qt, live_q, D, BLOCK_D, True)
    p = q
    rate = 0.0
    if HAS_PATH:
        bp = b * HP + h // (H // HP)
        p = load_rows(PROBE_Q + bp * TQ * P, row, m, P, live_q, P, BLOCK_P, True) * (LOG2E / P)
        PROBE_K += bp * TK * P
        rate = tl.load(PATH_RATE + h)
    ours = t
    if HAS_DOCS:
        ours = tl.load(DOCS + t, mask=live_q & (t >= 0), other=-1)

    SIMPLE: tl.constexpr = not (WINDOW or HAS_DOCS or HAS_PADDING)
    begin, whole, end = key_range(
        DOCS, FIRST, row, i, t, TQ, TK, window, CAUSAL, WINDOW, HAS_DOCS, False, SIMPLE, BM, BN, BN
    )
    tiles = (end - begin) // BN
    acc = tl.zeros((BM, BLOCK_DV), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    carry = tl.zeros((BM,), tl.float32)
    carry_low = tl.zeros((BM,), tl.float32)
    # Tiles that need no mask are seen by all rows: what is not finite there spoils them all.
    spoiled = tl.sum(q.to(tl.float32) * 0.0, 1) + poison_of(POISON, begin, whole)
    reach = carry
    if PRUNE:
        reach = tl.sqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)) * tl.abs(scale)
        BOUNDS += bh * (1 + 4 * R) * patches
    n = tl.arange(0, BN)
    hi = end
    for phase in tl.static_range(2 if SIMPLE else 1):  # phase 0: tiles that need a mask
        lo = begin
        if SIMPLE and phase == 0:
            lo = whole
        while hi > lo:
            stop = lo
            if PRUNE:
                stop = tl.maximum(lo, hi - STRIDE * BN)
            for done in range(0, hi - stop, BN):
                top = hi - done - 1
                j = top - n
                live, poison = sound_keys(PADDING, POISON, j, TK, HAS_PADDING, phase == 0)
                k = load_rows(K, top, -n, stride_kt, live, D, BLOCK_D, phase == 0)
                x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
                x = add_slopes(
                    x, RATE_Q, RATE_K, C_Q, C_K, i, j, live_q, live, TQ, TK, R, HAS_RATE_Q, HAS_RATE_K, 1
                )
                if HAS_PATH:
                    # Column j holds the edge of token j + 1, which key j is the first to be charged for.
                    probe = load_rows(PROBE_K, top + 1, -n, P, j + 1 < TK, P, BLOCK_P, phase == 0)
                    edge = edges(tl.dot(p, tl.trans(probe), input_precision="tf32x3"), BOUNDED)[0]
                    if phase == 0:
                        edge = tl.where(j[None, :] < t[:, None], edge, 0.0)
                    x += rate * (tl.cumsum(edge, 1) + (carry + carry_low)[:, None])
                    carry, carry_low = add_exactly(carry, carry_low, tl.sum(edge, 1))
                if phase == 0:
                    seen = visible(
                        PADDING, DOCS, ours, t, j, TK, window, CAUSAL, WINDOW, HAS_DOCS, HAS_PADDING, 1
                    )
                    x = tl.where(seen, x + poison[None, :], float("-inf"))
                v = load_rows(V, top, -n, stride_vt, live, DV, BLOCK_DV, phase == 0)
                higher = tl.maximum(peak, tl.max(x, 1))
                # A row that has seen nothing has maximum -inf; any finite number then gives weights of zero.
                anchor = tl.where(higher == float("-inf"), 0.0, higher)
                w = tl.exp2(x - anchor[:, None])
                fade = tl.exp2(peak - anchor)
                total = total * fade + tl.sum(w, 1)
                coarse = w.to(v.dtype)
                acc = tl.dot(coarse, v, acc * fade[:, None], input_precision=PRECISION)
                if EXACT:
                    fine = (w - coarse.to(tl.float32)).to(v.dtype)
                    acc = tl.dot(fine, v, acc, input_precision=PRECISION)
                peak = higher
            hi = stop
            if PRUNE:  # noqa: SIM102  (one is known to the compiler, the other to the program)
                if hi > begin:
                    # A path of a negative rate may rise again: then nothing is known.
                    sum_so_far = tl.where(rate >= 0, rate * (carry + carry_low) * LN2, float("inf"))
                    best = _bound(
                        BOUNDS, RATE_Q, C_Q, reach, sum_so_far, i, live_q, hi, TQ, patches,
                        R, HAS_RATE_Q, HAS_PATH,
                    )  # fmt: skip
                    # Written so that a NaN keeps the row going.
                    over = (best < peak * LN2 - tl.load(TAU)) | ~live_q
                    begin = tl.where(tl.min(over.to(tl.int32), 0) == 1, hi, begin)
                    lo = tl.maximum(lo, begin)
    total += spoiled
    tl.store(LSE + bh * TQ + i, logsumexp(peak, total), mask=live_q)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    store_rows(OUT + bh * TQ * DV, row, m, DV, live_q, out, DV, BLOCK_DV)
    if EXACT:
        left = out - out.to(OUT.dtype.element_ty).to(tl.float32)
        store_rows(FINE + bh * TQ * DV, row, m, DV, live_q, left, DV, BLOCK_DV)
    if PRUNE:
        tl.store(FIRST + bh * tl.cdiv(TQ, PATCH) + i // PATCH, hi + 0 * i, mask=live_q & (i % PATCH == 0))
    WORK += (bh * tl.num_programs(0) + row // BM) * 2
    tl.store(WORK, (end - hi) // BN)
    tl.store(WORK + 1, tiles)
