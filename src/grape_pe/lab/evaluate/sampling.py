"""Sampling from a model, token by token through its cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ...models import Decoder
from ..errors import LabError


def sample_tokens(
    model: Decoder,
    prompt: list[int],
    *,
    count: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Sample up to `count` tokens after the prompt.

    Args:
        model: the decoder.
        prompt: token ids, at least one.
        count: largest number of new tokens.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: sample from the smallest set of tokens with this probability.
        seed: of the random numbers.
        stop: the token that ends the text.
    """
    if not prompt:
        raise LabError("prompt must have at least one token")
    if count < 1:
        raise LabError(f"tokens must be 1 or more, got {count}")
    if not 0 <= temperature < math.inf:
        raise LabError(f"temperature must be finite and at least 0, got {temperature}")
    if not 0 < top_p <= 1:
        raise LabError(f"top_p must be above 0 and at most 1, got {top_p}")
    return _sampled(model, prompt, count, temperature, top_p, torch.Generator().manual_seed(seed), stop)


def _sampled(
    model: Decoder, prompt: list[int], count: int, temperature: float, top_p: float,
    dice: torch.Generator, stop: int | None,
) -> Iterator[int]:  # fmt: skip
    model.eval()
    with torch.inference_mode():
        cache = model.cache()
        coming = torch.tensor([prompt], device=model.head.device)
        for _ in range(count):
            logits = model(coming, cache=cache)[0, -1].float().cpu()
            token = _draw(logits, temperature, top_p, dice)
            if token == stop:
                return
            yield token
            coming = torch.tensor([[token]], device=model.head.device)


def _draw(logits: Tensor, temperature: float, top_p: float, dice: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    chances, order = (logits / temperature).softmax(-1).sort(descending=True)
    kept = chances.cumsum(-1) - chances < top_p  # the smallest set with top_p, never empty
    chances = chances * kept
    return int(order[torch.multinomial(chances, 1, generator=dice)])
