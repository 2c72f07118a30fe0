"""Encodings and windows by layer: one for all layers, or a list that repeats over the layers.

`encoding=["grape-m@w128", "grape-m@w128", "grape-m@w128", "grape-a-qk"]` gives every fourth layer another encoding;
`@w128` sets the window of a layer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..attention.masks import check_window
from ..encodings.registry import entry
from ..encodings.registry import names as known_names

WINDOWED = re.compile(r"([^@]+)@w([1-9]\d*)")


@dataclass(frozen=True)
class LayerSetting:
    """The name of a layer's encoding, and the layer's window."""

    encoding: str
    window: int | None


def layer_settings(encoding: Any, window: Any, sinks: int, layers: int) -> list[LayerSetting]:
    """Check encoding, window and sinks of a model, and return the setting of each layer.

    The names of encodings are checked by `build`.
    """
    names, windows = _repeated("encoding", encoding, layers), _repeated("window", window, layers)
    found = [_setting(i, *each) for i, each in enumerate(zip(names, windows, strict=True))]
    widest = [each.window for each in found if each.window is not None]
    check_window(widest[0] if widest else None, sinks)
    return found


def _repeated(name: str, value: Any, layers: int) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * layers
    if not value or layers % len(value):
        raise ValueError(
            f"the list {name} repeats over the layers, so its length must divide layers={layers}, got "
            f"{len(value)}: {list(value)}"
        )
    return list(value) * (layers // len(value))


def _setting(layer: int, name: Any, window: Any) -> LayerSetting:
    if not isinstance(name, str):
        raise TypeError(f"encoding must be a name or a list of names, got {name!r}")
    check_window(window, 0)
    if "@" not in name:
        return LayerSetting(name, window)
    parts = WINDOWED.fullmatch(name)
    if parts is None:
        raise ValueError(
            f"after @ an encoding must have w and a number of tokens, as in 'grape-m@w128', got {name!r}"
        )
    if window is not None:
        raise ValueError(
            f"layer {layer} has two windows: {name!r} in encoding and {window} in window; remove one of them"
        )
    return LayerSetting(parts[1], int(parts[2]))


def label(encoding: str | Sequence[str]) -> str:
    """One line for reports, such as "grape-m@w128 x3, grape-a-qk"."""
    if isinstance(encoding, str):
        return encoding
    runs = ((name, len(list(same))) for name, same in itertools.groupby(encoding))
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in runs)


def options_for(name: str, names: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the encoding `name`, one of the model's `names`: those of the model that it has."""
    every = dict.fromkeys(names)
    if len(every) < 2:
        return dict(options)
    for key in options:
        if key == "coords" or (isinstance(options[key], Mapping) and "coords" in options[key]):
            raise ValueError(
                "encoding_options: coords needs one encoding for all layers, got " + ", ".join(every)
            )
        if not any(_has(each, key) for each in every):
            raise TypeError(
                f"encoding_options: {key!r} is not an option of {', '.join(every)}; grape encodings NAME lists options"
            )
    return {key: value for key, value in options.items() if _has(name, key)}


def _has(name: str, key: str) -> bool:
    parts = name.split("+")
    return key in parts or any(part in known_names() and key in entry(part).options() for part in parts)
