"""Going back when the loss rises and stays up: `train.rollback_above`.

As for PaLM (Chowdhery et al., 2022, section 5.1): training continues from a checkpoint before the spike, without
the batches around it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import RISE, USUAL
from .unread import Taken


@dataclass(frozen=True)
class Rollback:
    """A return to the checkpoint of step `to`; the run continues with batch `batch`."""

    to: int  #: number of steps that are kept
    batch: int  #: the next batch, counted from 0
    noticed: int  #: the last step of the rise (from 1, as in metrics.jsonl)
    loss: float | None  #: of that step; None if it was not finite
    median: float  #: of the losses before the rise


class Rise(Exception):
    """The losses of steps `since` to `last` (from 0) are too high, or that of `last` is not finite."""

    def __init__(self, since: float, last: float, loss: float, median: float) -> None:
        super().__init__(since, last, loss, median)
        self.since, self.last, self.loss, self.median = int(since), int(last), loss, median

    def __str__(self) -> str:
        return f"the loss is {self.loss:.4g} at step {self.last + 1}, after a median of {self.median:.4g}"


def look(
    recent: Sequence[float], taken: Sequence[Taken], above: float
) -> tuple[tuple[float, ...], Rise | None]:
    """The recent losses including new steps, and the first rise that ends in one of them."""
    seen, rise = tuple(recent), None
    for step, loss, norm in taken:
        seen = (*seen, loss if math.isfinite(norm) else norm)[-RISE - USUAL :]
        rise = rise or risen(seen, step, above)
    return seen, rise


def risen(recent: Sequence[float], step: int, above: float) -> Rise | None:
    """Whether the last `RISE` losses up to `step` are all above `above` times the median of the `USUAL` before."""
    if not math.isfinite(recent[-1]):
        return Rise(step, step, recent[-1], statistics.median(recent[:-1] or [math.nan]))
    if len(recent) < USUAL + RISE:
        return None
    median = statistics.median(recent[:-RISE])
    if min(recent[-RISE:]) <= above * median:
        return None
    return Rise(step - RISE + 1, step, recent[-1], median)


def returned(rise: Rise, to: int, before: Sequence[Rollback]) -> tuple[Rollback, ...]:
    """All rollbacks of a run after it went back to step `to`."""
    loss = rise.loss if math.isfinite(rise.loss) else None
    return (*before, Rollback(to, batch_of(rise.last, before) + 1, rise.last + 1, loss, rise.median))


def batch_of(step: int, rollbacks: Sequence[Rollback]) -> int:
    """The batch of a step: consecutive since the last rollback."""
    last = next((each for each in reversed(rollbacks) if each.to <= step), None)
    return step if last is None else last.batch + step - last.to
