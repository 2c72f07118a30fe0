"""The rows of the paper's tables: the settings of their runs and the published accuracies (paper.yaml).

row = rows()[0]
row.config().train.steps, row.scores["arc_easy"], row.average
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from .config import RunConfig, load

KV = "+kv"
SIZES = ("medium", "large")


@dataclass(frozen=True)
class Row:
    """A row of the table of one size; `scores` (by lm_eval task) and `average` in percent."""

    size: str
    encoding: str
    kv_shift: bool
    scores: Mapping[str, float]
    average: float

    @property
    def label(self) -> str:
        return self.encoding + KV * self.kv_shift

    @property
    def name(self) -> str:
        """The name of the run's directory in the launch files."""
        return f"{self.size}-{self.label.replace('+', '-')}"

    @property
    def arguments(self) -> list[str]:
        """Arguments of `grape train`."""
        return [f"paper-{self.size}", "--encoding", self.encoding, *["--kv-shift"] * self.kv_shift]

    def config(self) -> RunConfig:
        return load(f"paper-{self.size}", {"model.encoding": self.encoding, "model.kv_shift": self.kv_shift})

    def alternatives(self, setting: str) -> Iterator[Any]:
        """Other values of a setting that reproduce this row."""
        own = {"size": self.size, "encoding": self.encoding}
        for each in published()["alternatives"]:
            where = {key: value for key, value in each.items() if key in own}
            if each["setting"] == setting and where.items() <= own.items():
                yield each["value"]


@cache
def published() -> dict[str, Any]:
    """paper.yaml: source, questions of each task, alternatives, and the rows of each size."""
    found: dict[str, Any] = yaml.safe_load(
        resources.files(__package__).joinpath("paper.yaml").read_text("utf-8")
    )
    return found


@cache
def rows() -> tuple[Row, ...]:
    """All rows, in the order of the tables."""
    return tuple(_row(size, label, scores) for size in SIZES for label, scores in published()[size].items())


def _row(size: str, label: str, scores: list[float]) -> Row:
    named = dict(zip(published()["questions"], scores[:-1], strict=True))
    return Row(size, label.removesuffix(KV), label.endswith(KV), named, scores[-1])
