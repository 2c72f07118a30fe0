"""xPos (Sun et al., 2022): RoPE whose planes also decay with the distance, each at its own rate (Eq. M17)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..checks import check_positive
from ..groups import PlaneRotation, ScaledRotation
from ..groups.rotation import Layout
from ..precision import ensure, exact_dtype, readable
from .base import Encoded, HeadShape, State, Tokens
from .facts import Facts
from .frequencies import Frequencies
from .rotary import RotationEncoding, check_layout

#: the part of a dtype's range of exponents that may be used, so that squares of keys do not overflow
RANGE = 0.45


class XPos(RotationEncoding):
    """xPos: RoPE that also multiplies plane i of <q_t, k_j> by zeta_i^((t - j) / scale_base), at most 1 for j <= t.

    Queries are multiplied by zeta^(t - c) and keys by zeta^(c - j), where c is the middle position of the first
    call, kept in the state. These factors must not overflow: positions farther than `reach(dtype)` from c raise an
    error. In a cache, `StreamingCache.rebase` shifts the positions, so sequences can have any length.

    For causal attention only: the factor of keys after the query would grow with the distance.

    Args:
        shape: heads, key heads, features of a head, and width.
        scale_base: divisor of the distance in the exponent.
        gamma: sets zeta_i = (2i/D + gamma) / (1 + gamma).
        base: base of the frequencies base^(-2i/D).
        layout: which features form a plane, "half" or "interleaved".
    """

    sets_norms = True
    facts = (
        Facts(
            name="xpos",
            about="rotates as RoPE, and shrinks each plane with the distance",
            formula="⟨q_t, k_j⟩ → Σ_i ζ_i^{(t−j)/512} ⟨q_i, R((j−t) θ_i) k_i⟩,  ζ_i = (2i/D + γ) / (1 + γ)",
            group="in GL(D): ζ^n R(n θ) on queries, its inverse transpose on keys; all elements commute",
            source="Sun et al., 2022, A Length-Extrapolatable Transformer, arXiv:2212.10554",
            recovers="xPos; `rope` as `scale_base` grows",
        ),
    )

    def __init__(
        self,
        shape: HeadShape,
        *,
        scale_base: float = 512.0,
        gamma: float = 0.4,
        base: float = 10_000.0,
        layout: Layout = "half",
    ) -> None:
        super().__init__(shape)
        check_layout(layout)
        for name, value in (("scale_base", scale_base), ("gamma", gamma)):
            check_positive(name, value)
        self.layout, self.scale_base, self.gamma = layout, float(scale_base), float(gamma)
        self.frequencies = Frequencies(shape.head_dim // 2, base=base)

    def reset_parameters(self) -> None:
        self.frequencies.reset_parameters()

    def rates(self, device: torch.device) -> Tensor:
        """The decay rates -log(zeta_i) / scale_base of all planes, in float64."""
        planes = self.frequencies.planes
        i = torch.arange(planes, device=device, dtype=exact_dtype(device))
        return -((i / max(planes, 1) + self.gamma) / (1 + self.gamma)).log() / self.scale_base

    def reach(self, dtype: torch.dtype) -> float:
        """The largest allowed distance of a position from the middle position of the first call."""
        info = torch.finfo(dtype)
        fastest = math.log((1 + self.gamma) / self.gamma) / self.scale_base
        return RANGE * min(math.log(info.max), -math.log(info.tiny)) / fastest

    def element(self, tokens: Tokens, state: State) -> tuple[Any, State]:
        """The scaled rotation of each token; `state` is c, (B, 1, 1), or None for 0."""
        n = tokens.positions[..., 0, None]  # (B|1, T, 1)
        planes = PlaneRotation.from_angle(
            (n * self.frequencies()[0])[:, None, None], tokens.q.dtype, self.layout
        )
        log_scale = (0.0 if state is None else state.transpose(1, 2)) - n
        return ScaledRotation(planes, (log_scale * self.rates(n.device))[:, None, None]), state

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        n = tokens.positions[..., 0].unsqueeze(1)  # (B|1, 1, T)
        if state is None:
            state = n if not n.shape[-1] else (n.amin(-1, keepdim=True) + n.amax(-1, keepdim=True)) / 2
        state = state[..., -1:].expand(tokens.q.shape[0], 1, -1)
        self._check_reach((n - state).abs(), tokens.q.dtype)
        code = super().encode(tokens, state)
        code.state = state.expand(-1, -1, n.shape[-1]).clone()  # `state` may be a view of a cache's storage
        return code

    def _check_reach(self, far: Tensor, dtype: torch.dtype) -> None:
        reach = self.reach(dtype)
        ensure(
            (far <= reach).all(),
            readable(far) and far.device.type == "cpu",
            f"positions of xpos may be at most {reach:.0f} from the middle of the first call in {dtype}, and these "
            "are farther; call cache.rebase(n) of a StreamingCache before the next tokens, or raise scale_base",
        )

    def _turn_key(self, element: ScaledRotation, x: Tensor) -> Tensor:
        return element.contragredient().apply(x)

    def _turn_again(self, element: ScaledRotation, x: Tensor) -> Tensor:
        return self._turn_key(element, x)

    def rebase_keys(self, k: Tensor, offset: float) -> Tensor:
        moved = super().rebase_keys(k, offset)
        if not bool(moved.isfinite().all()):
            raise ValueError(
                f"keys of xpos overflow {k.dtype} if they are moved by {offset:g}; move them by less"
            )
        return moved
