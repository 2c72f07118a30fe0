"""A table of what is kept for each token: named columns (B, n, T, …) that grow together.

The cache is nothing but such a table, so cutting, reordering, forking and saving are written once
for everything a token leaves behind: keys, values, bias traces, carried state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class Columns:
    """Named tensors along one token axis (the third), written at the end, read as views.

    `capacity` fixes the storage once (a static cache); otherwise it doubles when full, so that writing
    costs O(1) a token on average. `keep_last` bounds what is stored: older tokens are dropped, except the
    first `keep_first`. Dropping moves data only when the storage is full, so it is O(1) a token as well.
    """

    def __init__(self, capacity: int | None = None, keep_last: int | None = None, keep_first: int = 0):
        self.capacity, self.keep_last, self.keep_first = capacity, keep_last, keep_first
        self.storage: dict[str, Tensor] = {}
        self.length = 0  # tokens in storage
        self.dropped = 0  # tokens that once stood after the first `keep_first` and are gone

    def check(self, new: Mapping[str, Tensor]) -> None:
        """Raise before anything is written if `new` does not continue what is here."""
        for name, tensor in new.items():
            held = self.storage.get(name)
            if held is None:
                if self.storage:
                    raise ValueError(f"the cache has no column {name!r}; it belongs to another encoding")
                continue
            want = (*held.shape[:2], *held.shape[3:])
            if (*tensor.shape[:2], *tensor.shape[3:]) != want or tensor.dtype != held.dtype:
                raise ValueError(
                    f"column {name!r} holds {held.dtype} {want} a token, got {tensor.dtype} "
                    f"{(*tensor.shape[:2], *tensor.shape[3:])}; "
                    "use a new cache for another model, dtype or batch"
                )
        if self.storage and new.keys() != self.storage.keys():
            missing = ", ".join(sorted(self.storage.keys() - new.keys()))
            raise ValueError(f"the cache also holds {missing}; it belongs to another encoding")
        self._room(next(iter(new.values())).shape[2])

    def _room(self, tokens: int) -> None:
        if self.capacity is not None and self.keep_last is None and self.length + tokens > self.capacity:
            raise ValueError(
                f"the static cache holds {self.length} of {self.capacity} tokens and cannot take {tokens} "
                "more; build it with a larger capacity, or with a window"
            )

    def append(self, new: Mapping[str, Tensor]) -> None:
        self.check(new)
        tokens = next(iter(new.values())).shape[2]
        if not self.storage:
            size = self._first_size(tokens)
            self.storage = {name: _empty_like(t, size) for name, t in new.items()}
        self._make_room(tokens)
        for name, tensor in new.items():
            self.storage[name][:, :, self.length : self.length + tokens] = tensor
        self.length += tokens

    def _first_size(self, tokens: int) -> int:
        if self.capacity is not None:
            return max(self.capacity, tokens) if self.keep_last is not None else self.capacity
        return max(64, tokens)

    def _make_room(self, tokens: int) -> None:
        size = self._size()
        if self.length + tokens <= size:
            return
        kept = self.length if self.keep_last is None else min(self.length, self.keep_first + self.keep_last)
        larger = size
        while kept + tokens > larger or (self.keep_last is not None and larger < 2 * kept):
            larger *= 2
        first, last = min(self.keep_first, kept), kept - min(self.keep_first, kept)
        for name, old in self.storage.items():
            fresh = old if larger == size and 2 * kept <= self.length else _empty_like(old, larger)
            fresh[:, :, :first] = old[:, :, :first]
            fresh[:, :, first:kept] = old[:, :, self.length - last : self.length]
            self.storage[name] = fresh
        self.dropped += self.length - kept
        self.length = kept

    def _size(self) -> int:
        return next(iter(self.storage.values())).shape[2]

    def view(self, name: str, last: int | None = None) -> Tensor:
        """The first `keep_first` and the `last` tokens of a column, in order; all of them by default."""
        held = self.storage[name][:, :, : self.length]
        start = 0 if last is None else max(0, self.length - last)
        if start <= self.keep_first:
            return held
        recent = held[:, :, start:]
        return torch.cat([held[:, :, : self.keep_first], recent], 2) if self.keep_first else recent

    def drop_last(self, tokens: int) -> None:
        self.length -= tokens

    def map(self, change: Callable[[str, Tensor], Tensor]) -> None:
        self.storage = {name: change(name, tensor) for name, tensor in self.storage.items()}

    def stored(self) -> dict[str, Tensor]:
        return {name: tensor[:, :, : self.length] for name, tensor in self.storage.items()}


def _empty_like(tensor: Tensor, tokens: int) -> Tensor:
    return tensor.new_empty(*tensor.shape[:2], tokens, *tensor.shape[3:])
