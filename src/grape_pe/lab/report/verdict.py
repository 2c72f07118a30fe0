"""The answer in plain words, from the numbers: who is best, by how much, and whether that may be luck."""

from __future__ import annotations

from dataclasses import dataclass

from .ranking import Row, ranking
from .results import Results
from .statistics import Summary, paired_difference


@dataclass(frozen=True)
class Verdict:
    """`headline` is one sentence; `details` say the rest; `tied` are the arms not separable from the best."""

    headline: str
    details: tuple[str, ...]
    best: str | None
    tied: tuple[str, ...]


def verdict(results: Results) -> Verdict:
    """What the comparison says about "which encoding should I use?"."""
    every = ranking(results)
    rows = [row for row in every if row.val_loss is not None]
    if not rows:
        return _task_verdict([row for row in every if row.tasks is not None])
    best, others = rows[0], rows[1:]
    if not others:
        return Verdict(
            f"Only {best.label} has finished: validation loss {_pm(best.val_loss)}.",
            tuple(_details(results, rows)),
            best.label,
            (),
        )
    tied = tuple(row.label for row in others if not _separated(best, row, len(others)))
    return Verdict(_headline(rows, tied), tuple(_details(results, rows)), best.label, tied)


def _task_verdict(rows: list[Row]) -> Verdict:
    """Without text to model, the tasks decide."""
    if not rows:
        return Verdict("There is no finished run yet, so there is nothing to rank.", (), None, ())
    best, others = rows[0], rows[1:]
    lead = f"{best.label} solves most of the tasks, {_percent(best.tasks)} exactly"
    gaps = {row.label: paired_difference(best.solved, row.solved, len(others)) for row in others}
    tied = tuple(label for label, gap in gaps.items() if gap is None or not gap.excludes_zero)
    if not others:
        said = f"{lead}."
    elif all(len(row.solved) == 1 for row in rows):
        said = f"{lead}. With one seed for each encoding there is no telling whether that is luck."
    elif tied:
        said = f"{lead}, but {_listed(tied)} cannot be told apart from it beyond the spread of the seeds."
    else:
        said = f"{lead}, beyond the spread of the seeds against every other."
    return Verdict(said, (), best.label, tied)


def _separated(best: Row, other: Row, comparisons: int) -> bool:
    """Whether `other` is behind beyond doubt: the interval of the paired difference, widened for the number
    of comparisons because the best one was picked after seeing them, does not reach zero."""
    apart = paired_difference(other.losses, best.losses, comparisons)
    return apart is not None and apart.excludes_zero


def _headline(rows: list[Row], tied: tuple[str, ...]) -> str:
    best, second = rows[0], rows[1]
    gap = paired_difference(second.losses, best.losses)
    lead = f"{best.label} has the lowest validation loss, {_pm(best.val_loss)}"
    if gap is None or gap.low is None:
        return f"{lead}. With one seed for each encoding there is no telling whether that is luck."
    if not tied:
        return (
            f"Use {best.label}: its validation loss, {_pm(best.val_loss)}, is the lowest, beyond the spread "
            f"of the seeds against {'the other' if len(rows) == 2 else 'every other'}."
        )
    if second.label not in tied:
        return f"{lead}; its lead over {second.label}, the next, is beyond the spread of the seeds."
    if gap.excludes_zero:
        return (
            f"{lead}. Against {second.label} alone that is beyond the spread, but the best of {len(rows)} is "
            "always a little lucky: more seeds would tell."
        )
    return f"{lead}, but {_listed(tied)} cannot be told apart from it: the differences are within the spread."


def _details(results: Results, rows: list[Row]) -> list[str]:
    said = [_gap_sentence(rows), _long_sentence(results, rows), _task_sentence(rows), _cost_sentence(rows)]
    return [sentence for sentence in [*said, _scale_sentence(results, rows)] if sentence]


def _gap_sentence(rows: list[Row]) -> str:
    if len(rows) < 2:
        return ""
    best, second = rows[0], rows[1]
    gap = paired_difference(second.losses, best.losses)
    if gap is None:
        return f"{second.label} comes next; it shares no seed with {best.label}, so they cannot be paired."
    percent = 100 * gap.mean / best.val_loss.mean if best.val_loss and best.val_loss.mean else 0.0
    said = f"{second.label} comes next, {gap.mean:.4f} behind ({percent:.1f}%)"
    if gap.low is None or gap.high is None:
        return f"{said}; one seed gives no interval."
    return f"{said}; 95% interval of the difference, paired by seed: {gap.low:+.4f} to {gap.high:+.4f}."


def _long_sentence(results: Results, rows: list[Row]) -> str:
    known = [row for row in rows if row.long_loss is not None and row.growth is not None]
    if not known:
        return ""
    best = min(known, key=lambda row: row.long_loss.mean if row.long_loss else 0.0)
    worst = max(known, key=lambda row: row.growth.mean if row.growth else 0.0)
    said = f"At {results.stretch} the training length {best.label} is best, {_pm(best.long_loss)}"
    if worst.label != best.label and worst.growth and worst.growth.mean >= 0.01:
        said += f"; {worst.label} loses most there, {worst.growth.mean:+.2f} against its own 1×"
    return said + "."


def _task_sentence(rows: list[Row]) -> str:
    known = [row for row in rows if row.tasks is not None]
    if len(known) < 2:
        return ""
    order = sorted(known, key=lambda row: -(row.tasks.mean if row.tasks else 0.0))
    first, last = order[0], order[-1]
    return (
        f"On the tasks, averaged, {first.label} solves most ({_percent(first.tasks)} exact), "
        f"{last.label} least ({_percent(last.tasks)})."
    )


def _cost_sentence(rows: list[Row]) -> str:
    known = [row for row in rows if row.speed is not None]
    if len(known) < 2 or rows[0].speed is None:
        return ""
    fastest = max(known, key=lambda row: row.speed.mean if row.speed else 0.0)
    assert fastest.speed is not None
    if fastest.label == rows[0].label:
        return f"{fastest.label} also trains fastest, {fastest.speed.mean:,.0f} tokens a second."
    slower = 100 * (1 - rows[0].speed.mean / fastest.speed.mean)
    return f"{rows[0].label} trains {slower:.0f}% slower than {fastest.label}, the fastest."


def _scale_sentence(results: Results, rows: list[Row]) -> str:
    seeds = sorted({row.val_loss.count for row in rows if row.val_loss})
    counts = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    sizes = [run.parameters for arm in results.arms for run in arm.language.values() if run.parameters]
    size = f"models of {_short(max(sizes))} parameters, " if sizes else ""
    steps = results.recipes[0].settings.get("train.steps")
    trained = f"{steps:,} steps, " if isinstance(steps, int) else ""
    plural = "seed" if counts == "1" else "seeds"
    return f"The evidence: {size}{trained}{counts} {plural} each. Larger models may order differently."


def _pm(summary: Summary | None) -> str:
    if summary is None:
        return "unknown"
    return f"{summary.mean:.4f}" + ("" if summary.spread is None else f" ± {summary.spread:.4f}")


def _percent(summary: Summary | None) -> str:
    return "unknown" if summary is None else f"{100 * summary.mean:.0f}%"


def _listed(names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return names[0]
    shown = list(names[:4]) + ([f"{len(names) - 4} more"] if len(names) > 4 else [])
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _short(count: float) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:.0f}"
