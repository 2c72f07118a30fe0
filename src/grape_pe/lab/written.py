"""Names with options in brackets, as on the command line: fox[forget_bias=4]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from .errors import LabError


def split_names(text: str) -> list[str]:
    """Split `a,b[x=1,y=2]` at commas outside brackets."""
    return [part for part in (each.strip() for each in _split(text)) if part]


def _split(text: str) -> Iterator[str]:
    depth = start = 0
    for index, letter in enumerate(text):
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def read_name(text: str) -> tuple[str, dict[str, Any]]:
    """`name[x=1,y=2]` as a name and its options."""
    name, opened, rest = text.partition("[")
    if opened and not rest.endswith("]"):
        raise LabError(
            f"cannot read {text!r}; options go in brackets after the name, as in fox[forget_bias=4]"
        )
    return name, read_options(rest[:-1], text)


def read_options(text: str, whole: str) -> dict[str, Any]:
    """`x=1,y=2`, the options of `whole`."""
    return dict(_option(whole, each) for each in split_names(text))


def _option(whole: str, text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        if equals and name.strip():
            return name.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        pass
    raise LabError(
        f"cannot read the option {text!r} of {whole!r}; write name=value, as in fox[forget_bias=4]"
    )


def with_options(name: str, options: dict[str, Any]) -> str:
    listed = ",".join(f"{key}={value}" for key, value in options.items())
    return name + (f"[{listed}]" if listed else "")
