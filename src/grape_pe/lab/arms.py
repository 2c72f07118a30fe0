"""The arms of a comparison: an encoding with its options, and whatever else is set for this arm alone.

Arm.parse("fox[forget_bias=4]+kv")
Arm(label="slow", encoding="fox", options={"forget_bias": 4}, train={"lr": 1e-3})
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import Field, model_validator

from .config import RunConfig, Section, merged, validated
from .errors import LabError

KV = "+kv"
#: an encoding, then its options in brackets, then whether it has KV-shift
WRITTEN = re.compile(r"(?P<encoding>[^\[\]]+?)(\[(?P<options>.*)\])?(?P<kv>\+kv)?", re.DOTALL)


class Arm(Section):
    """One side of a comparison. Without a label it is named as it would be written on the command line."""

    label: str = Field("", description="what it is called; names its directories")
    encoding: str = Field(description="a name, or several joined by +")
    options: dict[str, Any] = Field({}, description="of the encoding")
    kv_shift: bool = False
    model: dict[str, Any] = Field({}, description="settings of the model for this arm alone")
    train: dict[str, Any] = Field({}, description="settings of the training for this arm alone")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, said: Any) -> Any:
        return _parsed(said) if isinstance(said, str) else said

    @model_validator(mode="after")
    def _named(self) -> Arm:
        label = self.label or _written(self.encoding, self.options, self.kv_shift)
        if "/" in label or label.startswith("."):
            raise ValueError(f"the label {label!r} names a directory: give one without / and a leading dot")
        object.__setattr__(self, "label", label)
        return self

    @classmethod
    def parse(cls, text: str) -> Arm:
        """An arm as it is written on the command line: fox[forget_bias=4]+kv."""
        return cls(**_parsed(text))

    def applied(self, config: RunConfig, seed: int) -> RunConfig:
        """The recipe for this arm."""
        options = {**config.model.encoding_options, **self.options}
        own = {
            **self.model,
            "encoding": self.encoding,
            "encoding_options": options,
            "kv_shift": self.kv_shift,
        }
        return validated(merged(config.model_dump(), {"seed": seed, "model": own, "train": self.train}))

    def described(self) -> dict[str, Any]:
        """What results say of it."""
        return self.model_dump()


def split_arms(text: str) -> list[str]:
    """`a,b[x=1,y=2]` at its commas outside brackets."""
    return [part for part in (each.strip() for each in _split(text)) if part]


def _split(text: str) -> Iterator[str]:
    depth = start = 0
    for index, letter in enumerate(text):
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def _parsed(text: str) -> dict[str, Any]:
    found = WRITTEN.fullmatch(text.strip())
    if found is None:
        raise LabError(
            f"cannot read the encoding {text!r}; options go in brackets after the whole name, then +kv, as "
            "in 'rope+fox[forget_bias=4]+kv'"
        )
    options = dict(_option(text, each) for each in split_arms(found["options"] or ""))
    return {
        "label": text.strip(), "encoding": found["encoding"], "options": options,
        "kv_shift": found["kv"] is not None,
    }  # fmt: skip


def _option(text: str, said: str) -> tuple[str, Any]:
    name, equals, value = said.partition("=")
    try:
        if equals and name.strip():
            return name.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        pass
    raise LabError(f"cannot read the option {said!r} of {text!r}; write name=value, as in fox[forget_bias=4]")


def _written(encoding: str, options: dict[str, Any], kv_shift: bool) -> str:
    said = ",".join(f"{name}={value}" for name, value in options.items())
    return encoding + (f"[{said}]" if said else "") + (KV if kv_shift else "")
