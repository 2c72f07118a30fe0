"""Losses and gradient norms that are still on the device, until someone wants to see them."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor


class Taken(NamedTuple):
    """A step, the mean loss of its batch and the norm of its gradient before clipping."""

    step: int
    loss: float
    norm: float


class Unread:
    """Steps since the last `read`, which copies their numbers to the host at once and waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._forget()

    def _forget(self) -> None:
        self.steps: list[int] = []
        self.numbers: list[Tensor] = []
        self.tokens, self.began = 0, 0.0

    def begin(self) -> None:
        """A step begins; the clock starts with the first one after a `read`."""
        if not self.steps:
            self.began = time.perf_counter()

    def add(self, step: int, loss: Tensor, norm: Tensor, tokens: int) -> None:
        self.steps.append(step)
        self.numbers.append(torch.stack([loss, norm]))
        self.tokens += tokens

    def read(self) -> tuple[list[Taken], int, float]:
        """What was taken, its tokens, and the seconds from the first step to now."""
        found = torch.stack(self.numbers).tolist() if self.numbers else []
        taken = [Taken(step, loss, norm) for step, (loss, norm) in zip(self.steps, found, strict=True)]
        tokens, seconds = self.tokens, max(time.perf_counter() - self.began, 1e-9)
        self._forget()
        return taken, tokens, seconds
