"""Forward and backward as torch custom operators, so that torch.compile and torch.export see one node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import launch
from .launch import Gradients, Problem

Outputs = tuple[Tensor, Tensor, Tensor]
#: dq dk dv d_rate_q d_rate_k d_c_q d_c_k d_probe_q d_probe_k d_path_rate; what is absent is empty
Grads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _prunes(causal: bool, tau: float, documents: Tensor | None, c_q: Tensor | None, path: bool) -> bool:
    """Whether a forward call hands the first key of each row to the backward."""
    return causal and (documents is not None or (tau >= 0 and (c_q is not None or path)))


@torch.library.custom_op("grape::triton_forward", mutates_args=())
def triton_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate_q: Tensor | None,
    rate_k: Tensor | None,
    c_q: Tensor | None,
    c_k: Tensor | None,
    probe_q: Tensor | None,
    probe_k: Tensor | None,
    path_rate: Tensor | None,
    documents: Tensor | None,
    padding: Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    tau: float,
    bounded: bool,
) -> Outputs:
    """out (B, H, Tq, Dv), logsumexp (B, H, Tq), first key of each row (B, H, Tq) or empty."""
    problem = Problem(
        q, k, v, rate_q, rate_k, c_q, c_k, probe_q, probe_k, path_rate, documents, padding,
        causal, window, scale, tau, bounded,
    )  # fmt: skip
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    first = launch.first_keys(problem)
    # With slopes beside it a low path sum is no bound of the logit: then only the slopes prune.
    early = problem.has_path and problem.terms == 0 and causal and tau >= 0
    stop = q.new_empty(q.shape[:3], dtype=torch.int32) if early else None
    launch.plan_forward(problem, out, lse, first, stop, problem.arch).run()
    reached = stop if stop is not None else first
    return out, lse, q.new_empty((0,), dtype=torch.int32) if reached is None else reached


@triton_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, rate_q: Tensor | None, rate_k: Tensor | None, c_q: Tensor | None,
    c_k: Tensor | None, probe_q: Tensor | None, probe_k: Tensor | None, path_rate: Tensor | None,
    documents: Tensor | None, padding: Tensor | None, causal: bool, window: int, scale: float, tau: float,
    bounded: bool,
) -> Outputs:  # fmt: skip
    pruned = _prunes(causal, tau, documents, c_q, probe_q is not None)
    return (
        q.new_empty((*q.shape[:3], v.shape[-1])),
        q.new_empty(q.shape[:3], dtype=torch.float32),
        q.new_empty(q.shape[:3] if pruned else (0,), dtype=torch.int32),
    )


@torch.library.custom_op("grape::triton_backward", mutates_args=())
def triton_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate_q: Tensor | None,
    rate_k: Tensor | None,
    c_q: Tensor | None,
    c_k: Tensor | None,
    probe_q: Tensor | None,
    probe_k: Tensor | None,
    path_rate: Tensor | None,
    documents: Tensor | None,
    padding: Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    tau: float,
    bounded: bool,
    need_rate: bool,
    need_c: bool,
) -> Grads:
    problem = Problem(
        q, k, v, rate_q, rate_k, c_q, c_k, probe_q, probe_k, path_rate, documents, padding,
        causal, window, scale, tau, bounded,
    )  # fmt: skip
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    delta = torch.empty_like(lse)
    launch.plan_delta(out, dout, delta).run()
    arch = problem.arch
    several = q.shape[1] != k.shape[1] or len(list(launch.chunks(problem, arch))) > 1
    gradients = empty_gradients(problem, need_rate, need_c, several)
    reached = first if first.numel() else None
    for step in launch.plan_backward(problem, dout, lse, delta, reached, gradients, arch):
        step.run()
    return _gather(problem, gradients, need_c)


def empty_gradients(problem: Problem, need_rate: bool, need_c: bool, several: bool) -> Gradients:
    """Room for the kernels' results; where several launches add up, dk and dv do so in float32."""
    p = problem

    def room(like: Tensor | None, dtype: torch.dtype = torch.float32, wanted: bool = True) -> Tensor | None:
        return None if like is None or not wanted else like.new_empty(like.shape, dtype=dtype)

    def by_head(like: Tensor | None) -> Tensor | None:
        if like is None:
            return None
        shape = (like.shape[0], p.q.shape[1], *like.shape[2:])
        return like.new_zeros(shape, dtype=torch.float32)

    def stacked(like: Tensor) -> Tensor:
        return like.new_empty(like.shape, dtype=torch.float32 if several else like.dtype)

    # Row 0 of d_probe_k stays zero: no key stands before token 0, so its edge is never part of a sum.
    return Gradients(
        p.q.new_empty(p.q.shape),
        stacked(p.k),
        stacked(p.v),
        room(p.rate_q, wanted=need_rate),
        room(p.rate_k, wanted=need_rate),
        room(p.c_q, wanted=need_c and p.rate_k is not None),
        room(p.c_k, wanted=need_c),
        by_head(p.probe_q),
        by_head(p.probe_k),
        None if p.probe_q is None else p.q.new_empty(p.q.shape[:3], dtype=torch.float32),
    )


def _gather(problem: Problem, g: Gradients, need_c: bool) -> Grads:
    """Gradients in the shapes and dtypes of the inputs; heads that share a probe are summed in order."""
    p = problem

    def nothing() -> Tensor:
        return p.q.new_empty((0,))

    def share(grad: Tensor | None, like: Tensor | None) -> Tensor:
        if grad is None or like is None:
            return nothing()
        return grad.unflatten(1, (like.shape[1], -1)).sum(2).to(like.dtype)

    def cast(grad: Tensor | None, like: Tensor | None) -> Tensor:
        return nothing() if grad is None or like is None else grad.to(like.dtype)

    d_c_q = cast(g.d_c_q, p.c_q)
    if need_c and g.d_c_q is None and p.c_q is not None:
        d_c_q = torch.zeros_like(p.c_q)  # rate_q alone: a row's shift leaves a softmax as it is
    d_path_rate = nothing() if g.d_path_rate is None else g.d_path_rate.sum(-1)
    return (
        g.dq,
        cast(g.dk, p.k),
        cast(g.dv, p.v),
        cast(g.d_rate_q, p.rate_q),
        cast(g.d_rate_k, p.rate_k),
        d_c_q,
        cast(g.d_c_k, p.c_k),
        share(g.d_probe_q, p.probe_q),
        share(g.d_probe_k, p.probe_k),
        d_path_rate,
    )


@triton_backward.register_fake
def _(
    dout: Tensor, out: Tensor, lse: Tensor, first: Tensor, q: Tensor, k: Tensor, v: Tensor,
    rate_q: Tensor | None, rate_k: Tensor | None, c_q: Tensor | None, c_k: Tensor | None,
    probe_q: Tensor | None, probe_k: Tensor | None, path_rate: Tensor | None, documents: Tensor | None,
    padding: Tensor | None, causal: bool, window: int, scale: float, tau: float, bounded: bool,
    need_rate: bool, need_c: bool,
) -> Grads:  # fmt: skip
    def like(tensor: Tensor | None, wanted: bool = True) -> Tensor:
        if tensor is None or not wanted:
            return q.new_empty((0,))
        return tensor.new_empty(tensor.shape)

    return (
        like(q), like(k), like(v), like(rate_q, need_rate), like(rate_k, need_rate), like(c_q, need_c),
        like(c_k, need_c), like(probe_q), like(probe_k), like(path_rate),
    )  # fmt: skip


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    ctx.save_for_backward(*output, *inputs[:12])
    ctx.options = inputs[12:]
    ctx.mark_non_differentiable(output[1], output[2])


def _differentiate(ctx: Any, dout: Tensor, _lse: Tensor, _first: Tensor) -> tuple[Tensor | None, ...]:
    out, lse, first, *inputs = ctx.saved_tensors
    needs = ctx.needs_input_grad
    need_rate, need_c = needs[3] or needs[4], needs[5] or needs[6]
    grads = triton_backward(dout, out, lse, first, *inputs, *ctx.options, need_rate, need_c)
    wanted = [grad if needs[n] else None for n, grad in enumerate(grads)]
    return (*wanted, *[None] * 7)


triton_forward.register_autograd(_differentiate, setup_context=_remember)
