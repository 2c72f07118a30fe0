"""Streaming: one cache for every encoding, exact however the sequence is cut.

    cache = grape.StreamingCache(enc)
    y = cache.attend(q, k, v, x=x)          # any number of new tokens, at the positions that follow

What is kept for a token is what it left on arrival: its rotated key, its value, its bias traces, and
(for a short while) the running state after it. Nothing is ever recomputed for an old token.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from .attention import attend
from .bias import Bias, PathBias, SumBias, TileBias
from .columns import Columns
from .encodings.base import Encoded, Encoding
from .ragged import assemble, attend_ragged, one_sequence

FORMAT = "grape-pe cache 1"


class StreamingCache:
    """Keys, values, bias traces and state of one attention layer.

    Args:
        encoding: the layer's encoding.
        window: a token sees fewer than `window` tokens back; older keys are dropped. Exact: a key's trace
            does not depend on older keys, and a bias between two tokens only on what lies between them.
        sinks: the first tokens, which stay visible when a window is set. Refused where the bias sums over
            the tokens in between, because those would be gone.
        capacity: preallocate storage for this many tokens; by default it grows.
        rollback: how many tokens can be taken back by `crop` (state, and dropped keys, are kept that long).
        shift: the layer's `KVShift`, if it has one; it then needs x on every call.
    """

    def __init__(
        self,
        encoding: Encoding,
        *,
        window: int | None = None,
        sinks: int = 0,
        capacity: int | None = None,
        rollback: int = 128,
        shift: Any = None,
    ) -> None:
        for name, value in (("window", window), ("capacity", capacity)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 token, got {value}")
        if sinks < 0 or rollback < 0:
            raise ValueError(f"sinks and rollback must be >= 0, got {sinks} and {rollback}")
        if sinks and window is None:
            raise ValueError("sinks are the tokens that outlive a window; set window=… as well")
        self.encoding, self.window, self.sinks, self.shift = encoding, window, sinks, shift
        self.rollback = rollback
        keep = None if window is None else window + rollback
        self.tokens = Columns(capacity, keep, sinks)  # seen by later queries
        self.states = Columns(None, rollback + encoding.lookback)  # read by the next token only
        self.template: Encoded | None = None
        self.aliases: list[str | None] = []
        self.next_position: Tensor | None = None  # (B,), where the next token of each sequence stands
        self.key_bound: Tensor | None = None  # (B, Hkv), no cached key is longer: decoding prunes with it
        self.length = 0  # tokens appended and not taken back, dropped ones included
        self.contiguous = True  # whether positions have gone on in steps of one
        self.ragged = False  # whether sequences of different lengths are held

    # Writing ------------------------------------------------------------------------------------

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        x: Tensor | None = None,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Append new tokens and attend from them: (B, H, T, Dv).

        `positions` default to those that follow. `padding` (B, T) is True where a sequence has no token
        (on its left or its right); such rows give zeros. `options` go to `grape.attend`.
        """
        if padding is not None and bool(padding.any()):
            return attend_ragged(self, q, k, v, x, positions, padding, options)
        code = self.append(q, k, v, x=x, positions=positions)
        return self._read(code, options)

    def append(
        self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None = None, positions: Tensor | None = None
    ) -> Encoded:
        """Encode new tokens and keep what they leave behind; nothing changes if this raises."""
        positions = self._positions(q, positions)
        shift_state = None
        if self.shift is not None:
            if x is None:
                raise ValueError("KV-shift reads the block's input: pass x=… (B, T, C)")
            k, v, shift_state = self.shift(k, v, x, self._shift_state())
        code = self.encoding(q, k, x=x, v=v, positions=positions, state=self._state())
        self._refuse_sinks(code.bias)
        if not q.shape[2]:
            return code
        where = positions.expand(q.shape[0], -1) if self.encoding.coords == 1 else positions
        columns, states, aliases = self._columns(code, v, where, shift_state)
        self.tokens.check(columns)
        self._append_states(states, q.shape[2])
        self.tokens.append(columns)
        self.template, self.aliases = code, aliases
        self.key_bound = _larger(self.key_bound, code.k.norm(dim=-1).amax(-1))
        self.contiguous &= self._continues(where)
        self.next_position = where[:, -1] + 1 if self.encoding.coords == 1 else torch.zeros(q.shape[0])
        self.length += q.shape[2]
        return code

    def _append_states(self, states: dict[str, Tensor], count: int) -> None:
        """Only as many as may be taken back; what is older than a gap is of no use any more."""
        self.states.check(states)
        kept = self.rollback + self.encoding.lookback
        if count > kept:
            self.states.drop_last(self.states.length)
        self.states.append({name: tensor[:, :, -kept:] for name, tensor in states.items()})

    def _continues(self, where: Tensor) -> bool:
        """Whether positions go on in steps of one, so that they can be counted back."""
        if self.encoding.coords > 1:
            return True
        start = 0 if self.next_position is None else self.next_position
        return bool((where[:, 0] == start).all()) and bool((where.diff(dim=-1) == 1).all())

    def _positions(self, q: Tensor, positions: Tensor | None) -> Tensor:
        count = q.shape[2]
        if self.encoding.coords > 1:
            if positions is None:
                raise ValueError("positions must be given for n-dimensional encodings")
            return positions
        start = self.next_position
        if positions is None:
            steps = torch.arange(count, device=q.device)
            return steps if start is None else start.unsqueeze(-1) + steps
        if start is not None and count:
            first = positions[..., 0].to(start.device)
            if bool((first < start).any()) or bool((positions.diff(dim=-1) <= 0).any()):
                raise ValueError(
                    f"positions must go on from {start.tolist()} and increase, got {positions.tolist()}; "
                    "to go back, crop the cache first"
                )
        return positions

    def _columns(
        self, code: Encoded, v: Tensor, where: Tensor, shift_state: tuple[Tensor, Tensor] | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str | None]]:
        """What to keep, in two tables; a state that is also a trace is kept once, as the trace."""
        batch, count = v.shape[0], v.shape[2]
        traces = code.bias.traces()
        columns = {"k": code.k, "v": v}
        columns |= {f"bias.{n}": t.expand(batch, *t.shape[1:]) for n, t in traces.items()}
        columns["padding"] = torch.zeros(batch, 1, count, dtype=torch.bool, device=v.device)
        states = {"position": where.unsqueeze(1) if where.dim() == 2 else columns["padding"].long()}
        aliases: list[str | None] = []
        for i, tensor in enumerate(_flatten(code.state)):
            same = next((name for name, trace in traces.items() if trace is tensor), None)
            aliases.append(None if same is None else f"bias.{same}")
            if same is None:
                states[f"state.{i}"] = tensor[..., -count:] if count else tensor[..., :0]
        if shift_state is not None:
            states |= {"shift.k": shift_state[0], "shift.v": shift_state[1]}
        return columns, states, aliases

    def _refuse_sinks(self, bias: Bias) -> None:
        if self.sinks and _sums_in_between(bias):
            raise ValueError(
                f"{self.encoding!r} sums its bias over the tokens between query and key; with sinks those "
                "would be gone. Use a window without sinks"
            )

    def _state(self) -> Any:
        if self.template is None:
            return None
        found = []
        for i, alias in enumerate(self.aliases):
            table, name = (self.tokens, alias) if alias else (self.states, f"state.{i}")
            found.append(table.view(name))
        return _unflatten(self.template.state, iter(found))

    def _shift_state(self) -> tuple[Tensor, Tensor] | None:
        if self.template is None:
            return None
        return self.states.view("shift.k"), self.states.view("shift.v")

    # Reading ------------------------------------------------------------------------------------

    def _read(self, code: Encoded, options: Mapping[str, Any]) -> Tensor:
        count = code.q.shape[2]
        last = None if self.window is None else self.window + max(count, 1) - 1
        held = {name: self.tokens.view(name, last) for name in self.tokens.storage}
        traces = {name.removeprefix("bias."): t for name, t in held.items() if name.startswith("bias.")}
        hidden = held["padding"][:, 0]
        # one query needs no mask for a window: what is read is the window
        masks: dict[str, Any] = {"window": self.window} if self.window is not None and count > 1 else {}
        if self.ragged:
            masks["key_padding"] = hidden
        if self.sinks and "window" in masks:
            masks["sinks"] = self.sinks
        bias = code.bias.replaced(traces)
        masks["key_bound"] = self.key_bound
        return attend(code.q, held["k"], held["v"], bias=bias, **masks, **options)

    # Cutting and moving ---------------------------------------------------------------------------

    def crop(self, tokens: int | Tensor) -> Self:
        """Take back the last `tokens` tokens (one number, or one for each sequence), as if never come."""
        if isinstance(tokens, Tensor) and tokens.dim():
            pieces = [one_sequence(self, b) for b in range(len(tokens))]
            for piece, count in zip(pieces, tokens.tolist(), strict=True):
                piece.crop(count)
            assemble(self, pieces)
            return self
        tokens = int(tokens)
        self._check_crop(tokens)
        if tokens == self.length:
            return self.reset()
        if tokens:
            self.next_position = self._positions_before(tokens)
            self.tokens.drop_last(tokens)
            self.states.drop_last(min(tokens, self.states.length))
            self.length -= tokens
        return self

    def _check_crop(self, tokens: int) -> None:
        shortest = self.length
        if self.ragged:
            shortest -= int(self.tokens.view("padding").sum(-1).max())
        if not 0 <= tokens <= shortest:
            raise ValueError(f"cannot take back {tokens} tokens: the cache has {shortest}")
        if tokens == self.length:
            return
        left = self.states.length - tokens
        lost_state = len(self.states.storage) > 1 and left < min(self.encoding.lookback, self.length - tokens)
        lost_keys = self.tokens.dropped > 0 and self.tokens.length - tokens < self.sinks + (self.window or 0)
        lost_positions = tokens >= self.states.length and not self.contiguous
        if lost_state or lost_keys or lost_positions:
            raise ValueError(
                f"cannot take back {tokens} tokens: what came before them is no longer kept; "
                f"build the cache with rollback={tokens} or more"
            )

    def _positions_before(self, tokens: int) -> Tensor:
        assert self.next_position is not None
        if tokens >= self.states.length:
            return self.next_position - tokens
        return self.states.view("position")[:, 0, -tokens]

    def reset(self) -> Self:
        """Empty, with the storage released."""
        self.tokens = Columns(self.tokens.capacity, self.tokens.keep_last, self.tokens.keep_first)
        self.states = Columns(None, self.states.keep_last)
        self.template, self.aliases, self.next_position, self.length = None, [], None, 0
        self.key_bound = None
        self.ragged, self.contiguous = False, True
        return self

    def select(self, index: Tensor) -> Self:
        """Keep the sequences `index` of the batch, in that order: beam search, finished requests."""

        def pick(_: str, tensor: Tensor) -> Tensor:
            return tensor.index_select(0, index.to(tensor.device))

        self.tokens.map(pick)
        self.states.map(pick)
        if self.next_position is not None and self.key_bound is not None:
            self.next_position, self.key_bound = pick("", self.next_position), pick("", self.key_bound)
        return self

    reorder = select

    def repeat(self, times: int) -> Self:
        """Every sequence `times` times, side by side."""
        batch = 0 if self.next_position is None else self.next_position.shape[0]
        return self.select(torch.arange(batch).repeat_interleave(times))

    def fork(self) -> StreamingCache:
        """An independent copy: what is written to one is not seen by the other."""
        twin = copy.copy(self)
        for name in ("tokens", "states"):
            table = copy.copy(getattr(self, name))
            table.map(lambda _, tensor: tensor.clone())
            setattr(twin, name, table)
        return twin

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move everything; `dtype` is for keys and values only, traces and sums keep their precision."""
        self.tokens.map(lambda name, t: t.to(device, dtype if name in ("k", "v") else None))
        self.states.map(lambda name, t: t.to(device, dtype if name.startswith("shift") else None))
        if self.next_position is not None:
            self.next_position = self.next_position.to(device)
            self.key_bound = self.tokens.view("k").norm(dim=-1).amax(-1)
        return self

    def rebase(self, offset: float) -> Self:
        """Move all positions down by `offset`, keys and traces with them, where the group law allows it."""
        if self.encoding.coords > 1:
            raise ValueError("positions of several coordinates cannot be rebased; keep them as they are")
        if self.template is None:
            return self
        held = self.tokens.stored()
        traces = {n.removeprefix("bias."): t for n, t in held.items() if n.startswith("bias.")}
        moved = self.template.bias.replaced(traces).rebased(offset).traces()
        keys = self.encoding.rebase_keys(held["k"], offset)
        for name, tensor in {"k": keys, **{f"bias.{n}": t for n, t in moved.items()}}.items():
            held[name].copy_(tensor)
        assert self.next_position is not None
        self.next_position = self.next_position - offset
        self.states.storage["position"] -= offset
        return self

    # Size, saving ---------------------------------------------------------------------------------

    @property
    def bytes_per_token(self) -> int:
        """What one more token of one sequence costs, in all heads of this layer."""
        return sum(t[:1, :, :1].nbytes for name, t in self.tokens.storage.items() if name != "padding")

    @property
    def nbytes(self) -> int:
        """What is stored now, in bytes."""
        return sum(t.nbytes for table in (self.tokens, self.states) for t in table.stored().values())

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on later: tensors and plain values, fit for safetensors or torch.save."""
        if self.template is None:
            raise ValueError("an empty cache has nothing to save")
        tables = {f"tokens.{n}": t.clone() for n, t in self.tokens.stored().items()}
        tables |= {f"states.{n}": t.clone() for n, t in self.states.stored().items()}
        said = {"format": FORMAT, "encoding": repr(self.encoding), "length": self.length}
        said |= {"dropped": self.tokens.dropped, "ragged": self.ragged, "contiguous": self.contiguous}
        return {**said, "next_position": self.next_position, **tables}

    def load_state_dict(self, saved: Mapping[str, Any]) -> Self:
        """Continue from `state_dict()`, in a cache built for the same encoding."""
        if saved.get("format") != FORMAT:
            raise ValueError(f"not a saved cache: expected format {FORMAT!r}, got {saved.get('format')!r}")
        if saved["encoding"] != repr(self.encoding):
            raise ValueError(f"saved for {saved['encoding']}, this cache is for {self.encoding!r}")
        self.reset()
        for prefix, table in (("tokens.", self.tokens), ("states.", self.states)):
            found = {n.removeprefix(prefix): t for n, t in saved.items() if n.startswith(prefix)}
            if found:
                table.append(found)
        self.tokens.dropped, self.length = saved["dropped"], saved["length"]
        self.ragged, self.contiguous = saved["ragged"], saved["contiguous"]
        self.next_position = saved["next_position"]
        self.key_bound = self.tokens.view("k").norm(dim=-1).amax(-1)
        self.template, self.aliases = self._blank()
        return self

    def _blank(self) -> tuple[Encoded, list[str | None]]:
        """What the encoding returns for one empty token: the structure of its bias and state."""
        k, v = (torch.zeros_like(self.tokens.view(name)[:, :, :1]) for name in ("k", "v"))
        shape, coords = self.encoding.shape, self.encoding.coords
        q = k.new_zeros(k.shape[0], shape.heads, 1, shape.head_dim)
        x = None if shape.width is None else k.new_zeros(k.shape[0], 1, shape.width)
        positions = torch.zeros((1,) if coords == 1 else (1, coords), dtype=torch.long, device=k.device)
        code = self.encoding(q, k, x=x, v=v, positions=positions)
        return code, self._columns(code, v, positions.expand(k.shape[0], -1), None)[2]


def _larger(bound: Tensor | None, new: Tensor) -> Tensor:
    return new if bound is None else torch.maximum(bound, new)


def _sums_in_between(bias: Bias) -> bool:
    if isinstance(bias, SumBias):
        return any(_sums_in_between(part) for part in bias.parts)
    return isinstance(bias, (PathBias, TileBias))


def _flatten(state: Any) -> list[Tensor]:
    if isinstance(state, tuple):
        return [tensor for part in state for tensor in _flatten(part)]
    return [] if state is None else [state]


def _unflatten(like: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(like, tuple):
        return tuple(_unflatten(part, tensors) for part in like)
    return None if like is None else next(tensors)
