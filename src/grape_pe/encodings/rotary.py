"""Encodings that rotate q and k: RoPE, and all forms of multiplicative GRAPE."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..bias import NO_BIAS
from ..checks import check_choice
from ..groups import (
    JointMixtureRotation,
    MixtureRotation,
    PartialRotation,
    PlaneRotation,
    Rank2Rotation,
    orthonormal_columns,
    quarter_turn,
    skew_from_pairs,
)
from ..groups.rotation import Layout, angle_tables, turn_halves
from ..precision import exact_dtype, ignores_autocast
from .base import Encoded, Encoding, HeadShape, State, Tokens, own_parameter
from .facts import GRAPE, Facts
from .frequencies import Axes, Frequencies, Spectrum, log_uniform
from .gated_cumsum import Gate, GatedCumsum, softplus_inverse
from .scaling import read_scaling


class RotationEncoding(Encoding):
    """Base class: multiplies q and k by a group element of their position. Cached keys are rotated only once.

    Elements have the batch axes (B|1, Hkv|1, 1, T): all query heads of a key head share its rotation.
    """

    transforms = True
    #: whether the generators of different axes commute
    axes_commute: ClassVar[bool] = True

    @property
    def breaks_relative_law(self) -> str | None:
        if self.coords == 1 or self.axes_commute:
            return None
        return "generators of different axes do not commute, so exp(x + y) is not exp(x) exp(y)"

    @property
    def rotary_heads(self) -> int:
        """Number of key heads that are rotated, the first ones, with their query heads."""
        return self.shape.kv_heads

    @abstractmethod
    def element(self, tokens: Tokens, state: State) -> tuple[Any, State]:
        """Return the group element of each token, and the new state."""

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        element, state = self.element(tokens, state)
        q = self._heads(
            self._turn_query, element, tokens.q.unflatten(1, (self.shape.kv_heads, self.shape.group))
        )
        k = self._heads(self._turn_key, element, tokens.k.unsqueeze(2))
        return Encoded(q.flatten(1, 2), k.squeeze(2), NO_BIAS, state)

    def _heads(self, turn: Callable[[Any, Tensor], Tensor], element: Any, x: Tensor) -> Tensor:
        """Apply `turn` to the key heads of x, (B, Hkv, G, T, D), that are rotated."""
        if self.rotary_heads == x.shape[1]:
            return turn(element, x)
        return torch.cat([turn(element, x[:, : self.rotary_heads]), x[:, self.rotary_heads :]], 1)

    def _turn(self, element: Any, x: Tensor) -> Tensor:
        return element.apply(x)

    def _turn_query(self, element: Any, x: Tensor) -> Tensor:
        return self._turn(element, x)

    def _turn_key(self, element: Any, x: Tensor) -> Tensor:
        return self._turn(element, x)

    @ignores_autocast
    def rebase_keys(self, k: Tensor, offset: float) -> Tensor:
        """Multiply encoded keys by G(-offset), since G(n - offset) = G(-offset) G(n)."""
        k = super().rebase_keys(k, offset)
        if self.contextual:
            return k  # rotated by a running sum, not by positions
        exact = exact_dtype(k.device)
        positions = torch.full((1, 1, self.coords), -float(offset), dtype=exact, device=k.device)
        element, _ = self.element(Tokens(k, k, positions), None)
        return self._heads(self._turn_again, element, k.unsqueeze(2)).squeeze(2)

    def _turn_again(self, element: Any, x: Tensor) -> Tensor:
        return element.apply(x)


class PlanesEncoding(RotationEncoding):
    """Base class: rotates coordinate planes, of all features and heads or of the first ones.

    Args:
        shape: heads, key heads, features of a head, and width.
        coords: number of coordinates of a position, 1 to 3.
        layout: which features form a plane, "half" as in Hugging Face's Llama, or "interleaved".
        rotary_dim: number of first features to rotate; all by default.
        rotary_heads: number of first key heads to rotate, with their query heads; all by default.
    """

    def __init__(
        self,
        shape: HeadShape,
        coords: int = 1,
        *,
        layout: Layout = "half",
        rotary_dim: int | None = None,
        rotary_heads: int | None = None,
    ) -> None:
        super().__init__(shape, coords)
        check_layout(layout)
        self.layout = layout
        self.rotary_dim = shape.head_dim if rotary_dim is None else rotary_dim
        self._rotary_heads = shape.kv_heads if rotary_heads is None else rotary_heads
        if rotary_dim is not None and (
            not isinstance(rotary_dim, int) or rotary_dim % 2 or not 2 <= rotary_dim <= shape.head_dim
        ):
            raise ValueError(
                f"rotary_dim must be even, from 2 to head_dim = {shape.head_dim}, got {rotary_dim!r}"
            )
        if type(self._rotary_heads) is not int or not 1 <= self._rotary_heads <= shape.kv_heads:
            raise ValueError(
                f"rotary_heads must be from 1 to kv_heads = {shape.kv_heads}, the number of first key heads to rotate, "
                f"got {rotary_heads!r}"
            )

    @property
    def rotary_heads(self) -> int:
        return self._rotary_heads

    @property
    def whole(self) -> bool:
        """Whether all features of all heads are rotated."""
        return (self.rotary_dim, self.rotary_heads) == (self.shape.head_dim, self.shape.kv_heads)

    def turned(self, angle: Tensor, dtype: torch.dtype) -> PlaneRotation | PartialRotation:
        """The rotation by angles (B|1, H|1, 1, T, planes) in float64."""
        planes = PlaneRotation.from_angle(angle, dtype, self.layout)
        return planes if self.rotary_dim == self.shape.head_dim else PartialRotation(planes, self.rotary_dim)


class Rotary(PlanesEncoding):
    """RoPE, with fixed frequencies, and GRAPE-M, with learned ones (Eq. M3, M6).

    Args:
        shape: heads, key heads, features of a head, and width.
        base: base of the initial frequencies base^(-2i/D).
        spectrum: "log-uniform", or one initial frequency for each plane.
        learned: whether to learn the frequencies.
        per_head: whether each key head has its own learned frequencies.
        scaling: scaling of the frequencies for a longer context, such as "yarn:4" or
            `{"type": "linear", "factor": 4.0}`.
        coords: number of coordinates (axes) of a position, 1 to 3.
        axes: "disjoint" (each plane rotates with one axis, each axis has its own spectrum) or "mixed" (each plane
            has a random direction over all axes).
        sections: number of planes for each axis, which then share one spectrum (M-RoPE, Eq. M13).
        planes: `layout`, `rotary_dim` and `rotary_heads` of `PlanesEncoding`.
    """

    facts: ClassVar[Sequence[Facts]] = (
        Facts(
            name="rope",
            about="rotates d/2 coordinate planes, fixed frequencies",
            formula="G_n = diag(R(n θ_1), …, R(n θ_{D/2})),  θ_i = base^{−2(i−1)/D}",
            group="in the torus of SO(D): a turn by n θ_i in plane i; all elements commute",
            source="Su et al., 2021, RoFormer, arXiv:2104.09864; Llama, Qwen, Mistral",
            recovers="RoPE, exactly",
        ),
        Facts(
            name="grape-m",
            about="rotates d/2 coordinate planes, learned frequencies",
            formula="G_n = diag(R(n θ_1), …, R(n θ_{D/2})),  log θ_i learned",
            group="in the torus of SO(D): a turn by n θ_i in plane i; all elements commute",
            source=GRAPE,
            recovers="RoPE",
            learned="frequencies",
        ),
    )

    def __init__(
        self,
        shape: HeadShape,
        *,
        base: float = 10_000.0,
        spectrum: Spectrum = "log-uniform",
        learned: bool = False,
        per_head: bool = False,
        scaling: Mapping[str, Any] | str | None = None,
        coords: int = 1,
        axes: Axes = "disjoint",
        sections: Sequence[int] | None = None,
        **planes: Any,
    ) -> None:
        super().__init__(shape, coords, **planes)
        rule = read_scaling(scaling)
        #: YaRN multiplies queries and keys by a factor; here queries get both
        self.query_factor = 1.0 if rule is None else rule.attention**2
        self.frequencies = Frequencies(
            self.rotary_dim // 2,
            coords=coords,
            groups=self.rotary_heads if per_head else 1,
            base=base,
            spectrum=spectrum,
            axes=axes,
            sections=sections,
            learned=learned,
            scaling=rule,
        )

    def reset_parameters(self) -> None:
        self.frequencies.reset_parameters()

    def planes(self, tokens: Tokens) -> PlaneRotation | PartialRotation:
        """The rotation of each token in its coordinate planes."""
        angle = torch.einsum("btn,gnm->bgtm", tokens.positions, self.frequencies()).unsqueeze(2)
        return self.turned(angle, tokens.q.dtype)

    def element(self, tokens: Tokens, state: State) -> tuple[Any, State]:
        return self.planes(tokens), None

    @property
    def like(self) -> Hashable | None:
        """Not None if all heads have the same frequencies and `turn_halves` applies."""
        delta = self.frequencies.delta
        shared = delta is None or delta.shape[0] == 1
        halves = self.layout == "half" and self.whole and self.rotary_dim % 2 == 0
        return (self.coords, delta is None, self.frequencies.rule) if shared and halves else None

    @classmethod
    def prepare(cls, parts: Sequence[Any], positions: Tensor, working: torch.dtype) -> Sequence[Any]:
        """For each of `parts`, cos and sin, (B|1, 1, T, D)."""
        theta = Frequencies.stacked([part.frequencies for part in parts])  # (L, coords, planes)
        rows, count, coords = positions.shape
        angle = positions.view(rows, 1, 1, count, coords) @ theta.view(1, -1, 1, coords, theta.shape[-1])
        cos, sin = angle_tables(angle, working)  # (B|1, L, 1, T, D)
        return list(zip(cos.unbind(1), sin.unbind(1), strict=True))

    def encode(self, tokens: Tokens, state: State) -> Encoded:
        tables = tokens.prepared_for(self)
        if tables is None:
            return super().encode(tokens, state)
        turned = turn_halves(torch.cat([tokens.q, tokens.k], 1), *tables)
        q, k = turned.split((self.shape.heads, self.shape.kv_heads), 1)
        return Encoded(self._amplified(q), k, NO_BIAS)

    def _turn_query(self, element: Any, x: Tensor) -> Tensor:
        return self._amplified(self._turn(element, x))

    def _amplified(self, q: Tensor) -> Tensor:
        """Multiply the rotated features by YaRN's factor, as transformers does through cos and sin."""
        if self.query_factor == 1.0:
            return q
        if self.rotary_dim == self.shape.head_dim:
            return q * self.query_factor
        return torch.cat([q[..., : self.rotary_dim] * self.query_factor, q[..., self.rotary_dim :]], -1)


class ContextualRotary(PlanesEncoding):
    """GRAPE-M with a contextual phase: plane i rotates by Phi_t theta_i, with Phi_t a sum of gates (Eq. M10).

    Phi_t is the sum of the gates of the tokens before t; a gate is a function of the token's input x.

    Args:
        shape: heads, key heads, features of a head, and width.
        gate: "sigmoid", as in the paper's experiments, or "softplus".
        phase_per_head: whether each key head has its own phase.
        phase_per_plane: whether each plane has its own phase, as in Selective RoPE (Eq. M14).
        base: base of the initial frequencies base^(-2i/D).
        spectrum: "log-uniform", or one initial frequency for each plane.
        learned: whether to learn the frequencies.
        planes: `layout`, `rotary_dim` and `rotary_heads` of `PlanesEncoding`.
    """

    facts = (
        Facts(
            name="grape-m-ctx",
            about="rotates by a running sum of a learned gate",
            formula="G_t = diag(R(Φ_t θ_1), …),  Φ_t = Σ_{l<t} gate(x_l)",
            group="in the torus of SO(D), with the running sum Φ_t instead of the position",
            source=GRAPE,
            recovers="RoPE (constant gate); Selective RoPE's rotation, with steps of one sign (`phase_per_plane`)",
            learned="gate, frequencies",
        ),
    )

    contextual = True
    state_adds = True

    def __init__(
        self,
        shape: HeadShape,
        *,
        gate: Gate = "sigmoid",
        phase_per_head: bool = False,
        phase_per_plane: bool = False,
        base: float = 10_000.0,
        spectrum: Spectrum = "log-uniform",
        learned: bool = True,
        **planes: Any,
    ) -> None:
        super().__init__(shape, **planes)
        assert shape.width is not None
        count = self.rotary_dim // 2
        #: phases of each token: (key heads or 1, planes or 1)
        self.sizes = (
            self.rotary_heads if phase_per_head else 1,
            max(count, 1) if phase_per_plane else 1,
        )
        self.clock = GatedCumsum(
            shape.width, self.sizes[0] * self.sizes[1], gate, bias=softplus_inverse(1e-3)
        )
        self.frequencies = Frequencies(count, base=base, spectrum=spectrum, learned=learned)

    def reset_parameters(self) -> None:
        self.clock.reset_parameters()
        self.frequencies.reset_parameters()

    def element(self, tokens: Tokens, state: State) -> tuple[Any, State]:
        assert tokens.x is not None
        total = self.clock(tokens.x, state)
        angle = self.phases(self.clock.before(total, state)) * self.frequencies()[:, 0]
        return self.turned(angle.unsqueeze(2), tokens.q.dtype), total

    def phases(self, total: Tensor) -> Tensor:
        """Reshape running sums (B, n, T) to phases (B, Hkv|1, T, planes|1)."""
        return total.unflatten(1, self.sizes).transpose(-1, -2)


class PlaneRotary(RotationEncoding):
    """A rotation exp(-n omega L(a, b)) in one learned plane for each key head, by Rodrigues' formula (Eq. R3-R5).

    a and b start orthonormal. With a = e_1 and b = e_2 this is one plane of RoPE.

    Args:
        shape: heads, key heads, features of a head, and width.
        tied: whether b = J a, where J rotates every coordinate plane by 90 degrees.
        frequency: initial omega, which is learned.
        layout: the coordinate planes of J, "half" or "interleaved".
    """

    facts = (
        Facts(
            name="grape-m-plane",
            about="rotates one plane spanned by any a, b (Rodrigues)",
            formula="G_n = exp(−n ω L),  L = a b^T − b a^T",
            group="in SO(D): a one-parameter group of rank-2 generators",
            source=GRAPE,
            recovers="one plane of RoPE",
            learned="a, b, frequency",
        ),
    )

    def __init__(
        self, shape: HeadShape, *, tied: bool = False, frequency: float = 1.0, layout: Layout = "half"
    ) -> None:
        super().__init__(shape)
        check_layout(layout)
        if shape.head_dim < 2:
            raise ValueError(f"grape-m-plane needs head_dim >= 2, got {shape.head_dim}; use nope")
        self.layout = layout
        self.a = own_parameter(shape.kv_heads, shape.head_dim)
        self.b = None if tied else own_parameter(shape.kv_heads, shape.head_dim)
        self.frequency = Frequencies(1, groups=shape.kv_heads, spectrum=(frequency,), learned=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.frequency.reset_parameters()
        with torch.no_grad():
            even = 2 * (self.shape.head_dim // 2)
            self.a.normal_()[:, even:] = 0.0
            self.a.div_(self.a.norm(dim=-1, keepdim=True))
            if self.b is not None:
                self.b.copy_(quarter_turn(self.a, self.layout))

    def element(self, tokens: Tokens, state: State) -> tuple[Any, State]:
        exact = exact_dtype(self.a.device)
        a = self.a.to(exact)
        b = quarter_turn(a, self.layout) if self.b is None else self.b.to(exact)
        eta = -tokens.positions[..., 0].unsqueeze(1) * self.frequency()[:, 0]  # (B|1, Hkv, T)
        return Rank2Rotation(a[None, :, None, None], b[None, :, None, None], eta.unsqueeze(2)), None


class MixtureRotary(RotationEncoding):
    """GRAPE-M with overlapping planes that do not commute, in a subspace of rank r (Eq. N1-N5).

    The relative law holds for one coordinate. It does not hold for more, because the generators of different axes
    do not commute.

    Args:
        shape: heads, key heads, features of a head, and width.
        rank: r, even.
        per_head: whether each key head has its own planes.
        base: base of the initial frequencies.
        coords: number of coordinates of a position, 1 to 3.
    """

    facts = (
        Facts(
            name="grape-m-mix",
            about="rotates overlapping, non-commuting planes in a small subspace",
            formula="G_n = exp(n E L_r E^T),  L_r = Σ_k (a_k b_k^T − b_k a_k^T)",
            group="in SO(D): a one-parameter group; its planes overlap, so their terms do not commute",
            source=GRAPE,
            recovers="RoPE (rank d)",
            learned="frame, planes",
        ),
    )

    axes_commute = False

    def __init__(
        self,
        shape: HeadShape,
        *,
        rank: int = 8,
        per_head: bool = False,
        base: float = 10_000.0,
        coords: int = 1,
    ) -> None:
        super().__init__(shape, coords)
        if not isinstance(rank, int) or rank % 2 or not 2 <= rank <= shape.head_dim:
            raise ValueError(f"rank must be even, from 2 to head_dim = {shape.head_dim}, got {rank!r}")
        heads = shape.kv_heads if per_head else 1
        self.rank, self.base = rank, base
        self.frame = own_parameter(heads, shape.head_dim, rank)
        self.pairs = own_parameter(2, heads, coords, rank - 1, rank)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Planes (e_k, e_k+1): those of even k as in RoPE, weak rotations between them."""
        nn.init.normal_(self.frame)  # orthonormalized in `element`
        theta = log_uniform(self.rank // 2, self.base)
        strength = torch.empty(self.rank - 1, dtype=torch.float32)
        strength[0::2] = theta
        strength[1::2] = 0.1 * (theta[:-1] * theta[1:]).sqrt()
        eye = torch.eye(self.rank, dtype=torch.float32)
        with torch.no_grad():
            # L(b, a) rotates by +theta, L(a, b) by -theta
            self.pairs[0] = strength.sqrt()[:, None] * eye[1:]
            self.pairs[1] = strength.sqrt()[:, None] * eye[:-1]

    def element(self, tokens: Tokens, state: State) -> tuple[Any, State]:
        exact = exact_dtype(self.frame.device)
        frame = orthonormal_columns(self.frame.to(exact))[None, :, None]
        skew = skew_from_pairs(*self.pairs.to(exact))[None, :, None]  # (1, Hkv|1, 1, coords, r, r)
        n = tokens.positions[:, None, None]  # (B|1, 1, 1, T, coords)
        if self.coords == 1:
            return MixtureRotation(frame, skew[..., 0, :, :], n[..., 0]), None
        return JointMixtureRotation(frame, skew, n), None


def check_layout(layout: str) -> None:
    """Raise a ValueError unless this is a layout of planes."""
    check_choice("layout", layout, ("half", "interleaved"))


def convert_layout(weight: Tensor, head_dim: int, *, to: Layout) -> Tensor:
    """Reorder the rows of a query or key projection for the other layout of rotation planes.

    Converted weights with the converted layout give the same scores, bit for bit.

    Args:
        weight: weight or bias of the projection, (heads * head_dim, …).
        head_dim: features of a head, even.
        to: the layout to convert to, "half" or "interleaved".

    Returns:
        The reordered tensor, of the same shape.
    """
    check_layout(to)
    if head_dim % 2:
        raise ValueError(
            f"head_dim must be even to convert between layouts, got {head_dim}; use {head_dim + 1}"
        )
    if weight.shape[0] % head_dim:
        raise ValueError(
            f"the first axis of weight must be a multiple of head_dim={head_dim}, got {weight.shape[0]} rows"
        )
    pairs = (2, head_dim // 2) if to == "interleaved" else (head_dim // 2, 2)
    return weight.unflatten(0, (-1, *pairs)).transpose(1, 2).flatten(0, 2)
