"""From projected tokens to what attention needs: KV-shift, key norm, encoding; queries and all they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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

#: of encoded queries and keys
Norms = tuple[nn.Module, nn.Module]


@dataclass(eq=False, slots=True)
class AttentionInputs:
    """Encoded queries and all they may see: keys, values, bias and masks for `attend`.

    `rows` (B, T), if not None, puts the results in the packed order of the call. `step` marks a prepared call
    of one token on the CPU, whose tensors are known to fit.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Bias
    masks: dict[str, Any]
    rows: Tensor | None = None
    step: bool = False

    def attend(self, **options: Any) -> Tensor:
        if self.step and not options.keys() - {"scale"}:
            return attend_step(self.q, self.k, self.v, self.bias, **options, **self.masks)
        y = attend(self.q, self.k, self.v, bias=self.bias, **self.masks, **options)
        return y if self.rows is None else take(y, self.rows, 2)

    def weights(self, **options: Any) -> Tensor:
        """Dense softmax weights (B, H, T, Tk): attention over the unit vectors of the keys."""
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
    """KV-shift, key norm, encoding, norms after it: (code, values, state of the shift)."""
    shifted = None
    if shift is not None:
        if x is None:
            raise ValueError("KV-shift reads the block's input: pass x=… (B, T, C)")
        k, v, shifted = shift(k, v, x, shift_state, layout.starts)
    if key_norm is not None:
        k = key_norm(k).to(v.dtype)
    prepared = layout.prepared
    if prepared is None or prepared.working != working_dtype(q.dtype) or hooked(encoding):
        code = encoding(q, k, x=x, v=v, positions=layout.positions, state=state)
    else:
        tokens = Tokens(q, k, prepared.positions, x, v, prepared.values, whole=True)
        code = encoding.encode(tokens, state)
    if norm_after is not None:
        _check_norm_after(encoding, layout)
        code = replace(code, q=norm_after[0](code.q).to(v.dtype), k=norm_after[1](code.k).to(v.dtype))
    return code, v, shifted


def check_packing(encoding: Encoding, layout: Layout) -> None:
    """Refuse packed documents where the encoding itself reads across their borders."""
    if layout.documents is None:
        return
    if any(isinstance(part, PaTH) and part.conv is not None for part in encoding.modules()):
        raise ValueError(
            "path reads its directions through a short convolution, which would cross the borders of packed "
            "documents; use encoding_options={'conv': 0}, or one document a sequence"
        )


def _check_norm_after(encoding: Encoding, layout: Layout) -> None:
    """A running phase goes on over the borders of packed documents; only the relative law makes that harmless."""
    parts = encoding.modules()
    if layout.documents is not None and any(
        isinstance(part, RotationEncoding) and part.contextual for part in parts
    ):
        raise ValueError(
            f"packed documents need the exact relative law with {encoding!r}, because its phase runs on from one to "
            'the next, and qk_norm="after" breaks it; use qk_norm=True, or one document a sequence'
        )


def move_to_end(code: Encoded, counts: Sequence[int]) -> tuple[Tensor, Bias, Tensor]:
    """Queries of which each sequence has another number, moved to the last keys; and the index back."""
    count, most, device = code.q.shape[2], max(counts), code.q.device
    missing = most - torch.tensor(counts, device=device).unsqueeze(-1)
    pick = (torch.arange(most, device=device) - missing).clamp(min=0)
    rows = (torch.arange(count, device=device) + missing).clamp(max=most - 1)
    moved = {n: take(t, pick, 2) for n, t in code.bias.query_tensors().items() if t.shape[2] == count}
    return take(code.q, pick, 2), code.bias.replaced(moved), rows
