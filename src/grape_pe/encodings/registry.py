"""Encodings by name: `build("rope+grape-ap", heads=8, head_dim=64, width=512)`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .additive import ALiBi, FoX, GatedSlope, PhaseSlope, ShiftSlope
from .base import Composite, Encoding, HeadShape, NoPE
from .liere import LieRE
from .path import PaTH
from .path_integral import PathIntegral
from .rotary import BasisRotary, ContextualRotary, MixtureRotary, PlaneRotary, Rotary


@dataclass(frozen=True)
class Entry:
    """A class, the options that make it what its name says, and other defaults than the class's."""

    cls: type[Encoding]
    preset: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def options(self) -> list[str]:
        """What may be set: every keyword of the constructor that the name does not fix."""
        names: dict[str, None] = {}
        for cls in self.cls.__mro__:
            if "__init__" not in vars(cls) or not issubclass(cls, Encoding):
                continue
            parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
            names |= dict.fromkeys(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
        return [name for name in names if name not in self.preset]


ENTRIES: dict[str, Entry] = {
    "nope": Entry(NoPE),
    "rope": Entry(Rotary, {"learned": False}),
    "grape-m": Entry(Rotary, {"learned": True}),
    "grape-m-ctx": Entry(ContextualRotary),
    "grape-m-basis": Entry(BasisRotary),
    "grape-m-plane": Entry(PlaneRotary),
    "grape-m-mix": Entry(MixtureRotary),
    "alibi": Entry(ALiBi),
    "fox": Entry(FoX),
    "grape-a-shift": Entry(ShiftSlope),
    "grape-a-q": Entry(GatedSlope, {"query": True, "key": False, "atoms": 1}),
    "grape-a-k": Entry(GatedSlope, {"query": False, "key": True, "atoms": 1}),
    "grape-a-qk": Entry(GatedSlope, {"query": True, "key": True, "atoms": 1}),
    "grape-a-dict": Entry(GatedSlope, {"query": True, "key": True}, {"atoms": 4}),
    "grape-a-phase": Entry(PhaseSlope),
    "grape-ap": Entry(PathIntegral),
    "liere": Entry(LieRE),
    "path": Entry(PaTH),
}


def names() -> list[str]:
    """Every encoding `build` knows; any of them may be joined with `+`."""
    return list(ENTRIES)


def register(name: str, cls: type[Encoding], **preset: Any) -> None:
    """Give an encoding of your own a name, so that `build`, models and training find it."""
    if not (isinstance(cls, type) and issubclass(cls, Encoding)):
        raise TypeError(f"register expects a subclass of grape_pe.Encoding, got {cls!r}")
    if name in ENTRIES or "+" in name or "@" in name:
        raise ValueError(f"{name!r} is taken or contains '+' or '@'; choose another name")
    ENTRIES[name] = Entry(cls, preset)


def build(
    name: str,
    *,
    heads: int,
    head_dim: int,
    width: int | None = None,
    kv_heads: int | None = None,
    **options: Any,
) -> Encoding:
    """Build an encoding by name; `+` composes one rotation with any number of biases.

    Args:
        name: one of `names()`, or several joined by "+", such as "grape-m+grape-ap".
        heads: query heads. head_dim: features of a head. kv_heads: key heads, if fewer.
        width: the model's hidden size; needed by encodings that read the block's input.
        options: of the encoding. In a composition an option goes to every part that has it, or to
            one of them as `**{"grape-ap": {"probe_dim": 16}}`.
    """
    shape = HeadShape(heads, head_dim, heads if kv_heads is None else kv_heads, width)
    parts = name.split("+") if isinstance(name, str) else [name]
    for part in parts:
        _check_name(part)
    if len(set(parts)) < len(parts):
        raise ValueError(f"{name!r} names a part twice; each may appear once")
    _check_options(parts, options)
    built = {part: _build_part(part, shape, _options_of(part, options)) for part in parts}
    encoding = built[parts[0]] if len(parts) == 1 else Composite(shape, built)
    encoding.spec = _spec(name, shape, options)
    return encoding


def _check_name(name: str) -> None:
    if name not in ENTRIES:
        near = difflib.get_close_matches(str(name), ENTRIES, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"names: {', '.join(ENTRIES)}"
        raise ValueError(f"unknown encoding {name!r}; {hint}")


def _check_options(parts: list[str], options: dict[str, Any]) -> None:
    known = {part: ENTRIES[part].options() for part in parts}
    everything = [name for names in known.values() for name in names]
    for key, value in options.items():
        if key in known and isinstance(value, Mapping):
            wrong = [(name, known[key]) for name in value if name not in known[key]]
        else:
            wrong = [] if key in everything else [(key, everything)]
        for name, choices in wrong:
            near = difflib.get_close_matches(name, choices, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            known_ones = ", ".join(choices) or "none"
            raise TypeError(f"unknown option {name!r} for {'+'.join(parts)}; options: {known_ones}{hint}")


def _options_of(part: str, options: dict[str, Any]) -> dict[str, Any]:
    mine = {key: value for key, value in options.items() if key in ENTRIES[part].options()}
    nested = options.get(part)
    return {**mine, **nested} if isinstance(nested, Mapping) else mine


def _build_part(name: str, shape: HeadShape, options: dict[str, Any]) -> Encoding:
    entry = ENTRIES[name]
    part = entry.cls(shape, **{**entry.preset, **entry.defaults, **options})
    part.spec = _spec(name, shape, options)
    return part


def _spec(name: str, shape: HeadShape, options: dict[str, Any]) -> str:
    """The call that builds it again: what `repr` shows."""
    said: dict[str, Any] = {"heads": shape.heads, "head_dim": shape.head_dim}
    if shape.kv_heads != shape.heads:
        said["kv_heads"] = shape.kv_heads
    if shape.width is not None:
        said["width"] = shape.width
    plain = {key: value for key, value in options.items() if key.isidentifier()}
    nested = {key: value for key, value in options.items() if key not in plain}
    words = [repr(name), *(f"{key}={value!r}" for key, value in {**said, **plain}.items())]
    return f"build({', '.join(words + ([f'**{nested!r}'] if nested else []))})"
