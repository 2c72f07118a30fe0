"""Cross entropy over a large vocabulary, in chunks of tokens, so that not all logits are in memory at once.

The gradients of a chunk are computed together with its loss. torch 2.13 has a chunked `linear_cross_entropy` too, but
for bfloat16 it returns the loss in bfloat16, with an error of up to 0.4 %, and it does not compile. Here losses are
summed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..precision import autocasts, readable

IGNORE = -100
#: number of logits of a chunk on a CPU (32 MB in float32, about the size of its cache)
CHUNK_ELEMENTS = 1 << 23
#: on a GPU, the logits of a chunk in float32 take this share of its memory
CHUNK_SHARE = 1 / 64


def chunk_rows(head: Tensor) -> int:
    """Number of tokens of a chunk, for a head (V, C).

    On a GPU it depends on the total memory, not on the free memory: other chunks change the last bits of a sum, and a
    resumed run must give the same numbers.
    """
    elements = CHUNK_ELEMENTS
    if head.device.type == "cuda":
        elements = int(torch.cuda.get_device_properties(head.device).total_memory * CHUNK_SHARE) // 4
    return max(1, elements // head.shape[0])


@torch.library.custom_op("grape::chunked_cross_entropy", mutates_args=())
def _chunked(
    hidden: Tensor, weight: Tensor, targets: Tensor, hidden_grad: bool, weight_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of losses in float32, and its gradients for hidden (N, C) and weight (V, C), or empty tensors."""
    counted = counted_rows(targets)
    if counted is not None:  # leave out rows without a target
        total, d_rows, d_weight = _dense(hidden[counted], weight, targets[counted], hidden_grad, weight_grad)
        d_hidden = hidden.new_zeros(hidden.shape if hidden_grad else 0)
        return total, d_hidden.index_copy_(0, counted, d_rows) if hidden_grad else d_hidden, d_weight
    return _dense(hidden, weight, targets, hidden_grad, weight_grad)


def counted_rows(targets: Tensor) -> Tensor | None:
    """Indices of rows with a target; None if all rows have one, or on a GPU, where reading them would be slow."""
    if targets.device.type != "cpu" or not readable(targets):
        return None
    found = (targets.reshape(-1) != IGNORE).nonzero().squeeze(-1)
    return None if len(found) == targets.numel() else found


def _dense(
    hidden: Tensor, weight: Tensor, targets: Tensor, hidden_grad: bool, weight_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    total = hidden.new_zeros((), dtype=torch.float32)
    d_hidden = torch.empty_like(hidden) if hidden_grad else hidden.new_empty(0)
    d_weight = weight.new_zeros(weight.shape, dtype=torch.float32) if weight_grad else hidden.new_empty(0)
    size = chunk_rows(weight)
    for start in range(0, hidden.shape[0], size):
        rows, wanted = hidden[start : start + size], targets[start : start + size]
        counted = wanted != IGNORE
        index = wanted.where(counted, 0).unsqueeze(-1)
        logits = (rows @ weight.T).float()
        norm = logits.logsumexp(-1, keepdim=True)
        total += (norm - logits.gather(-1, index)).squeeze(-1).where(counted, 0.0).sum()
        if not (hidden_grad or weight_grad):
            continue
        slope = logits.sub_(norm).exp_()  # softmax, in the storage of the logits
        slope.scatter_add_(-1, index, slope.new_full((), -1.0).expand_as(index))
        if targets.device.type != "cpu":  # on the CPU all rows have a target
            slope.mul_(counted.unsqueeze(-1))
        slope = slope.to(hidden.dtype)
        if hidden_grad:
            torch.mm(slope, weight, out=d_hidden[start : start + size])
        if weight_grad:
            if rows.dtype == torch.float32:
                d_weight.addmm_(slope.T, rows)
            else:
                d_weight += slope.T @ rows
    return total, d_hidden, d_weight.to(weight.dtype) if weight_grad else d_weight


@_chunked.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, hidden_grad: bool, weight_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    d_hidden = torch.empty_like(hidden) if hidden_grad else hidden.new_empty(0)
    d_weight = torch.empty_like(weight) if weight_grad else hidden.new_empty(0)
    return hidden.new_empty((), dtype=torch.float32), d_hidden, d_weight


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], output[2])
    ctx.wanted = inputs[3:5]
    ctx.mark_non_differentiable(output[1], output[2])


def _backward(ctx: Any, d_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grads = [
        saved * d_total.to(saved.dtype) if wanted else None
        for saved, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    ]
    return grads[0], grads[1], None, None, None


_chunked.register_autograd(_backward, setup_context=_setup)


def cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, count: Tensor | int | float | None = None
) -> Tensor:
    """Mean cross entropy of the logits `hidden @ weight.T`, computed in chunks of tokens.

    Args:
        hidden: last hidden states, (…, C).
        weight: weight of the head, (V, C).
        targets: integers, (…); -100 where there is no target.
        count: divisor of the summed loss; the number of targets by default.

    Returns:
        The loss, a scalar in float32.
    """
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if rows.shape[0] != wanted.shape[0]:
        raise ValueError(
            f"targets must have shape {tuple(hidden.shape[:-1])}, one token for each hidden state, "
            f"got {tuple(targets.shape)}"
        )
    if autocasts(hidden):
        rows = rows.to(torch.get_autocast_dtype(hidden.device.type))
    weight = weight.to(rows.dtype)
    learns = torch.is_grad_enabled()
    total, _, _ = _chunked(
        rows, weight, wanted, learns and rows.requires_grad, learns and weight.requires_grad
    )
    return total / ((wanted != IGNORE).sum().clamp(min=1) if count is None else count)
