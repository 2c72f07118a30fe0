"""A slope bias as extra coordinates of q and k, on torch's own attention; NoBias is the case of none.

rate_t (c_j - c_t) is the inner product of (rate_t, -rate_t c_t) with (c_j, 1). Formed like that it loses
every digit at long range. So rates, coordinates and constants are written in digits, each a multiple of a
unit so chosen that products of equal weight, of all terms, are multiples of one number and add up without
any rounding in the accumulator. Digits of the most weight stand *first*: what cancels cancels before
anything small is added, and only the last digits round.

The coordinates are formed in float64 and carry no gradient: a rate's gradient would come out of the lift
as a difference of large sums (docs/attention.md), so `blockwise` is the one that trains them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..bias import Bias, NoBias, SlopeBias, SlopeTerm
from .masks import Masks
from .one_key import attend_one_key
from .pruning import Prune
from .rows import attend_formed_rows, form_rows
from .surroundings import decided, readable

#: digits of a number, and their bits: a product of two leaves two bits of the accumulator (24 in float32)
#: to sums. In half precision the first digit of a product takes two coordinates.
DIGITS = {torch.float64: (2, 25), torch.float32: (3, 11), torch.bfloat16: (4, 7), torch.float16: (3, 10)}
#: torch multiplies blocks of this many queries; a block of one alone would be summed in another order
ROWS = 32
#: of rates times coordinates in float16: its digits end 31 bits below, and there its own spacing begins
LARGEST = 2.0**20

Pair = tuple[Tensor, Tensor]  # a coordinate of the side that owns the rate, and of the other side


def why_not_lifted(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks) -> str | None:
    if not isinstance(bias, (NoBias, SlopeBias)):
        return f"a {type(bias).__name__} has no finite lift into extra coordinates"
    if not masks.plain:
        return "torch's attention takes window, documents and padding only as a dense T x T mask"
    if masks.causal and masks.shift and masks.query_length > 1:
        return (
            "torch's causal attention aligns the first query with the first key, not the last with the last"
        )
    if isinstance(bias, SlopeBias) and not masks.causal and masks.query_length != 1:
        return "ahead of a query the bias grows, and q.k, added to it by the lift, rounds at its size"
    if q.dtype not in DIGITS:
        return f"no splitting is known for {q.dtype}"
    if torch.is_grad_enabled() and isinstance(bias, SlopeBias) and _learns(bias):
        return "gradients of rates and coordinates lose digits in the lift"
    if isinstance(bias, SlopeBias) and q.dtype == torch.float16 and q.shape[2] > 1 and _too_large(bias):
        return f"a bias beyond {LARGEST:.0f} is more than the digits of float16 can hold"
    return None


def _learns(bias: SlopeBias) -> bool:
    each = (x for term in bias.terms for x in (term.c_q, term.c_k, term.rate_q, term.rate_k))
    return any(x is not None and x.requires_grad for x in each)


def _too_large(bias: SlopeBias) -> bool:
    """Whether float16 would lose it, or overflow. A look at the data, where there are data to look at."""
    if not readable(bias.terms[0].c_k):
        return False
    with torch.no_grad():
        return bool((_size(_all_products(bias, 1.0, torch.float16)) > LARGEST).any())


def attend_lifted(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float, prune: Prune = "auto"
) -> Tensor:
    width = v.shape[-1]
    if q.numel() == 0 or k.shape[2] == 0 or width == 0:
        return v.new_zeros(*q.shape[:3], width) + sum(x[..., :0].sum() for x in (q, k, v))
    if k.shape[2] == 1:
        return attend_one_key(q, k, v, bias, masks, scale)
    if isinstance(bias, SlopeBias) and q.shape[2] == 1:
        return _attend_one_query(q, k, v, bias, masks, scale)
    return _attend_many(q, k, v, bias, masks, scale)


def _attend_one_query(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float) -> Tensor:
    """The bias of one query is no larger than a key's worth, and exact as it stands."""
    with torch.no_grad():
        row, _ = form_rows(q, k, bias, masks)
    assert row is not None
    return attend_formed_rows(q, k, v, row, scale)


def _attend_many(q: Tensor, k: Tensor, v: Tensor, bias: Bias, masks: Masks, scale: float) -> Tensor:
    width = v.shape[-1]
    q, scale = _with_positive_scale(q, scale)
    if isinstance(bias, SlopeBias):
        if q.dtype in (torch.float32, torch.float64):  # a scale inside the product would round the digits
            q, scale = q * scale, 1.0
        q, k, v = _lift(q, k, v, bias, scale)
        q, k, v = _whole_blocks(q, k, v, masks.causal)
    size = max(q.shape[-1], v.shape[-1])  # the flash kernels want q, k and v of one width
    q, k, v = (x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in (q, k, v))
    causal, shared = decided(masks.causal and masks.query_length > 1), decided(q.shape[1] != k.shape[1])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=shared)
    return out[:, :, : masks.query_length, :width]


def _with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same logits: torch's causal kernel scales -inf too, and any other scale makes a NaN of it."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0.0, 1.0)


def _whole_blocks(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Queries padded to whole blocks; in causal attention keys too, all of them in everyone's future."""
    missing = (0, 0, 0, -q.shape[2] % ROWS)
    if missing[-1] == 0:
        return q, k, v
    return F.pad(q, missing), F.pad(k, missing) if causal else k, F.pad(v, missing) if causal else v


def _lift(q: Tensor, k: Tensor, v: Tensor, bias: SlopeBias, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        products = _all_products(bias, scale, q.dtype)
        unit = _unit(products, q.dtype)
        levels = range(DIGITS[q.dtype][0])
        pairs = [pair for level in levels for product in products for pair in product.level(level, unit)]
        extra_q, extra_k = (_stack([pair[side] for pair in pairs], q.dtype) for side in (0, 1))
    if extra_k.shape[1] != 1:  # a coordinate for each query head: key heads can no longer be shared
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    extra_q = extra_q.expand(*q.shape[:3], -1)
    extra_k = extra_k.expand(*k.shape[:3], -1)
    return torch.cat([extra_q, q], -1), torch.cat([extra_k, k], -1), v


def _stack(coordinates: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*coordinates), -1).to(dtype)


def _all_products(bias: SlopeBias, scale: float, dtype: torch.dtype) -> list[_Product]:
    return [product for term in bias.terms for product in _products(term, scale, dtype)]


def _products(term: SlopeTerm, scale: float, dtype: torch.dtype) -> list[_Product]:
    """The term as products owned by the query and by the key; attention scales them, so c is divided.

    A softmax does not feel a shift of its row: where the query owns the rate, c is taken from its own key,
    whose bias becomes zero. So q.k is added to something small at the keys that matter.
    """
    middle = 0.5 * (term.c_k.double().amin(-1, True) + term.c_k.double().amax(-1, True))
    c_q, c_k = ((c.double() - middle) / scale for c in (term.c_q, term.c_k))
    products = []
    if term.rate_q is not None:
        products.append(_Product(term.rate_q.double(), c_k, c_k, dtype, swap=False))
    if term.rate_k is not None:  # rate_k (c_k - c_q) = -rate_k (c_q - c_k), owned by the key
        products.append(_Product(-term.rate_k.double(), c_k, c_q, dtype, swap=True))
    return products


class _Product:
    """rate * (c_other - c_own) as pairs of coordinates (of q, of k); rate and c_own on the same side."""

    def __init__(self, rate: Tensor, own: Tensor, other: Tensor, dtype: torch.dtype, swap: bool) -> None:
        reach, steepness = torch.maximum(_power(own), _power(other)), _power(rate)
        balance = share = torch.ones_like(reach)
        if dtype == torch.float16:  # ends at 65504: both factors of a product are made about equally large
            balance, share = _root(reach / steepness), _root(reach * steepness)
        self.rate, self.own, self.other = rate * balance, own / balance, other / balance
        self.share, self.one, self.swap = share, share.expand_as(other * share), swap
        self.count, self.bits = DIGITS[dtype]
        self.short = dtype in (torch.bfloat16, torch.float16)

    def size(self) -> Tensor:
        """A power of two above |rate * c|, by batch and head."""
        return _power(self.rate) * torch.maximum(_power(self.own), _power(self.other))

    def level(self, level: int, unit: Tensor) -> list[Pair]:
        """All products of digits with this much weight, and that digit of the constant -rate * c_own."""
        rate_unit = _power(self.rate) * 2.0**-self.bits
        rates, others = self._digits(self.rate, rate_unit), self._digits(self.other, unit / rate_unit)
        pairs = [(rates[a], others[level - a]) for a in range(level + 1)]
        if level == self.count - 1 and level > 1 and not self.short:  # what is lighter still, all at once
            pairs[0], pairs[-1] = (rates[0] + rates[1], others[-1]), (rates[-1], others[0] + others[1])
        constant = self._digits(-self.rate * self.own, unit)[level]
        constants = [constant]
        if self.short and level == 0:  # twice as long as a digit: two coordinates
            top = _round(constant, unit * 2.0**self.bits)
            constants = [top, constant - top]
        pairs += [(x / self.share, self.one) for x in constants]
        return [(other, own) for own, other in pairs] if self.swap else pairs

    def _digits(self, x: Tensor, unit: Tensor) -> list[Tensor]:
        digits = []
        for _ in range(self.count - 1):
            digits.append(_round(x, unit))
            x, unit = x - digits[-1], unit * 2.0**-self.bits
        return [*digits, x]


def _size(products: list[_Product]) -> Tensor:
    """A power of two above their sum, by batch and head."""
    sizes = torch.broadcast_tensors(*(product.size() for product in products))
    return torch.stack(sizes).amax(0) * 2.0 ** (len(products) - 1).bit_length()


def _unit(products: list[_Product], dtype: torch.dtype) -> Tensor:
    """What all products of first digits are multiples of, by batch and head."""
    return _size(products) * 2.0 ** (-2 * DIGITS[dtype][1])


def _power(x: Tensor) -> Tensor:
    """The power of two at or above max |x| over tokens."""
    return torch.exp2(x.abs().amax(-1, True).clamp(min=2.0**-60).log2().ceil())


def _root(x: Tensor) -> Tensor:
    """A power of two near the root of x."""
    return torch.exp2((0.5 * x.log2()).round())


def _round(x: Tensor, unit: Tensor) -> Tensor:
    return torch.round(x / unit) * unit
