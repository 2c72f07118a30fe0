"""The answer in plain words, from the numbers: who is best, by how much, and whether that may be chance."""

from __future__ import annotations

from dataclasses import dataclass

from .ranking import Row, loss_blocks, ranking, task_blocks
from .results import Results
from .statistics import Blocks, Summary

ONE_SEED = "With one seed for each encoding there is no telling whether that is chance."


@dataclass(frozen=True)
class Verdict:
    """`headline` is one sentence; `details` say the rest; `tied` are the arms not separable from the best."""

    headline: str
    details: tuple[str, ...]
    best: str | None
    tied: tuple[str, ...]


def verdict(results: Results) -> Verdict:
    """What the comparison says about "which encoding should I use?"."""
    every, found = ranking(results), loss_blocks(results)
    rows = [row for row in every if row.label in found.means]
    if not any(row.losses for row in every):
        return _task_verdict(results, [row for row in every if row.tasks is not None])
    if not rows:
        return Verdict(_nothing_comparable(results), tuple(_missing_sentences(results)), None, ())
    best, others = rows[0], rows[1:]
    details = tuple(_details(results, rows, found))
    if not others:
        said = f"Only {best.label} can be ranked: validation loss {_pm(best.val_loss)}."
        return Verdict(said, details, best.label, ())
    tied = tuple(row.label for row in others if not found.apart(row.label, best.label))
    return Verdict(_headline(rows, tied, found), details, best.label, tied)


def _nothing_comparable(results: Results) -> str:
    if all(any(run.diverged for run in arm.language.values()) for arm in results.arms):
        return "Every encoding has a run that diverged, so there is nothing to rank."
    return "The encodings share no seed, so their losses cannot be compared."


def _task_verdict(results: Results, rows: list[Row]) -> Verdict:
    """Without text to model, the tasks decide."""
    if not rows:
        return Verdict("There is no finished run yet, so there is nothing to rank.", (), None, ())
    best, others, found = rows[0], rows[1:], task_blocks(results)
    lead = f"{best.label} solves most of the tasks, {_percent(best.tasks)} exactly"
    known = found.means.keys() >= {row.label for row in rows}
    tied = tuple(row.label for row in others if not known or not found.apart(row.label, best.label))
    if not others:
        said = f"{lead}."
    elif len(found.seeds) < 2:
        said = f"{lead}. {ONE_SEED}"
    elif tied:
        said = f"{lead}, but {_listed(tied)} cannot be told apart from it: the difference may be chance."
    else:
        said = f"{lead}, beyond chance against every other."
    return Verdict(said, (), best.label, tied)


def _headline(rows: list[Row], tied: tuple[str, ...], found: Blocks) -> str:
    best, second = rows[0], rows[1]
    lead = f"{best.label} has the lowest validation loss, {_pm(best.val_loss)}"
    if found.margin is None:
        return f"{lead}. {ONE_SEED}"
    if not tied:
        against = second.label if len(rows) == 2 else "every other"
        return (
            f"Use {best.label}: its validation loss, {_pm(best.val_loss)}, is the lowest, beyond chance "
            f"against {against}."
        )
    seeds = len(found.seeds)
    return (
        f"{lead}, but {_listed(tied)} cannot be told apart from it: with {seeds} seeds a difference below "
        f"{found.margin:.4f} may be chance."
    )


def _details(results: Results, rows: list[Row], found: Blocks) -> list[str]:
    said = [_gap_sentence(rows, found), _behind_sentence(rows, found), *_missing_sentences(results)]
    said += [_noisy_sentence(found), _long_sentence(results, rows), _task_sentence(rows)]
    said += [_cost_sentence(rows), _scale_sentence(results, rows)]
    return [sentence for sentence in said if sentence]


def _gap_sentence(rows: list[Row], found: Blocks) -> str:
    if len(rows) < 2:
        return ""
    best, second = rows[0], rows[1]
    gap = found.difference(second.label, best.label)
    percent = 100 * gap.mean / found.means[best.label] if found.means[best.label] else 0.0
    said = f"{second.label} comes next, {gap.mean:.4f} behind ({percent:.1f}%)"
    if gap.low is None or gap.high is None:
        return f"{said}; one seed gives no interval."
    return (
        f"{said}; its 95% interval, simultaneous with those of all pairs: {gap.low:+.4f} to {gap.high:+.4f}."
    )


def _behind_sentence(rows: list[Row], found: Blocks) -> str:
    """Which arms are behind the best, where some are and some are not."""
    best, others = rows[0].label, [row.label for row in rows[1:]]
    behind = tuple(label for label in others if found.apart(label, best))
    return f"Behind it beyond chance: {_listed(behind)}." if 0 < len(behind) < len(others) else ""


def _missing_sentences(results: Results) -> list[str]:
    """Runs that diverged or are not done, by name: they are part of the answer."""
    out = []
    for arm in results.arms:
        total = len(arm.language)
        diverged = sum(run.diverged for run in arm.language.values())
        missing = sum(not run.evaluated for run in arm.language.values())
        if diverged:
            out.append(f"{arm.label} diverged in {diverged} of {total} runs, so it is not ranked.")
        if missing:
            out.append(
                f"{arm.label} has {missing} of {total} runs not done; arms are compared on shared seeds."
            )
    return out


def _noisy_sentence(found: Blocks) -> str:
    if not found.noisy:
        return ""
    more = "vary" if len(found.noisy) > 1 else "varies"
    return f"{_listed(found.noisy)} {more} more between seeds than the others; its interval is too narrow."


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
