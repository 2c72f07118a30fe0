"""KV-shift: mix each key and value with those of the token before (Eq. K1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Shifted = tuple[Tensor, Tensor]


class KVShift(nn.Module):
    """Mixes k_t <- a_t k_{t-1} + (1 - a_t) k_t with a_t = sigmoid(w_h . x_t), and v_t with its own gate.

    k and v are the projected ones, before any norm. The first token is mixed with zero.

    Args:
        width: features of the layer's input x.
        kv_heads: number of key heads.
    """

    def __init__(self, width: int, kv_heads: int) -> None:
        super().__init__()
        self.gate_k = nn.Linear(width, kv_heads, bias=False)
        self.gate_v = nn.Linear(width, kv_heads, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for gate in (self.gate_k, self.gate_v):
            nn.init.normal_(gate.weight, std=0.5 / gate.in_features**0.5)

    def forward(
        self, k: Tensor, v: Tensor, x: Tensor, state: Shifted | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Shifted]:
        """Mix keys and values.

        Args:
            k: (B, Hkv, T, D).
            v: (B, Hkv, T, Dv).
            x: the layer's input, (B, T, width).
            state: the unmixed k and v of earlier tokens, of which the last token is read; None at the start.
            starts: (B|1, T), True at the first token of a document.

        Returns:
            Mixed k, mixed v, and the new state.
        """
        before = (None, None) if state is None else state
        mixed = [
            _mix(now, earlier, torch.sigmoid(gate(x)).transpose(1, 2).unsqueeze(-1), starts)
            for now, earlier, gate in ((k, before[0], self.gate_k), (v, before[1], self.gate_v))
        ]
        return mixed[0], mixed[1], (k, v)


def _mix(now: Tensor, earlier: Tensor | None, gate: Tensor, starts: Tensor | None) -> Tensor:
    previous = torch.zeros_like(now[:, :, :1]) if earlier is None else earlier[:, :, -1:]
    if now.shape[2] != 1:
        previous = torch.cat([previous, now[:, :, :-1]], 2)
    if starts is not None:
        previous = previous.masked_fill(starts[:, None, :, None], 0.0)
    return torch.lerp(now, previous, gate.to(now.dtype))
