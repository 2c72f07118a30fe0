"""Kernels for few queries: the keys are split over programs, and the query heads that share keys are packed.

A program holds PACK query heads x TQ queries as the rows of one tile and walks its part of the keys from
the last to the first. `combine_kernel` then merges the parts. The path sum of a part starts at zero; what
the later parts add to it is the same for all its keys, so it is added when the parts are merged.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from . import tile as ops


@triton.jit(do_not_specialize=["SIZES"])
def decode_kernel(
    INPUTS, STRIDES, SIZES, PARTS, STATS,
    KIND: tl.constexpr, PACK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """PARTS[b, h, i, part] the sum of weighted values; STATS the maximum, the sum of weights and of edges."""
    part = tl.program_id(0)
    packs = SIZES.H // PACK
    b = (tl.program_id(1) // packs).to(tl.int64)
    first_head = (tl.program_id(1) % packs * PACK).to(tl.int64)
    TQ, TK = SIZES.TQ, SIZES.TK
    m = tl.arange(0, BM)
    live_q = m < PACK * TQ
    h = first_head + tl.where(live_q, m // TQ, 0)
    i = m % TQ
    t = i + TK - TQ
    shared = ops.of_head(INPUTS, STRIDES, SIZES, b, first_head, KIND)  # keys, values and probes
    own = ops.of_head(INPUTS, STRIDES, SIZES, b, h, KIND)  # of each row's own head
    d = tl.arange(0, ops.padded(KIND.d))
    q_rows = own.q + i * STRIDES.q[2]
    q = tl.load(q_rows[:, None] + d[None, :], mask=live_q[:, None] & (d < KIND.d)[None, :], other=0.0)
    p = ops.probes_of(shared, q, 0, i, live_q, KIND)[0]
    ours = ops.documents_of(shared, t, live_q, KIND)
    acc = ops.zeros(BM, ops.padded(KIND.dv))
    total = tl.zeros((BM,), tl.float32)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    carry = tl.zeros((BM,), tl.float32)
    rate = carry
    if KIND.path:
        rate = tl.load(own.path_rate, mask=live_q, other=0.0)
    n = tl.arange(0, BN)
    begin = SIZES.key_from + part * SIZES.part_keys
    end = begin + tl.cdiv(tl.maximum(tl.minimum(begin + SIZES.part_keys, TK) - begin, 0), BN) * BN
    for done in range(0, end - begin, BN):
        top = end - done - 1
        j = top - n
        live = ops.live_keys(shared, j, SIZES, KIND)
        k = ops.load_rows(shared.k, top, -n, STRIDES.k[2], live, KIND.d, True)
        v = ops.load_rows(shared.v, top, -n, STRIDES.v[2], live, KIND.dv, True)
        # What is not finite is taken out, and comes back as a logit of NaN where it is seen.
        poison = tl.sum(k.to(tl.float32) * 0.0, 1) + tl.sum(v.to(tl.float32) * 0.0, 1)
        k = tl.where((poison == 0.0)[:, None], k, 0.0)
        v = tl.where((poison == 0.0)[:, None], v, 0.0)
        x = tl.dot(q, tl.trans(k), input_precision=KIND.precision) * (SIZES.scale * ops.LOG2E)
        x = ops.add_biases(x, own, (i, j, live_q, live), SIZES, KIND, 1)
        if KIND.path:
            probe = ops.load_rows(shared.probe_k, top + 1, -n, KIND.p, j + 1 < TK, KIND.p, True)
            edge = ops.edges(tl.dot(p, tl.trans(probe), input_precision="tf32x3"), KIND.bounded)[0]
            edge = tl.where((j[None, :] < t[:, None]) & (j < TK)[None, :], edge, 0.0)
            x += rate[:, None] * (tl.cumsum(edge, 1) + carry[:, None])
            carry += tl.sum(edge, 1)
        seen = ops.visible(shared, ours, t, j, SIZES, KIND, 1)
        x = tl.where(seen, x + poison[None, :], float("-inf"))
        acc, total, peak = ops.softmax_step(x, v, acc, total, peak, KIND)
    total += tl.sum(q.to(tl.float32) * 0.0, 1)
    row = ((b * SIZES.H + h) * TQ + i) * tl.num_programs(0) + part
    ops.store_rows(PARTS, 0, row, live_q, acc, KIND.dv)
    tl.store(STATS + row * 3, peak, mask=live_q)
    tl.store(STATS + row * 3 + 1, total, mask=live_q)
    tl.store(STATS + row * 3 + 2, rate * carry, mask=live_q)


@triton.jit(do_not_specialize=["parts"])
def combine_kernel(PARTS, STATS, OUT, FINE, LSE, parts, KIND: tl.constexpr):
    """One row's out and logsumexp from its parts, the last first: each is charged with the paths after it."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, ops.padded(KIND.dv))
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
    tl.store(LSE + row, ops.logsumexp(peak, total))
    out = acc / tl.where(total == 0.0, 1.0, total)
    first = tl.arange(0, 1)
    ops.store_out(OUT, FINE, row, first, first == 0, out[None, :], KIND)
