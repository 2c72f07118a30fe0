"""The custom op behind `blockwise`: slope terms, a path, every mask; forward and backward.

Being an op, it is one node to torch.compile and torch.export. Its tensors are already in the working
dtype (float32 or float64) and expanded to all heads:

    q (B,H,Tq,D)  k (B,Hkv,Tk,D)  v (B,Hkv,Tk,Dv)
    c_q (R,B,H,Tq)  c_k (R,B,H,Tk) in float64;  rate_q, rate_k (R,B,H,T)
    probe_q (B,H,Tq,P)  probe_k (B,H,Tk,P)  path_rate (H,)
    documents (B,Tk) integer  key_padding (B,Tk) bool

The compiled kernel computes it where it can (CPU, float32), plain torch everywhere else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cpu import build as native
from .tile_native import native_backward, native_forward
from .tile_problem import TileProblem
from .tile_torch import torch_backward, torch_forward


def uses_native(q: Tensor) -> bool:
    """Whether the compiled kernel serves this tensor, already in the working dtype."""
    return q.device.type == "cpu" and q.dtype == torch.float32 and native.available()


def kernel_for(q: Tensor) -> str:
    """Which kernel attention over q would get: half precision works in float32."""
    served = q.device.type == "cpu" and q.dtype != torch.float64 and native.available()
    return "compiled" if served else "torch"


@torch.library.custom_op("grape::tiles", mutates_args=())
def tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c_q: Tensor | None,
    c_k: Tensor | None,
    rate_q: Tensor | None,
    rate_k: Tensor | None,
    probe_q: Tensor | None,
    probe_k: Tensor | None,
    path_rate: Tensor | None,
    documents: Tensor | None,
    key_padding: Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    bounded: bool,
    prune: float,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out (B,H,Tq,Dv), norms (B,H,Tq,2): maximum and sum of exp, work (B,H,2): tiles computed, visible)."""
    problem = TileProblem(
        q, k, v, c_q, c_k, rate_q, rate_k, probe_q, probe_k, path_rate, documents, key_padding,
        causal, window, scale, bounded, prune, bias_grad,
    )  # fmt: skip
    return native_forward(problem) if uses_native(q) else torch_forward(problem)


@tiles.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = q.shape[:3]
    work = q.new_empty((*q.shape[:2], 2), dtype=torch.int64)
    return q.new_empty((*rows, v.shape[-1])), q.new_empty((*rows, 2)), work


@torch.library.custom_op("grape::tiles_backward", mutates_args=())
def tiles_backward(
    d_out: Tensor,
    out: Tensor,
    norms: Tensor,
    work: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c_q: Tensor | None,
    c_k: Tensor | None,
    rate_q: Tensor | None,
    rate_k: Tensor | None,
    probe_q: Tensor | None,
    probe_k: Tensor | None,
    path_rate: Tensor | None,
    documents: Tensor | None,
    key_padding: Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    bounded: bool,
    prune: float,
    bias_grad: bool,
    c_grad: bool,
) -> list[Tensor]:
    """Gradients of the first ten arguments of `tiles`; an empty tensor stands for None."""
    problem = TileProblem(
        q, k, v, c_q, c_k, rate_q, rate_k, probe_q, probe_k, path_rate, documents, key_padding,
        causal, window, scale, bounded, prune, bias_grad,
    )  # fmt: skip
    backward = native_backward if uses_native(q) else torch_backward
    grads = backward(problem, d_out, out, norms, work, c_grad)
    return [q.new_empty(0) if grad is None else grad.contiguous() for grad in grads]


@tiles_backward.register_fake
def _(d_out: Tensor, out: Tensor, norms: Tensor, work: Tensor, *inputs: Any) -> list[Tensor]:
    rates, c = inputs[-2:]
    wanted = [
        *inputs[:3],
        *(x if c else None for x in inputs[3:5]),
        *(x if rates else None for x in inputs[5:7]),
    ]
    wanted += inputs[7:10]
    return [
        d_out.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in wanted
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:12])
    ctx.options = inputs[12:]
    ctx.mark_non_differentiable(output[1], output[2])


def _backward(ctx: Any, d_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    out, norms, work, *tensors = ctx.saved_tensors
    needed = ctx.needs_input_grad
    grads = tiles_backward(d_out, out, norms, work, *tensors, *ctx.options, needed[3] or needed[4])
    kept = [grad if needed[i] and tensors[i] is not None else None for i, grad in enumerate(grads)]
    return (*kept, None, None, *(None for _ in ctx.options))


tiles.register_autograd(_backward, setup_context=_setup)
