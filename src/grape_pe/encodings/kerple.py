"""KERPLE (Chi et al., 2022): a learned logarithm or power of the distance (Eq. D3, D4)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bias.distance import Profile
from ..checks import check_choice
from .base import HeadShape, Tokens, own_parameter
from .distance import ProfileEncoding, over
from .facts import Facts
from .gated_cumsum import softplus_inverse

KERPLE = "Chi et al., 2022, KERPLE, arXiv:2205.09921"


def _log(distance: Tensor, numbers: Tensor) -> Tensor:
    """-r1 log(1 + r2 |d|)."""
    r1, r2 = (over(x, distance) for x in numbers.unbind(-1))
    return -r1 * torch.log1p(r2 * distance.abs().to(numbers.dtype))


def _power(distance: Tensor, numbers: Tensor) -> Tensor:
    """-r1 |d|^r2; at distance 0 a constant 0, because the derivative of 0^r2 is not finite."""
    r1, r2 = (over(x, distance) for x in numbers.unbind(-1))
    size = distance.abs().to(numbers.dtype)
    return -r1 * torch.where(size > 0, size.clamp(min=1) ** r2, 0.0)


class Kerple(ProfileEncoding):
    """KERPLE: the bias -r1 log(1 + r2 |t - j|) or -r1 |t - j|^r2, with r1 and r2 learned for each head.

    With "log", r1 is initialized in [0.05, 2] and r2 in [0.05, 1]. With "power", r1 is initialized in [0.05, 1] and
    r2, which stays between 0 and 2, in [0.5, 1.5].

    Args:
        shape: heads, key heads, features of a head, and width.
        kernel: "log" or "power".
    """

    facts = (
        Facts(
            name="kerple-log",
            about="subtracts a learned logarithm of the distance",
            formula="b(t, j) = −r_{1h} log(1 + r_{2h} |t − j|)",
            group="none: log(1 + m) does not add up over offsets; scores keep the relative law",
            source=KERPLE,
            learned="r_1, r_2",
        ),
        Facts(
            name="kerple-power",
            about="subtracts a learned power of the distance",
            formula="b(t, j) = −r_{1h} |t − j|^{r_{2h}}, 0 < r_{2h} < 2",
            group="none, unless r_2 = 1, which is ALiBi: a power does not add up over offsets",
            source=KERPLE,
            recovers="ALiBi (r_2 = 1)",
            learned="r_1, r_2",
        ),
    )

    def __init__(self, shape: HeadShape, *, kernel: Literal["log", "power"] = "log") -> None:
        super().__init__(shape)
        check_choice("kernel", kernel, ("log", "power"))
        self.kernel = kernel
        self.r1, self.r2 = own_parameter(shape.heads), own_parameter(shape.heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        low, one, two = (softplus_inverse(x) for x in (0.05, 1.0, 2.0))
        nn.init.uniform_(self.r1, low, two if self.kernel == "log" else one)
        nn.init.uniform_(self.r2, *((low, one) if self.kernel == "log" else (-1.1, 1.1)))

    def numbers(self, tokens: Tokens) -> Tensor:
        r1, r2 = F.softplus(self.r1.to(tokens.working)), self.r2.to(tokens.working)
        return torch.stack([r1, F.softplus(r2) if self.kernel == "log" else 2 * r2.sigmoid()], -1).unsqueeze(
            1
        )

    def profile(self) -> Profile:
        return _log if self.kernel == "log" else _power
