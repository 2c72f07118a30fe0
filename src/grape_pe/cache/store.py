"""Tensors and lengths of the tokens of one attention layer: `TokenStore`, the base of `StreamingCache`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..attention import key_bound
from ..encodings.base import Encoding
from .layout import Tail
from .sequences import Sequences
from .table import OPTIONAL, TokenTable


class TokenStore:
    """Two tables of tokens, the lengths of the sequences, and a bound of the keys' norms.

    It writes what it is given, cuts, selects, copies and moves. `StreamingCache` fills and reads it.
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
        self.tokens = TokenTable(self.capacity, keep, self.sinks)  # read by all later queries
        self.states = TokenTable(None, self.rollback + self.encoding.lookback)  # read by the next token only
        self.carried: Any = None  # the encoding's state, with the names of columns in place of tensors
        self.sequences = Sequences()
        self.bound: Tensor | None = None  # (B, Hkv), no shorter than any key but the last `unbounded`
        self.unbounded = 0
        return self

    @property
    def length(self) -> int:
        """Tokens of the longest sequence, dropped ones included."""
        return max(self.sequences.lengths, default=0)

    @property
    def batch(self) -> int:
        """Sequences seen so far; 0 for an empty cache."""
        return self.sequences.batch

    @property
    def next_position(self) -> Tensor | None:
        """(B,): the position of the next token of each sequence; None if empty or with coords > 1."""
        known = self.sequences
        return torch.tensor(known.next) if known.lengths and known.next is not None else None

    def tail(self) -> Tail | None:
        """Where the next call goes on; None for an empty cache."""
        known = self.sequences
        if not known.lengths or known.next is None:
            return None
        document = self.tokens.storage.get("document")
        last = None if document is None else document[:, 0, self.tokens.length - 1]
        return Tail(known.next, known.lengths, last)

    def _traces(self) -> dict[str, Tensor]:
        """The cached tensors of the bias, by the bias's own names."""
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
        if pads is None and count > kept:  # nothing older can be reached any more
            self.states.clear()
            states, count = {name: t[:, :, -kept:] for name, t in states.items()}, kept
        if states:
            self.states.append(states, count)
        if states and pads is not None:
            self.states.cut(pads, trim=True)

    def _state(self, carried: Any) -> Any:
        if isinstance(carried, tuple):
            return tuple(self._state(part) for part in carried)
        if carried is None:
            return None
        table = self.tokens if carried in self.tokens.storage else self.states
        return table.newest(carried, self.encoding.lookback)

    def _shift_state(self) -> tuple[Tensor, Tensor] | None:
        if self.shift is None or not self.sequences.lengths:
            return None
        return self.states.newest("shift.k", 1), self.states.newest("shift.v", 1)

    def _key_bound(self) -> Tensor:
        """(B, Hkv): no key is longer. Only keys that came since the last time are read."""
        if self.bound is None:
            self.bound = key_bound(self.tokens.view("k"))
        elif self.unbounded:
            self.bound = torch.maximum(self.bound, key_bound(self.tokens.newest("k", self.unbounded)))
        self.unbounded = 0
        return self.bound

    # Cutting and moving ---------------------------------------------------------------------------

    def crop(self, tokens: int | Sequence[int] | Tensor) -> Self:
        """Take back the last `tokens` tokens (one number, or one for each sequence), as if never appended."""
        given = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        each = given if isinstance(given, Sequence) else [given] * max(1, len(self.sequences.lengths))
        return self._crop([int(n) for n in each])

    def crop_columns(self, columns: int) -> Self:
        """Take back the last `columns` columns of the attention mask: tokens, and padding between them."""
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
                f"crop takes one number, or one for each of {len(lengths)} sequences, got {counts}"
            )
        uneven = list(counts) != lengths and (len(set(counts)) > 1 or bool(self.tokens.lead))
        for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            if not 0 <= count <= length:
                raise ValueError(f"cannot remove {count} tokens: the cache has {length}")
            if uneven and self.sinks and length - count <= self.sinks:
                raise ValueError(
                    f"sequences of different lengths must keep more than their first sinks={self.sinks} "
                    f"tokens: cannot remove {count} of {length}"
                )
            if 0 < count < length and not self._reachable(b, count, length - count):
                raise ValueError(
                    f"cannot remove {count} tokens: the tokens before them are no longer cached; "
                    f"build the cache with rollback={count} or more"
                )

    def _reachable(self, b: int, count: int, left: int) -> bool:
        """Whether the keys and the state before the last `count` tokens of sequence b are still here."""
        kept = self.tokens.held(b)
        if kept < count + left and kept - count < self.sinks + min((self.window or 1) - 1, left - self.sinks):
            return False
        return not self.states.storage or self.states.held(b) - count >= min(self.encoding.lookback, left)

    def select(self, index: Tensor) -> Self:
        """Keep the sequences `index` of the batch, in that order: beam search, finished requests."""
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
        """Every sequence `times` times, side by side."""
        return self.select(torch.arange(self.batch).repeat_interleave(times))

    def fork(self) -> Self:
        """An independent copy: what is written to one is not seen by the other."""
        copied = copy.copy(self)
        copied.tokens, copied.states = self.tokens.copy(), self.states.copy()
        copied.sequences = self.sequences.copy()
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """`fork`: the tokens are copied, not the modules of the layer they belong to."""
        return self.fork()

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move everything; `dtype` is for keys and values only, sums and positions keep their precision."""
        cast = ("k", "v", "shift.k", "shift.v")
        for table in (self.tokens, self.states):
            table.map(lambda name, t: t.to(device, dtype if name in cast else None))
        self.bound = None
        return self

    @property
    def bytes_per_token(self) -> int:
        """What one more token of one sequence costs, in all heads of this layer."""
        return sum(t[:1, :, :1].nbytes for name, t in self.tokens.storage.items() if name not in OPTIONAL)

    @property
    def nbytes(self) -> int:
        """What is stored now, in bytes."""
        return sum(t.nbytes for table in (self.tokens, self.states) for t in table.stored().values())
