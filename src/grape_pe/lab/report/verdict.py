"""The answer in plain words, from the numbers: who is best, by how much, and whether that may be chance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .ranking import (
    Row,
    budget_blocks,
    length_blocks,
    loss_blocks,
    ranking,
    scored_by,
    task_blocks,
    text_blocks,
    trend_blocks,
)
from .results import Results
from .statistics import Blocks, Summary
from .tables import SCORED, interval, short_count, sweeps, trend_word

#: tokens a parameter below which a warning is given
ENOUGH = 8
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
        alone = "Only one encoding can be ranked" if len(every) > 1 else "One encoding"
        return Verdict(
            f"{alone}: {best.label}, validation loss {_pm(best.val_loss)}.", details, best.label, ()
        )
    tied = tuple(row.label for row in others if not found.apart(row.label, best.label))
    lead = _lead_sentence(results, best.label, others[0].label)
    return Verdict(" ".join(filter(None, (_headline(rows, tied, found), lead))), details, best.label, tied)


def _nothing_comparable(results: Results) -> str:
    if all(arm.diverged for arm in results.arms):
        return "Every encoding has a run that diverged, so there is nothing to rank."
    return "The encodings share no seed, so their losses cannot be compared."


def _task_verdict(results: Results, rows: list[Row]) -> Verdict:
    """Without text to model, the tasks decide."""
    if not rows:
        return Verdict("There is no finished run yet, so there is nothing to rank.", (), None, ())
    best, others, found = rows[0], rows[1:], task_blocks(results)
    lead = f"{best.label} scores highest on the tasks, {_percent(best.tasks)} ({_scores_named(results)})"
    known = found.means.keys() >= {row.label for row in rows}
    tied = tuple(row.label for row in others if not known or not found.apart(row.label, best.label))
    if not others:
        said = f"{lead}."
    elif len(found.units) < 2:
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
        return f"{lead}, beyond chance against {against}."
    seeds = len(found.units)
    return (
        f"{lead}, but {_listed(tied)} cannot be told apart from it: with {seeds} seeds a difference below "
        f"{found.margin:.4f} may be chance."
    )


def _scores_named(results: Results) -> str:
    kinds = dict.fromkeys(scored_by(results, task) for task in results.tasks)
    return " or ".join(SCORED[kind] for kind in kinds)


def _details(results: Results, rows: list[Row], found: Blocks) -> list[str]:
    sentences = [_gap_sentence(rows, found), _behind_sentence(rows, found), *_missing_sentences(results)]
    sentences += [_noisy_sentence(found), *_trend_sentences(results), _sweep_sentence(results)]
    sentences += [*_long_sentences(results, rows), _task_sentence(results, rows), _cost_sentence(rows)]
    return [sentence for sentence in (*sentences, _scale_sentence(results, rows)) if sentence]


def _lead_sentence(results: Results, best: str, second: str) -> str:
    """The lead over the next arm at the last budget and at the first, and whether it closes."""
    found, trend = budget_blocks(results), trend_blocks(results)
    if not {best, second} <= trend.means.keys():
        return ""
    (first, early), *_, (last, late) = found.items()
    change = trend.difference(second, best)
    now, before = (each.difference(second, best).mean for each in (late, early))
    if now < 0:
        return ""
    lead = f"It leads {second} by {now:.2g} at {short_count(last)} tokens; "
    if before >= 0:
        lead += f"the lead was {before:.2g} at {short_count(first)}"
    else:
        lead += f"at {short_count(first)} it was {-before:.2g} behind"
    word = trend_word(change)
    if word in ("closing", "opening"):
        return f"{lead} and is {word}." if before >= 0 else f"{lead}, a change beyond chance."
    return f"{lead}, {'and one seed does not say whether that is chance' if word == 'one seed' else word}."


def _trend_sentences(results: Results) -> list[str]:
    """Which arms come nearer to the best with more tokens, and which fall back."""
    found, trend = budget_blocks(results), trend_blocks(results)
    if len(trend.means) < 2 or trend.margin is None:
        return []
    budgets = list(found)
    best = found[budgets[-1]].best
    span = f"from {short_count(budgets[0])} to {short_count(budgets[-1])} tokens"
    out = []
    for text, word in (("comes nearer to", "closing"), ("falls further behind", "opening")):
        others = [label for label in trend.means if label != best]
        moved = [label for label in others if trend_word(trend.difference(label, best)) == word]
        out += (
            [f"{_listed(tuple(moved))} {_plural(text, moved)} {best} {span}, beyond chance."] if moved else []
        )
    out = out or [
        f"No gap to {best} changes beyond chance {span}: a change below {trend.margin:.3f} may be chance."
    ]
    if (first := found[budgets[0]].best) != best:
        out.append(
            f"At {short_count(budgets[0])} tokens {first} was lowest: the order depends on the budget."
        )
    lost = [n for n in loss_blocks(results).means if n not in trend.means]
    if lost:
        out.append(
            f"{_listed(tuple(lost))}: no loss at {short_count(budgets[0])} tokens in all seeds, so no change."
        )
    return out


def _plural(text: str, names: list[str]) -> str:
    return text if len(names) == 1 else text.replace("comes", "come").replace("falls", "fall")


def _sweep_sentence(results: Results) -> str:
    edge = tuple(each.label for each in sweeps(results) if each.at_edge)
    return (
        f"The best learning rate is at the edge of the sweep for {_listed(edge)}: a rate beyond it may be better."
        if edge
        else ""
    )


def _gap_sentence(rows: list[Row], found: Blocks) -> str:
    if len(rows) < 2:
        return ""
    best, second = rows[0], rows[1]
    gap = found.difference(second.label, best.label)
    percent = 100 * gap.mean / found.means[best.label] if found.means[best.label] else 0.0
    said = f"{second.label} comes next, {gap.mean:.4f} behind ({percent:.1f}%)"
    if gap.low is None:
        return f"{said}; one seed gives no interval."
    return f"{said}; its 95% interval, simultaneous with those of all pairs: {interval(gap, 4)}."


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
        if arm.diverged:
            out.append(f"{arm.label} diverged in {arm.diverged} of {total} runs, so it is not ranked.")
        if arm.missing:
            out.append(
                f"{arm.label} has {arm.missing} of {total} runs not done; arms are compared on shared seeds."
            )
    return out


def _noisy_sentence(found: Blocks) -> str:
    if not found.noisy:
        return ""
    more = "vary" if len(found.noisy) > 1 else "varies"
    return f"{_listed(found.noisy)} {more} more between seeds than the others; its interval is too narrow."


def _long_sentences(results: Results, rows: list[Row]) -> list[str]:
    """The best at the longest length, who cannot be told from it, and who loses most."""
    seeds = length_blocks(results, results.longest or 0)
    if not seeds.means or results.longest == results.train_length:
        return []
    text, best, far = text_blocks(results, results.longest or 0), seeds.best, results.times(results.longest)
    others = [label for label in seeds.means if label != best]
    said = f"At {far} the training length {best} is lowest, {seeds.means[best]:.4f}"
    tests = {"seeds": seeds} | ({"text": text} if best in text.means else {})
    if others and seeds.margin is not None:
        tied = tuple(n for n in others if not all(n in t.means and t.apart(n, best) for t in tests.values()))
        over = f"95% intervals over {' and over '.join(tests)}"
        said += (
            f"; not told apart from it by {over}: {_listed(tied)}"
            if tied
            else f", apart from every other by {over}"
        )
    worst = max((row for row in rows if row.growth), key=_of(lambda row: row.growth), default=None)
    if worst and worst.growth and worst.label != best and worst.growth.mean >= 0.01:
        said += f"; {worst.label} loses most there, {worst.growth.mean:+.2f} against its own 1×"
    return [f"{said}."]


def _of(summary: Callable[[Row], Summary | None]) -> Callable[[Row], float]:
    return lambda row: found.mean if (found := summary(row)) else 0.0


def _task_sentence(results: Results, rows: list[Row]) -> str:
    known = [row for row in rows if row.tasks is not None]
    if len(known) < 2:
        return ""
    order = sorted(known, key=_of(lambda row: row.tasks))
    first, last = order[-1], order[0]
    found = task_blocks(results)
    chance = found.margin is None or not found.apart(first.label, last.label)
    end = "; that may be chance" if chance else ", beyond chance"
    return (
        f"On the tasks, averaged, {first.label} scores highest ({_percent(first.tasks)}, {_scores_named(results)}), "
        f"{last.label} lowest ({_percent(last.tasks)}){end}."
    )


def _cost_sentence(rows: list[Row]) -> str:
    known = [row for row in rows if row.speed is not None]
    if len(known) < 2 or rows[0].speed is None:
        return ""
    fastest = max(known, key=_of(lambda row: row.speed))
    assert fastest.speed is not None
    if fastest.label == rows[0].label:
        return f"{fastest.label} also trains fastest, {fastest.speed.mean:,.0f} tokens a second."
    slower = 100 * (1 - rows[0].speed.mean / fastest.speed.mean)
    return f"{rows[0].label} trains {slower:.0f}% slower than {fastest.label}, the fastest."


def _scale_sentence(results: Results, rows: list[Row]) -> str:
    seeds = sorted({row.val_loss.count for row in rows if row.val_loss})
    counts = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    size = max((run.parameters for run in results.evaluations if run.parameters), default=None)
    tokens = _tokens(results)
    parts = [f"models of {short_count(size)} parameters" if size else ""]
    parts += [f"{short_count(tokens)} tokens" if tokens else ""]
    parts += [f"{counts} {'seed' if counts == '1' else 'seeds'} each"]
    evidence = f"The evidence: {', '.join(filter(None, parts))}."
    if len(rows) < 2:
        return evidence
    if size and tokens and tokens < ENOUGH * size:
        evidence += (
            f" That is {tokens / size:.2g} tokens a parameter: the order may only show how each begins."
        )
    return f"{evidence} Larger models may order differently."


def _tokens(results: Results) -> float | None:
    """Tokens of the longest training: of the last budget, or by the recipe."""
    known = max((each.tokens for run in results.evaluations for each in run.budgets), default=None)
    settings = results.recipes[0].settings
    sizes = [settings.get(name, 0) for name in ("train.steps", "train.batch", "data.sequence")]
    return known or math.prod(sizes) or None


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
