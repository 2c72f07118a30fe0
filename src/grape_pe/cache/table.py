"""`TokenTable`, the storage of a cache: named columns (B, n, S, …) that grow together along the token axis.

Sequences of different lengths are aligned at their last token. A shorter sequence has empty slots before it, which
are zero in every column.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

#: columns that are added only when a call needs them
OPTIONAL = {"document"}


class TokenTable:
    """Named tensors with a common token axis (the third), appended to at the end and read as views.

    Appending costs O(1) per token on average: the storage doubles when it is full, and only then are old tokens
    dropped.

    Args:
        capacity: number of tokens to allocate storage for at once; None to grow as needed.
        keep_last: number of last tokens to keep; None keeps all.
        keep_first: number of first tokens to keep as well.
    """

    def __init__(self, capacity: int | None = None, keep_last: int | None = None, keep_first: int = 0):
        self.capacity, self.keep_last, self.keep_first = capacity, keep_last, keep_first
        self.storage: dict[str, Tensor] = {}
        self.length = 0  # slots in use
        self.lead: list[int] = []  # empty slots of each sequence, after the first `keep_first`; [] for none
        self.ends: Tensor | None = None  # (B, 1), the end of these slots, on the device of the columns

    # Writing ------------------------------------------------------------------------------------

    def check(self, new: Mapping[str, Tensor]) -> None:
        """Raise a ValueError if `new` cannot be appended."""
        storage, tokens = self.storage, 0
        if storage and storage.keys() != new.keys():
            for name in (storage.keys() ^ new.keys()) - OPTIONAL:
                raise ValueError(
                    f"only one of the cache and the new tokens has {name!r}; use a cache of the same layer"
                )
        for name, tensor in new.items():
            cached, tokens = storage.get(name, tensor), tensor.shape[2]
            kind, want = ((t.shape[:2], t.shape[3:], t.dtype, t.device) for t in (tensor, cached))
            if kind != want:
                raise ValueError(
                    f"{name!r} is cached as {cached.dtype} {(*want[0], *want[1])} per token on {cached.device}, got "
                    f"{tensor.dtype} {(*kind[0], *kind[1])} on {tensor.device}; "
                    "use a new cache for another model, dtype or batch"
                )
        if self.capacity is not None and self.keep_last is None and self.length + tokens > self.capacity:
            raise ValueError(
                f"the cache holds {self.length} of {self.capacity} tokens, and {tokens} more do not fit; "
                "build it with a larger capacity, or with a window"
            )

    def append(self, new: Mapping[str, Tensor], tokens: int) -> None:
        """Write new tokens at the end. Values are copied without gradients."""
        if not self.storage:
            size = max(64, tokens) if self.capacity is None else max(self.capacity, tokens)
            self.storage = {name: _allocate(tensor, size) for name, tensor in new.items()}
        for name in new.keys() - self.storage.keys():  # a new column is zero for earlier tokens
            self.storage[name] = _allocate(new[name], self.size).zero_()
        self._reserve(tokens)
        start, self.length = self.length, self.length + tokens
        for name, tensor in new.items():
            values = tensor.detach() if tensor.requires_grad else tensor
            self.storage[name].narrow(2, start, tokens).copy_(values)

    def clear(self) -> None:
        """Remove all tokens and keep the storage."""
        self.length = 0
        self._set_lead([])

    def load(self, columns: Mapping[str, Tensor], lead: Sequence[int]) -> None:
        """Fill an empty table with the columns of `stored` and the `lead` of another table."""
        if columns:
            self.append(columns, next(iter(columns.values())).shape[2])
        self._set_lead(list(lead))

    @property
    def size(self) -> int:
        """Number of allocated slots."""
        return next(iter(self.storage.values())).shape[2] if self.storage else 0

    @property
    def device(self) -> torch.device:
        """The device of the columns."""
        return next(iter(self.storage.values())).device

    def _reserve(self, tokens: int) -> None:
        size, first = self.size, self.keep_first
        if self.length + tokens <= size:
            return
        kept = self.length if self.keep_last is None else min(self.length, first + self.keep_last)
        larger = size
        while kept + tokens > larger or (self.keep_last is not None and larger < 2 * kept):
            larger *= 2
        first = min(first, kept)
        for name, old in self.storage.items():
            fresh = old if larger == size and 2 * kept <= self.length else _allocate(old, larger)
            fresh[:, :, :first] = old[:, :, :first]
            fresh[:, :, first:kept] = old[:, :, self.length - (kept - first) : self.length]
            self.storage[name] = fresh
        self._set_lead([max(0, lead - (self.length - kept)) for lead in self.lead])
        self.length = kept

    def _set_lead(self, lead: list[int]) -> None:
        self.lead, self.ends = lead if any(lead) else [], None
        if self.lead:
            self.ends = torch.tensor(lead, device=self.device).unsqueeze(-1) + self.keep_first

    # Removing -----------------------------------------------------------------------------------

    def cut(self, counts: Sequence[int], trim: bool = False) -> None:
        """Remove the last counts[b] tokens of each sequence b and align the others at the end.

        With `trim`, also drop tokens before the last `keep_last`.
        """
        if not self.storage:
            return
        least, first = min(counts), self.keep_first
        away = [count - least for count in counts]
        self.length -= least
        room, empty = max(0, self.length - first), self.lead or [0] * len(away)
        lead = [min(room, a + b) for a, b in zip(away, empty, strict=True)]
        start = min(lead)
        if trim and self.keep_last is not None:
            start = max(start, room - self.keep_last)
        if start or any(away):
            self._move(start, away, [max(0, slots - start) for slots in lead])

    def _move(self, start: int, away: list[int], lead: list[int]) -> None:
        """Drop `start` slots after the first `keep_first`, shift sequences by `away` slots, empty `lead` slots."""
        first, kept = self.keep_first, self.length - start
        slot = torch.arange(first, kept, device=self.device)
        shift, empty = torch.tensor([away, lead], device=self.device).unsqueeze(-1)
        source, hidden = (slot + start - shift).clamp(min=0), slot < first + empty
        for name, old in self.storage.items():
            moved = take(old, source, 2).masked_fill(fit(hidden, old, 2), 0)
            size = max(64, kept) if self.capacity is None else old.shape[2]
            fresh = old if size == old.shape[2] else _allocate(old, size)
            fresh[:, :, :first] = old[:, :, :first]
            fresh[:, :, first:kept] = moved
            self.storage[name] = fresh
        self.length = kept
        self._set_lead(lead)

    # Reading ------------------------------------------------------------------------------------

    def newest(self, name: str, count: int) -> Tensor:
        """The last `count` tokens of a column, or all if there are fewer."""
        count = min(count, self.length)
        return self.storage[name].narrow(2, self.length - count, count)

    def tokens_of(self, b: int) -> int:
        """Number of stored tokens of sequence b."""
        return self.length - (self.lead[b] if self.lead else 0)

    def view(self, name: str, last: int | None = None) -> Tensor:
        """The first `keep_first` and the last `last` tokens of a column, in order; all tokens by default."""
        start = 0 if last is None else max(0, self.length - last)
        if start <= self.keep_first:
            return self.storage[name].narrow(2, 0, self.length)
        recent = self.storage[name].narrow(2, start, self.length - start)
        return (
            torch.cat([self.storage[name][:, :, : self.keep_first], recent], 2) if self.keep_first else recent
        )

    def hidden(self, last: int | None = None) -> Tensor | None:
        """(B, slots), True where a slot of `view(…, last)` is empty; None if no slot is."""
        start, first = 0 if last is None else max(0, self.length - last), self.keep_first
        if self.ends is None or first + max(self.lead) <= start:
            return None
        slot = torch.arange(self.length, device=self.device)
        hidden = (slot >= first) & (slot < self.ends)
        return hidden if start <= first else torch.cat([hidden[:, :first], hidden[:, start:]], 1)

    def stored(self) -> dict[str, Tensor]:
        """All slots in use, by column, as views."""
        return {name: tensor[:, :, : self.length] for name, tensor in self.storage.items()}

    def map(self, change: Callable[[str, Tensor], Tensor]) -> None:
        """Replace every column by `change(name, column)`."""
        with writable():
            self.storage = {name: change(name, tensor) for name, tensor in self.storage.items()}
        self._set_lead(self.lead)

    def select(self, index: Tensor, rows: list[int]) -> None:
        """Keep the sequences `index` (`rows` as a list), in that order."""
        self.map(lambda _, tensor: tensor.index_select(0, index.to(tensor.device)))
        if self.lead:
            self._set_lead([self.lead[row] for row in rows])
            self.cut([0] * len(rows))

    def copy(self) -> TokenTable:
        """Return an independent copy."""
        copied = TokenTable(self.capacity, self.keep_last, self.keep_first)
        with writable():
            copied.storage = {name: tensor.clone() for name, tensor in self.storage.items()}
        copied.length, copied.lead, copied.ends = self.length, list(self.lead), self.ends
        return copied


def take(tensor: Tensor, index: Tensor, dim: int) -> Tensor:
    """Gather tensor[b, …, index[b, i], …] along `dim`, with index (B, n); a batch of 1 is expanded."""
    return torch.take_along_dim(tensor, fit(index, tensor, dim), dim)


def fit(index: Tensor, like: Tensor, dim: int) -> Tensor:
    """Reshape (B, n) to (B, 1, …, n, …, 1) with n at `dim`, to broadcast with `like`."""
    shape = [1] * like.dim()
    shape[0], shape[dim] = index.shape
    return index.view(shape)


def writable() -> contextlib.AbstractContextManager[object]:
    """Turn inference mode off for new storage, so that calls outside inference mode can write to it."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    return torch.inference_mode(False)


def _allocate(like: Tensor, tokens: int) -> Tensor:
    """Uninitialized storage for a column like this, with `tokens` slots."""
    with writable():
        return torch.empty(*like.shape[:2], tokens, *like.shape[3:], dtype=like.dtype, device=like.device)
