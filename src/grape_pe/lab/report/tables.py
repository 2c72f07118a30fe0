"""The tables of a report, each built once and written as text, Markdown or HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..evaluate.benchmarks import METRICS, PAPER_TASKS
from .ranking import (
    budget_blocks,
    diverged_at,
    length_blocks,
    ranking,
    scored_by,
    text_blocks,
    trend_blocks,
)
from .results import Results
from .statistics import Blocks, Summary

MEGABYTE = 2**20
WIDTH = 100
SCORED = {"exact": "samples solved exactly", "token": "tokens of answers that are right"}


@dataclass(frozen=True)
class Cell:
    """What a cell shows; `small` is an interval. `value` is what the page sorts by."""

    text: str = ""
    small: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Table:
    """Rows by the label of an arm or model; columns without any value are left out."""

    key: str
    title: str
    caption: str
    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    notes: Sequence[str] = ()

    def filled(self) -> Table:
        kept = [i for i in range(len(self.heads)) if any(cells[i].text for _, cells in self.rows)]
        rows = [(label, [cells[i] for i in kept]) for label, cells in self.rows]
        return replace(self, heads=[self.heads[i] for i in kept], rows=rows)

    def text(self) -> str:
        """Long labels are cut to keep within 100 columns, where the rest leaves room for them."""
        columns = [["encoding", *(label for label, _ in self.rows)]]
        for i, head in enumerate(self.heads):
            columns.append([head, *(_joined(cells[i]) or "-" for _, cells in self.rows)])
        widths = [max(map(len, column)) for column in columns]
        room = WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1)
        widths[0] = min(widths[0], room) if room >= 8 else widths[0]
        lines = []
        for first, *rest in zip(*columns, strict=True):
            cut = first if len(first) <= widths[0] else f"{first[: widths[0] - 1]}…"
            cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
            lines.append("  ".join([cut.ljust(widths[0]), *cells]).rstrip())
        return "\n".join([*lines, *self.notes])

    def markdown(self) -> str:
        lines = [["encoding", *self.heads], ["---"] * (len(self.heads) + 1)]
        lines += [[f"`{label}`", *(_joined(cell) or "–" for cell in cells)] for label, cells in self.rows]
        rows = ["| " + " | ".join(each.replace("|", "\\|") for each in line) + " |" for line in lines]
        return "\n".join([*rows, *(f"\n{note}" for note in (self.caption, *self.notes) if note)])


def _joined(cell: Cell) -> str:
    return f"{cell.text} ({cell.small})" if cell.small else cell.text


def tables(results: Results) -> list[Table]:
    """Every table that has rows."""
    made = [ranking_table(results), budget_table(results), length_table(results), far_table(results)]
    made += [sweep_table(results), lm_table(results)]
    return [table.filled() for table in made if table.rows and table.heads]


def number(summary: Summary | None, digits: int, scale: float = 1.0, unit: str = "") -> Cell:
    """mean ± standard deviation over seeds."""
    if summary is None:
        return Cell()
    spread = "" if summary.spread is None else f"{summary.spread * scale:,.{digits}f}"
    spread = f" ± {spread}" if spread.strip("0.") else ""
    return Cell(f"{summary.mean * scale:,.{digits}f}{spread}{unit}", "", summary.mean)


def difference(gap: Summary | None, digits: int = 3) -> Cell:
    """A paired difference and its interval."""
    return Cell() if gap is None else Cell(f"{gap.mean:+.{digits}f}", interval(gap, digits), gap.mean)


def interval(gap: Summary, digits: int = 3) -> str:
    if gap.low is None or gap.high is None:
        return ""
    return f"{gap.low:+.{digits}f} … {gap.high:+.{digits}f}"


def short_count(count: float) -> str:
    """8M, 512k."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:.0f}"


def ranking_table(results: Results) -> Table:
    rows = ranking(results)
    heads = [
        "val loss",
        "behind the best",
        f"at {results.times(results.longest)}",
        "tasks",
        "tok/s",
        "memory",
        "seeds",
    ]
    cells = [
        (row.label, [
            number(row.val_loss, 4), difference(row.behind), number(row.long_loss, 3),
            number(row.tasks and replace(row.tasks, spread=None), 1, 100, "%"),
            number(row.speed and replace(row.speed, spread=None), 0),
            number(row.memory and replace(row.memory, spread=None), 0, 1 / MEGABYTE, " MB"),
            Cell(str(len(row.losses) or len(row.solved)), "", len(row.losses) or len(row.solved)),
        ])
        for row in rows
    ]  # fmt: skip
    if rows and rows[0].val_loss and len(rows) > 1:
        cells[0][1][1] = Cell("best", "", 0.0)
    notes = [f"{row.label}: {row.status}" for row in rows if row.status]
    if rows and all(max(len(row.losses), len(row.solved)) <= 1 for row in rows):
        notes.append("one seed each: no spread and no interval")
    kinds = {scored_by(results, task) for task in results.tasks}
    caption = (
        "Mean ± standard deviation over seeds. “Behind the best” compares runs of the same seed; with it the 95% "
        "interval, simultaneous over all pairs: where it stays above zero, the difference is beyond chance. The ± "
        "of two encodings may overlap all the same, because a seed moves both together."
    )
    if kinds:
        caption += (
            f" Tasks: share of {' or '.join(SCORED[k] for k in sorted(kinds))}, over lengths, then tasks."
        )
    return Table("ranking", "", caption, heads, cells, notes)


def budget_table(results: Results) -> Table:
    """The gap to the best arm after each number of tokens, and how it changed."""
    found, trend = budget_blocks(results), trend_blocks(results)
    if not found:
        return Table("budgets", "", "", (), ())
    last = list(found.values())[-1]
    best, order = last.best, sorted(last.means, key=lambda label: last.means[label])
    names = [short_count(tokens) for tokens in found]
    rows = [
        (label, [*(_at_budget(each, label, best) for each in found.values()), _change(trend, label, best)])
        for label in order
    ]
    caption = (
        f"Loss of {best}, and how far the others are behind it, by tokens trained on, on the seeds that all have "
        f"({len(last.units)}). The last column is the change of that gap from {names[0]} to {names[-1]} tokens, "
        "paired by seed, with its 95% interval, simultaneous over all pairs: closing or opening where the interval "
        "excludes zero. Closing says nothing about where the gap ends."
    )
    widths = [
        f"{name}: {each.margin:.3f}" for name, each in zip(names, found.values(), strict=True) if each.margin
    ]
    if widths:
        caption += f" A gap below this may be chance: {', '.join(widths)}."
    lost = {short_count(n): [arm.label for arm in results.arms if diverged_at(arm, n)] for n in found}
    notes = [
        f"{', '.join(labels)} diverged at {n} tokens and is not compared there"
        for n, labels in lost.items()
        if labels
    ]
    return Table("budgets", "Tokens", caption, [*names, "change of the gap"], rows, notes)


def _at_budget(found: Blocks, label: str, best: str) -> Cell:
    if label not in found.means or best not in found.means:
        return Cell()
    if label == best:
        return Cell(f"{found.means[best]:.3f}", "", 0.0)
    gap = found.difference(label, best)
    return Cell(f"{gap.mean:+.3f}", "", gap.mean)


def trend_word(change: Summary) -> str:
    """Whether the gap to the arm that is best at the last budget closes."""
    if change.low is None:
        return "one seed"
    if not change.excludes_zero:
        return "no clear change"
    return "opening" if change.mean > 0 else "closing"


def _change(trend: Blocks, label: str, best: str) -> Cell:
    if label == best or label not in trend.means or best not in trend.means:
        return Cell()
    change = trend.difference(label, best)
    return Cell(f"{trend_word(change)} {change.mean:+.3f}", interval(change), change.mean)


def length_table(results: Results) -> Table:
    """Losses at each length, and at the longest with a window, on the seeds that all compared arms have."""
    lengths, entries = results.lengths(), [e for run in results.evaluations for e in run.extrapolation]
    windows = {(e.length, e.window) for e in entries if e.window is not None and e.length == results.longest}
    places: list[tuple[int, int | None]] = [*((n, None) for n in lengths), *sorted(windows)]
    found = [length_blocks(results, *place) for place in places]
    heads = [results.times(n) + (f", window {w}" if w else "") for n, w in places]
    rows = [(row.label, [_plain(each.means.get(row.label)) for each in found]) for row in ranking(results)]
    rows = [row for row in rows if any(cell.text for cell in row[1])] if len(lengths) > 1 else []
    caption = (
        "Mean loss over the seeds that all compared encodings have, at multiples of the training length."
    )
    return Table("lengths", "Longer texts", caption, heads, rows)


def far_table(results: Results) -> Table:
    """Differences to the best arm at the longest length, over seeds and over text."""
    far, empty = results.times(results.longest), Table("far", "", "", (), ())
    if results.longest is None or len(results.lengths()) < 2:
        return empty
    seeds, text = length_blocks(results, results.longest), text_blocks(results, results.longest)
    if len(seeds.means) < 2:
        return empty
    order = sorted(seeds.means, key=lambda label: seeds.means[label])
    rows = [(label, [_gap(each, label, order[0]) for each in (seeds, text)]) for label in order]
    caption = (
        "Differences with 95% intervals, simultaneous over all pairs. Over seeds: other training runs, the same "
        f"text ({len(seeds.units)} seeds, paired). "
    )
    caption += (
        f"Over text: the same models, other text ({len(text.units)} stretches, paired, taken as independent). Each "
        "covers its own uncertainty only; a difference beyond chance should be so in both."
        if text.means
        else "Other text is not covered: these results have no losses of single stretches."
    )
    return Table("far", f"Behind {order[0]} at {far}", caption, ["over seeds", "over text"], rows)


def _plain(value: float | None) -> Cell:
    return Cell() if value is None else Cell(f"{value:.3f}", "", value)


def _gap(found: Blocks, label: str, best: str) -> Cell:
    if not {label, best} <= found.means.keys():
        return Cell()
    return Cell("best", "", 0.0) if label == best else difference(found.difference(label, best))


@dataclass(frozen=True)
class Sweep:
    """Losses of one arm by learning rate, in the sweep before the seeds; None where it diverged."""

    label: str
    chosen: float | None
    losses: dict[float, float | None]

    @property
    def at_edge(self) -> bool:
        """Whether a rate beyond those tried may be better."""
        known = [rate for rate, loss in self.losses.items() if loss is not None]
        best = min(known, key=lambda rate: self.losses[rate] or 0.0, default=None)
        return len(self.losses) > 1 and best in (min(self.losses), max(self.losses))


def sweeps(results: Results) -> Iterator[Sweep]:
    for arm in results.arms:
        run = next((each for each in arm.evaluations.values() if each.sweep), None)
        if run is not None:
            yield Sweep(arm.label, run.lr, {each.lr: each.loss for each in run.sweep})


def sweep_table(results: Results) -> Table:
    found = list(sweeps(results))
    rates = sorted({rate for each in found for rate in each.losses})

    def cell(each: Sweep, rate: float) -> Cell:
        if rate not in each.losses:
            return Cell()
        loss = each.losses[rate]
        mark = " *" if rate == each.chosen else ""
        return Cell("diverged" if loss is None else f"{loss:.4f}{mark}", "", loss)

    rows = [(each.label, [cell(each, rate) for rate in rates]) for each in found]
    edge = [each.label for each in found if each.at_edge]
    notes = [
        f"The best rate is at the edge of the sweep for {', '.join(edge)}: a rate beyond it may be better."
    ]
    caption = (
        "Validation loss by learning rate, on one seed, before the others; * is the rate taken for all seeds."
    )
    return Table(
        "sweep", "Learning rates", caption, [f"{rate:g}" for rate in rates], rows, notes if edge else ()
    )


def lm_table(results: Results) -> Table:
    """Accuracies of `grape eval lm` in percent, with their standard errors."""
    found = results.lm_scores
    names = list(dict.fromkeys(name for scores in found.values() for name in scores.tasks))
    heads = [*(PAPER_TASKS.get(name, name) for name in names), "Avg."]
    rows = []
    for model, scores in found.items():
        for metric in METRICS:
            cells = [_accuracy(scores.tasks.get(name), metric) for name in names]
            average = scores.average(metric) if len(scores.tasks) == len(names) else None
            rows.append((f"{model} {metric}", [*cells, _percent(average)]))
    limits = {
        f"at most {each.limit} samples a task" if each.limit else "all samples" for each in found.values()
    }
    how = [*sorted(f"{shots} shots" for shots in {each.shots for each in found.values()}), *sorted(limits)]
    caption = f"Accuracy in percent ± its standard error over samples ({', '.join(how)}); one model a row."
    return Table("lm", "Language tasks", caption, heads, rows)


def _accuracy(score: object, metric: str) -> Cell:
    value, error = (getattr(score, name, None) for name in (metric, f"{metric}_stderr"))
    return _percent(value, error)


def _percent(value: float | None, error: float | None = None) -> Cell:
    if value is None:
        return Cell()
    return Cell(f"{100 * value:.2f}" + ("" if error is None else f" ± {100 * error:.2f}"), "", value)
