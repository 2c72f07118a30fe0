"""The loss of a batch, and the mean loss of the validation set over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..data import Batch, Batches
from .distributed import World


def batch_loss(model: nn.Module, part: Batch, count: float, precision: str, among: World) -> Tensor:
    """The sum of the losses of this rank's tokens, divided by `count`."""

    def moved(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or among.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(among.device, non_blocking=True)

    given: dict[str, Any] = {
        "targets": moved(part.targets),
        "documents": moved(part.documents),
        "count": count,
    }
    if among.parallel is not None:
        given["parallel"] = among.parallel
    half = precision == "bf16" and not isinstance(model, FSDPModule)
    with torch.autocast(among.device.type, torch.bfloat16, enabled=half):
        loss = model(moved(part.tokens), **given)
    assert isinstance(loss, Tensor)
    return loss


@torch.no_grad()
def mean_loss(
    loss_of: Callable[[Batch, float], Tensor], batches: Batches, rows: int, size: int, among: World
) -> float:
    """Mean over the targets of the first `rows` validation rows (0: all), `size` rows at a time on each group."""
    total = min(batches.validation_rows, rows or batches.validation_rows)
    share, largest = among.rows(total), -(-total // among.groups)
    summed, count = torch.zeros((), dtype=torch.float64, device=among.device), 0
    for first in range(share.start, share.start + largest, size):
        own = range(first, min(first + size, share.stop))
        part = batches.validation(own or range(1))
        loss = loss_of(part, 1.0)  # also without rows: sharded models compute together
        if own:
            summed += loss.double()
            count += int((part.targets >= 0).sum())
    whole, predicted = among.total(summed, count)
    return whole / max(1.0, predicted)
