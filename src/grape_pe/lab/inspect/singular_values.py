"""The spectral quantities of docs/math.md (Eq. S2-S7), in closed form and measured on the explicit matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
LOGN = "no action over a distance: a factor of the query's position (Eq. Q1)"


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


def spectral_rows(view: LayerView) -> tuple[list[SpectralRow], str]:
    """Rows for distances within the text, and what is measured in words."""
    within = [d for d in DISTANCES if d < view.length]
    parts = parts_of(view.encoding)
    special = [part for part in parts if isinstance(part, (LogN, PaTH, PoPE, ShiftSlope, XPos))]
    if special and len(parts) > 1:
        return [], "no closed form is known for this composition"
    if isinstance(view.encoding, PoPE):
        return [], "no matrix acts on queries and keys (Eq. M18)"
    if isinstance(view.encoding, LogN):
        return [], LOGN
    if isinstance(view.encoding, XPos):
        return [
            _xpos_row(view, view.encoding, d) for d in within
        ], "turned and faded planes in GL(D) (Eq. M17)"
    if isinstance(view.encoding, PaTH):
        return [_path_row(view, d) for d in within], (
            "product of factors I − β w wᵀ along the last tokens (Eq. S7): determinant, and bounds of σ"
        )
    if isinstance(view.encoding, ShiftSlope):
        return _shift_rows(view, view.encoding, within), "I + s A of the (D+1) lift, s = distance (Eq. S5)"
    return _joint_rows(view, within), _about(view)


def _about(view: LayerView) -> str:
    rotation, bias = rotation_of(view.encoding) is not None, view.bias() is not None
    if rotation and bias:
        return "rotation and slope as one action in GL(D+2) (Eq. S6), s = −(mean bias)"
    if rotation:
        return "rotation in SO(D) (Eq. S1-S3)"
    if bias:
        return "I + s E in GL(D+2) (Eq. S4), s = −(mean bias) of the head with the strongest bias"
    return "the identity"


def _row(distance: int, head: int, quantities: list[Quantity]) -> SpectralRow:
    return SpectralRow(distance, head, quantities, max(q.difference for q in quantities))


def _joint_rows(view: LayerView, within: Sequence[int]) -> list[SpectralRow]:
    """Rotation, slope, both, or neither: one explicit matrix for each distance."""
    width = view.encoding.shape.head_dim
    found, bias = group_elements(view), view.bias()
    elements = None if found is None else found[1]
    strength = torch.zeros(1, len(within)) if bias is None else -by_distance(bias, within)[..., 0]
    head = int(strength.abs().sum(-1).argmax())
    rows = []
    for i, distance in enumerate(within):
        s = strength[head, i].double()
        turned = _relative(elements, head // view.encoding.shape.group, distance, width)
        matrix = _explicit(turned, s, width) if bias is not None else turned
        quantities = _singular(matrix, s)
        if elements is not None:
            quantities.append(_trace(view, turned, head // view.encoding.shape.group, distance))
        rows.append(_row(distance, head, quantities))
    return rows


def _relative(elements: Tensor | None, head: int, distance: int, width: int) -> Tensor:
    """G_0^T G_d, the rotation between two tokens so far apart."""
    if elements is None:
        return torch.eye(width, dtype=torch.float64)
    return elements[head, 0].double().T @ elements[head, distance].double()


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


def _xpos_row(view: LayerView, encoding: XPos, distance: int) -> SpectralRow:
    """The matrix between a query and a key so far before it: sigma is zeta^(distance / scale_base) of each plane."""
    elements = group_elements(view)
    assert elements is not None
    q, k = (each[0].double() for each in elements)
    values = torch.linalg.svdvals(q[distance].T @ k[0])
    closed = torch.exp(-encoding.rates(q.device) * distance)
    largest = 1.0 if encoding.shape.head_dim % 2 else float(closed.max())
    quantities = [
        Quantity("largest σ", largest, float(values[0])),
        Quantity("smallest σ", float(closed.min()), float(values[-1])),
    ]
    return _row(distance, 0, quantities)


def _xpos_singular_values(encoding: XPos, at: Sequence[int]) -> Tensor:
    """(H, n, 2), the same for all heads; the last feature of an odd head is left alone."""
    closed = torch.exp(-encoding.rates(encoding.frequencies.initial.device) * torch.tensor(at)[:, None])
    largest = torch.ones(len(at)) if encoding.shape.head_dim % 2 else closed.amax(-1)
    return torch.stack([largest.double(), closed.amin(-1).double()], -1).expand(encoding.shape.heads, -1, -1)


def _shift_rows(view: LayerView, encoding: ShiftSlope, within: Sequence[int]) -> list[SpectralRow]:
    rate = (encoding.slopes * F.softplus(encoding.strength)).double() * encoding.shape.head_dim**-0.5
    head = int(rate.argmax())
    direction = F.normalize(encoding.u[head // encoding.shape.group, 0].double(), dim=-1)
    p, q = shift_generator(rate[head] * direction)
    rows = []
    for distance in within:
        s = torch.tensor(float(distance), dtype=torch.float64)
        rows.append(_row(distance, head, _singular(Unipotent(p, q, s).as_matrix(), s * rate[head])))
    return rows


def _path_row(view: LayerView, distance: int) -> SpectralRow:
    bias = view.code.bias
    assert isinstance(bias, TileBias)
    w, beta = (bias.key[name][0, 0, -distance:].double() for name in ("w", "beta"))
    w = F.normalize(w, dim=-1)  # made in float32: unit only to 1e-7
    product = torch.eye(w.shape[-1], dtype=torch.float64)
    for direction, strength in zip(w, beta, strict=True):
        product = product @ (torch.eye(w.shape[-1]).double() - strength * torch.outer(direction, direction))
    determinant, lower, upper = path_bounds(beta)
    values = torch.linalg.svdvals(product)
    quantities = [
        Quantity("determinant", float(determinant), float(torch.linalg.det(product))),
        Quantity("smallest σ ≥", float(lower), float(values[-1])),
        Quantity("largest σ ≤", float(upper), float(values[0])),
    ]
    return SpectralRow(distance, 0, quantities, quantities[0].difference)


def singular_values(view: LayerView, at: Sequence[int]) -> tuple[Tensor | None, str]:
    """((H, n, 2) largest and smallest singular value of the action over a distance, how it was found)."""
    encoding, bias = view.encoding, view.bias()
    parts = parts_of(encoding)
    if len(parts) > 1 and any(isinstance(part, (LogN, PaTH, PoPE, ShiftSlope, XPos)) for part in parts):
        return None, "no closed form is known for this composition"
    if isinstance(encoding, LogN):
        return None, LOGN
    if isinstance(encoding, PoPE):
        return None, "no matrix acts on queries and keys (Eq. M18)"
    if isinstance(encoding, XPos):
        return _xpos_singular_values(encoding, at), "of turned and faded planes in GL(D) (Eq. M17)"
    if isinstance(encoding, PaTH):
        return path_singular_values(view, at), "of the product of the factors, measured on the text"
    if isinstance(encoding, ShiftSlope):
        rate = encoding.slopes * F.softplus(encoding.strength) * encoding.shape.head_dim**-0.5
        s = rate.detach().double()[:, None] * torch.tensor(at, dtype=torch.float64)
        return torch.stack(singular_pair(s), -1), "of I + s A with |s A| = rate × distance (Eq. S5)"
    if bias is None:
        ones = torch.ones(encoding.shape.heads, len(at), 2, dtype=torch.float64)
        return ones, "a rotation: every singular value is 1 at every distance (Eq. S2)"
    s = by_distance(bias, at)[..., 0]
    return torch.stack(singular_pair(s), -1), "of I + s E with s = −(mean bias) (Eq. S4)"


def path_singular_values(view: LayerView, at: Sequence[int]) -> Tensor:
    """(H, n, 2) of H_{j+1} … H_t over the last tokens of the text, for PaTH."""
    bias = view.code.bias
    assert isinstance(bias, TileBias)
    w, beta = bias.key["w"][0].double(), bias.key["beta"][0].double()
    product = torch.eye(w.shape[-1], dtype=torch.float64).repeat(w.shape[0], 1, 1)
    found = {0: product}
    for distance in range(1, max(at) + 1):
        last, strength = w[:, -distance], beta[:, -distance, None, None]
        factor = torch.eye(w.shape[-1], dtype=torch.float64) - strength * last[:, :, None] * last[:, None]
        product = factor @ product
        if distance in at:
            found[distance] = product
    values = torch.linalg.svdvals(torch.stack([found[d] for d in at], 1))
    return values[..., [0, -1]].repeat_interleave(view.encoding.shape.group, 0)
