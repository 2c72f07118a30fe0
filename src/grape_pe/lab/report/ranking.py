"""What is compared with what, and the ranking: one row for each arm, best validation loss first.

Arms are compared if they belong to the first recipe and no run of theirs diverged, and on the seeds they all have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .results import ArmResults, Results
from .statistics import Blocks, Summary, blocks, summarize
from .stored import Evaluation, Score

Kind = Literal["exact", "token"]
#: a score below this for every run, or as near to 1, does not tell arms apart
FLOOR = 0.02


@dataclass(frozen=True)
class Row:
    """An arm's summaries over seeds; None where nothing was measured.

    Losses and tasks are over the seeds that all compared arms have; `behind` is the difference to the best.
    """

    label: str
    losses: Mapping[int, float]
    val_loss: Summary | None
    behind: Summary | None
    long_loss: Summary | None
    growth: Summary | None
    solved: Mapping[int, float]
    tasks: Summary | None
    speed: Summary | None
    memory: Summary | None
    status: str


def _compared(results: Results) -> list[ArmResults]:
    return [arm for arm in results.arms if arm.recipe == 0 and not arm.diverged]


def _blocks(results: Results, of: Callable[[Evaluation], float | None]) -> Blocks:
    """A value of each run, compared seed by seed."""
    return blocks({arm.label: found for arm in _compared(results) if (found := arm.values(of))})


def loss_blocks(results: Results) -> Blocks:
    """Validation losses, seed by seed."""
    return _blocks(results, lambda run: run.val_loss)


def length_blocks(results: Results, length: int, window: int | None = None) -> Blocks:
    """Losses at one length, seed by seed: other training runs, the same text."""
    return _blocks(results, lambda run: run.loss_at(length, window))


def text_blocks(results: Results, length: int) -> Blocks:
    """Losses at one length, stretch by stretch: the same models, other text."""
    seeds = length_blocks(results, length).units
    found: dict[str, dict[int, float]] = {}
    for arm in _compared(results):
        entries = [each.at(length) for seed, each in arm.evaluations.items() if seed in seeds]
        texts = [entry.stretches for entry in entries if entry is not None]
        if seeds and len(texts) == len(seeds) and len({len(text) for text in texts}) == 1:
            columns = enumerate(zip(*texts, strict=True))
            found[arm.label] = {i: sum(x) / len(x) for i, x in columns if all(v is not None for v in x)}  # type: ignore[arg-type]
    found = {label: each for label, each in found.items() if each}
    same_text = len({max(each) for each in found.values()}) == 1
    return blocks(found, pooled=False) if same_text else Blocks()


def speed_blocks(results: Results) -> Blocks:
    """Logarithms of the training speeds, seed by seed, so that differences are ratios."""
    return _blocks(results, lambda run: math.log(run.tokens_per_second) if run.tokens_per_second else None)


def diverged_at(arm: ArmResults, tokens: int) -> bool:
    """Whether a run of this arm ended without a loss at this budget."""
    return any((tokens, None) in run.at_budgets.items() for run in arm.evaluations.values())


def _sound(results: Results, *budgets: int) -> Results:
    """Without the arms that diverged at any of these budgets."""
    arms = (arm for arm in results.arms if not any(diverged_at(arm, n) for n in budgets))
    return replace(results, arms=tuple(arms))


def budget_blocks(results: Results) -> dict[int, Blocks]:
    """Losses after each number of tokens, seed by seed; empty with fewer than two budgets."""
    budgets = sorted({n for run in results.evaluations for n in run.at_budgets})
    every = {n: _blocks(_sound(results, n), lambda run, n=n: run.at_budgets.get(n)) for n in budgets}  # type: ignore[misc]
    found = {n: each for n, each in every.items() if each.means}
    return found if len(found) > 1 else {}


def trend_blocks(results: Results) -> Blocks:
    """How much loss each arm gained (positive) from the first budget to the last, seed by seed.

    The difference of two arms is the change of the gap between them.
    """
    if not (tokens := list(budget_blocks(results))):
        return Blocks()
    first, last = tokens[0], tokens[-1]

    def change(run: Evaluation) -> float | None:
        before, now = run.at_budgets.get(first), run.at_budgets.get(last)
        return None if before is None or now is None else now - before

    return _blocks(_sound(results, first, last), change)


def _with_tasks(results: Results) -> list[ArmResults]:
    """Arms of the first recipe with scores and without a diverged run on a task."""
    arms = [arm for arm in results.arms if arm.recipe == 0 and not arm.diverged_probes]
    return [arm for arm in arms if any(arm.scores(task) for task in results.tasks)]


def compared_tasks(results: Results) -> list[str]:
    """The tasks that every compared arm has scores of: means over different tasks say nothing."""
    return [task for task in results.tasks if all(arm.scores(task) for arm in _with_tasks(results))]


def task_blocks(results: Results) -> Blocks:
    """Task scores, compared seed by seed."""
    found = {arm.label: task_scores(results, arm) for arm in _with_tasks(results)}
    return blocks({label: scores for label, scores in found.items() if scores})


def scored_by(results: Results, task: str) -> Kind:
    """The score that tells runs apart: samples solved exactly, unless that is near 0 or near 1 for all of them."""
    runs = [scores for arm in results.arms for scores in arm.scores(task).values()]
    kinds: tuple[Kind, ...] = ("exact", "token")
    for kind in kinds:
        means = [mean_score(scores, kind) for scores in runs]
        known = [mean for mean in means if mean is not None]
        if known and max(known) > FLOOR and min(known) < 1 - FLOOR:
            return kind
    return "exact"


def mean_score(scores: Sequence[Score], kind: Kind) -> float | None:
    values = [value for score in scores if (value := getattr(score, kind)) is not None]
    return sum(values) / len(values) if values else None


def task_scores(results: Results, arm: ArmResults) -> dict[int, float]:
    """Seed to the mean score, over lengths and splits within a task, then over the compared tasks."""
    kinds = {task: scored_by(results, task) for task in compared_tasks(results)}
    out: dict[int, float] = {}
    for seed in dict.fromkeys(seed for _, seed in arm.probes):
        means = [mean_score(arm.scores(task).get(seed, ()), kind) for task, kind in kinds.items()]
        known = [mean for mean in means if mean is not None]
        out |= {seed: sum(known) / len(known)} if known and len(known) == len(means) else {}
    return out


def ranking(results: Results) -> list[Row]:
    """Rows by validation loss, those that cannot be compared last; without a loss, by tasks solved."""
    found, tasks = loss_blocks(results), task_blocks(results)
    far = length_blocks(results, results.longest) if results.longest else Blocks()

    def place(row: Row) -> tuple[bool, float, float]:
        loss = row.val_loss.mean if row.val_loss else math.inf
        among = found.means or tasks.means
        return row.label not in among, loss, -row.tasks.mean if row.tasks else 1.0

    rows = sorted((_row(results, arm, found, far, tasks) for arm in results.arms), key=place)
    ranked = [row.label for row in rows if row.label in found.means]
    behind = {label: found.difference(label, ranked[0]) for label in ranked[1:]}
    return [replace(row, behind=behind.get(row.label)) for row in rows]


def in_order(results: Results) -> list[ArmResults]:
    """Arms in the order of the ranking."""
    arms = {arm.label: arm for arm in results.arms}
    return [arms[row.label] for row in ranking(results)]


def _row(results: Results, arm: ArmResults, found: Blocks, far: Blocks, tasks: Blocks) -> Row:
    def over(values: Mapping[int, float], among: Blocks) -> Summary | None:
        """On the compared seeds; on its own for an arm that is not compared."""
        seeds = among.units if arm.label in among.means else values
        return summarize([values[seed] for seed in seeds])

    losses, solved = arm.values(lambda run: run.val_loss), task_scores(results, arm)
    long, short = (
        arm.values(lambda run, n=n: run.loss_at(n or 0))  # type: ignore[misc]
        for n in (results.longest, results.train_length)
    )
    val_loss = over(losses, found)
    return Row(
        label=arm.label,
        losses=losses,
        val_loss=val_loss,
        behind=None,
        long_loss=over(long, far),
        growth=over({s: long[s] - short[s] for s in long}, far) if long.keys() <= short.keys() else None,
        solved=solved,
        tasks=over(solved, tasks),
        speed=summarize(list(arm.values(lambda run: run.tokens_per_second).values())),
        memory=summarize(list(arm.values(lambda run: run.peak_memory_bytes).values())),
        status=_status(arm, len(losses) - (val_loss.count if val_loss else 0)),
    )


def _status(arm: ArmResults, left_out: int) -> str:
    """Empty when every seed is there and compared."""
    runs, planned = len(arm.language), arm.planned  # planned: tasks too
    counts = [
        (arm.diverged, runs, "diverged"),
        (arm.diverged_probes, len(arm.probes), "on tasks diverged"),
        (arm.missing, planned, "not done"),
        (left_out, runs, "of a seed that others lack"),
    ]
    return ", ".join(f"{n} of {total} {what}" for n, total, what in counts if n)
