"""The answer in plain words, from the numbers: who is best, by how much, and whether that may be chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .cells import interval, number, short_count
from .ranking import (
    Row,
    budget_blocks,
    compared_tasks,
    length_blocks,
    loss_blocks,
    ranking,
    scored_by,
    speed_blocks,
    task_blocks,
    text_blocks,
    trend_blocks,
)
from .results import Results
from .statistics import Blocks
from .tables import EDGE, SCORED, sweeps, trend_word

#: tokens a parameter below which a warning is given
ENOUGH = 8
ONE_SEED = "With one seed for each encoding this may be chance."


@dataclass(frozen=True)
class Verdict:
    """`headline` is one sentence; `details` say the rest; `tied` are the arms not separable from the best."""

    headline: str
    details: tuple[str, ...]
    best: str | None
    tied: tuple[str, ...]


def verdict(results: Results) -> Verdict:
    """What the comparison says about "which encoding should I use?".

    Args:
        results: from `read_results`.
    """
    every, found = ranking(results), loss_blocks(results)
    rows = [row for row in every if row.label in found.means]
    if not any(row.losses for row in every):
        return _task_verdict(results, every)
    if not rows:
        return Verdict(_nothing_comparable(results), tuple(_missing_sentences(results)), None, ())
    best, others = rows[0], rows[1:]
    details = tuple(_details(results, rows, found))
    if not others:
        alone = "Only one encoding can be ranked" if len(every) > 1 else "One encoding"
        headline = f"{alone}: {best.label}, validation loss {number(best.val_loss, 4)}."
        return Verdict(headline, details, best.label, ())
    tied = tuple(row.label for row in others if not found.apart(row.label, best.label))
    lead = _lead_sentence(results, best.label, others[0].label)
    return Verdict(" ".join(filter(None, (_headline(rows, tied, found), lead))), details, best.label, tied)


def _nothing_comparable(results: Results) -> str:
    if all(arm.diverged or arm.diverged_probes for arm in results.arms):
        return "Every encoding has a run that diverged, so there is nothing to rank."
    return "The encodings share no seed (or no task), so they cannot be compared."


def _task_verdict(results: Results, every: list[Row]) -> Verdict:
    """Without text to model, the tasks decide."""
    details, found = tuple(_missing_sentences(results)), task_blocks(results)
    rows = [row for row in every if row.label in found.means]
    if not rows or rows[0].tasks is None:
        begun = any(each for arm in results.arms for each in arm.probes.values())
        none = "There is no finished run yet, so there is nothing to rank."
        return Verdict(_nothing_comparable(results) if begun else none, details, None, ())
    best, others = rows[0].label, [row.label for row in rows[1:]]
    tied = tuple(label for label in others if not found.apart(label, best))
    end = ", beyond chance against every other." if others else "."
    if others and len(found.units) < 2:
        end = f". {ONE_SEED}"
    elif tied:
        end = f", but {_listed(tied)} cannot be told apart from it: the difference may be chance."
    lead = f"{best} scores highest on the tasks, {rows[0].tasks.mean:.0%} ({_scores_named(results)})"
    return Verdict(lead + end, details, best, tied)


def _headline(rows: list[Row], tied: tuple[str, ...], found: Blocks) -> str:
    lead = f"{rows[0].label} has the lowest validation loss, {number(rows[0].val_loss, 4)}"
    if found.margin is None:
        return f"{lead}. {ONE_SEED}"
    if not tied:
        return f"{lead}, beyond chance against {rows[1].label if len(rows) == 2 else 'every other'}."
    return (
        f"{lead}, but {_listed(tied)} cannot be told apart from it: with {len(found.units)} seeds a difference "
        f"below {found.margin:.4f} may be chance."
    )


def _scores_named(results: Results) -> str:
    tasks = compared_tasks(results)
    kinds = " or ".join(dict.fromkeys(SCORED[scored_by(results, task)] for task in tasks))
    return kinds if len(tasks) == len(results.tasks) else f"{kinds}; of {', '.join(tasks)} only"


def _details(results: Results, rows: list[Row], found: Blocks) -> list[str]:
    edge = [each.label for each in sweeps(results) if each.at_edge]
    sentences = [
        *_missing_sentences(results),
        _gap_sentence(rows, found),
        _behind_sentence(rows, found),
        _noisy_sentence(found),
        *_trend_sentences(results),
        EDGE.format("learning ", _listed(edge)) if edge else "",
        _long_sentence(results, rows),
        _task_sentence(results, rows),
        _cost_sentence(results, rows[0].label),
        _scale_sentence(results, rows),
    ]
    return [sentence for sentence in sentences if sentence]


def _lead_sentence(results: Results, best: str, second: str) -> str:
    """The lead over the next arm at the last budget and at the first, and whether it closes."""
    found, trend = budget_blocks(results), trend_blocks(results)
    if not {best, second} <= trend.means.keys():
        return ""
    (first, early), *_, (last, late) = found.items()
    now, before = (each.difference(second, best).mean for each in (late, early))
    if now < 0:
        return ""
    word = trend_word(trend.difference(second, best))
    end = {"one seed": ", and one seed does not say whether that is chance"}.get(word, f", {word}")
    if word in ("closing", "opening"):
        end = f" and is {word}" if before >= 0 else ", a change beyond chance"
    start = short_count(first)
    was = (
        f"the lead was {before:.2g} at {start}" if before >= 0 else f"at {start} it was {-before:.2g} behind"
    )
    return f"It leads {second} by {now:.2g} at {short_count(last)} tokens; {was}{end}."


def _trend_sentences(results: Results) -> list[str]:
    """Which arms come nearer to the best with more tokens, and which fall back."""
    found, trend = budget_blocks(results), trend_blocks(results)
    if len(trend.means) < 2 or trend.margin is None:
        return []
    (first, early), *_, (last, late) = found.items()
    best, start = late.best, f"{short_count(first)} tokens"
    span = f"from {short_count(first)} to {short_count(last)} tokens"
    words = {n: trend_word(trend.difference(n, best)) for n in trend.means if n != best}
    out = []
    for word, one, several in (
        ("closing", "comes nearer to", "come nearer to"),
        ("opening", "falls further behind", "fall further behind"),
    ):
        if moved := [label for label in words if words[label] == word]:
            out.append(
                f"{_listed(moved)} {one if len(moved) == 1 else several} {best} {span}, beyond chance."
            )
    if not out:
        chance = f"a change below {trend.margin:.3f} may be chance"
        out.append(f"No gap to {best} changes beyond chance {span}: {chance}.")
    if early.best != best:
        out.append(f"At {start} {early.best} was lowest: the order depends on the budget.")
    if lost := [label for label in loss_blocks(results).means if label not in trend.means]:
        out.append(f"{_listed(lost)}: no loss at {start} in all seeds, so no change.")
    return out


def _gap_sentence(rows: list[Row], found: Blocks) -> str:
    if len(rows) < 2:
        return ""
    best, second = rows[0], rows[1]
    gap = found.difference(second.label, best.label)
    percent = 100 * gap.mean / found.means[best.label] if found.means[best.label] else 0.0
    answer = f"{second.label} comes next, {gap.mean:.4f} behind ({percent:.1f}%)"
    if gap.low is None:
        return f"{answer}; one seed gives no interval."
    return f"{answer}; its 95% interval, simultaneous with those of all pairs: {interval(gap, 4)}."


def _behind_sentence(rows: list[Row], found: Blocks) -> str:
    """Which arms are behind the best, where some are and some are not."""
    best, others = rows[0].label, [row.label for row in rows[1:]]
    behind = tuple(label for label in others if found.apart(label, best))
    return f"Behind it beyond chance: {_listed(behind)}." if 0 < len(behind) < len(others) else ""


def _missing_sentences(results: Results) -> list[str]:
    """Runs that are not done or diverged, by name: they are part of the answer."""
    planned = sum(arm.planned for arm in results.arms)
    waiting = {arm.label: arm.missing for arm in results.arms if arm.missing}
    out = []
    if waiting:
        named = ", ".join(f"{label} {count}" for label, count in waiting.items())
        if len(waiting) == len(results.arms) > 1 and len(set(waiting.values())) == 1:
            named = f"{next(iter(waiting.values()))} of each encoding"
        out.append(
            f"{planned - sum(waiting.values())} of {planned} runs done; not done: {named}. "
            "Arms are compared on the seeds that all of those with results have."
        )
    text = [(arm.label, arm.diverged, len(arm.language), "", "") for arm in results.arms]
    tasks = [(arm.label, arm.diverged_probes, len(arm.probes), " on tasks", " there") for arm in results.arms]
    return out + [
        f"{label} diverged in {count} of {runs} runs{where}, so it is not ranked{there}."
        for label, count, runs, where, there in (*text, *tasks)
        if count
    ]


def _noisy_sentence(found: Blocks) -> str:
    if not found.noisy:
        return ""
    more = "vary" if len(found.noisy) > 1 else "varies"
    return (
        f"{_listed(found.noisy)} {more} more between seeds than the others: differences to it are judged by its own "
        "runs, with wide intervals."
    )


def _long_sentence(results: Results, rows: list[Row]) -> str:
    """The best at the longest length, who cannot be told from it, and who loses most."""
    length = results.longest or 0
    seeds, text = length_blocks(results, length), text_blocks(results, length)
    if not seeds.means or results.longest == results.train_length:
        return ""
    best, *others = seeds.order
    answer = f"At {results.times(length)} the training length {best} is lowest, {seeds.means[best]:.4f}"
    tests = {"seeds": seeds} | ({"text": text} if best in text.means else {})
    if others and seeds.margin is not None:
        tied = [
            label for label in seeds.means
            if label != best and not all(label in t.means and t.apart(label, best) for t in tests.values())
        ]  # fmt: skip
        over = f"95% intervals over {' and over '.join(tests)}"
        apart = f", apart from every other by {over}"
        answer += f"; not told apart from it by {over}: {_listed(tied)}" if tied else apart
    growth = {row.label: row.growth.mean for row in rows if row.growth}
    worst = max(growth, key=lambda label: growth[label], default=best)
    if worst != best and growth[worst] >= 0.01:
        answer += f"; {worst} loses most there, {growth[worst]:+.2f} against its own 1×"
    return f"{answer}."


def _task_sentence(results: Results, rows: list[Row]) -> str:
    found = task_blocks(results)
    known = {row.label: row.tasks.mean for row in rows if row.tasks and row.label in found.means}
    if len(known) < 2:
        return ""
    last, *_, first = sorted(known, key=lambda label: known[label])
    beyond = found.margin is not None and found.apart(first, last)
    end = ", beyond chance" if beyond else "; that may be chance"
    return (
        f"On the tasks, averaged, {first} scores highest ({known[first]:.0%}, {_scores_named(results)}), "
        f"{last} lowest ({known[last]:.0%}){end}."
    )


def _cost_sentence(results: Results, best: str) -> str:
    """Speeds are those of the whole run, with whatever else the machine did: claimed only beyond that noise."""
    found = speed_blocks(results)
    if found.margin is None or best not in found.means:
        return ""
    fastest = found.order[-1]
    if fastest == best or not found.apart(best, fastest):
        return (
            f"No encoding trains faster than {best} beyond chance; grape bench train times them side by side."
        )
    slower = 1 - math.exp(found.means[best] - found.means[fastest])
    return f"{best} trains {slower:.0%} slower than {fastest}, the fastest."


def _scale_sentence(results: Results, rows: list[Row]) -> str:
    counts = {row.val_loss.count for row in rows if row.val_loss}
    seeds = " to ".join(map(str, sorted({min(counts), max(counts)})))
    size = max((run.parameters for run in results.evaluations if run.parameters), default=None)
    tokens = _tokens(results)
    parts = [f"models of {short_count(size)} parameters"] if size else []
    parts += [f"{short_count(tokens)} tokens"] if tokens else []
    parts += [f"{seeds} {'seed' if seeds == '1' else 'seeds'} each"]
    evidence = f"The evidence: {', '.join(parts)}."
    if len(rows) < 2:
        return evidence
    if size and tokens and tokens < ENOUGH * size:
        few = f"{tokens / size:.2g} tokens a parameter"
        evidence += f" That is {few}: the order may only show how each begins."
    return f"{evidence} Larger models may order differently."


def _tokens(results: Results) -> float | None:
    """Tokens of the longest training: of the last budget, or by the recipe."""
    known = max((each.tokens for run in results.evaluations for each in run.budgets), default=None)
    settings = results.recipes[0].settings
    sizes = [settings.get(name, 0) for name in ("train.steps", "train.batch", "data.sequence")]
    return known or math.prod(sizes) or None


def _listed(names: Sequence[str]) -> str:
    """a, b and c; from the sixth on the others are counted."""
    if len(names) == 1:
        return names[0]
    shown = list(names[:4]) + ([f"{len(names) - 4} more"] if len(names) > 4 else [])
    return f"{', '.join(shown[:-1])} and {shown[-1]}"
