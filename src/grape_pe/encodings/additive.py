"""Encodings whose bias is linear in an offset: ALiBi, FoX, and gated additive GRAPE (Eq. A3-A7, G1)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bias import DistanceBias, SlopeBias, SlopeTerm, TileBias
from ..checks import check_choice, check_integer
from ..precision import working_dtype
from .base import Encoded, Encoding, HeadShape, State, Tokens, own_parameter
from .distance import over, whole_positions
from .facts import GRAPE, Facts
from .gated_cumsum import Gate, GatedCumsum, softplus_inverse


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi's slopes: a geometric series for powers of two, else completed from the series of the next power."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    if power < heads:
        slopes += alibi_slopes(2 * power)[0::2][: heads - power]
    return slopes


class SlopeEncoding(Encoding):
    """Base class: a fixed slope for each query head.

    A subclass calls `reset_parameters` after it has created its parameters.

    Args:
        shape: heads, key heads, features of a head, and width.
        slopes: one slope for each head, or one for all; ALiBi's slopes by default.
        coords: number of coordinates of a position, 1 to 3.
    """

    slopes: Tensor

    def __init__(
        self, shape: HeadShape, slopes: Sequence[float] | float | None = None, coords: int = 1
    ) -> None:
        super().__init__(shape, coords)
        if isinstance(slopes, (int, float)):
            slopes = [slopes] * shape.heads
        if slopes is not None and len(slopes) != shape.heads:
            raise ValueError(
                f"slopes must have one number for each of the {shape.heads} heads, got {len(slopes)}"
            )
        if slopes is not None and not all(s >= 0 for s in slopes):
            raise ValueError(
                f"slopes must be >= 0, so that the penalty grows with distance, got {list(slopes)}; "
                "pass their absolute values"
            )
        self.initial_slopes = list(slopes) if slopes is not None else alibi_slopes(shape.heads)
        self.register_buffer("slopes", torch.empty(shape.heads, dtype=torch.float32))

    def reset_parameters(self) -> None:
        if not self.slopes.is_meta:
            self.slopes.copy_(torch.tensor(self.initial_slopes, dtype=torch.float32))

    def head_slopes(self, tokens: Tokens) -> Tensor:
        """The slopes, (1, H, 1), in at least float32."""
        return self.slopes.to(tokens.working).view(1, -1, 1)

    def offsets(self, tokens: Tokens, rate_q: Tensor | None, rate_k: Tensor | None) -> SlopeBias:
        """The bias (rate_q + rate_k) * (n_j - n_t), summed over the coordinates of positions n."""
        axes = [tokens.positions[..., a].unsqueeze(1) for a in range(self.coords)]
        return SlopeBias(tuple(SlopeTerm(n, n, rate_q, rate_k) for n in axes))


class ALiBi(SlopeEncoding):
    """ALiBi: the bias slope_h * (j - t).

    Args:
        shape: heads, key heads, features of a head, and width.
        slopes: one slope for each head, or one for all; ALiBi's slopes by default.
        coords: number of coordinates of a position, 1 to 3.
        metric: for several coordinates, "axis" (the sum of signed offsets) or "radial" (the Euclidean distance).
        both: whether the bias is -slope_h |t - j|, which also penalizes keys after the query; for encoders
            (Eq. D7).
    """

    facts = (
        Facts(
            name="alibi",
            about="subtracts a fixed slope times the distance",
            formula="b(t, j) = −s_h (t − j)",
            group="unipotent in GL(D+2): I + n A with A^2 = 0, the slope as its one entry",
            source="Press et al., 2021, ALiBi, arXiv:2108.12409; BLOOM, MPT",
            recovers="ALiBi, exactly",
        ),
    )

    def __init__(
        self,
        shape: HeadShape,
        *,
        slopes: Sequence[float] | float | None = None,
        coords: int = 1,
        metric: Literal["axis", "radial"] = "axis",
        both: bool = False,
    ) -> None:
        super().__init__(shape, slopes, coords)
        if both and (coords > 1 or metric == "radial"):
            raise ValueError(
                f'both=True needs coords=1 and metric="axis", got coords={coords} and metric={metric!r}; '
                'metric="radial" is symmetric without it'
            )
        self.both = both
        check_choice("metric", metric, ("axis", "radial"))
        self.metric = metric
        self.reset_parameters()

    @property
    def nonpositive(self) -> bool:  # type: ignore[override]
        return self.coords == 1 or self.metric == "radial"

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        slopes = self.head_slopes(tokens)
        if self.both:
            positions, table = whole_positions(tokens), slopes.view(1, -1, 1, 1, 1)
            bias = DistanceBias(positions, positions, table, profile=_symmetric)
            return Encoded(tokens.q, tokens.k, bias)
        if self.metric == "axis":
            return Encoded(tokens.q, tokens.k, self.offsets(tokens, slopes, None))
        place = tokens.positions.unsqueeze(1)
        length = tokens.q.shape[2]
        query = {"place": place, "slope": slopes.unsqueeze(-1).expand(1, -1, length, 1)}
        return Encoded(tokens.q, tokens.k, TileBias(_radial_tile, query, {"place": place}, pairwise=True))


def _symmetric(distance: Tensor, slopes: Tensor) -> Tensor:
    return -over(slopes[..., 0], distance) * distance.abs().to(slopes.dtype)


def _radial_tile(rows: slice, cols: slice, query: Mapping[str, Tensor], key: Mapping[str, Tensor]) -> Tensor:
    """-slope * |r_t - r_j|: shift-invariant, but not a group action, because distances do not add."""
    offset = query["place"][:, :, rows].unsqueeze(-2) - key["place"][:, :, cols].unsqueeze(-3)
    slope = query["slope"][:, :, rows]
    return -slope * offset.norm(dim=-1).to(slope.dtype)


class GatedSlope(SlopeEncoding):
    """GRAPE-A: the bias rate * (j - t), where the rate depends on the query, the key, or both (Eq. G1).

    rate = slope_h * sum_r softplus(omega_hr) * [softplus(v_hr . q / sqrt(D)) + softplus(u_hr . k / sqrt(D))],
    with learned unit vectors u and v.

    Args:
        shape: heads, key heads, features of a head, and width.
        query: whether the rate depends on the query.
        key: whether the rate depends on the key.
        atoms: number of terms r (`grape-a-dict`). Their generators commute, so the terms add (Eq. A6).
        slopes: one slope for each head, or one for all; ALiBi's slopes by default.
        coords: number of coordinates of a position, 1 to 3.
    """

    facts = (
        Facts(
            name="grape-a-q",
            about="subtracts a slope that the query sets",
            formula="b(t, j) = −s_h sp(ω_h) sp(⟨v_h, q_t⟩/√D) (t − j)",
            group="unipotent in GL(D+2), an element for each pair of tokens: its rate depends on the query",
            source=GRAPE,
            recovers="ALiBi",
            learned="gate",
        ),
        Facts(
            name="grape-a-k",
            about="subtracts a slope that the key sets",
            formula="b(t, j) = −s_h sp(ω_h) sp(⟨u_h, k_j⟩/√D) (t − j)",
            group="unipotent in GL(D+2), an element for each pair of tokens: its rate depends on the key",
            source=GRAPE,
            recovers="ALiBi",
            learned="gate",
        ),
        Facts(
            name="grape-a-qk",
            about="subtracts a slope that query and key set",
            formula="b(t, j) = −s_h sp(ω_h) [sp(⟨v_h, q_t⟩/√D) + sp(⟨u_h, k_j⟩/√D)] (t − j)",
            group="unipotent in GL(D+2), an element for each pair of tokens: its rate depends on both",
            source=GRAPE,
            recovers="ALiBi",
            learned="gates",
        ),
        Facts(
            name="grape-a-dict",
            about="a sum of gated slopes",
            formula="b(t, j) = −s_h Σ_r sp(ω_{hr}) [sp(⟨v_{hr}, q_t⟩/√D) + sp(⟨u_{hr}, k_j⟩/√D)] (t − j)",
            group="unipotent in GL(D+2R): R commuting generators with A_r A_s = 0",
            source=GRAPE,
            recovers="`grape-a-qk`",
            learned="gates",
        ),
    )

    def __init__(
        self,
        shape: HeadShape,
        *,
        query: bool = True,
        key: bool = True,
        atoms: int = 1,
        slopes: Sequence[float] | None = None,
        coords: int = 1,
    ) -> None:
        super().__init__(shape, slopes, coords)
        check_integer("atoms", atoms)
        if not (query or key):
            raise ValueError(
                "a gated slope needs query=True or key=True, got neither; without a gate use alibi"
            )
        d = shape.head_dim
        self.strength = own_parameter(shape.heads, atoms)
        self.v = own_parameter(shape.heads, atoms, d) if query else None
        self.u = own_parameter(shape.kv_heads, atoms, d) if key else None
        self.reset_parameters()

    @property
    def nonpositive(self) -> bool:  # type: ignore[override]
        return self.coords == 1

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.strength, softplus_inverse(1.0 / self.strength.shape[1]))
        for direction in (self.v, self.u):
            if direction is not None:
                nn.init.normal_(direction)

    @property
    def like(self) -> Hashable:
        return self.strength.shape, self.v is None, self.u is None

    @classmethod
    def prepare(cls, parts: Sequence[Any], positions: Tensor, working: torch.dtype) -> Sequence[Any]:
        """For each of `parts`, the scale (H, 1, R), and the directions v (H, D, R) and u (Hkv, D, R), or None."""
        slopes, strength = (torch.stack([getattr(p, n) for p in parts]) for n in ("slopes", "strength"))
        scale = slopes.to(working)[..., None, None] * F.softplus(strength.to(working)).unsqueeze(2)
        sides: list[Sequence[Tensor | None]] = []
        for name in ("v", "u"):
            given = [getattr(part, name) for part in parts]
            sides.append(given if given[0] is None else _units(torch.stack(given), working).unbind())
        return list(zip(scale.unbind(), *sides, strict=True))

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        prepared = tokens.prepared_for(self) or self.prepare([self], tokens.positions, tokens.working)[0]
        scale, v, u = prepared
        rate_q = rate_k = None
        if v is not None:
            rate_q = _total(scale * F.softplus(tokens.q.to(v.dtype) @ v))
        if u is not None:
            gate = F.softplus(tokens.k.to(u.dtype) @ u)
            rate_k = _total(
                scale * (gate if self.shape.group == 1 else gate.repeat_interleave(self.shape.group, 1))
            )
        return Encoded(tokens.q, tokens.k, self.offsets(tokens, rate_q, rate_k))


def _units(direction: Tensor, working: torch.dtype) -> Tensor:
    """Normalize directions (…, R, D), divide them by sqrt(D) and transpose them to (…, D, R)."""
    unit = F.normalize(direction.to(working), dim=-1) * direction.shape[-1] ** -0.5
    return unit.transpose(-1, -2)


def _total(rates: Tensor) -> Tensor:
    """Sum over atoms, the last axis."""
    return rates.squeeze(-1) if rates.shape[-1] == 1 else rates.sum(-1)


def project(x: Tensor, direction: Tensor) -> Tensor:
    """<unit direction, x> / sqrt(D), in at least float32: (B, H, T, D), (H, R, D) -> (B, H, T, R)."""
    working = working_dtype(x.dtype)
    return x.to(working) @ _units(direction, working)


class ShiftSlope(SlopeEncoding):
    """The (D + 1) lift of GRAPE-A: the bias -(j - t) omega <u, k_j>, whose slope has both signs (Eq. A3).

    The lift also adds 1 to every score, which is left out because softmax does not depend on it.

    Args:
        shape: heads, key heads, features of a head, and width.
        slopes: one slope for each head, or one for all; ALiBi's slopes by default.
        coords: number of coordinates of a position, 1 to 3.
    """

    facts = (
        Facts(
            name="grape-a-shift",
            about="adds a signed slope that depends on the key",
            formula="b(t, j) = s_h sp(ω_h) ⟨u_h, k_j⟩/√D (t − j)",
            group="unipotent in GL(D+1): a translation of [k; 1] by n u",
            source=GRAPE,
            recovers="the (d+1) lift",
            learned="direction, strength",
        ),
    )

    nonpositive = False

    def __init__(self, shape: HeadShape, *, slopes: Sequence[float] | None = None, coords: int = 1) -> None:
        super().__init__(shape, slopes, coords)
        self.strength = own_parameter(shape.heads)
        self.u = own_parameter(shape.kv_heads, 1, shape.head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.strength, softplus_inverse(1.0))
        nn.init.normal_(self.u)

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        scale = self.head_slopes(tokens) * F.softplus(self.strength.to(tokens.working))[:, None]
        gate = project(tokens.k, self.u).squeeze(-1).repeat_interleave(self.shape.group, 1)
        return Encoded(tokens.q, tokens.k, self.offsets(tokens, None, -scale * gate))


class PhaseSlope(SlopeEncoding):
    """Phase-modulated GRAPE-A: the bias -slope_h * (Phi_t - Phi_j), with Phi_t a sum of gates (Eq. A7).

    Phi_t sums the gates of the tokens up to and including t. The gates start at 1 (with "sigmoid" at 0.98), so the
    encoding starts as ALiBi.

    Args:
        shape: heads, key heads, features of a head, and width.
        gate: "softplus" or "sigmoid" of a linear function of the input x.
        phase_per_head: whether each head has its own gates.
        slopes: one slope for each head, or one for all; ALiBi's slopes by default.
    """

    facts = (
        Facts(
            name="grape-a-phase",
            about="a slope on a running sum of a learned gate",
            formula="b(t, j) = −s_h (Φ_t − Φ_j),  Φ_t = Σ_{l≤t} gate(x_l)",
            group="unipotent in GL(D+2), with the running sum Φ_t instead of the position",
            source=GRAPE,
            recovers="ALiBi, FoX",
            learned="gate",
        ),
    )

    contextual = True
    state_adds = True

    def __init__(
        self,
        shape: HeadShape,
        *,
        gate: Gate = "softplus",
        phase_per_head: bool = False,
        slopes: Sequence[float] | None = None,
    ) -> None:
        super().__init__(shape, slopes)
        assert shape.width is not None
        # a sigmoid is below 1: a bias of 64, divided by 16, starts it at 0.98
        bias = 64.0 if gate == "sigmoid" else softplus_inverse(1.0)
        self.clock = GatedCumsum(shape.width, shape.heads if phase_per_head else 1, gate, bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.clock.reset_parameters()

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        assert tokens.x is not None
        total = self.clock(tokens.x, state)
        term = SlopeTerm(total, total, self.head_slopes(tokens), coordinate="sum")
        return Encoded(tokens.q, tokens.k, SlopeBias((term,)), total)


class FoX(Encoding):
    """FoX, the Forgetting Transformer: the bias is the sum of log f_l over tokens l = j+1 … t (Eq. A7).

    The forget gates are f = sigmoid(w_h . x + b_h), with x the attention block's input.

    Args:
        shape: heads, key heads, features of a head, and width.
        forget_bias: initial b_h.
    """

    facts = (
        Facts(
            name="fox",
            about="subtracts the sum of log forget gates in between",
            formula="b(t, j) = Σ_{l=j+1}^t log f_l,  f_l = σ(⟨w_h, x_l⟩ + b_h)",
            group="unipotent in GL(D+2): the product of I − log f_l E over the tokens in between",
            source="Lin et al., 2025, Forgetting Transformer, arXiv:2503.02130",
            recovers="FoX, exactly",
            learned="gates",
        ),
    )

    contextual = True
    state_adds = True

    def __init__(self, shape: HeadShape, *, forget_bias: float = 0.0) -> None:
        super().__init__(shape)
        assert shape.width is not None
        self.clock = GatedCumsum(
            shape.width, shape.heads, "forget", forget_bias, 0.5 / math.sqrt(shape.width)
        )

    def reset_parameters(self) -> None:
        self.clock.reset_parameters()

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        assert tokens.x is not None
        forgotten = self.clock(tokens.x, state)
        one = torch.ones(1, self.shape.heads, 1, dtype=tokens.working, device=tokens.q.device)
        term = SlopeTerm(forgotten, forgotten, one, coordinate="sum")
        return Encoded(tokens.q, tokens.k, SlopeBias((term,)), forgotten)
