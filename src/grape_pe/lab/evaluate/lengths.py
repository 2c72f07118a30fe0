"""Losses of a language model at any length, streamed in chunks through its cache.

losses = stream_losses(model, tokens, window=256)                    # (B, L - 1)
found = evaluate_language(model, open_dataset(DIR), train_length=256)    # 1 to 16 times that length
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...models import Decoder
from ...models.loss import IGNORE, chunk_rows
from ..data.batches import Batches
from ..data.dataset import Dataset
from ..errors import LabError
from ..train.distributed import World
from ..train.validation import batch_loss, mean_loss

FACTORS = (1, 2, 4, 8, 16)
#: losses (rows, length) by length and window, or the reason for having none
Found = dict[tuple[int, int | None], Tensor | str]
#: tokens of a batch of chunks
TOKENS_AT_ONCE = 1 << 13


@torch.inference_mode()
def stream_hidden(
    model: Decoder, tokens: Tensor, *, chunk: int = 512, window: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Last hidden states of (B, L) tokens, chunk by chunk through a cache: (first position, (B, n, C))."""
    if chunk < 1:
        raise LabError(f"chunk must be at least 1 token, got {chunk}")
    cache = model.cache(window=window, rollback=0)
    tokens = tokens.to(model.head.device)
    for first in range(0, tokens.shape[1], chunk):
        span = slice(first, first + chunk)
        yield first, model.hidden(tokens[:, span], cache=cache)


@torch.inference_mode()
def stream_losses(model: Decoder, tokens: Tensor, *, chunk: int = 512, window: int | None = None) -> Tensor:
    """Losses (B, L - 1) in float32: entry t is that of token t + 1 after all tokens up to t.

    Args:
        model: the decoder.
        tokens: (B, L) integer, L at least 2.
        chunk: tokens per row in a forward pass; affects time and memory, not the result.
        window: attention reaches fewer than this many tokens back.
    """
    if tokens.dim() != 2 or tokens.shape[1] < 2:
        raise LabError(f"tokens must be (rows, at least 2 tokens), got shape {tuple(tokens.shape)}")
    targets = tokens[:, 1:].to(model.head.device)
    losses = torch.empty(targets.shape, dtype=torch.float32, device=targets.device)
    for first, hidden in stream_hidden(model, tokens[:, :-1], chunk=chunk, window=window):
        span = slice(first, first + hidden.shape[1])
        losses[:, span] = token_losses(hidden, model.head, targets[:, span])
    return losses


def token_losses(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each target in float32, 0 where it is -100, computed in chunks of tokens."""
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    size = chunk_rows(head)
    parts = []
    for some, index in zip(rows.split(size), wanted.split(size), strict=True):
        logits = (some @ head.T).float()
        parts.append(torch.nn.functional.cross_entropy(logits, index, ignore_index=IGNORE, reduction="none"))
    return torch.cat(parts).view(targets.shape)


@torch.inference_mode()
def validation_loss(model: Decoder, batches: Batches, rows: int = 0, *, batch: int = 16) -> float:
    """Mean loss over the targets of the first `rows` rows of the validation set; 0 for all of it.

    Args:
        model: the decoder.
        batches: where the validation set comes from.
        rows: number of rows; 0 for all.
        batch: rows read together.
    """
    here = World(device=model.head.device)
    return mean_loss(lambda part, n: batch_loss(model, part, n, "fp32", here), batches, rows, batch, here)


def evaluate_language(
    model: Decoder,
    data: Dataset | Tensor,
    train_length: int,
    *,
    factors: Sequence[int] = FACTORS,
    windows: Sequence[int | None] | None = None,
    tokens: int = 1 << 13,
    seed: int = 0,
    chunk: int = 512,
) -> dict[str, Any]:
    """Loss by position, and loss and perplexity at multiples of the training length.

    The same text is used at every length: stretches of the greatest length, cut into shorter ones. Two lengths
    differ only in the context.

    Args:
        model: the decoder.
        data: a prepared dataset, whose validation split is read; or tokens, (N,) or (rows, N).
        train_length: tokens of a sequence in training.
        factors: multiples of the training length.
        windows: how far attention reaches, None for all; by default None and `train_length`.
        tokens: predictions at each length, rounded down to whole stretches, one at least.
        seed: which stretches are taken.
        chunk: tokens per row in a forward pass; affects time and memory, not the result.
    """
    if train_length < 1 or not factors or min(factors) < 1:
        raise LabError(f"train_length and factors must be at least 1, got {train_length} and {factors}")
    chosen = (None, train_length) if windows is None else tuple(windows)
    lengths = [factor * train_length for factor in sorted(factors)]
    source = _Source(data)
    fitting = [length for length in lengths if length < source.longest]
    if not fitting:
        raise LabError(
            f"a sequence of {lengths[0]} needs {lengths[0] + 1} tokens, the longest piece of the "
            f"validation text has {source.longest}; use more data"
        )
    text = source.stretches(fitting[-1], tokens, seed)
    found: Found = {}
    for window in chosen:
        for length in lengths:
            unlimited = found.get((length, None))
            if window is not None and window >= length and unlimited is not None:
                found[length, window] = unlimited  # the window covers the whole sequence
            elif length in fitting:
                optional = window is not None or length > lengths[0]
                found[length, window] = _losses_at(model, text, length, window, chunk, optional)
            else:
                found[length, window] = f"no stretch of the validation text has {length + 1} tokens"
    return {
        "by_position": _by_position(found, train_length),
        "extrapolation": [_entry(n, w, losses, train_length, len(text)) for (n, w), losses in found.items()],
    }


class _Source:
    """Tokens in one or more pieces; stretches do not cross their ends."""

    def __init__(self, data: Dataset | Tensor) -> None:
        self.data = data
        if isinstance(data, Tensor):
            self.rows = data if data.dim() == 2 else data[None]
            self.sizes = [self.rows.shape[1]] * self.rows.shape[0]
        else:
            self.shards = data.manifest.of("val")
            self.sizes = [shard.tokens for shard in self.shards]
        self.longest = max(self.sizes, default=0)

    def _read(self, piece: int, start: int, count: int) -> Tensor:
        if isinstance(self.data, Tensor):
            return self.rows[piece, start : start + count].long()
        return torch.from_numpy(self.data.read(self.shards[piece], start, count))

    def stretches(self, length: int, tokens: int, seed: int) -> Tensor:
        """(rows, length + 1): distinct stretches in a random order that depends on the seed alone."""
        places = [(i, k * length) for i, size in enumerate(self.sizes) for k in range((size - 1) // length)]
        order = np.random.default_rng(seed).permutation(len(places))[: max(1, tokens // length)]
        chosen = [places[i] for i in order]
        return torch.stack([self._read(piece, start, length + 1) for piece, start in chosen])


def _losses_at(
    model: Decoder, text: Tensor, length: int, window: int | None, chunk: int, optional: bool
) -> Tensor | str:
    """Losses (rows, length) of the text cut into sequences of that length; if optional, the reason for having none."""
    rows = text.unfold(1, length + 1, length).reshape(-1, length + 1)
    parts = rows.split(max(1, TOKENS_AT_ONCE // min(length, chunk)))
    try:
        return torch.cat([stream_losses(model, part, chunk=chunk, window=window).cpu() for part in parts])
    except ValueError as problem:
        if not optional:
            raise
        return str(problem)  # a model may refuse a window or a length


def _entry(
    length: int, window: int | None, losses: Tensor | str, train_length: int, stretches: int
) -> dict[str, Any]:
    """A line of the evaluation; without a loss, the reason. `stretches` has the mean loss of each stretch of text,
    in the same order at every length."""
    entry: dict[str, Any] = {
        "length": length, "window": window, "loss": None, "perplexity": None, "tail_loss": None, "tokens": 0,
        "stretches": [],
    }  # fmt: skip
    if isinstance(losses, str):
        return entry | {"reason": losses}
    loss = _finite(losses.double().mean())
    return entry | {
        "loss": loss,
        "perplexity": None if loss is None else math.exp(min(loss, 700.0)),
        "tail_loss": _finite(losses[:, -train_length:].double().mean()),
        "tokens": losses.numel(),
        "stretches": [_finite(mean) for mean in losses.double().reshape(stretches, -1).mean(1)],
    }


def _by_position(found: Found, train_length: int) -> dict[str, Any]:
    """Mean loss by the number of previous tokens, over all passes without a window: eight buckets within the training
    length, then two per training length."""
    passes = [x.double() for (_, window), x in found.items() if window is None and isinstance(x, Tensor)]
    longest = max((x.shape[1] for x in passes), default=0)
    fine, coarse = max(1, train_length // 8), max(1, train_length // 2)
    edges = sorted({*range(0, train_length, fine), *range(train_length, longest, coarse), longest})
    centres, losses = [], []
    for first, last in pairwise(edges):
        here = [x[:, first:last].flatten() for x in passes]
        centres.append((first + 1 + last) / 2)
        losses.append(_finite(torch.cat(here).mean()))
    return {"position": centres, "loss": losses}


def _finite(value: Tensor) -> float | None:
    """None if not finite, as JSON has no such number."""
    return float(value) if bool(value.isfinite()) else None
