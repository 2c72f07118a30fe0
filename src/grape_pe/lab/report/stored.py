"""The files of a comparison as types: what `grape compare` writes and a report reads, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ..comparison import AGAIN, RESTORE
from ..files import damaged, read_json, read_json_lines

REWRITE = "remove it; grape compare writes it anew"


class Stored(BaseModel):
    """Values of other kinds than these mean a damaged file; fields that a report does not read may differ."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class StoredArm(Stored):
    label: str
    encoding: str
    options: dict[str, Any] = {}
    kv_shift: bool = False
    model: dict[str, Any] = {}
    train: dict[str, Any] = {}

    def own_settings(self) -> dict[str, Any]:
        """Everything that is set for this arm alone."""
        model = {f"model.{name}": value for name, value in self.model.items()}
        return self.options | model | {f"train.{name}": value for name, value in self.train.items()}


class StoredComparison(Stored):
    """compare.json."""

    arms: list[StoredArm]
    seeds: list[int] = []
    tasks: list[str] = []
    recipe: dict[str, Any] = {}
    machine: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    command: str = ""
    comparison: dict[str, Any] = {}


class StoredStretch(Stored):
    length: int
    window: int | None = None
    loss: float | None = None


class StoredPositions(Stored):
    position: list[float] = []
    loss: list[float | None] = []


class StoredScore(Stored):
    split: str = ""
    length: int
    depth: float | None = None
    exact: float | None = None
    token: float | None = None


class Evaluation(Stored):
    """evaluation.json, of a run on text or on a task; also a line of results.jsonl."""

    kind: str = "language"
    label: str
    seed: int
    task: str | None = None
    val_loss: float | None = None
    parameters: int | None = None
    train_length: int | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: float | None = None
    seconds: float | None = None
    by_position: StoredPositions = StoredPositions()
    extrapolation: list[StoredStretch] = []
    scores: list[StoredScore] = []


Kind = TypeVar("Kind", bound=Stored)


def read_comparison(path: Path) -> StoredComparison:
    return _checked(StoredComparison, read_json(path, RESTORE), path, RESTORE)


def read_evaluation(path: Path) -> Evaluation:
    return _checked(Evaluation, read_json(path, AGAIN), path, AGAIN)


def read_evaluations(path: Path) -> list[Evaluation]:
    """The lines of results.jsonl."""
    return [_checked(Evaluation, line, path, REWRITE) for line in read_json_lines(path, REWRITE)]


def _checked(kind: type[Kind], said: dict[str, Any], path: Path, remedy: str) -> Kind:
    try:
        return kind.model_validate(said)
    except ValidationError as problem:
        error = problem.errors()[0]
        name = ".".join(map(str, error["loc"]))
        raise damaged(path, f"{name}: {error['msg']}, got {error['input']!r:.60}", remedy) from None
