"""`TokenStore`, the base class of `StreamingCache`: the storage of one attention layer's tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..attention import key_bound
from ..encodings.base import Encoding
from .layout import Tail, as_numbers
from .sequences import Sequences
from .table import OPTIONAL, TokenTable


class TokenStore:
    """Two tables of tokens, the lengths of the sequences, and a bound of the norms of keys.

    It appends, crops, selects, copies and moves tokens. `StreamingCache` encodes them and reads them.
    """

    encoding: Encoding
    shift: nn.Module | None
    window: int | None
    sinks: int
    capacity: int | None
    rollback: int

    def reset(self) -> Self:
        """Remove all tokens and release the storage."""
        keep = None if self.window is None else self.window + self.rollback
        self.tokens = TokenTable(self.capacity, keep, self.sinks)  # for all later queries
        self.states = TokenTable(None, self.rollback + self.encoding.lookback)  # for the next token only
        self.state_names: Any = None  # the encoding's state, with names of columns instead of tensors
        self.sequences = Sequences()
        self.bound: Tensor | None = None  # (B, Hkv), the largest norm of all keys but the last `unbounded`
        self.unbounded = 0
        return self

    @property
    def length(self) -> int:
        """Number of tokens of the longest sequence, including tokens dropped by a window."""
        return max(self.sequences.lengths, default=0)

    @property
    def batch(self) -> int:
        """Number of sequences; 0 for an empty cache."""
        return self.sequences.batch

    @property
    def next_position(self) -> Tensor | None:
        """The next position of each sequence, (B,), on the CPU; None if empty or with several coordinates."""
        known = self.sequences
        return (
            as_numbers(known.next, torch.device("cpu")) if known.lengths and known.next is not None else None
        )

    def tail(self) -> Tail | None:
        """The end of the sequences, from which the next call continues; None for an empty cache."""
        known = self.sequences
        if not known.lengths or known.next is None:
            return None
        document = self.tokens.storage.get("document")
        last = None if document is None else document[:, 0, self.tokens.length - 1]
        return Tail(known.next, known.lengths, last)

    def _bias_tensors(self) -> dict[str, Tensor]:
        """The cached key-side tensors of the bias, by the names of `Bias.key_tensors`."""
        kept = self.tokens.stored()
        return {name.removeprefix("bias."): t for name, t in kept.items() if name.startswith("bias.")}

    def _write(
        self,
        columns: dict[str, Tensor],
        states: dict[str, Tensor],
        count: int,
        counts: Sequence[int] | None,
    ) -> None:
        pads = None if counts is None else [count - n for n in counts]
        self.tokens.append(columns, count)
        self.unbounded += count
        if pads is not None:
            self.tokens.cut(pads)
            self.bound = None
        kept = self.rollback + self.encoding.lookback
        if pads is None and count > kept:  # no older state can be needed again
            self.states.clear()
            states, count = {name: t[:, :, -kept:] for name, t in states.items()}, kept
        if states:
            self.states.append(states, count)
        if states and pads is not None:
            self.states.cut(pads, trim=True)

    def _state(self, state_names: Any) -> Any:
        if isinstance(state_names, tuple):
            return tuple(self._state(part) for part in state_names)
        if state_names is None:
            return None
        table = self.tokens if state_names in self.tokens.storage else self.states
        return table.newest(state_names, self.encoding.lookback)

    def _shift_state(self) -> tuple[Tensor, Tensor] | None:
        if self.shift is None or not self.sequences.lengths:
            return None
        return self.states.newest("shift.k", 1), self.states.newest("shift.v", 1)

    def _key_bound(self) -> Tensor:
        """The largest norm of all cached keys, (B, Hkv). Only reads keys that are new since the last call."""
        if self.bound is None:
            self.bound = key_bound(self.tokens.view("k"))
        elif self.unbounded:
            self.bound = torch.maximum(self.bound, key_bound(self.tokens.newest("k", self.unbounded)))
        self.unbounded = 0
        return self.bound

    # Removing and moving --------------------------------------------------------------------------

    def crop(self, tokens: int | Sequence[int] | Tensor) -> Self:
        """Remove the last `tokens` tokens: one number, or one for each sequence. At most `rollback`, or all."""
        given = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        each = list(given) if isinstance(given, Sequence) else [given] * max(1, len(self.sequences.lengths))
        if not all(isinstance(n, Integral) and not isinstance(n, bool) for n in each):
            raise TypeError(f"crop takes whole numbers of tokens, got {given!r}")
        return self._crop([int(n) for n in each])

    def crop_columns(self, columns: int) -> Self:
        """Remove the last `columns` columns of the attention mask: tokens, and padding between them."""
        first, padded = self.sequences.columns - columns, self.sequences.padded
        self._crop(self.sequences.tokens_of(columns))
        self.sequences.columns = first
        self.sequences.padded = [[column for column in row if column < first] for row in padded]
        return self

    def _crop(self, counts: list[int]) -> Self:
        self._check_crop(counts)
        if counts == (self.sequences.lengths or counts):
            return self.reset()
        self.tokens.cut(counts)
        self.states.cut([min(c, self.states.length) for c in counts])
        self.sequences.crop(counts)
        self.unbounded = max(0, self.unbounded - min(counts))
        if len(set(counts)) > 1:
            self.bound = None
        return self

    def _check_crop(self, counts: Sequence[int]) -> None:
        lengths = self.sequences.lengths or [0] * len(counts)
        if len(counts) != len(lengths):
            raise ValueError(
                f"crop takes one number, or one for each of the {len(lengths)} sequences, got {counts}"
            )
        uneven = list(counts) != lengths and (len(set(counts)) > 1 or bool(self.tokens.lead))
        for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            if not 0 <= count <= length:
                raise ValueError(f"cannot remove {count} tokens: the cache has {length}")
            if uneven and self.sinks and length - count <= self.sinks:
                raise ValueError(
                    f"cannot remove {count} of {length} tokens: sequences of different lengths must keep more than "
                    f"sinks={self.sinks} tokens"
                )
            if 0 < count < length and not self._reachable(b, count, length - count):
                raise ValueError(
                    f"cannot remove {count} tokens: the tokens before them are no longer cached; "
                    f"build the cache with rollback={count} or more"
                )

    def _reachable(self, b: int, count: int, left: int) -> bool:
        """Whether the keys and the state before the last `count` tokens of sequence b are still stored."""
        kept = self.tokens.tokens_of(b)
        if kept < count + left and kept - count < self.sinks + min((self.window or 1) - 1, left - self.sinks):
            return False
        return not self.states.storage or self.states.tokens_of(b) - count >= min(
            self.encoding.lookback, left
        )

    def select(self, index: Tensor) -> Self:
        """Keep the sequences `index` of the batch, in that order, for beam search or finished requests."""
        if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32) or index.dim() != 1:
            got = f"{index.dtype} {tuple(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(f"select takes a 1-D integer tensor of rows, got {got}; use torch.tensor(…)")
        if not self.batch:
            return self
        rows = index.tolist()
        self.tokens.select(index, rows)
        self.states.select(index, rows)
        self.sequences.select(rows)
        if not self.length:  # only sequences without tokens are left
            columns, padded = self.sequences.columns, self.sequences.padded
            self.reset().sequences = Sequences(columns=columns, padded=padded)
        self.bound = None if self.bound is None else self.bound.index_select(0, index.to(self.bound.device))
        return self

    reorder = select

    def repeat(self, times: int) -> Self:
        """Repeat every sequence `times` times, as `torch.repeat_interleave` does."""
        return self.select(torch.arange(self.batch, device="cpu").repeat_interleave(times))

    def fork(self) -> Self:
        """Return an independent copy of the cache."""
        copied = copy.copy(self)
        copied.tokens, copied.states = self.tokens.copy(), self.states.copy()
        copied.sequences = self.sequences.copy()
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Same as `fork`: copies the tokens, but not the layer's modules."""
        return self.fork()

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move all tensors. `dtype` applies to keys and values only; sums and positions keep their precision."""
        cast = ("k", "v", "shift.k", "shift.v")
        for table in (self.tokens, self.states):
            table.map(lambda name, t: t.to(device, dtype if name in cast else None))
        self.bound = None
        return self

    @property
    def bytes_per_token(self) -> int:
        """Bytes for each token of a sequence, over all heads of this layer."""
        return sum(t[:1, :, :1].nbytes for name, t in self.tokens.storage.items() if name not in OPTIONAL)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tokens."""
        return sum(t.nbytes for table in (self.tokens, self.states) for t in table.stored().values())
