"""Checks of arguments that share one message."""

from __future__ import annotations

import math
from collections.abc import Iterable


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise a ValueError unless `value` is one of `choices`."""
    allowed = list(choices)
    if value not in allowed:
        *first, last = (f'"{each}"' for each in allowed)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {value!r}")


def check_positive(name: str, value: object) -> None:
    """Raise a ValueError unless `value` is a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value!r}")


def check_integer(name: str, value: object, least: int = 1) -> None:
    """Raise a ValueError unless `value` is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
