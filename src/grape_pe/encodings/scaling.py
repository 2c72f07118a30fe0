"""Scaling rules for RoPE's frequencies, for longer contexts: the static rules of transformers' `rope_parameters`.

    grape.build("rope", heads=8, head_dim=64, scaling={"type": "yarn", "factor": 4.0, "original_context": 2048})

Each rule is a function of the frequency, so it also applies to learned frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checks import check_choice, check_positive


@dataclass(frozen=True)
class Scaling:
    """Position interpolation, type "linear": divides every frequency by `factor`."""

    kind: ClassVar[str] = "linear"

    factor: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            optional = field.default is None
            if field.type != "bool" and not (optional and value is None):
                check_positive(f'{field.name} of scaling type "{self.kind}"', value)
        if self.factor < 1:
            raise ValueError(
                f"scaling factor must be at least 1, got {self.factor}; 4.0 means 4 times the context"
            )

    @property
    def attention(self) -> float:
        """The factor of queries, and of keys."""
        return 1.0

    def __call__(self, theta: Tensor, base: float) -> Tensor:
        """Rescale frequencies theta, (..., planes), whose initial values are base^(-i/planes)."""
        return theta / self.factor

    def rope_parameters(self, base: float, planes: int) -> dict[str, Any]:
        """`rope_parameters` of a transformers configuration with the same frequencies."""
        return {"rope_type": self.kind, "rope_theta": base, "factor": self.factor}


@dataclass(frozen=True)
class NTKAware(Scaling):
    """Type "ntk": a larger base, which divides the lowest frequency by `factor` and does not change the highest."""

    kind: ClassVar[str] = "ntk"

    def __call__(self, theta: Tensor, base: float) -> Tensor:
        planes = theta.shape[-1]
        power = math.log(self.factor) / math.log(base) * planes / max(planes - 1, 1)
        return theta ** (1 + power)

    def rope_parameters(self, base: float, planes: int) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": base * self.factor ** (planes / max(planes - 1, 1))}


@dataclass(frozen=True)
class YaRN(Scaling):
    """Type "yarn": divides low frequencies by `factor`, does not change high ones, with a ramp over planes between.

    The ramp runs over planes with `beta_slow` to `beta_fast` turns in `original_context`. `truncate` rounds its
    ends to whole planes. `attention_factor` is 1 + 0.1 log(factor) by default.
    """

    kind: ClassVar[str] = "yarn"

    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def attention(self) -> float:
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor

    def __call__(self, theta: Tensor, base: float) -> Tensor:
        planes = theta.shape[-1]
        low, high = (self._plane(turns, planes, base) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * planes - 1)
        index = theta.log() * (-planes / math.log(base))
        whole = index.round()
        near = (
            index - whole
        ).abs() < 1e-4  # theta is base^(-i/planes) up to rounding to float32: use i exactly
        index = index + torch.where(near, whole - index, 0.0).detach()
        ramp = ((index - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        return theta / self.factor * ramp + theta * (1 - ramp)

    def _plane(self, turns: float, planes: int, base: float) -> float:
        """The (real) index of the plane that makes this number of turns in the original context."""
        return planes * math.log(self.original_context / (turns * 2 * math.pi)) / math.log(base)

    def rope_parameters(self, base: float, planes: int) -> dict[str, Any]:
        return {
            **super().rope_parameters(base, planes),
            "original_max_position_embeddings": self.original_context,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "attention_factor": self.attention,
            "truncate": self.truncate,
        }


@dataclass(frozen=True)
class Llama3(Scaling):
    """Type "llama3": divides low frequencies by `factor`, does not change high ones, with a ramp between."""

    kind: ClassVar[str] = "llama3"

    original_context: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"scaling high_freq_factor ({self.high_freq_factor}) must be above low_freq_factor "
                f"({self.low_freq_factor}); Llama 3.1 has 4.0 and 1.0"
            )

    def __call__(self, theta: Tensor, base: float) -> Tensor:
        turns = self.original_context * theta / (2 * math.pi)
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * theta / self.factor + smooth * theta

    def rope_parameters(self, base: float, planes: int) -> dict[str, Any]:
        return {
            **super().rope_parameters(base, planes),
            "original_max_position_embeddings": self.original_context,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
        }


KINDS: dict[str, type[Scaling]] = {cls.kind: cls for cls in (Scaling, NTKAware, YaRN, Llama3)}


def spelled_out(scaling: Any) -> dict[str, Any]:
    """Convert "yarn:4" to {"type": "yarn", "factor": 4.0}; a mapping does not change."""
    if isinstance(scaling, Mapping) and "type" in scaling:
        return dict(scaling)
    kind, _, factor = scaling.partition(":") if isinstance(scaling, str) else ("", "", "")
    try:
        return {"type": kind, "factor": float(factor)}
    except ValueError:
        raise TypeError(
            f'scaling must be like "linear:4" or {{"type": "linear", "factor": 4.0}}, got {scaling!r}'
        ) from None


def read_scaling(scaling: Mapping[str, Any] | str | None) -> Scaling | None:
    """Build the scaling rule that the option `scaling` describes.

    Args:
        scaling: a mapping such as {"type": "linear", "factor": 4.0}, or the short form "linear:4".

    Returns:
        The rule; None for None.

    Raises:
        ValueError: if the type or a value is not allowed.
        TypeError: if `scaling` has another form, an unknown option, or lacks a required one.
    """
    if scaling is None:
        return None
    options = spelled_out(scaling)
    kind = options["type"]
    if kind == "dynamic":
        raise ValueError(
            'scaling type "dynamic" changes the frequencies while a sequence grows, but cached keys keep the old '
            'ones; use "ntk" with the factor of the longest sequence'
        )
    check_choice("scaling type", kind, KINDS)
    given = {name: value for name, value in options.items() if name != "type"}
    known = {field.name: field for field in fields(KINDS[kind])}
    for name in given:
        if name not in known:
            raise TypeError(f'unknown option {name!r} of scaling type "{kind}"; options: {", ".join(known)}')
    for name, field in known.items():
        if field.default is MISSING and name not in given:
            raise TypeError(f'scaling type "{kind}" needs {name!r}; add it to scaling={options!r}')
    return KINDS[kind](**given)
