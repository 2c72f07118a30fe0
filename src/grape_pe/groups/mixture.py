"""Rotations exp(n L) with L = E L_r E^T, where E (D x r) is orthonormal and L_r is any skew r x r matrix.

exp(n L) = I + E (exp(n L_r) - I) E^T costs O(rD) for each token. L_r is decomposed once. The gradient of its
exponential uses divided differences, which stay finite for equal eigenvalues; the derivative of an eigenvector
does not (Eq. N1-N4 of docs/math.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..precision import exact_dtype, ignores_autocast, working_dtype
from .rank2 import rank2_generator, sinc_of_square
from .rotation import batch_first, matrix_exp


def skew_from_pairs(a: Tensor, b: Tensor) -> Tensor:
    """Sum K rank-2 generators, whose planes may overlap (Eq. N1).

    Args:
        a: (..., K, r), the first vector of each pair.
        b: (..., K, r), the second vector of each pair.

    Returns:
        A skew matrix, (..., r, r).
    """
    return rank2_generator(a, b).sum(-3)


def orthonormal_columns(weight: Tensor) -> Tensor:
    """Orthonormalize the columns of W: the Q of W = Q R with a positive diagonal of R, smooth in W of full rank.

    Computed in float64 by Householder QR, so the columns are orthonormal for any condition number of W
    (the Cholesky factor of W^T W would square it).

    Args:
        weight: W, (..., D, r).

    Returns:
        Q, (..., D, r), in float64.
    """
    q, r = torch.linalg.qr(weight.to(exact_dtype(weight.device)))
    return torch.where(r.diagonal(dim1=-2, dim2=-1).unsqueeze(-2) < 0, -q, q)


class _SkewExp(torch.autograd.Function):
    """(y, L_r, n) -> exp(n L_r) y, for y (..., T, r), L_r (..., r, r), n (..., T).

    The first backward pass uses the eigendecomposition. For higher derivatives the backward pass uses a dense
    exponential for each token, because eigenvectors have no derivative at equal eigenvalues.
    """

    @staticmethod
    def forward(y: Tensor, skew: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        mu, basis = torch.linalg.eigh(1j * skew)  # L_r = U diag(-i mu) U^H
        half = torch.exp(-0.5j * n.unsqueeze(-1) * mu.unsqueeze(-2))  # half angles: see backward
        work = torch.complex128 if y.dtype == torch.float64 else torch.complex64
        modes = y.to(work) @ basis.conj().to(work)
        out = ((modes * half.square().to(work)) @ basis.mT.to(work)).real
        return out.to(y.dtype, copy=True), modes, mu, basis, half  # a view would have no forward mode

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs, *output)
        ctx.save_for_forward(*inputs, output[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        y, skew, n, out, modes, mu, basis, half = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable_backward(grad, y, skew, n, out, ctx.needs_input_grad)
        g = grad.to(modes.dtype) @ basis.conj().to(modes.dtype)
        back = g * half.square().to(modes.dtype).conj()
        grad_y = (back @ basis.mT.to(modes.dtype)).real.to(grad.dtype)
        grad_n = grad_skew = None
        if ctx.needs_input_grad[2]:
            rate = (back.conj() * modes * (-1j * mu).to(modes.dtype).unsqueeze(-2)).real.sum(-1)
            grad_n = rate.sum_to_size(n.shape).to(n.dtype)
        if ctx.needs_input_grad[1]:
            grad_skew = _divided_difference_sum(g, modes, mu, half, n, basis, skew.shape)
        return grad_y.sum_to_size(y.shape), grad_skew, grad_n

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        y, skew, n, out = ctx.saved_tensors
        dy, dskew, dn = tangents
        change = torch.zeros_like(out) if dy is None else skew_exp_apply(dy, skew, n)
        if dn is not None:  # d exp(n L) y / dn = L exp(n L) y
            change = change + dn.unsqueeze(-1).to(out.dtype) * (out @ skew.mT.to(out.dtype))
        if dskew is not None:
            turned = _frechet(skew.unsqueeze(-3), dskew.unsqueeze(-3), n[..., None, None]).to(out.dtype)
            change = change + (turned @ y.unsqueeze(-1)).squeeze(-1)
        return change, None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Any, Any]:
        y, skew, n = inputs
        y, skew, n = batch_first(dims, y, skew, n.unsqueeze(-1))  # n has an axis less than the others
        out = _SkewExp.apply(y.expand(info.batch_size, *y.shape[1:]), skew, n.squeeze(-1))
        return out, (0,) * len(out)


def _differentiable_backward(
    grad: Tensor, y: Tensor, skew: Tensor, n: Tensor, out: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of exp(n L) y, in operations that can be differentiated again."""
    grad_y = grad_skew = grad_n = None
    if needs[0]:
        grad_y = skew_exp_apply(grad, skew, -n).sum_to_size(y.shape)
    if needs[1]:
        outer = grad.unsqueeze(-1) * y.unsqueeze(-2)  # d<g, exp(n L) y> = <g y^T, d exp(n L)>
        change = _frechet(skew.mT.unsqueeze(-3), outer.to(skew.dtype), n[..., None, None])
        grad_skew = change.sum(-3).sum_to_size(skew.shape)
    if needs[2]:
        grad_n = (grad * (out @ skew.mT.to(out.dtype))).sum(-1).sum_to_size(n.shape).to(n.dtype)
    return grad_y, grad_skew, grad_n


def _frechet(a: Tensor, direction: Tensor, n: Tensor) -> Tensor:
    """The directional derivative of exp(n A) in A along E = `direction`: a block of exp(n [[A, E], [0, A]])."""
    a, direction = torch.broadcast_tensors(a, direction)
    blocks = torch.cat([torch.cat([a, direction], -1), torch.cat([torch.zeros_like(a), a], -1)], -2)
    size = a.shape[-1]
    return matrix_exp(n * blocks)[..., :size, size:]


def _divided_difference_sum(
    g: Tensor, modes: Tensor, mu: Tensor, half: Tensor, n: Tensor, basis: Tensor, shape: torch.Size
) -> Tensor:
    """d<g, exp(n L) y>/dL summed over tokens (Daleckii-Krein, Eq. N4).

    The divided difference of e^(-i n mu) at (mu_a, mu_b) is n h_a h_b sinc(n (mu_a - mu_b) / 2), with h the
    half-angle phases. It has no division, so mu_a = mu_b is safe.
    """
    gap = n[..., None, None] * (mu.unsqueeze(-1) - mu.unsqueeze(-2)).unsqueeze(-3) / 2
    weight = n[..., None, None] * sinc_of_square(gap.square())
    weight = (weight * half.unsqueeze(-1) * half.unsqueeze(-2)).to(g.dtype)
    total = (_pair_sum(g.conj(), modes, weight.shape) * weight).sum(-3)
    full = basis.conj() @ total.to(basis.dtype) @ basis.mT
    return full.real.sum_to_size(shape)


def _pair_sum(left: Tensor, right: Tensor, shape: torch.Size) -> Tensor:
    """left_a right_b for each token, summed over the leading axes that `shape` (..., T, r, r) shares."""
    lead = "uvwxyz"[: left.dim() - 2]
    sizes = (1,) * (len(lead) + 3 - len(shape)) + tuple(shape[:-3])
    kept = "".join(axis for axis, size in zip(lead, sizes, strict=True) if size != 1)
    total = torch.einsum(f"{lead}ta,{lead}tb->{kept}tab", left, right.expand(left.shape))
    return total.reshape(*shape[:-3], *total.shape[-3:])


def skew_exp_apply(y: Tensor, skew: Tensor, n: Tensor) -> Tensor:
    """exp(n L_r) y without an r x r matrix for each token, with exact gradients for y, L_r and n.

    torch.compile cannot trace the custom function, so compiled code does build these matrices.
    """
    if torch.compiler.is_compiling():
        turn = matrix_exp(n[..., None, None] * skew.unsqueeze(-3)).to(y.dtype)
        return (turn @ y.unsqueeze(-1)).squeeze(-1)
    return _SkewExp.apply(y, skew, n)[0]  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class MixtureRotation:
    """A rotation exp(n E L_r E^T) inside the subspace spanned by the columns of E (Eq. N2).

    Args:
        frame: E, (..., D, r), with orthonormal columns.
        skew: L_r, (..., r, r), skew-symmetric, in float64.
        n: (..., T), the positions.
    """

    frame: Tensor
    skew: Tensor
    n: Tensor

    @ignores_autocast
    def apply(self, x: Tensor) -> Tensor:
        working = working_dtype(x.dtype)
        frame = self.frame.to(working)
        inside = x.to(working) @ frame
        change = skew_exp_apply(inside, self.skew, self.n) - inside
        return (x.to(working) + change @ frame.transpose(-1, -2)).to(x.dtype)

    def compose(self, other: MixtureRotation) -> MixtureRotation:
        if self.frame is not other.frame or self.skew is not other.skew:
            raise ValueError(
                "MixtureRotation.compose needs two elements with the same frame and skew tensors; "
                "multiply their as_matrix() instead"
            )
        return MixtureRotation(self.frame, self.skew, self.n + other.n)

    def inverse(self) -> MixtureRotation:
        return MixtureRotation(self.frame, self.skew, -self.n)

    def as_matrix(self, width: int | None = None) -> Tensor:
        small = matrix_exp(self.n[..., None, None] * self.skew.unsqueeze(-3))
        return _thin_matrix(self.frame, small)


@dataclass(frozen=True, eq=False)
class JointMixtureRotation:
    """A rotation exp(E (sum over axes of n_a L_a) E^T) for n-dimensional positions.

    Computes one r x r exponential for each token. If the generators L_a do not commute, the relative law does
    not hold, and there is no `compose` (Eq. N5).

    Args:
        frame: E, (..., D, r), with orthonormal columns.
        skew: L_a, (..., axes, r, r), skew-symmetric, in float64.
        n: (..., T, axes), the positions.
    """

    frame: Tensor
    skew: Tensor
    n: Tensor

    def _small(self) -> Tensor:
        generators = (self.n[..., None, None] * self.skew.unsqueeze(-4)).sum(-3)
        return matrix_exp(generators)

    @ignores_autocast
    def apply(self, x: Tensor) -> Tensor:
        working = working_dtype(x.dtype)
        frame = self.frame.to(working)
        inside = x.to(working) @ frame
        turned = (self._small().to(working) @ inside.unsqueeze(-1)).squeeze(-1)
        return (x.to(working) + (turned - inside) @ frame.transpose(-1, -2)).to(x.dtype)

    def inverse(self) -> JointMixtureRotation:
        return JointMixtureRotation(self.frame, self.skew, -self.n)

    def as_matrix(self, width: int | None = None) -> Tensor:
        return _thin_matrix(self.frame, self._small())


def _thin_matrix(frame: Tensor, small: Tensor) -> Tensor:
    """I + E (small - I) E^T."""
    frame = frame.to(small.dtype).unsqueeze(-3)
    eye_r = torch.eye(small.shape[-1], dtype=small.dtype, device=small.device)
    eye = torch.eye(frame.shape[-2], dtype=small.dtype, device=small.device)
    return eye + frame @ (small - eye_r) @ frame.transpose(-1, -2)
