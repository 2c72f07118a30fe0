"""The files of a comparison as types, checked when read: compare.json, evaluation.json, results.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

from ..compare.arms import Arm
from ..compare.comparison import AGAIN, RESTORE
from ..files import read_json, read_json_lines, typed

REWRITE = "remove it; grape compare writes it anew"
Curve = Mapping[float, float]


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


#: None where nothing was measured, or where it was no number
Number = Annotated[float | None, AfterValidator(finite)]


class Stored(BaseModel):
    """Values of other kinds than these mean a damaged file; fields that a report does not read may differ."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class LengthLoss(Stored):
    """Loss at one length, in full (`window` None) or with attention limited to a window.

    `stretches`: the mean loss of each stretch of text, in the same order at all lengths and for all arms.
    """

    length: int
    window: int | None = None
    loss: Number = None
    stretches: list[Number] = []


class BudgetLoss(Stored):
    """Loss of the model that was trained on so many tokens, its rate brought down to the end."""

    tokens: int
    loss: Number = None


class RateLoss(Stored):
    """Loss of the sweep's run at one learning rate."""

    lr: float
    loss: Number = None


class Positions(Stored):
    position: list[float] = []
    loss: list[Number] = []


class Score(Stored):
    """How one run did on one task at one length (and depth)."""

    split: str = ""
    length: int
    depth: Number = None
    exact: Number = None
    token: Number = None


class Passkey(Stored):
    """A `PasskeyScore` of an adapted model."""

    length: int
    depth: float
    cases: int
    exact: float
    nats: float


class Evaluation(Stored):
    """evaluation.json, of a run on text or on a task; also a line of results.jsonl."""

    kind: str = "language"
    label: str
    seed: int
    task: str | None = None
    val_loss: Number = None
    parameters: int | None = None
    train_length: int | None = None
    tokens_per_second: Number = None
    peak_memory_bytes: Number = None
    lr: Number = None
    sweep: list[RateLoss] = []
    budgets: list[BudgetLoss] = []
    by_position: Positions = Positions()
    extrapolation: list[LengthLoss] = []
    scores: list[Score] = []
    passkey: list[Passkey] = []

    @property
    def at_budgets(self) -> dict[int, float | None]:
        """Tokens to loss."""
        return {each.tokens: each.loss for each in self.budgets}

    def at(self, length: int, window: int | None = None) -> LengthLoss | None:
        return next((e for e in self.extrapolation if (e.length, e.window) == (length, window)), None)

    def loss_at(self, length: int, window: int | None = None) -> float | None:
        found = self.at(length, window)
        return None if found is None else found.loss


class StoredComparison(Stored):
    """compare.json."""

    arms: list[Arm]
    seeds: list[int] = []
    tasks: list[str] = []
    recipe: dict[str, Any] = {}
    machine: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    command: str = ""
    comparison: dict[str, Any] = {}
    elsewhere: list[dict[str, Any]] = []


def curve(pairs: Iterable[tuple[Any, Any]]) -> dict[float, float]:
    """x to y, where both are finite numbers."""
    return {float(x): float(y) for x, y in pairs if _number(x) and _number(y)}


def curves(lines: Sequence[Mapping[str, Any]]) -> tuple[Curve, Curve]:
    """Training and validation loss by step, from the lines of metrics.jsonl."""

    def of(kind: str) -> Curve:
        return curve((x["step"], x.get("loss")) for x in lines if x["kind"] == kind)

    return of("train"), of("validation")


def went_back(label: str, seed: int, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each rollback of a run."""
    for x in lines:
        if x["kind"] == "rollback":
            yield (
                f"{label}, seed {seed}: the loss rose at step {x['noticed']}; training went back to step {x['to']} and "
                f"on with batch {x['batch']}, so later batches are not those of other runs"
            )


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def read_comparison(path: Path) -> StoredComparison:
    return typed(StoredComparison, read_json(path, RESTORE), path, RESTORE)


def read_evaluation(path: Path) -> Evaluation:
    return typed(Evaluation, read_json(path, AGAIN), path, AGAIN)


def read_lines(path: Path) -> tuple[StoredComparison | None, list[Evaluation]]:
    """results.jsonl: a line for each run, and in a file that `grape report --jsonl` wrote first compare.json."""
    lines = read_json_lines(path, REWRITE)
    first = [line for line in lines if line.get("kind") == "comparison"]
    measured = [line for line in lines if line.get("kind") not in ("comparison", "trial")]
    runs = [typed(Evaluation, line, path, REWRITE) for line in measured]
    return typed(StoredComparison, first[0], path, REWRITE) if first else None, runs
