"""Run a fuzz target for consecutive seeds, up to a number of cases or seconds."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """The result of a case: the number of comparisons, and the messages of refusals."""

    runs: int = 0
    refused: list[str] = field(default_factory=list)


@dataclass
class Summary:
    """The results of all cases of a run. `failures` maps the seed of a failing case to its traceback."""

    cases: int = 0
    runs: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.cases} cases, {self.runs} comparisons, {self.refused.total()} refused, "
            f"{len(self.failures)} failures"
        )


def run(
    check: Callable[[int], Outcome],
    *,
    cases: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    keep_going: bool = False,
    progress: Callable[[Summary], None] = lambda summary: None,
) -> Summary:
    """Run `check` for seed, seed + 1, … up to `cases` or `seconds`, or until a case fails (unless `keep_going`)."""
    summary, start = Summary(), time.monotonic()
    while (cases is None or summary.cases < cases) and (
        seconds is None or time.monotonic() - start < seconds
    ):
        _check_one(check, seed + summary.cases, summary)
        summary.cases += 1
        progress(summary)
        if summary.failures and not keep_going:
            break
    return summary


def _check_one(check: Callable[[int], Outcome], seed: int, summary: Summary) -> None:
    try:
        outcome = check(seed)
    except Exception:
        summary.failures[seed] = traceback.format_exc()
        return
    summary.runs += outcome.runs
    summary.refused.update(outcome.refused)
