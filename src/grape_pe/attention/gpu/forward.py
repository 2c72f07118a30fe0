"""The forward kernel: one program owns BM queries of one head and walks its keys from the last to the first.

In this order the sum of a path grows with every key, and all that is carried from tile to tile is each
row's sum. Where the bias only falls with distance the walk can stop early, by a bound that `keys_kernel`
prepares.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from . import tile as ops
from .tile import LN2, PATCH


@triton.jit(do_not_specialize=["SIZES"])
def keys_kernel(INPUTS, STRIDES, SIZES, POISON, BOUNDS, KIND: tl.constexpr):
    """POISON[b, hk, j]: NaN where a key or its value is not finite, else 0. And, for pruning:

    BOUNDS[b, h, f, n] of PATCH keys: the largest |k|, then for each term the largest -c, c, -rate and rate.
    What is not finite gives infinity, which prunes nothing. Hidden keys do not count.
    """
    TERMS: tl.constexpr = KIND.terms
    n = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // SIZES.H, bh % SIZES.H
    head = ops.of_head(INPUTS, STRIDES, SIZES, b, h, KIND)
    group = SIZES.H // SIZES.HKV
    step = tl.arange(0, PATCH)
    start = n * PATCH
    j = start + step
    live = ops.live_keys(head, j, SIZES, KIND)
    k = ops.load_rows(head.k, start, step, STRIDES.k[2], live, KIND.d, True).to(tl.float32)
    v = ops.load_rows(head.v, start, step, STRIDES.v[2], live, KIND.dv, True).to(tl.float32)
    poison = tl.sum(k * 0.0, 1) + tl.sum(v * 0.0, 1)
    tl.store(
        POISON + (b * SIZES.HKV + h // group) * SIZES.TK + j, poison, mask=(j < SIZES.TK) & (h % group == 0)
    )
    if KIND.prune:
        patches = SIZES.patches
        BOUNDS += bh * (1 + 4 * TERMS) * patches + n
        norm = tl.where(poison == 0.0, tl.sqrt(tl.sum(k * k, 1)), float("inf"))
        tl.store(BOUNDS, tl.max(norm, 0))
        for r in tl.static_range(TERMS):
            c = tl.load(head.c_k + 2 * r * SIZES.TK + j, mask=live, other=0.0)
            rate = tl.zeros((PATCH,), tl.float32)
            if KIND.rate_k:
                rate = tl.load(head.rate_k + r * SIZES.TK + j, mask=live, other=0.0)
            tl.store(BOUNDS + (4 * r + 1) * patches, _largest(-c, live))
            tl.store(BOUNDS + (4 * r + 2) * patches, _largest(c, live))
            tl.store(BOUNDS + (4 * r + 3) * patches, _largest(-rate, live))
            tl.store(BOUNDS + (4 * r + 4) * patches, _largest(rate, live))


@triton.jit
def _largest(x, live):
    """The largest number that is live, infinity if one is NaN."""
    return tl.max(tl.where(live, tl.where(x == x, x, float("inf")), float("-inf")), 0)


@triton.jit
def _bound(BOUNDS, head, reach, path, i, live, hi, sizes, KIND: tl.constexpr):
    """For each row more than any logit with a key before `hi`, in nats (see pruning.logit_bounds).

    BOUNDS holds the largest of all patches up to each. A product over a rectangle is largest at a corner.
    """
    TERMS: tl.constexpr = KIND.terms
    patches = sizes.patches
    BOUNDS += tl.cdiv(hi, PATCH) - 1
    best = reach * tl.load(BOUNDS)
    for r in tl.static_range(TERMS):
        c = tl.load(head.c_q + 2 * r * sizes.TQ + i, mask=live, other=0.0)
        low_c = -tl.load(BOUNDS + (4 * r + 1) * patches)
        high_c = tl.load(BOUNDS + (4 * r + 2) * patches)
        # Coarse parts only: what they leave out is less than 2^-24 of each.
        slack = (tl.abs(c) + tl.maximum(tl.abs(low_c), tl.abs(high_c))) * 1.2e-7
        low, high = low_c - c - slack, high_c - c + slack
        low_rate = -tl.load(BOUNDS + (4 * r + 3) * patches)
        high_rate = tl.load(BOUNDS + (4 * r + 4) * patches)
        rate = tl.zeros_like(c)
        if KIND.rate_q:
            rate = tl.load(head.rate_q + r * sizes.TQ + i, mask=live, other=0.0)
        first = tl.maximum((rate + low_rate) * low, (rate + low_rate) * high)
        second = tl.maximum((rate + high_rate) * low, (rate + high_rate) * high)
        best += tl.maximum(first, second)
    if KIND.path:
        best += path
    return best + tl.abs(best) * 1e-5 + 1e-3


@triton.jit(do_not_specialize=["SIZES"])
def forward_kernel(
    INPUTS, STRIDES, SIZES, OUT, FINE, LSE, FIRST, WORK, BOUNDS, TAU,
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
    head = ops.of_head(INPUTS, STRIDES, SIZES, bh // SIZES.H, bh % SIZES.H, KIND)
    TQ = SIZES.TQ
    m = tl.arange(0, BM)
    i = row + m
    t = i + SIZES.TK - TQ
    live_q = i < TQ
    q = ops.load_rows(head.q, row, m, STRIDES.q[2], live_q, KIND.d, True)
    p, rate = ops.probes_of(head, q, row, m, live_q, KIND)
    ours = ops.documents_of(head, t, live_q, KIND)

    begin, whole, end = ops.key_range(head, row, i, t, SIZES, KIND, False, BM, BN, BN)
    tiles = (end - begin) // BN
    acc = ops.zeros(BM, ops.padded(KIND.dv))
    total = tl.zeros((BM,), tl.float32)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    carry = (tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32))
    # Tiles that need no mask are seen by all rows: what is not finite there spoils them all.
    spoiled = tl.sum(q.to(tl.float32) * 0.0, 1) + ops.poison_of(head, begin, whole)
    reach = spoiled
    if KIND.prune:
        reach = tl.sqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)) * tl.abs(SIZES.scale)
        BOUNDS += bh * (1 + 4 * TERMS) * SIZES.patches
    n = tl.arange(0, BN)
    hi = end
    for phase in tl.static_range(2 if KIND.simple else 1):  # phase 0: tiles that need a mask
        lo = begin
        if KIND.simple and phase == 0:
            lo = whole
        while hi > lo:
            stop = lo
            if KIND.prune:
                stop = tl.maximum(lo, hi - STRIDE * BN)
            for done in range(0, hi - stop, BN):
                top = hi - done - 1
                j = top - n
                live, poison = ops.sound_keys(head, j, SIZES, KIND, phase == 0)
                k = ops.load_rows(head.k, top, -n, STRIDES.k[2], live, KIND.d, phase == 0)
                x = tl.dot(q, tl.trans(k), input_precision=KIND.precision) * (SIZES.scale * ops.LOG2E)
                x = ops.add_biases(x, head, (i, j, live_q, live), SIZES, KIND, 1)
                if KIND.path:
                    _, path, _, carry = ops.path_step(head, p, carry, top, n, t, SIZES, KIND, phase == 0)
                    x += rate * path
                if phase == 0:
                    seen = ops.visible(head, ours, t, j, SIZES, KIND, 1)
                    x = tl.where(seen, x + poison[None, :], float("-inf"))
                v = ops.load_rows(head.v, top, -n, STRIDES.v[2], live, KIND.dv, phase == 0)
                acc, total, peak = ops.softmax_step(x, v, acc, total, peak, KIND)
            hi = stop
            if KIND.prune:  # noqa: SIM102  (one is known to the compiler, the other to the program)
                if hi > begin:
                    # A path of a negative rate may rise again: then nothing is known.
                    path = tl.where(rate >= 0, rate * (carry[0] + carry[1]) * LN2, float("inf"))
                    best = _bound(BOUNDS, head, reach, path, i, live_q, hi, SIZES, KIND)
                    # Written so that a NaN keeps the row going.
                    over = (best < peak * LN2 - tl.load(TAU)) | ~live_q
                    begin = tl.where(tl.min(over.to(tl.int32), 0) == 1, hi, begin)
                    lo = tl.maximum(lo, begin)
    total += spoiled
    tl.store(LSE + bh * TQ + i, ops.logsumexp(peak, total), mask=live_q)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    ops.store_out(OUT, FINE, bh * TQ + row, m, live_q, out, KIND)
    if KIND.prune:
        tl.store(FIRST + bh * tl.cdiv(TQ, PATCH) + i // PATCH, hi, mask=live_q & (i % PATCH == 0))
    WORK += (bh * tl.num_programs(0) + row // BM) * 2
    tl.store(WORK, (end - hi) // BN)
    tl.store(WORK + 1, tiles)
