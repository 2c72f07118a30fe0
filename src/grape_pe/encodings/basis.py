"""GRAPE-M in the planes of an orthogonal basis: learned, or STRING's Cayley and circulant forms."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from ..checks import check_choice
from ..groups import BasisRotation, cayley_from, fourier_basis, orthogonal_from, unitary_from
from .base import HeadShape, State, Tokens, own_parameter
from .facts import GRAPE, Facts
from .rotary import Rotary

Basis = Literal["orthogonal", "unitary", "cayley", "circulant"]
STRING = "Schenck et al., 2025, STRING, arXiv:2502.02562"


class BasisRotary(Rotary):
    """GRAPE-M in the planes of a basis: B R B^T, with B always orthogonal (Eq. M7-M9, M15, M16).

    A learned basis starts at the identity, so the encoding starts as grape-m.

    Args:
        shape: heads, key heads, features of a head, and width.
        basis: "orthogonal" (any planes), "unitary" (planes (a_i, J a_i)), "cayley" (any planes whose B does not
            have the eigenvalue -1), or "circulant" (the fixed planes of the discrete Fourier transform).
        basis_per_head: whether each key head has its own learned basis.
        learned: whether to learn the frequencies.
        rotary_dim: number of first features to rotate, in the basis; all by default.
        options: the other options of `Rotary`.
    """

    facts = (
        Facts(
            name="grape-m-basis",
            about="rotates planes of a learned orthogonal or unitary basis",
            formula="G_n = B diag(R(n θ_1), …) B^T,  B = exp(W − W^T)",
            group="in a torus of SO(D), conjugated by the learned basis B",
            source=GRAPE,
            recovers="`grape-m`; STRING",
            learned="basis, frequencies",
        ),
        Facts(
            name="string-cayley",
            about="rotates planes of a learned basis in Cayley's form",
            formula="G_n = B diag(R(n θ_1), …) B^T,  B = (I − S)(I + S)^{−1},  S = W − W^T",
            group="in a torus of SO(D), conjugated by the learned basis B: `grape-m-basis` with another chart",
            source=STRING,
            recovers="`grape-m`; Cayley-STRING",
            learned="basis, frequencies",
        ),
        Facts(
            name="string-circulant",
            about="rotates the planes of the Fourier basis",
            formula="G_n = exp(n (C − C^T)) with C circulant = F diag(R(n θ_1), …) F^T,  F Fourier",
            group="in the torus of circulant matrices in SO(D): `grape-m-basis` with the Fourier basis",
            source=STRING,
            recovers="Circulant-STRING",
            learned="frequencies",
        ),
    )

    def __init__(
        self,
        shape: HeadShape,
        *,
        basis: Basis = "orthogonal",
        basis_per_head: bool = False,
        learned: bool = True,
        rotary_dim: int | None = None,
        **options: Any,
    ) -> None:
        d = shape.head_dim
        if basis == "circulant":
            rotary_dim = _fourier_dim(d, rotary_dim, basis_per_head)
        super().__init__(shape, learned=learned, rotary_dim=rotary_dim, **options)
        check_choice("basis", basis, ("orthogonal", "unitary", "cayley", "circulant"))
        if basis == "unitary" and d % 2:
            raise ValueError(f'a unitary basis needs an even head_dim, got {d}; use basis="orthogonal"')
        if basis == "unitary" and self.rotary_dim != d:
            raise ValueError(
                f'a unitary basis needs rotary_dim={d}, all features, got {self.rotary_dim}; use basis="orthogonal"'
            )
        self.kind = basis
        heads = self.rotary_heads if basis_per_head else 1
        size = (heads, 2, d // 2, d // 2) if basis == "unitary" else (heads, d, d)
        self.weight = None if basis == "circulant" else own_parameter(*size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.weight is not None:
            nn.init.zeros_(self.weight)

    @property
    def like(self) -> None:
        return None

    def basis(self) -> Tensor:
        """The orthogonal matrix B, (Hkv|1, D, D)."""
        if self.weight is None:
            return fourier_basis(self.shape.head_dim, self.layout, self.frequencies.initial.device).unsqueeze(
                0
            )
        if self.kind == "unitary":
            return unitary_from(self.weight, self.layout)
        return (cayley_from if self.kind == "cayley" else orthogonal_from)(self.weight)

    def element(self, tokens: Tokens, state: State) -> tuple[Any, State]:
        return BasisRotation(self.basis()[None, :, None], self.planes(tokens)), None

    def _turn(self, element: BasisRotation, x: Tensor) -> Tensor:
        return element.apply_in_basis(x)

    def _turn_again(self, element: BasisRotation, x: Tensor) -> Tensor:
        return element.planes.apply(x)  # encoded keys are in the coordinates of the basis


def _fourier_dim(head_dim: int, rotary_dim: int | None, basis_per_head: bool) -> int:
    """Number of Fourier modes that form planes: all but the mean, and for even head_dim the alternating mode."""
    most = 2 * ((head_dim - 1) // 2)
    if not most:
        raise ValueError(f'basis="circulant" needs head_dim >= 3, got {head_dim}; use rope')
    if basis_per_head:
        raise ValueError(
            'basis="circulant" is the same for all heads and needs basis_per_head=False; for frequencies of '
            "each head use per_head=True"
        )
    if isinstance(rotary_dim, int) and rotary_dim > most:
        raise ValueError(
            f'basis="circulant" can rotate at most {most} of {head_dim} features, got rotary_dim={rotary_dim}'
        )
    return most if rotary_dim is None else rotary_dim
