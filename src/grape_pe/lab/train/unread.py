"""Losses and gradient norms that stay on the device until they are needed."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor


class Taken(NamedTuple):
    """A step, its mean loss and its gradient norm before clipping."""

    step: int
    loss: float
    norm: float


class Unread:
    """Steps since the last `read`, which waits for the device and copies their numbers to the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._forget()

    def _forget(self) -> None:
        self.steps: list[int] = []
        self.numbers: list[Tensor] = []
        self.tokens, self.began = 0, 0.0

    def begin(self) -> None:
        """Start the clock, at the first step after a `read`."""
        if not self.steps:
            self.began = time.perf_counter()

    def add(self, step: int, loss: Tensor, norm: Tensor, tokens: int) -> None:
        self.steps.append(step)
        self.numbers.append(torch.stack([loss, norm]))
        self.tokens += tokens

    def read(self) -> tuple[list[Taken], int, float]:
        """The steps, their tokens, and the seconds since the first of them began."""
        found = torch.stack(self.numbers).tolist() if self.numbers else []
        taken = [Taken(step, loss, norm) for step, (loss, norm) in zip(self.steps, found, strict=True)]
        tokens, seconds = self.tokens, max(time.perf_counter() - self.began, 1e-9)
        self._forget()
        return taken, tokens, seconds
