"""`encode`: KV-shift, key norm and encoding of new tokens. `AttentionInputs`: the arguments of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..attention import attend
from ..attention.decode import attend_step
from ..bias import Bias
from ..encodings.base import Encoded, Encoding, Tokens
from ..encodings.path import PaTH
from ..encodings.prepared import hooked
from ..encodings.rotary import RotationEncoding
from ..precision import working_dtype
from .layout import Layout
from .table import take

if TYPE_CHECKING:
    from ..parallel import ContextParallel

#: the norms of encoded queries and of encoded keys
Norms = tuple[nn.Module, nn.Module]


@dataclass(eq=False, slots=True)
class AttentionInputs:
    """Encoded queries, and the keys, values, bias and masks to call `attend` with.

    Args:
        q: (B, H, T, D).
        k: (B, Hkv, Tk, D).
        v: (B, Hkv, Tk, Dv).
        bias: of these queries and keys.
        masks: keyword arguments of `attend`: window, sinks, documents, key_padding, key_bound.
        rows: indices (B, T) that put the results in the packed order of the call; None if they are in it.
        step: whether this is one token on the CPU whose tensors were checked, so that `attend_step` applies.
        parallel: the ranks that share each sequence. k and v are then those of this rank only.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Bias
    masks: dict[str, Any]
    rows: Tensor | None = None
    step: bool = False
    parallel: ContextParallel | None = None

    def attend(self, **options: Any) -> Tensor:
        """Compute attention, (B, H, T, Dv), with further options of `attend`."""
        if self.step and not options.keys() - {"scale"}:
            return attend_step(self.q, self.k, self.v, self.bias, **options, **self.masks)
        if self.parallel is not None:
            return self.parallel.attend(self.q, self.k, self.v, bias=self.bias, **self.masks, **options)
        y = attend(self.q, self.k, self.v, bias=self.bias, **self.masks, **options)
        return y if self.rows is None else take(y, self.rows, 2)

    def weights(self, **options: Any) -> Tensor:
        """Compute the softmax weights, (B, H, T, Tk), as attention over unit vectors in place of the values."""
        if self.parallel is not None:
            raise ValueError(
                "attention weights are not available when several devices share a sequence; call the layer without "
                "parallel=…"
            )
        unit = torch.eye(self.k.shape[2], dtype=self.v.dtype, device=self.v.device)
        unit = unit.expand(*self.k.shape[:2], -1, -1)
        y = attend(self.q, self.k, unit, bias=self.bias, impl="reference", **self.masks, **options)
        return y if self.rows is None else take(y, self.rows, 2)


def encode(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    layout: Layout,
    shift: nn.Module | None = None,
    key_norm: nn.Module | None = None,
    norm_after: Norms | None = None,
    state: Any = None,
    shift_state: Any = None,
) -> tuple[Encoded, Tensor, tuple[Tensor, Tensor] | None]:
    """Apply KV-shift, key norm, encoding and the norms after it to new tokens.

    Args:
        encoding: the layer's encoding.
        q: (B, H, T, D), packed by `layout`.
        k: (B, Hkv, T, D).
        v: (B, Hkv, T, Dv).
        x: the attention block's input, (B, T, C), or None.
        layout: positions and documents of the tokens.
        shift: the layer's `KVShift`.
        key_norm: norm of the keys between shift and encoding.
        norm_after: norms of encoded queries and keys.
        state: the encoding's state of earlier tokens.
        shift_state: the shift's state of earlier tokens.

    Returns:
        What the encoding returned, the values, and the new state of the shift.
    """
    shifted = None
    if shift is not None:
        if x is None:
            raise ValueError("KV-shift needs the attention block's input: pass x=…, (B, T, C)")
        if layout.parallel is not None:
            k, v = layout.parallel.shift(shift, k, v, x)
        else:
            k, v, shifted = shift(k, v, x, shift_state, layout.starts)
    if key_norm is not None:
        k = key_norm(k).to(v.dtype)
    prepared = layout.prepared
    if layout.parallel is not None:
        code = layout.parallel.encode(encoding, q, k, x=x, v=v, positions=layout.positions)
    elif prepared is None or prepared.working != working_dtype(q.dtype) or hooked(encoding):
        code = encoding(q, k, x=x, v=v, positions=layout.positions, state=state)
    else:
        tokens = Tokens(q, k, prepared.positions, x, v, prepared.values, whole=True)
        code = encoding.encode(tokens, state)
    if norm_after is not None:
        _check_norm_after(encoding, layout)
        code = replace(code, q=norm_after[0](code.q).to(v.dtype), k=norm_after[1](code.k).to(v.dtype))
    return code, v, shifted


def check_packing(encoding: Encoding, layout: Layout) -> None:
    """Raise a ValueError for packed documents if the encoding reads tokens of the document before."""
    if layout.documents is None:
        return
    if any(isinstance(part, PaTH) and part.conv is not None for part in encoding.modules()):
        raise ValueError(
            "packed documents are not possible for path with its short convolution, which would mix neighbouring "
            "documents; use encoding_options={'conv': 0}, or one document per sequence"
        )


def _check_norm_after(encoding: Encoding, layout: Layout) -> None:
    """Raise a ValueError for packed documents, a contextual phase and norms after the rotation.

    The phase is a sum over all documents before, which cancels only if the relative law holds.
    """
    parts = encoding.modules()
    if layout.documents is not None and any(
        isinstance(part, RotationEncoding) and part.contextual for part in parts
    ):
        raise ValueError(
            f'packed documents are not possible for {encoding!r} with qk_norm="after", because its phase continues '
            "from one document to the next and the norm breaks the relative law; use qk_norm=True, or one document "
            "per sequence"
        )


def move_to_end(code: Encoded, counts: Sequence[int]) -> tuple[Tensor, Bias, Tensor]:
    """Align the queries at the last keys, for sequences with different numbers of them.

    Args:
        code: what the encoding returned for T tokens, padding last.
        counts: number of tokens of each sequence.

    Returns:
        The queries, their bias, and indices (B, T) that undo the move.
    """
    count, most, device = code.q.shape[2], max(counts), code.q.device
    missing = most - torch.tensor(counts, device=device).unsqueeze(-1)
    pick = (torch.arange(most, device=device) - missing).clamp(min=0)
    rows = (torch.arange(count, device=device) + missing).clamp(max=most - 1)
    moved = {n: take(t, pick, 2) for n, t in code.bias.query_tensors().items() if t.shape[2] == count}
    return take(code.q, pick, 2), code.bias.replaced(moved), rows
