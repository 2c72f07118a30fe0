"""Checks of the laws of encodings, for tests.

    from grape_pe import testing

    testing.assert_relative_law(enc)        # scores do not change when all positions shift
    testing.assert_streaming(enc)           # any split of the sequence gives the same scores

Each raises an AssertionError with the largest deviation, or `LawDoesNotHold` if the encoding declares that the law does
not hold. `relative_law_error`, `composition_error`, `path_composition_error`, `linearity_error` and `streaming_error`
return the deviation as a number, for any encoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..bias import SlopeBias
from ..encodings.base import Encoding, Tokens, check_positions
from ..encodings.rotary import RotationEncoding
from ..groups import Unipotent, lift_key, lift_query, matrix_exp, score, slope_generator

#: allowed deviation of two computations of the same value, relative to max(1, |value|)
TOL = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}


class LawDoesNotHold(Exception):
    """The encoding declares that this law does not hold (`Encoding.breaks_relative_law`); the message says why."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Random inputs of an encoding.

    Args:
        q: queries, (B, H, T, D).
        k: keys, (B, Hkv, T, D).
        v: values, (B, Hkv, T, D).
        x: the attention block's input, (B, T, C); None if the encoding has no width.
        positions: (T,), or (T, n) for n coordinates.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor | None
    positions: Tensor

    def cut(self, part: slice) -> Sample:
        """Select tokens."""
        x = None if self.x is None else self.x[:, part]
        q, k, v = (t[:, :, part] for t in (self.q, self.k, self.v))
        return Sample(q, k, v, x, self.positions[part])

    def at(self, positions: Tensor) -> Sample:
        """Return the same tokens at other positions."""
        return Sample(self.q, self.k, self.v, self.x, positions)


def sample(
    enc: Encoding, *, batch: int = 2, tokens: int = 12, dtype: torch.dtype | None = None, seed: int = 0
) -> Sample:
    """Draw inputs from a standard normal distribution, at positions 0 … tokens-1 (random ones in 2D and 3D).

    Args:
        enc: the encoding.
        batch: B.
        tokens: T.
        dtype: dtype of the tensors; by default float64 if the encoding is in float64, else float32.
        seed: seed of the random numbers.

    Returns:
        The inputs.
    """
    dtype = dtype or parameter_dtype(enc)
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    shape = enc.shape
    x = draw(batch, tokens, shape.width) if shape.width is not None else None
    q = draw(batch, shape.heads, tokens, shape.head_dim)
    k, v = (draw(batch, shape.kv_heads, tokens, shape.head_dim) for _ in range(2))
    positions = torch.arange(tokens)
    if enc.coords > 1:
        positions = torch.randint(0, 32, (tokens, enc.coords), generator=generator)
    return Sample(q, k, v, x, positions)


def parameter_dtype(enc: Encoding) -> torch.dtype:
    """float64 if all parameters and buffers are in float64, else float32."""
    dtypes = {t.dtype for t in (*enc.parameters(), *enc.buffers()) if t.is_floating_point()}
    return torch.float64 if dtypes == {torch.float64} else torch.float32


def scores(enc: Encoding, data: Sample) -> Tensor:
    """Compute all logits, scale <q, k> + b, in float64 from the encoded q and k.

    Args:
        enc: the encoding.
        data: the inputs.

    Returns:
        The logits, (B, H, T, T).
    """
    code = enc(data.q, data.k, x=data.x, v=data.v, positions=data.positions)
    return _logits(code.q, code.k, code.bias.dense(), enc.shape.group)


def _logits(q: Tensor, k: Tensor, bias: Tensor | None, group: int) -> Tensor:
    keys = k.double().repeat_interleave(group, 1)
    product = q.double() @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
    return product if bias is None else product + bias.double()


def deviation(got: Tensor, want: Tensor) -> float:
    """The largest |got - want| relative to max(1, |want|); infinite if only one of them is finite."""
    got, want = got.double(), want.double()
    off = ((got - want).abs() / want.abs().clamp_min(1.0)).nan_to_num(nan=math.inf, posinf=math.inf)
    off = off.masked_fill(got == want, 0.0)
    return off.max().item() if off.numel() else 0.0


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, what: str, slack: float = 1.0) -> None:
    """Check that |got - want| <= slack * TOL[dtype] * max(1, |want|) for all elements.

    Args:
        got: the result.
        want: the expected result.
        dtype: dtype of the computation, which selects the tolerance.
        what: name of the result in the error message.
        slack: factor of the tolerance.
    """
    _allow(deviation(got, want), dtype, what, slack)


def _allow(worst: float, dtype: torch.dtype, what: str, slack: float = 1.0) -> None:
    limit = slack * TOL[dtype]
    assert worst <= limit, f"{what}: off by {worst:.3g}, allowed {limit:.3g} ({dtype})"


def relative_law_error(
    enc: Encoding, data: Sample | None = None, *, shift: float | Sequence[float] = 1000
) -> float:
    """The largest change of causal scores when all positions are shifted by the same amount.

    Args:
        enc: the encoding.
        data: the inputs; random ones by default.
        shift: number to add to all positions, or one number for each coordinate.
    """
    data = data or sample(enc)
    moved = data.positions + torch.as_tensor(shift)
    return deviation(scores(enc, data.at(moved)).tril(), scores(enc, data).tril())


def assert_relative_law(
    enc: Encoding, data: Sample | None = None, *, shift: float | Sequence[float] = 1000
) -> None:
    """Check that scores do not change when all positions are shifted by the same amount (Eq. M2).

    Args:
        enc: the encoding.
        data: the inputs; random ones by default.
        shift: number to add to all positions, or one number for each coordinate.
    """
    if enc.breaks_relative_law:
        raise LawDoesNotHold(enc.breaks_relative_law)
    data = data or sample(enc)
    _allow(relative_law_error(enc, data, shift=shift), data.q.dtype, f"shift by {shift}")


def assert_norm(enc: Encoding, data: Sample | None = None) -> None:
    """Check that the encoding does not change the lengths of q and k.

    Args:
        enc: the encoding.
        data: the tokens to test on; random ones by default.
    """
    data = data or sample(enc)
    code = enc(data.q, data.k, x=data.x, v=data.v, positions=data.positions)
    for before, after in ((data.q, code.q), (data.k, code.k)):
        assert_close(after.double().norm(dim=-1), before.double().norm(dim=-1), data.q.dtype, "norm")


def assert_composition(enc: RotationEncoding, data: Sample | None = None) -> None:
    """Check that G(n) G(m) = G(n + m) and G(-n) G(n) = I, applied to vectors (Eq. M2).

    Args:
        enc: an encoding that rotates.
        data: the tokens to test on; random ones by default.
    """
    if enc.breaks_relative_law:
        raise LawDoesNotHold(enc.breaks_relative_law)
    data = data or sample(enc)
    _allow(composition_error(enc, data), data.q.dtype, "G(n) G(m) = G(n + m), or the inverse", 2)


def composition_error(enc: RotationEncoding, data: Sample | None = None) -> float:
    """The largest deviation of G(n) G(m) from G(n + m), and of G(-n) G(n) from I, applied to vectors.

    Args:
        enc: an encoding that rotates.
        data: the tokens to test on; random ones by default.
    """
    data = data or sample(enc)
    k = data.k.unsqueeze(2)
    if enc.contextual:  # a phase of earlier tokens acts like a position
        g_n, g_m, g_sum, g_0 = (_element(enc, data, phase) for phase in (3.0, 5.5, 8.5, None))
        together = g_sum.apply(g_0.apply(k))
    else:
        n = data.positions.double()
        m = torch.rand(n.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 50
        g_n, g_m, g_sum = (_element(enc, data.at(p)) for p in (n, m, n + m))
        together = g_sum.apply(k)
    inverse = deviation(g_n.inverse().apply(g_n.apply(k)), k)
    return max(deviation(g_n.apply(g_m.apply(k)), together), inverse)


def _element(enc: RotationEncoding, data: Sample, phase: float | None = None):  # type: ignore[no-untyped-def]
    tokens = Tokens(data.q, data.k, check_positions(data.positions, data.q, enc.coords), data.x, data.v)
    _, carried = enc.element(tokens, None)
    state = None if phase is None else torch.full_like(carried[..., :1], phase)
    return enc.element(tokens, state)[0]


def assert_path_composition(enc: Encoding, data: Sample | None = None) -> None:
    """Check that b(t, j) = b(t, s) + b(s, j), as for a sum over tokens in between that does not depend on the query.

    Args:
        enc: the encoding.
        data: the tokens to test on; random ones by default.
    """
    data = data or sample(enc)
    _allow(path_composition_error(enc, data), data.q.dtype, "b(t,j) = b(t,s) + b(s,j)")


def path_composition_error(enc: Encoding, data: Sample | None = None) -> float:
    """The largest deviation of b(t, s) + b(s, j) from b(t, j).

    Args:
        enc: the encoding.
        data: the tokens to test on; random ones by default.
    """
    data = data or sample(enc)
    bias = _dense_bias(enc, data)
    whole = bias.unsqueeze(-2)  # t, 1, j
    through = bias.unsqueeze(-1) + bias.unsqueeze(-3)  # b(t, s) + b(s, j)
    return deviation(through, whole.expand_as(through))


def assert_linear_in_offset(enc: Encoding, data: Sample | None = None) -> None:
    """Check that the bias doubles when all positions double, as in a one-parameter group (Eq. A1).

    Args:
        enc: the encoding.
        data: the tokens to test on; random ones by default.
    """
    data = data or sample(enc)
    _allow(linearity_error(enc, data), data.q.dtype, "b(2 m) = 2 b(m)")


def linearity_error(enc: Encoding, data: Sample | None = None) -> float:
    """The largest deviation of the bias at doubled positions from twice the bias.

    Args:
        enc: the encoding.
        data: the tokens to test on; random ones by default.
    """
    data = data or sample(enc)
    return deviation(_dense_bias(enc, data.at(2 * data.positions)), 2 * _dense_bias(enc, data))


def _dense_bias(enc: Encoding, data: Sample) -> Tensor:
    bias = enc(data.q, data.k, x=data.x, v=data.v, positions=data.positions).bias.dense()
    assert bias is not None, f"{enc!r} adds no bias"
    return bias


def assert_unipotent(enc: Encoding, data: Sample | None = None) -> None:
    """Check a `SlopeBias` against the explicit unipotent matrices in GL(D + 2R) (Eq. A1, A2, A4).

    For some pairs of tokens: A = sum_r -rate_r e e^T has A^2 = 0, and <G(t) q, G(j)^-T k> with its exponential is
    <q, k> plus the bias.

    Args:
        enc: the encoding.
        data: the tokens to test on; random ones by default.
    """
    data = data or sample(enc)
    bias = enc(data.q, data.k, x=data.x, v=data.v, positions=data.positions).bias
    assert isinstance(bias, SlopeBias), f"expected a SlopeBias, got {type(bias).__name__}"
    d, atoms = data.q.shape[-1], len(bias.terms)
    tile = bias.tile(slice(0, data.q.shape[2]), slice(0, data.q.shape[2]))
    for t, j in ((-1, 0), (-1, -1), (data.q.shape[2] // 2, 0)):
        q, k = (tensor[0, 0, i].double() for tensor, i in ((data.q, t), (data.k, j)))
        rate = torch.stack([_rate(term, t, j) for term in bias.terms])
        step = torch.stack([(term.c_k[0, 0, j] - term.c_q[0, 0, t]).double() for term in bias.terms])
        p, other = slope_generator(d, rate.abs(), atoms)
        p = p * (rate.sign() * step).unsqueeze(-1)
        move, still = (Unipotent(p, other, s) for s in torch.tensor([1.0, 0.0], dtype=torch.float64))
        generator = move.generator()
        assert (generator @ generator).abs().max() == 0, "the generator is not nilpotent"
        lifted = lift_query(q, atoms), lift_key(k, atoms)
        explicit = lifted[0] @ torch.linalg.inv(matrix_exp(generator)).T @ lifted[1]
        want = q @ k + tile[0, 0, t, j].double()
        assert_close(explicit, want, data.q.dtype, "explicit matrices")
        assert_close(score(still, lifted[0], move, lifted[1]), want, data.q.dtype, "contragredient score")


def _rate(term, t: int, j: int) -> Tensor:  # type: ignore[no-untyped-def]
    rate = torch.zeros((), dtype=torch.float64)
    if term.rate_q is not None:
        rate = rate + term.rate_q[0, 0, t if term.rate_q.shape[2] > 1 else 0].double()
    if term.rate_k is not None:
        rate = rate + term.rate_k[0, 0, j].double()
    return rate.detach()


def assert_nonpositive(enc: Encoding, data: Sample | None = None) -> None:
    """Check that b(t, j) <= 0 for j <= t.

    Args:
        enc: the encoding.
        data: the tokens to test on; random ones by default.
    """
    data = data or sample(enc)
    bias = enc(data.q, data.k, x=data.x, v=data.v, positions=data.positions).bias.dense()
    if bias is not None:
        worst = bias.tril().max().item()
        assert worst <= 0, f"a causal bias of {worst:.3g} is positive"


def assert_streaming(enc: Encoding, data: Sample | None = None, cuts: Sequence[int] = (1, 4, 5)) -> None:
    """Check that encoding a sequence in pieces, with the state passed on, gives the same scores as encoding it at once.

    Args:
        enc: the encoding.
        data: the tokens to test on; random ones by default.
        cuts: the tokens at which the sequence is cut.
    """
    data = data or sample(enc)
    _allow(streaming_error(enc, data, cuts), data.q.dtype, f"tokens fed in pieces, cut at {list(cuts)}")


def streaming_error(enc: Encoding, data: Sample | None = None, cuts: Sequence[int] = (1, 4, 5)) -> float:
    """The largest deviation of the scores of a sequence encoded in pieces from those of the sequence encoded at once.

    Args:
        enc: the encoding.
        data: the tokens to test on; random ones by default.
        cuts: the tokens at which the sequence is cut.
    """
    data = data or sample(enc)
    length = data.q.shape[2]
    edges = [0, *sorted({c for c in cuts if 0 < c < length}), length]
    whole = scores(enc, data)
    worst, state, keys, past = 0.0, None, None, None
    for start, stop in pairwise(edges):
        piece = data.cut(slice(start, stop))
        code = enc(piece.q, piece.k, x=piece.x, v=piece.v, positions=piece.positions, state=state)
        state = code.state
        keys = code.k if keys is None else torch.cat([keys, code.k], 2)
        past = code.bias if past is None else past.extend(code.bias)
        tile = past.tile(slice(0, stop - start), slice(0, stop))
        got = _logits(code.q, keys, tile, enc.shape.group)
        seen = torch.arange(stop) <= torch.arange(start, stop).unsqueeze(-1)
        worst = max(worst, deviation(got[..., seen], whole[:, :, start:stop, :stop][..., seen]))
    return worst
