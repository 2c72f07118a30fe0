"""AdamW groups, the learning rate schedule, and initial weights."""

from __future__ import annotations

import math

import torch
from torch import nn

from ...layers import RMSNorm
from ...models import Decoder
from ..config import TrainSection


def adamw(model: nn.Module, settings: TrainSection) -> torch.optim.AdamW:
    """Weight decay on everything but norms, as in the paper's experiments."""
    norms = {p for m in model.modules() if isinstance(m, RMSNorm) for p in m.parameters(recurse=False)}
    learned = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learned if p not in norms], "weight_decay": settings.weight_decay},
        {"params": [p for p in learned if p in norms], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=betas, fused=True)


def learning_rate(step: int, settings: TrainSection) -> float:
    """The rate of step 0, 1, 2, …: linear warm-up, then a cosine, or a plateau and a linear decay."""
    top, low, total = settings.lr, settings.min_lr, settings.steps
    if step < settings.warmup:
        return top * (step + 1) / settings.warmup
    if settings.schedule == "cosine":
        done = (step - settings.warmup) / max(1, total - settings.warmup)
        return low + (top - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    length = decay_steps(settings)
    left = max(0, total - step)
    return top if left >= length else low + (top - low) * left / length


def decay_steps(settings: TrainSection) -> int:
    """Steps of the decay that ends a wsd schedule."""
    return max(1, round(settings.decay * settings.steps))


def initialise(model: Decoder, seed: int) -> None:
    """Initial weights. Each block has its own seed and draws its encoding last, so that models that differ only
    in their encoding start with the same matrices.
    """
    trunk = model.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed(seed, 0))
        model.reset_parameters()
        for number, block in enumerate(trunk.layers, start=1):
            torch.manual_seed(_seed(seed, number))
            block.reset_parameters()  # type: ignore[operator]


def _seed(seed: int, part: int) -> int:
    return (seed * 1_000_003 + part) % (1 << 63)
