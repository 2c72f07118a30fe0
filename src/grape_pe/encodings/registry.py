"""Encodings by name: `build("rope+grape-ap", heads=8, head_dim=64, width=512)`."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import own
from .additive import ALiBi, FoX, GatedSlope, PhaseSlope, ShiftSlope
from .base import Composite, Encoding, HeadShape, NoPE
from .basis import BasisRotary
from .cope import CoPE
from .dape import DAPE
from .facts import Facts
from .fire import FIRE
from .kerple import Kerple
from .liere import LieRE
from .path import PaTH
from .path_integral import PathIntegral
from .pope import PoPE
from .relative import Relative
from .rotary import ContextualRotary, MixtureRotary, PlaneRotary, Rotary
from .sandwich import Sandwich
from .t5 import T5
from .temperature import LogN
from .xpos import XPos


@dataclass(frozen=True)
class Entry:
    """A registered encoding: its class, the options that the name fixes, and defaults that differ from the class's."""

    cls: type[Encoding]
    preset: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """The options of `build` with their defaults: keywords of the constructor that the name does not fix."""
        found: dict[str, Any] = {}
        for cls in self.cls.__mro__:
            if "__init__" not in vars(cls) or not issubclass(cls, Encoding):
                continue
            parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
            found = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} | found
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
        return {
            name: self.defaults.get(name, value) for name, value in found.items() if name not in self.preset
        }


ENTRIES: dict[str, Entry] = {
    "nope": Entry(NoPE),
    "rope": Entry(Rotary, {"learned": False}),
    "grape-m": Entry(Rotary, {"learned": True}),
    "grape-m-ctx": Entry(ContextualRotary),
    "grape-m-basis": Entry(BasisRotary),
    "string-cayley": Entry(BasisRotary, {"basis": "cayley"}),
    "string-circulant": Entry(BasisRotary, {"basis": "circulant", "basis_per_head": False}),
    "grape-m-plane": Entry(PlaneRotary),
    "grape-m-mix": Entry(MixtureRotary),
    "xpos": Entry(XPos),
    "pope": Entry(PoPE),
    "alibi": Entry(ALiBi),
    "fox": Entry(FoX),
    "grape-a-shift": Entry(ShiftSlope),
    "grape-a-q": Entry(GatedSlope, {"query": True, "key": False, "atoms": 1}),
    "grape-a-k": Entry(GatedSlope, {"query": False, "key": True, "atoms": 1}),
    "grape-a-qk": Entry(GatedSlope, {"query": True, "key": True, "atoms": 1}),
    "grape-a-dict": Entry(GatedSlope, {"query": True, "key": True}, {"atoms": 4}),
    "grape-a-phase": Entry(PhaseSlope),
    "grape-ap": Entry(PathIntegral),
    "t5": Entry(T5),
    "kerple-log": Entry(Kerple, {"kernel": "log"}),
    "kerple-power": Entry(Kerple, {"kernel": "power"}),
    "sandwich": Entry(Sandwich),
    "relative": Entry(Relative),
    "fire": Entry(FIRE),
    "cope": Entry(CoPE),
    "dape": Entry(DAPE),
    "liere": Entry(LieRE),
    "path": Entry(PaTH),
    "logn": Entry(LogN),
}


#: the names of this package, which no other encoding can have
SHIPPED = frozenset(ENTRIES)


def names() -> list[str]:
    """List the names that `build` accepts. Several can be joined with "+"."""
    return [*ENTRIES, *(name for name in own.offered() if name not in ENTRIES)]


def register(name: str, cls: type[Encoding], **preset: Any) -> None:
    """Register your own encoding under a name, for `build`, models and training.

    Registering a class of the same module and name again replaces it, so a notebook cell can run twice.

    Args:
        name: the name, without "+", "@", ",", "/", brackets and spaces.
        cls: a subclass of `Encoding`.
        preset: options of the class that the name fixes.

    Raises:
        ValueError: if the name is not valid or is in use.
    """
    if not (isinstance(cls, type) and issubclass(cls, Encoding)):
        raise TypeError(f"register expects a subclass of grape_pe.Encoding, got {cls!r}")
    if not name or set(name) & set("+@,[]/ "):
        raise ValueError(f"{name!r} is not a valid encoding name; use letters, digits and hyphens")
    old = ENTRIES[name].cls if name in ENTRIES else cls
    if (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"{name!r} is taken by {old.__qualname__}; choose another name")
    ENTRIES[name] = Entry(cls, preset)


def entry(name: str) -> Entry:
    """The entry of a name. An encoding that another installed package offers is imported at its first use."""
    _check_name(name)
    if name not in ENTRIES:
        register(name, own.load_offered(name))  # type: ignore[arg-type]
    return ENTRIES[name]


def facts(name: str) -> Facts | None:
    """The description of the encoding of this name; None if its class has none."""
    return next((each for each in entry(name).cls.facts if each.name == name), None)


def own_modules() -> list[str]:
    """Modules that worker processes must import to register the same encodings."""
    main = getattr(sys.modules["__main__"], "__spec__", None)  # set by python -m MODULE
    named = [*own.IMPORTED, *(main.name if each == "__main__" and main else each for each in _defining())]
    return list(dict.fromkeys(name for name in named if name != "__main__"))


def main_script() -> str | None:
    """The script that worker processes must also run, because it registers encodings; None if there is none."""
    main = sys.modules["__main__"]
    named = "__main__" not in _defining() or getattr(main, "__spec__", None) is not None
    return None if named else getattr(main, "__file__", None)


def _defining() -> list[str]:
    return [each.cls.__module__ for name, each in ENTRIES.items() if name not in SHIPPED]


def only_here(name: str) -> bool:
    """Whether the encoding is defined in an interactive session, which no other process can import."""
    main = sys.modules["__main__"]
    scripted = hasattr(main, "__file__") or getattr(main, "__spec__", None) is not None
    return entry(name).cls.__module__ == "__main__" and not scripted


def build(
    name: str,
    *,
    heads: int,
    head_dim: int,
    width: int | None = None,
    kv_heads: int | None = None,
    **options: Any,
) -> Encoding:
    """Build an encoding by name. "+" combines one rotation with any number of biases.

    Args:
        name: one of `names()`, or several joined by "+", such as "grape-m+grape-ap".
        heads: number of query heads.
        head_dim: features of a head.
        width: the model's hidden size; needed by encodings that read the attention block's input.
        kv_heads: number of key heads; must divide `heads`, which is the default.
        options: options of the encoding. With "+" an option goes to every part that has it; for a single part
            write `**{"grape-ap": {"probe_dim": 16}}`.

    Returns:
        The encoding, a module. Its `repr` is this call.
    """
    shape = HeadShape(heads, head_dim, heads if kv_heads is None else kv_heads, width)
    parts = name.split("+") if isinstance(name, str) else [name]
    for part in parts:
        _check_name(part)
    if len(set(parts)) < len(parts):
        raise ValueError(f"{name!r} names a part twice; remove one of them")
    _check_options(parts, options)
    built = {part: _build_part(part, shape, _options_of(part, options)) for part in parts}
    encoding = built[parts[0]] if len(parts) == 1 else Composite(shape, built)
    encoding.spec = _spec(name, shape, options)
    return encoding


def _check_name(name: str) -> None:
    known = names()
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.7)
        hint = f"; did you mean {', '.join(near)}?" if near else "."
        raise ValueError(
            f"unknown encoding {name!r}{hint} For your own encodings pass --import your_module "
            "(in Python: import it first); grape encodings lists the names"
        )


def _check_options(parts: list[str], options: dict[str, Any]) -> None:
    known = {part: list(entry(part).options()) for part in parts}
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
    mine = {key: value for key, value in options.items() if key in entry(part).options()}
    nested = options.get(part)
    return {**mine, **nested} if isinstance(nested, Mapping) else mine


def _build_part(name: str, shape: HeadShape, options: dict[str, Any]) -> Encoding:
    known = entry(name)
    for key, default in known.options().items():
        if isinstance(default, (int, float)) and isinstance(options.get(key), str):
            kind = "True or False" if isinstance(default, bool) else "a number"
            raise TypeError(f"{key} of {name} must be {kind}, got {options[key]!r}")
    part = known.cls(shape, **{**known.preset, **known.defaults, **options})
    part.spec = _spec(name, shape, options)
    return part


def _spec(name: str, shape: HeadShape, options: dict[str, Any]) -> str:
    """The `build` call of an encoding, for `repr`."""
    sizes: dict[str, Any] = {"heads": shape.heads, "head_dim": shape.head_dim}
    if shape.kv_heads != shape.heads:
        sizes["kv_heads"] = shape.kv_heads
    if shape.width is not None:
        sizes["width"] = shape.width
    plain = {key: value for key, value in options.items() if key.isidentifier()}
    nested = {key: value for key, value in options.items() if key not in plain}
    words = [repr(name), *(f"{key}={value!r}" for key, value in {**sizes, **plain}.items())]
    return f"build({', '.join(words + ([f'**{nested!r}'] if nested else []))})"
