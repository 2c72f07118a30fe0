"""Biases linear in an offset: ALiBi, FoX, and additive GRAPE with its gates (Eq. A3-A7, G1)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bias import DistanceBias, SlopeBias, SlopeTerm, TileBias
from ..precision import working_dtype
from .base import Encoded, Encoding, HeadShape, State, Tokens, own_parameter
from .distance import over, whole_positions
from .facts import GRAPE, Facts
from .gated_cumsum import Gate, GatedCumsum, softplus_inverse


def alibi_slopes(heads: int) -> list[float]:
    """The published recipe: geometric for a power of two, else filled up from the next power."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    if power < heads:
        slopes += alibi_slopes(2 * power)[0::2][: heads - power]
    return slopes


class SlopeEncoding(Encoding):
    """Base: one fixed slope for each query head, ALiBi's unless `slopes` are given (a number: for all heads).

    A subclass calls `reset_parameters` when all its parameters exist.
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
                f"slopes must have one number for each of {shape.heads} heads, got {len(slopes)}"
            )
        if slopes is not None and not all(s >= 0 for s in slopes):
            raise ValueError(
                f"slopes must be >= 0 (a penalty that grows with distance), got {list(slopes)}; "
                "pass their absolute values"
            )
        self.initial_slopes = list(slopes) if slopes is not None else alibi_slopes(shape.heads)
        self.register_buffer("slopes", torch.empty(shape.heads, dtype=torch.float32))

    def reset_parameters(self) -> None:
        if not self.slopes.is_meta:
            self.slopes.copy_(torch.tensor(self.initial_slopes, dtype=torch.float32))

    def head_slopes(self, tokens: Tokens) -> Tensor:
        """(1, H, 1)."""
        return self.slopes.to(tokens.working).view(1, -1, 1)

    def offsets(self, tokens: Tokens, rate_q: Tensor | None, rate_k: Tensor | None) -> SlopeBias:
        """One term for each position coordinate: (rate_q + rate_k) * (n_j - n_t)."""
        axes = [tokens.positions[..., a].unsqueeze(1) for a in range(self.coords)]
        return SlopeBias(tuple(SlopeTerm(n, n, rate_q, rate_k) for n in axes))


class ALiBi(SlopeEncoding):
    """slope_h * (j - t).

    Args:
        shape: heads, key heads, features of a head, and width.
        slopes: one slope for each head, or one for all; ALiBi's slopes by default.
        coords: coordinates of a position, 1 to 3.
        metric: with several coordinates, "axis" (a sum of signed offsets) or "radial" (their distance).
        both: -slope_h |t - j|, for encoders: keys after the query are penalised too (Eq. D7).
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
                f'both=True is for one coordinate, got coords={coords}, metric={metric!r}; use metric="radial" alone, '
                "which is symmetric"
            )
        self.both = both
        if metric not in ("axis", "radial"):
            raise ValueError(f'metric must be "axis" or "radial", got {metric!r}')
        self.metric = metric
        self.reset_parameters()

    @property
    def nonpositive(self) -> bool:  # type: ignore[override]
        return self.coords == 1 or self.metric == "radial"

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        slopes = self.head_slopes(tokens)
        if self.both:
            places, table = whole_positions(tokens), slopes.view(1, -1, 1, 1, 1)
            bias = DistanceBias(places, places, table, profile=_symmetric)
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
    """-slope * |r_t - r_j|: shift-invariant, but no group action (distances do not add)."""
    apart = query["place"][:, :, rows].unsqueeze(-2) - key["place"][:, :, cols].unsqueeze(-3)
    slope = query["slope"][:, :, rows]
    return -slope * apart.norm(dim=-1).to(slope.dtype)


class GatedSlope(SlopeEncoding):
    """GRAPE-A: the slope depends on the content of the query, the key, or both (Eq. G1).

    rate = slope_h * sum_r softplus(omega_hr) * [softplus(v_hr . q / sqrt(D)) + softplus(u_hr . k / sqrt(D))]
    with unit u, v.

    Args:
        shape: heads, key heads, features of a head, and width.
        query: the query sets the slope.
        key: the key sets the slope.
        atoms: number of terms r. More than 1 is the commuting dictionary: each atom has its own coordinates
            in the lift, so A_r A_s = 0 and their actions add.
        slopes: one slope for each head; ALiBi's slopes by default.
        coords: coordinates of a position, 1 to 3.
    """

    facts = (
        Facts(
            name="grape-a-q",
            about="subtracts a slope that the query sets",
            formula="b(t, j) = −s_h sp(ω_h) sp(⟨v_h, q_t⟩/√D) (t − j)",
            group="unipotent in GL(D+2), an element for each pair of tokens: the query sets its rate",
            source=GRAPE,
            recovers="ALiBi",
            learned="gate",
        ),
        Facts(
            name="grape-a-k",
            about="subtracts a slope that the key sets",
            formula="b(t, j) = −s_h sp(ω_h) sp(⟨u_h, k_j⟩/√D) (t − j)",
            group="unipotent in GL(D+2), an element for each pair of tokens: the key sets its rate",
            source=GRAPE,
            recovers="ALiBi",
            learned="gate",
        ),
        Facts(
            name="grape-a-qk",
            about="subtracts a slope that both set",
            formula="b(t, j) = −s_h sp(ω_h) [sp(⟨v_h, q_t⟩/√D) + sp(⟨u_h, k_j⟩/√D)] (t − j)",
            group="unipotent in GL(D+2), an element for each pair of tokens: both set its rate",
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
        if not isinstance(atoms, int) or atoms < 1:
            raise ValueError(f"atoms must be a positive integer, got {atoms!r}")
        if not (query or key):
            raise ValueError("a gated slope needs query=True or key=True; without a gate use alibi")
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
        """For each: its scale (H, 1, R), and the directions v and u (H, D, R) by which q and k are multiplied."""
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
    """Unit directions (…, R, D) as matrices (…, D, R), divided by sqrt(D)."""
    unit = F.normalize(direction.to(working), dim=-1) * direction.shape[-1] ** -0.5
    return unit.transpose(-1, -2)


def _total(rates: Tensor) -> Tensor:
    """The sum over atoms (the last axis)."""
    return rates.squeeze(-1) if rates.shape[-1] == 1 else rates.sum(-1)


def project(x: Tensor, direction: Tensor) -> Tensor:
    """<unit direction, x> / sqrt(D) in at least float32: (B, H, T, D), (H, R, D) -> (B, H, T, R)."""
    working = working_dtype(x.dtype)
    return x.to(working) @ _units(direction, working)


class ShiftSlope(SlopeEncoding):
    """The (D + 1) lift: a translation of [k; 1] gives the *signed* slope -(j - t) omega <u, k_j> (Eq. A3).

    The lift also adds the constant 1 to every score; softmax does not see it and it is left out.

    Args:
        shape: heads, key heads, features of a head, and width.
        slopes: one slope for each head; ALiBi's slopes by default.
        coords: coordinates of a position, 1 to 3.
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
    """Phase-modulated GRAPE-A: -slope_h * (Phi_t - Phi_j), Phi an inclusive running sum of gates (Eq. A7).

    The gates start at 1, so that it starts as ALiBi.

    Args:
        shape: heads, key heads, features of a head, and width.
        gate: "softplus" or "sigmoid" of a linear function of the input.
        phase_per_head: gates for each head instead of one for all.
        slopes: one slope for each head; ALiBi's slopes by default.
    """

    facts = (
        Facts(
            name="grape-a-phase",
            about="a slope on a running sum of a learned gate",
            formula="b(t, j) = −s_h (Φ_t − Φ_j),  Φ_t = Σ_{l≤t} gate(x_l)",
            group="unipotent in GL(D+2), with the running sum Φ_t in the place of the position",
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
        clocks = shape.heads if phase_per_head else 1
        # sigmoid stays below 1; a bias of 64 (divided by 16) starts it at 0.98
        bias = 64.0 if gate == "sigmoid" else softplus_inverse(1.0)
        self.clock = GatedCumsum(shape.width, clocks, gate, bias)
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
    """The Forgetting Transformer: sum for l = j+1 … t of log f_l, f = sigmoid(w_h . x + b_h) (Eq. A7).

    Args:
        shape: heads, key heads, features of a head, and width.
        forget_bias: initial b_h.
    """

    facts = (
        Facts(
            name="fox",
            about="subtracts the sum of log forget gates in between",
            formula="b(t, j) = Σ_{l=j+1}^t log f_l,  f_l = σ(⟨w_h, x_l⟩ + b_h)",
            group="unipotent in GL(D+2): the product of I − log f_l E over the tokens passed",
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
