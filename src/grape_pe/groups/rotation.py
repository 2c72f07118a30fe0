"""Commuting rotations in SO(D): in coordinate planes, or in the planes of a learned basis.

Letters: D features, m = D // 2 planes. The layout defines the planes: "half" pairs (x[i], x[i + m]), as Llama in
Hugging Face does; "interleaved" pairs (x[2i], x[2i + 1]). If D is odd, the last coordinate is not rotated.
Equations: docs/math.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..precision import exact_dtype, ignores_autocast, working_dtype

Layout = Literal["half", "interleaved"]
TURN = 2 * math.pi


def reduce_angle(angle: Tensor, dtype: torch.dtype) -> Tensor:
    """Reduce an angle to [-pi, pi] in float64, then round it (Eq. M4).

    At position 2^20 an angle computed in float32 has an error of up to 0.03 rad.

    Args:
        angle: angles of any size, in float64.
        dtype: dtype of the vectors to rotate.

    Returns:
        The angle in [-pi, pi], in float64 for a `dtype` of float64, else in float32.
    """
    working = torch.float64 if dtype == torch.float64 else torch.float32
    return (torch.remainder(angle + math.pi, TURN) - math.pi).to(working)


def split_planes(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The first and the second coordinates of all planes, each (..., m), as views of x."""
    m = x.shape[-1] // 2
    if layout == "half":
        return x[..., :m], x[..., m : 2 * m]
    return x[..., 0 : 2 * m : 2], x[..., 1 : 2 * m : 2]


def join_planes(first: Tensor, second: Tensor, width: int, layout: Layout) -> Tensor:
    """The inverse of `split_planes`; an odd last coordinate is zero."""
    both = (
        torch.cat([first, second], -1) if layout == "half" else torch.stack([first, second], -1).flatten(-2)
    )
    return F.pad(both, (0, width % 2))


class _RotatePlanes(torch.autograd.Function):
    """y = R(angle) x. Saves y instead of x, because dy/dangle = J y (Eq. M5).

    Differentiable any number of times. cos and sin have no gradient: all of it goes to `angle`.
    """

    @staticmethod
    def forward(x: Tensor, angle: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        return _turn(x, cos, sin, layout)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, angle, cos, sin, ctx.layout = inputs
        ctx.save_for_backward(output if ctx.needs_input_grad[1] else None, angle, cos, sin)
        ctx.save_for_forward(output, angle, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        y, angle, cos, sin = ctx.saved_tensors
        grad_x = grad_angle = None
        if ctx.needs_input_grad[0]:
            grad_x = rotate_planes(grad, -angle, cos, -sin, ctx.layout)
        if ctx.needs_input_grad[1]:
            y1, y2 = split_planes(y.to(angle.dtype), ctx.layout)
            g1, g2 = split_planes(grad.to(angle.dtype), ctx.layout)
            grad_angle = torch.addcmul(g2 * y1, g1, y2, value=-1).sum_to_size(angle.shape)
        return grad_x, grad_angle, None, None, None


class _RotatePlanesAnyMode(_RotatePlanes):
    """Adds forward-mode derivatives and vmap, which torch.compile cannot trace in a custom function."""

    @staticmethod
    def jvp(ctx: Any, x: Tensor | None, angle: Tensor | None, *_: None) -> Tensor:  # type: ignore[override]
        y, at, cos, sin = ctx.saved_tensors
        out = torch.zeros_like(y) if x is None else rotate_planes(x, at, cos, sin, ctx.layout)
        if angle is None:
            return out
        y1, y2 = split_planes(y.to(angle.dtype), ctx.layout)
        turned = join_planes(-y2 * angle, y1 * angle, y.shape[-1], ctx.layout)
        return out + turned.to(out.dtype)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        *tensors, layout = inputs
        x, angle, cos, sin = batch_first(dims, *tensors)
        x = x.expand(info.batch_size, *x.shape[1:])
        return rotate_planes(x, angle, cos, sin, layout), 0


def rotate_planes(x: Tensor, angle: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Rotate every plane of x by its angle; cos and sin are those of the angle, without a gradient."""
    function = _RotatePlanes if torch.compiler.is_compiling() else _RotatePlanesAnyMode
    return function.apply(x, angle, cos, sin, layout)


def batch_first(dims: tuple[int | None, ...], *tensors: Tensor) -> list[Tensor]:
    """Move the vmap axis to the front and pad all tensors to one number of axes, so that they still broadcast."""
    moved = [t.unsqueeze(0) if d is None else t.movedim(d, 0) for t, d in zip(tensors, dims, strict=False)]
    most = max(t.dim() for t in moved)
    return [t.reshape(t.shape[0], *(1,) * (most - t.dim()), *t.shape[1:]) for t in moved]


def _turn(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """(x1, x2) -> (x1 cos - x2 sin, x1 sin + x2 cos), without temporary copies of the halves (Eq. M3)."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.shape[-1] % 2:
        out[..., -1] = x[..., -1]
    x1, x2 = split_planes(x, layout)
    y1, y2 = split_planes(out, layout)
    if x.dtype == cos.dtype and not torch.compiler.is_compiling():  # torch.compile rejects a strided out=
        torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-1)
        torch.mul(x1, sin, out=y2).addcmul_(x2, cos)
    else:  # half precision: rotate in float32 and round once
        x1, x2 = x1.to(cos.dtype), x2.to(cos.dtype)
        y1.copy_(torch.addcmul(x1 * cos, x2, sin, value=-1))
        y2.copy_(torch.addcmul(x1 * sin, x2, cos))
    return out


def angle_tables(angle: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin, (..., D), for `turn_halves`: computed in float64 from angles (..., D/2), then rounded."""
    cos, sin = angle.cos(), angle.sin()
    both = torch.cat([cos, cos, -sin, sin], -1).to(dtype)
    cos, sin = both.split(2 * angle.shape[-1], -1)
    return cos, sin


def turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the planes (x[i], x[i + D/2]) in three operations, given `angle_tables`; for inference (Eq. M3)."""
    wide = x.to(cos.dtype)
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


class _Planar:
    """Base class of elements that contain a `PlaneRotation`."""

    def as_matrix(self, width: int) -> Tensor:
        """The matrix, (..., D, D), with D = `width`: the action on each coordinate vector, as columns."""
        element: Any = self
        planes = element
        while not isinstance(planes, PlaneRotation):
            planes = planes.planes
        angle = planes.angle
        eye = torch.eye(width, dtype=angle.dtype, device=angle.device)
        columns = [element.apply(row.expand(*angle.shape[:-1], width)) for row in eye]
        return torch.stack(columns, -1)


@dataclass(frozen=True, eq=False)
class PlaneRotation(_Planar):
    """A rotation of the coordinate planes, each by its own angle (Eq. M2). All of them commute.

    Build it with `from_angle`.

    Args:
        angle: (..., m), in [-pi, pi].
        cos: cosine of the angle, without a gradient.
        sin: sine of the angle, without a gradient.
        layout: which coordinates form a plane, "half" or "interleaved".
    """

    angle: Tensor
    cos: Tensor
    sin: Tensor
    layout: Layout = "half"

    @classmethod
    def from_angle(cls, angle: Tensor, dtype: torch.dtype, layout: Layout = "half") -> PlaneRotation:
        """Build from angles (..., m) of any size in float64; `dtype` is that of the vectors to rotate."""
        angle = reduce_angle(angle, dtype)
        return cls(angle, angle.detach().cos(), angle.detach().sin(), layout)

    def apply(self, x: Tensor) -> Tensor:
        """Rotate x, (..., D)."""
        m = x.shape[-1] // 2
        if self.angle.shape[-1] != m:
            raise ValueError(
                f"vectors of width {x.shape[-1]} need {m} angles, one for each pair of coordinates, "
                f"got {self.angle.shape[-1]}"
            )
        shape = torch.broadcast_shapes(x.shape[:-1], self.angle.shape[:-1])
        if shape != x.shape[:-1]:
            x = x.expand(*shape, x.shape[-1])
        return rotate_planes(x, self.angle, self.cos, self.sin, self.layout)

    def compose(self, other: PlaneRotation) -> PlaneRotation:
        if self.layout != other.layout:
            raise ValueError(
                f"PlaneRotation.compose needs two rotations of the same layout, got {self.layout!r} and "
                f"{other.layout!r}; build both with one layout, or multiply their as_matrix()"
            )
        return PlaneRotation.from_angle(
            self.angle.double() + other.angle.double(), self.angle.dtype, self.layout
        )

    def inverse(self) -> PlaneRotation:
        return PlaneRotation(-self.angle, self.cos, -self.sin, self.layout)


@dataclass(frozen=True, eq=False)
class ScaledRotation(_Planar):
    """A rotation of the coordinate planes times exp(log_scale), for xPos (Eq. M17).

    Keys use the inverse transpose, so the score depends on the difference of the log scales.

    Args:
        planes: the rotation.
        log_scale: (..., m), one for each plane.
    """

    planes: PlaneRotation
    log_scale: Tensor

    def apply(self, x: Tensor) -> Tensor:
        working = working_dtype(x.dtype)
        log_scale = join_planes(self.log_scale, self.log_scale, x.shape[-1], self.planes.layout)
        return (self.planes.apply(x.to(working)) * log_scale.exp().to(working)).to(x.dtype)

    def contragredient(self) -> ScaledRotation:
        """The inverse transpose, for keys."""
        return ScaledRotation(self.planes, -self.log_scale)

    def compose(self, other: ScaledRotation) -> ScaledRotation:
        return ScaledRotation(self.planes.compose(other.planes), self.log_scale + other.log_scale)

    def inverse(self) -> ScaledRotation:
        return ScaledRotation(self.planes.inverse(), -self.log_scale)


@dataclass(frozen=True, eq=False)
class PartialRotation(_Planar):
    """A rotation of the first coordinates; the others do not change (GPT-NeoX, Phi, GLM).

    Args:
        planes: the rotation.
        width: number of coordinates that rotate.
    """

    planes: PlaneRotation
    width: int

    def apply(self, x: Tensor) -> Tensor:
        turned = self.planes.apply(x[..., : self.width])
        rest = x[..., self.width :].expand(*turned.shape[:-1], x.shape[-1] - self.width)
        return torch.cat([turned, rest], -1)

    def compose(self, other: PartialRotation) -> PartialRotation:
        if self.width != other.width:
            raise ValueError(
                f"PartialRotation.compose needs two rotations of equally many coordinates, got {self.width} and "
                f"{other.width}; multiply their as_matrix() instead"
            )
        return PartialRotation(self.planes.compose(other.planes), self.width)

    def inverse(self) -> PartialRotation:
        return PartialRotation(self.planes.inverse(), self.width)


@dataclass(frozen=True, eq=False)
class BasisRotation(_Planar):
    """The rotation B R(angle) B^T in the planes of an orthogonal basis B (Eq. M7).

    Args:
        basis: B, (..., D, D), orthogonal.
        planes: R(angle), a rotation of coordinate planes.
    """

    basis: Tensor
    planes: PlaneRotation | PartialRotation

    @ignores_autocast
    def apply(self, x: Tensor) -> Tensor:
        working = working_dtype(x.dtype)
        turned = self.apply_in_basis(x.to(working))
        return (turned @ self.basis.transpose(-1, -2).to(working)).to(x.dtype)

    @ignores_autocast
    def apply_in_basis(self, x: Tensor) -> Tensor:
        """R B^T x: the rotated vector in the coordinates of the basis.

        The outer B cancels in <q, k>, so the scores are the same with one matrix product less.
        """
        working = working_dtype(x.dtype)
        return self.planes.apply(x.to(working) @ self.basis.to(working)).to(x.dtype)

    def compose(self, other: BasisRotation) -> BasisRotation:
        if self.basis is not other.basis:
            raise ValueError(
                "BasisRotation.compose needs two rotations with the same basis tensor; "
                "for different bases multiply their as_matrix()"
            )
        return BasisRotation(self.basis, self.planes.compose(other.planes))  # type: ignore[arg-type]

    def inverse(self) -> BasisRotation:
        return BasisRotation(self.basis, self.planes.inverse())


def matrix_exp(generator: Tensor) -> Tensor:
    """The matrix exponential, as `torch.linalg.matrix_exp` without two of its bugs.

    For a batch of one matrix torch uses a wrong coefficient (pytorch#196592), with an error of 2e-10 in float64 and
    2e-5 in float32; a batch of two is right. It also fails for some strides.

    Args:
        generator: (..., D, D).

    Returns:
        exp(generator), (..., D, D).
    """
    generator = generator.contiguous()
    if generator.shape[:-2].numel() != 1:
        return torch.linalg.matrix_exp(generator)
    return torch.linalg.matrix_exp(torch.stack([generator, generator]))[0]


def orthogonal_from(weight: Tensor) -> Tensor:
    """The rotation exp(W - W^T) of any square matrix W, computed in float64 (Eq. M8).

    W = 0 gives the identity, so a model starts as plain RoPE.

    Args:
        weight: W, (..., D, D).

    Returns:
        An orthogonal matrix, (..., D, D), in float64.
    """
    exact = weight.to(exact_dtype(weight.device))
    return matrix_exp(exact - exact.transpose(-1, -2))


def cayley_from(weight: Tensor) -> Tensor:
    """The Cayley transform (I - S)(I + S)^-1 of S = W - W^T: orthogonal, without the eigenvalue -1 (Eq. M15)."""
    exact = weight.to(exact_dtype(weight.device))
    skew = exact - exact.transpose(-1, -2)
    eye = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    return torch.linalg.solve(eye + skew, eye - skew)  # the factors commute


def fourier_basis(width: int, layout: Layout, device: torch.device) -> Tensor:
    """The real discrete Fourier basis, (D, D): (cos, sin) planes of modes 1, 2, …, then the unpaired ones (Eq. M16)."""
    n = torch.arange(width, device=device, dtype=exact_dtype(device)).unsqueeze(-1)
    angle = n * torch.arange(1, (width + 1) // 2, device=device, dtype=n.dtype) * (TURN / width)
    planes = join_planes(angle.cos(), angle.sin(), 2 * angle.shape[-1], layout) * math.sqrt(2)
    alone = [torch.ones_like(n), *([1 - 2 * (n % 2)] if width % 2 == 0 else [])]
    return torch.cat([planes, *alone], -1) / math.sqrt(width)


def unitary_from(weight: Tensor, layout: Layout = "half") -> Tensor:
    """A basis of planes (a_i, J a_i): a unitary m x m matrix as a real D x D one (Eq. M9).

    Orthogonal a_i are not enough: each must also be orthogonal to every J a_j, which a unitary matrix ensures.

    Args:
        weight: (..., 2, m, m), any numbers. The skew part of the first matrix and the symmetric part of the second
            are the real and the imaginary part of a skew-Hermitian matrix.
        layout: which coordinates form a plane, "half" or "interleaved".

    Returns:
        An orthogonal matrix, (..., D, D), in float64.
    """
    exact = weight.to(exact_dtype(weight.device))
    real, imag = exact.unbind(-3)
    real = real - real.transpose(-1, -2)
    imag = imag + imag.transpose(-1, -2)
    # X + iY as the real matrix [[X, -Y], [Y, X]]; exp keeps this form.
    algebra = torch.cat([torch.cat([real, -imag], -1), torch.cat([imag, real], -1)], -2)
    basis = matrix_exp(algebra)
    if layout == "half":
        return basis
    m = real.shape[-1]
    order = torch.arange(2 * m, device=weight.device).view(2, m).T.reshape(-1)
    return basis[..., order, :][..., order]


@dataclass(frozen=True, eq=False)
class DenseRotation:
    """A rotation given by its matrix, for LieRE. Slower than the closed forms.

    Args:
        matrix: (..., D, D), orthogonal.
    """

    matrix: Tensor

    @ignores_autocast
    def apply(self, x: Tensor) -> Tensor:
        working = working_dtype(x.dtype)
        return (self.matrix.to(working) @ x.to(working).unsqueeze(-1)).squeeze(-1).to(x.dtype)

    def compose(self, other: DenseRotation) -> DenseRotation:
        return DenseRotation(self.matrix @ other.matrix)

    def inverse(self) -> DenseRotation:
        return DenseRotation(self.matrix.transpose(-1, -2))

    def as_matrix(self, width: int | None = None) -> Tensor:
        return self.matrix
