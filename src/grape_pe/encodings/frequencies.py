"""The angular frequencies of rotation planes: fixed or learned, shared or per key head, for 1 to 3 coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..checks import check_choice, check_positive
from ..precision import exact_dtype
from .base import FullPrecision, own_parameter
from .scaling import Scaling

Spectrum = Literal["log-uniform"] | Sequence[float]
Axes = Literal["disjoint", "mixed"]

#: A learned frequency is theta0 * exp(delta / 16), so an Adam step on delta changes log theta 16 times less.
STEP_DIVISOR = 16.0


def log_uniform(planes: int, base: float) -> Tensor:
    """The frequencies base^(-i/planes), rounded to float32 exactly as in Hugging Face's RoPE (Eq. M6)."""
    exponent = torch.arange(0, 2 * planes, 2, dtype=torch.int64).to(torch.float32) / max(2 * planes, 1)
    return 1.0 / (base**exponent)


class Frequencies(FullPrecision):
    """Frequencies theta, (groups, coords, planes): plane i rotates by the sum over axes a of n_a theta[a, i] (Eq. M11).

    theta = scaling(initial * exp(delta / 16)) * strength, in float64. `delta` starts at 0. `strength` is below 1
    only while `RotationFade` removes the rotation.

    Args:
        planes: number of planes.
        coords: number of coordinates (axes) of a position.
        groups: number of independent sets of learned frequencies, such as one for each key head.
        base: base of the log-uniform spectrum.
        spectrum: "log-uniform", or one initial frequency for each plane.
        axes: "disjoint" divides the planes among the axes, each with its own spectrum; "mixed" gives each plane a
            random direction over all axes.
        sections: number of planes for each axis, which then share one spectrum (M-RoPE).
        learned: whether `delta` is a parameter.
        scaling: changes the spectrum for longer contexts.
    """

    initial: Tensor
    strength: float = 1.0

    def __init__(
        self,
        planes: int,
        *,
        coords: int = 1,
        groups: int = 1,
        base: float = 10_000.0,
        spectrum: Spectrum = "log-uniform",
        axes: Axes = "disjoint",
        sections: Sequence[int] | None = None,
        learned: bool = False,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__()
        check_choice("axes", axes, ("disjoint", "mixed"))
        check_positive("base", base)
        self.planes, self.coords, self.base, self.axes = planes, coords, float(base), axes
        self.spectrum, self.scaling = spectrum, scaling
        self.sections = None if sections is None else self._checked_sections(sections)
        if scaling is not None and coords > 1:
            raise ValueError(
                f"scaling needs coords=1, got coords={coords}; it is for positions in a sequence"
            )
        if scaling is not None and base <= 1:
            raise ValueError(f"scaling needs a base above 1, got base={base}")
        self._check_spectrum()
        self.register_buffer("initial", torch.empty(1, coords, planes, dtype=torch.float32))
        self.delta = own_parameter(groups, coords, planes) if learned else None
        self.reset_parameters()

    def _check_spectrum(self) -> None:
        if isinstance(self.spectrum, str):
            if self.spectrum != "log-uniform":
                raise ValueError(
                    f'spectrum must be "log-uniform" or a sequence of frequencies, got {self.spectrum!r}'
                )
        elif len(self.spectrum) != self.planes:
            raise ValueError(
                f"spectrum must have one frequency for each of the {self.planes} planes, "
                f"got {len(self.spectrum)}"
            )

    def _checked_sections(self, sections: Sequence[int]) -> list[int]:
        found = list(sections) if isinstance(sections, (list, tuple)) else []
        whole = all(isinstance(n, int) and n >= 0 for n in found)
        if not whole or self.coords == 1 or len(found) != self.coords or sum(found) != self.planes:
            raise ValueError(
                f"sections must be a number of planes for each of the coords={self.coords} axes (2 or 3 axes), "
                f"{self.planes} in total, got {found or sections!r}; Qwen2-VL has (16, 24, 24) of 64 planes"
            )
        if self.axes == "mixed":
            raise ValueError('sections need axes="disjoint" (the default), got axes="mixed"')
        return found

    def _axis_spectrum(self, planes: int) -> Tensor:
        if isinstance(self.spectrum, str):
            return log_uniform(planes, self.base)
        return torch.tensor(list(self.spectrum), dtype=torch.float32)[:planes]

    def _initial_spectrum(self) -> Tensor:
        theta = torch.zeros(self.coords, self.planes, dtype=torch.float32)
        if self.axes == "mixed" and self.coords > 1:
            direction = torch.randn(self.coords, self.planes, dtype=torch.float32)
            return self._axis_spectrum(self.planes) * direction / direction.norm(dim=0)
        if self.sections is not None:
            of_plane = torch.arange(self.coords).repeat_interleave(torch.tensor(self.sections))
            theta[of_plane, torch.arange(self.planes)] = self._axis_spectrum(self.planes)
            return theta
        for axis, planes in enumerate(torch.arange(self.planes).tensor_split(self.coords)):
            theta[axis, planes] = self._axis_spectrum(len(planes))
        return theta

    def reset_parameters(self) -> None:
        with torch.no_grad():
            if not self.initial.is_meta:
                self.initial.copy_(self._initial_spectrum())
            if self.delta is not None:
                self.delta.zero_()

    def forward(self) -> Tensor:
        return self.stacked([self])

    @staticmethod
    def stacked(parts: Sequence[Frequencies]) -> Tensor:
        """The frequencies of L encodings with one group and an equal `rule`, (L, coords, planes)."""
        theta = torch.cat([part.initial for part in parts]).to(exact_dtype(parts[0].initial.device))
        deltas: list[Tensor] = [part.delta for part in parts if part.delta is not None]
        if deltas:
            theta = theta * torch.exp(torch.cat(deltas).to(theta.dtype) / STEP_DIVISOR)
        scaling, base = parts[0].rule
        if scaling is not None:
            theta = scaling(theta, base)
        if any(part.strength != 1.0 for part in parts):
            theta = theta * theta.new_tensor([part.strength for part in parts]).view(-1, 1, 1)
        return theta

    @property
    def rule(self) -> tuple[Scaling | None, float]:
        """What `stacked` needs to be equal: the scaling, and the base if there is a scaling."""
        return self.scaling, self.base if self.scaling is not None else 0.0
