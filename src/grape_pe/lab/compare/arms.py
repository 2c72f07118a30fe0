"""The arms of a comparison: an encoding with its options and the arm's own settings.

Arm.parse("fox[forget_bias=4]+kv")
Arm.parse("[grape-m@w128,grape-a-qk]")
Arm(label="slow", encoding="fox", options={"forget_bias": 4}, train={"lr": 1e-3})
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, model_validator

from ..config import RunConfig, Section, merged, validated
from ..errors import LabError
from ..written import read_options, split_names, with_options

KV = "+kv"
#: an encoding or a list of them, options in brackets, KV-shift
WRITTEN = re.compile(r"(?P<encoding>\[[^\[\]]+\]|[^\[\]]+?)(\[(?P<options>.*)\])?(?P<kv>\+kv)?", re.DOTALL)


class Arm(Section):
    """One arm of a comparison; the default label is its form on the command line."""

    label: str = ""  #: its name, also of its directories
    #: a name, several joined by +, or a list that repeats over the layers
    encoding: str | Annotated[list[str], Field(min_length=1)]
    options: dict[str, Any] = Field({})  #: options of the encoding
    kv_shift: bool = False
    model: dict[str, Any] = Field({})  #: model settings of this arm
    train: dict[str, Any] = Field({})  #: training settings of this arm

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return _parsed(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _named(self) -> Arm:
        name = self.encoding if isinstance(self.encoding, str) else f"[{','.join(self.encoding)}]"
        label = self.label or with_options(name, self.options) + KV * self.kv_shift
        if "/" in label or label.startswith("."):
            raise ValueError(f"a label names a directory, got {label!r}; use one without / or a leading dot")
        object.__setattr__(self, "label", label)
        return self

    @classmethod
    def parse(cls, text: str) -> Arm:
        """An arm as on the command line: fox[forget_bias=4]+kv."""
        return cls(**_parsed(text))

    def applied(self, config: RunConfig, seed: int) -> RunConfig:
        """The recipe for this arm."""
        options = config.model.encoding_options | self.options
        own = {"encoding": self.encoding, "encoding_options": options, "kv_shift": self.kv_shift}
        own = self.model | own
        return validated(merged(config.model_dump(), {"seed": seed, "model": own, "train": self.train}))


def _parsed(text: str) -> dict[str, Any]:
    found = WRITTEN.fullmatch(text.strip())
    if found is None:
        raise LabError(
            f"cannot read the encoding {text!r}; options go in brackets after the whole name, then +kv, as "
            "in 'rope+fox[forget_bias=4]+kv'; encodings by layer go in a list, as in '[grape-m@w128,grape-a-qk]'"
        )
    name = found["encoding"]
    return {
        "label": text.strip(),
        "encoding": split_names(name[1:-1]) if name.startswith("[") else name,
        "options": read_options(found["options"] or "", text),
        "kv_shift": found["kv"] is not None,
    }
