"""The spectral quantities of docs/math.md (Eq. S2-S7), in closed form and measured on the explicit matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...bias import TileBias
from ...encodings.additive import ShiftSlope
from ...encodings.path import PaTH
from ...encodings.pope import PoPE
from ...encodings.rotary import ContextualRotary
from ...encodings.temperature import LogN
from ...encodings.xpos import XPos
from ...groups import DenseRotation, Joint, Unipotent, shift_generator, slope_generator
from ...groups.spectrum import path_bounds, singular_pair
from .capture import LayerView, by_distance, frequencies, group_elements, parts_of, rotation_of

DISTANCES = (1, 4, 16, 64, 256)


@dataclass(frozen=True)
class Quantity:
    """One number by formula and by measurement."""

    name: str
    closed: float
    measured: float

    @property
    def difference(self) -> float:
        """Relative to the formula's value, or to 1 where that is smaller."""
        return abs(self.measured - self.closed) / max(1.0, abs(self.closed))


@dataclass(frozen=True)
class SpectralRow:
    """The action over one distance, for one head."""

    distance: int
    head: int
    quantities: list[Quantity]
    difference: float


@dataclass(frozen=True)
class Action:
    """The action of a layer over a distance: what it is, rows of formulas beside the explicit matrix, and curves.

    `curves` are (H, n, 2): the largest and the smallest singular value at each of n distances.
    """

    about: str
    rows: Callable[[Sequence[int]], list[SpectralRow]] = lambda at: []
    curves: Callable[[Sequence[int]], Tensor | None] = lambda at: None


def spectral_rows(view: LayerView) -> tuple[list[SpectralRow], str]:
    """Rows for distances within the text, and what is measured in words."""
    found = action(view)
    return found.rows([d for d in DISTANCES if d < view.length]), found.about


def action(view: LayerView) -> Action:
    """The action of a layer's encoding; without rows and curves where none is known."""
    encoding, parts, bias = view.encoding, parts_of(view.encoding), view.bias()
    if len(parts) > 1 and any(isinstance(part, (LogN, PaTH, PoPE, ShiftSlope, XPos)) for part in parts):
        return Action("no closed form is known for this composition")
    if isinstance(encoding, PoPE):
        return Action("no matrix acts on queries and keys (Eq. M18)")
    if isinstance(encoding, LogN):
        return Action("no action over a distance: a factor of the query's position (Eq. Q1)")
    if isinstance(encoding, XPos):
        rows, curves = partial(_xpos_rows, view, encoding), partial(_xpos_curves, encoding)
        return Action("turned and faded planes in GL(D) (Eq. M17)", rows, curves)
    if isinstance(encoding, PaTH):
        about = "product of the factors I − β w wᵀ of the last tokens (Eq. S7)"
        return Action(about, partial(_path_rows, view), partial(_path_curves, view))
    if isinstance(encoding, ShiftSlope):
        about = "I + s A of the (D+1) lift, |s A| = rate × distance (Eq. S5)"
        return Action(about, partial(_shift_rows, encoding), partial(_shift_curves, encoding))
    about = "the identity" if bias is None else "I + s E in GL(D+2) (Eq. S4), s = −(mean bias)"
    if rotation_of(encoding) is not None:
        joint = "rotation and slope as one action in GL(D+2) (Eq. S6), s = −(mean bias)"
        about = joint if bias is not None else "rotation in SO(D) (Eq. S1-S3): every singular value is 1"
    return Action(about, partial(_joint_rows, view, bias), partial(_joint_curves, view, bias))


def _row(distance: int, head: int, quantities: list[Quantity]) -> SpectralRow:
    return SpectralRow(distance, head, quantities, max(q.difference for q in quantities))


def _joint_rows(view: LayerView, bias: Tensor | None, within: Sequence[int]) -> list[SpectralRow]:
    """One explicit matrix for each distance."""
    width = view.encoding.shape.head_dim
    found = group_elements(view)
    strength = torch.zeros(1, len(within)) if bias is None else -by_distance(bias, within)[..., 0]
    head = int(strength.abs().sum(-1).argmax())
    group = head // view.encoding.shape.group
    rows = []
    for s, distance in zip(strength[head].double(), within, strict=True):
        turned = torch.eye(width, dtype=torch.float64)
        if found is not None:  # G_0^T G_d, the rotation between two tokens so far apart
            turned = found[1][group, 0].double().T @ found[1][group, distance].double()
        quantities = _singular(turned if bias is None else _explicit(turned, s, width), s)
        if found is not None:
            quantities.append(_trace(view, turned, group, distance))
        rows.append(_row(distance, head, quantities))
    return rows


def _joint_curves(view: LayerView, bias: Tensor | None, at: Sequence[int]) -> Tensor:
    if bias is None:
        return torch.ones(view.encoding.shape.heads, len(at), 2, dtype=torch.float64)
    return torch.stack(singular_pair(by_distance(bias, at)[..., 0]), -1)


def _explicit(turned: Tensor, s: Tensor, width: int) -> Tensor:
    p, q = slope_generator(width, torch.ones(1, dtype=torch.float64))
    return Joint(DenseRotation(turned), Unipotent(p, q, s), width).as_matrix()


def _singular(matrix: Tensor, s: Tensor) -> list[Quantity]:
    larger, smaller = singular_pair(s)
    values = torch.linalg.svdvals(matrix)
    return [
        Quantity("largest σ", float(larger), float(values[0])),
        Quantity("smallest σ", float(smaller), float(values[-1])),
        Quantity("condition κ", float(larger / smaller), float(values[0] / values[-1])),
    ]


def _trace(view: LayerView, turned: Tensor, head: int, distance: int) -> Quantity:
    """tr G / D: its closed form is the mean of cos(angle) over all coordinates (Eq. S2)."""
    part = rotation_of(view.encoding)
    found = None if part is None else frequencies(part)
    width = turned.shape[-1]
    measured = float(turned.trace()) / width
    if part is None or found is None:
        return Quantity("tr G / D", measured, measured)
    theta = found[0][min(head, found[0].shape[0] - 1)]
    n = _phase(view, head, distance) if isinstance(part, ContextualRotary) else torch.tensor(float(distance))
    closed = (2 * torch.cos(n * theta).sum() + width - 2 * len(theta)) / width
    return Quantity("tr G / D", float(closed), measured)


def _phase(view: LayerView, head: int, distance: int) -> Tensor:
    """The phase gained between token 0 and token `distance` (planes|1,): the sum of the steps between (Eq. M10)."""
    states = view.code.state if isinstance(view.code.state, tuple) else (view.code.state,)
    for part, state in zip(parts_of(view.encoding), states, strict=True):
        if isinstance(part, ContextualRotary):
            phases = part.phases(state)[0]
            return phases[min(head, phases.shape[0] - 1), distance - 1]
    raise ValueError("no contextual rotation in this encoding")


def _xpos_rows(view: LayerView, encoding: XPos, within: Sequence[int]) -> list[SpectralRow]:
    """The matrix between a query and a key so far before it: sigma is zeta^(distance / scale_base) of each plane."""
    elements = group_elements(view)
    assert elements is not None
    q, k = (each[0].double() for each in elements)
    rows = []
    for distance, closed in zip(within, _xpos_curves(encoding, within)[0].tolist(), strict=True):
        measured = torch.linalg.svdvals(q[distance].T @ k[0])[[0, -1]].tolist()
        pairs = zip(("largest σ", "smallest σ"), closed, measured, strict=True)
        rows.append(_row(distance, 0, [Quantity(*each) for each in pairs]))
    return rows


def _xpos_curves(encoding: XPos, at: Sequence[int]) -> Tensor:
    """The same for all heads; the last feature of an odd head is left alone."""
    closed = torch.exp(-encoding.rates(encoding.frequencies.initial.device) * torch.tensor(at)[:, None])
    largest = torch.ones(len(at)) if encoding.shape.head_dim % 2 else closed.amax(-1)
    return torch.stack([largest.double(), closed.amin(-1).double()], -1).expand(encoding.shape.heads, -1, -1)


def _shift_rates(encoding: ShiftSlope) -> Tensor:
    """(H,): what each head's bias grows by with each token, for a key along its direction."""
    return (encoding.slopes * F.softplus(encoding.strength)).detach().double() * encoding.shape.head_dim**-0.5


def _shift_rows(encoding: ShiftSlope, within: Sequence[int]) -> list[SpectralRow]:
    rate = _shift_rates(encoding)
    head = int(rate.argmax())
    direction = F.normalize(encoding.u[head // encoding.shape.group, 0].double(), dim=-1)
    p, q = shift_generator(rate[head] * direction)
    at = torch.tensor(within, dtype=torch.float64)
    return [_row(int(s), head, _singular(Unipotent(p, q, s).as_matrix(), s * rate[head])) for s in at]


def _shift_curves(encoding: ShiftSlope, at: Sequence[int]) -> Tensor:
    s = _shift_rates(encoding)[:, None] * torch.tensor(at, dtype=torch.float64)
    return torch.stack(singular_pair(s), -1)


def _path_factors(view: LayerView) -> tuple[Tensor, Tensor]:
    """w (Hkv, T, D), of length 1, and beta (Hkv, T)."""
    bias = view.code.bias
    assert isinstance(bias, TileBias)
    return F.normalize(bias.key["w"][0].double(), dim=-1), bias.key["beta"][0].double()


def _path_products(view: LayerView, at: Sequence[int]) -> Tensor:
    """(Hkv, n, D, D): the product of the factors of so many of the last tokens."""
    w, beta = _path_factors(view)
    product = torch.eye(w.shape[-1], dtype=torch.float64).repeat(w.shape[0], 1, 1)
    found = {0: product}
    for distance in range(1, max(at) + 1):
        last, strength = w[:, -distance], beta[:, -distance, None, None]
        found[distance] = product = product - strength * last[:, :, None] * (last[:, None] @ product)
    return torch.stack([found[d] for d in at], 1)


def _path_rows(view: LayerView, within: Sequence[int]) -> list[SpectralRow]:
    beta = _path_factors(view)[1]
    rows = []
    for distance, product in zip(within, _path_products(view, within)[0], strict=True):
        determinant, lower, upper = path_bounds(beta[0, -distance:])
        values = torch.linalg.svdvals(product)
        quantities = [
            Quantity("determinant", float(determinant), float(torch.linalg.det(product))),
            Quantity("smallest σ ≥", float(lower), float(values[-1])),
            Quantity("largest σ ≤", float(upper), float(values[0])),
        ]
        rows.append(SpectralRow(distance, 0, quantities, quantities[0].difference))
    return rows


def _path_curves(view: LayerView, at: Sequence[int]) -> Tensor:
    values = torch.linalg.svdvals(_path_products(view, at))
    return values[..., [0, -1]].repeat_interleave(view.encoding.shape.group, 0)
