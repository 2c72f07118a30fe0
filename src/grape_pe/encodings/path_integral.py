"""GRAPE-AP: a bias summed over the tokens from key to query, with terms that depend on the query (Eq. P1-P3)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bias import LINKS, Link, PathBias, ProbeRotation
from ..checks import check_choice, check_integer
from ..groups import PlaneRotation
from ..groups.rotation import angle_tables, turn_halves
from ..precision import WideLinear
from .additive import SlopeEncoding
from .base import Encoded, HeadShape, State, Tokens
from .facts import GRAPE, Facts

ProbeSource = Literal["linear", "q", "k", "v"]
RMS_EPS = 1e-5


class PathIntegral(SlopeEncoding):
    """GRAPE-AP: the bias is the sum over tokens l = j+1 … t of slope_h * g(<p_t, R_l p_l> / P).

    p is a probe, a small vector of each token, and R_l rotates it by the position of l.

    Args:
        shape: heads, key heads, features of a head, and width.
        probe: "linear", a learned linear function of the input x, or "q", "k" or "v", the query, key or value.
        probe_dim: P, features of a linear probe for each key head; 8 by default.
        probe_rotation: "key" rotates only p_l, as in the paper, so the bias depends on absolute positions;
            "relative" rotates both probes, so the bias is shift-invariant; "none" rotates neither.
        link: g, "logsigmoid" or "bounded" (sigmoid - 1).
        normalize_query: whether to normalize p_t to unit RMS too, as in the paper's text; each term is then between
            -1.31 and -0.31 times the slope. By default only p_l is normalized, as in the authors' code.
        slopes: one slope for each head, or one for all; ALiBi's slopes by default.
    """

    facts = (
        Facts(
            name="grape-ap",
            about="sums a learned edge cost over the tokens in between",
            formula="b(t, j) = s_h Σ_{l=j+1}^t log σ(⟨p_t, R_l p_l⟩ / P)",
            group="for each query, a product of unipotent factors I − ψ E of the tokens in between; none for "
            "all queries together, since every factor depends on the query",
            source=GRAPE,
            recovers="ALiBi, FoX (endpoint-free)",
            learned="probe",
            law_with={"probe_rotation": "relative"},
        ),
    )

    def __init__(
        self,
        shape: HeadShape,
        *,
        probe: ProbeSource = "linear",
        probe_dim: int | None = None,
        probe_rotation: ProbeRotation = "key",
        link: Link = "logsigmoid",
        normalize_query: bool = False,
        slopes: Sequence[float] | None = None,
    ) -> None:
        self.contextual = probe == "linear"  # type: ignore[misc]
        super().__init__(shape, slopes)
        check_choice("probe", probe, ("linear", "q", "k", "v"))
        check_choice("probe_rotation", probe_rotation, ("key", "relative", "none"))
        check_choice("link", link, LINKS)
        if probe_dim is not None:
            check_integer("probe_dim", probe_dim)
            if probe != "linear":
                raise ValueError(
                    f'probe_dim={probe_dim} needs probe="linear", got probe="{probe}", which has the width of {probe}'
                )
        self.source, self.rotation, self.link = probe, probe_rotation, link
        self.normalize_query = normalize_query
        self.projection = None
        if probe == "linear":
            assert shape.width is not None
            self.projection = WideLinear(shape.width, shape.kv_heads * (probe_dim or 8), bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.projection is not None:
            nn.init.normal_(self.projection.weight, std=0.5 / self.projection.in_features**0.5)

    @property
    def breaks_relative_law(self) -> str | None:
        if self.rotation != "key":
            return None
        return (
            'probe_rotation="key" rotates only the key probe, so the bias depends on absolute positions; '
            'use probe_rotation="relative"'
        )

    def probes(self, tokens: Tokens) -> Tensor:
        """The probes of all tokens, (B, Hkv or H, T, P), in at least float32."""
        if self.projection is not None:
            assert tokens.x is not None
            probe = self.projection(tokens.x).unflatten(-1, (self.shape.kv_heads, -1)).transpose(1, 2)
        else:
            given = {"q": tokens.q, "k": tokens.k, "v": tokens.v}[self.source]
            if given is None:
                raise ValueError('grape-ap with probe="v" needs the values: pass v=…, (B, Hkv, T, Dv)')
            probe = given
        return probe.to(tokens.working)

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        probe = self.probes(tokens)
        unit = F.rms_norm(probe, probe.shape[-1:], eps=RMS_EPS)
        query = unit if self.normalize_query else probe
        key = unit
        if self.rotation != "none":
            turn = self._turn(tokens, probe.shape[-1])
            key = turn(key)
            query = turn(query) if self.rotation == "relative" else query
        bias = PathBias(query, key, self.head_slopes(tokens), self.link, self.rotation)
        return Encoded(tokens.q, tokens.k, bias)

    @property
    def like(self) -> Hashable | None:
        """The width of the probe, if it is rotated by `turn_halves`."""
        width = self.shape.head_dim
        if self.projection is not None:
            width = self.projection.out_features // self.shape.kv_heads
        return width if self.rotation != "none" and self.source != "v" and width % 2 == 0 else None

    @classmethod
    def prepare(cls, parts: Sequence[Any], positions: Tensor, working: torch.dtype) -> Sequence[Any]:
        """cos and sin, (B|1, 1, T, P), equal for all parts."""
        angle = positions[..., :1].unsqueeze(1).expand(-1, -1, -1, parts[0].like // 2)
        return [angle_tables(angle, working)] * len(parts)

    def _turn(self, tokens: Tokens, width: int) -> Callable[[Tensor], Tensor]:
        """The rotation exp(n J) of probes: each plane by one radian per position."""
        tables = tokens.prepared_for(self)
        if tables is not None:
            return lambda probe: turn_halves(probe, *tables)
        angle = tokens.positions[..., :1].unsqueeze(1)
        return PlaneRotation.from_angle(angle.expand(*angle.shape[:-1], width // 2), tokens.working).apply
