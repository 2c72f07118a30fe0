"""The tables of a report, each built once and written as text, Markdown or HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..evaluate.benchmarks import METRICS, PAPER_TASKS, percent
from ..evaluate.passkey import PasskeyScore, mean_of
from .cells import BEST, NONE, Cell, Table, difference, number, short_count
from .ranking import (
    budget_blocks,
    compared_tasks,
    diverged_at,
    length_blocks,
    ranking,
    scored_by,
    text_blocks,
    trend_blocks,
)
from .results import Results
from .statistics import Blocks, Summary
from .stored import Evaluation

#: the label of the pretrained model among the arms of its adapted ones
BEFORE = "before"
SCORED = {"exact": "samples solved exactly", "token": "tokens of answers that are right"}


def tables(results: Results) -> list[Table]:
    """Every table that has rows."""
    compared = (ranking_table, budget_table, length_table, far_table, sweep_table, lm_table)
    adapted = (before_table, passkey_table, far_table, lm_table)
    makers = adapted if any(arm.label == BEFORE for arm in results.arms) else compared
    made = [make(results) for make in makers]
    return [table.filled() for table in made if table and table.rows and table.heads]


def ranking_table(results: Results) -> Table:
    rows = ranking(results)
    far = f"at {results.times(results.longest)}"
    heads = ["val loss", "behind the best", far, "tasks", "tok/s", "memory", "seeds"]
    shown = []
    for row in rows:
        seeds = len(row.losses) or len(row.solved)
        leads = row is rows[0] and row.val_loss and len(rows) > 1
        behind = BEST if leads else difference(row.behind) if row.behind else NONE
        cells = [
            number(row.val_loss, 4),
            behind,
            number(row.long_loss, 3),
            number(_mean(row.tasks), 1, 100, "%"),
        ]
        cells += [number(_mean(row.speed), 0), number(_mean(row.memory), 0, 2**-20, " MB")]
        shown.append((row.label, [*cells, Cell(str(seeds), seeds)]))
    states: dict[str, list[str]] = {}
    for row in rows:
        states.setdefault(row.status, []).append(row.label)
    notes = [f"{', '.join(labels)}: {status}" for status, labels in states.items() if status]
    if rows and all(max(len(row.losses), len(row.solved)) <= 1 for row in rows):
        notes.append("one seed each: no spread and no interval")
    caption = (
        "Mean ± standard deviation over seeds. “Behind the best” compares runs of the same seed; with it the 95% "
        "interval, simultaneous over all pairs: where it stays above zero, the difference is beyond chance. The ± "
        "of two encodings may overlap all the same, because a seed moves both together. Speeds include whatever else "
        "the machine did."
    )
    if results.tasks:
        tasks = compared_tasks(results)
        kinds = " or ".join(SCORED[kind] for kind in sorted({scored_by(results, task) for task in tasks}))
        caption += f" Tasks ({', '.join(tasks)}): share of {kinds}, over lengths, then tasks."
    return Table("ranking", "", caption, heads, shown, notes)


def _mean(found: Summary | None) -> float | None:
    return None if found is None else found.mean


def _against(
    found: Blocks, label: str, best: str, own: Cell = NONE, other: Callable[[Summary], Cell] = difference
) -> Cell:
    """A cell for the difference of an arm to the best, where both are compared; `own` for the best itself."""
    if not {label, best} <= found.means.keys():
        return NONE
    return own if label == best else other(found.difference(label, best))


def budget_table(results: Results) -> Table | None:
    """The gap to the best arm after each number of tokens, and how it changed."""
    found, trend = budget_blocks(results), trend_blocks(results)
    if not found:
        return None
    names = {tokens: short_count(tokens) for tokens in found}
    *_, last = found.values()
    first_name, last_name, best = names[min(names)], names[max(names)], last.best
    rows = []
    for label in last.order:
        cells = []
        for each in found.values():
            own = Cell(f"{each.means.get(best, 0):.3f}", 0.0)
            cells.append(replace(_against(each, label, best, own), small=""))
        change = _against(trend, label, best, other=lambda gap: difference(gap, trend_word(gap)))
        rows.append((label, [*cells, change]))
    caption = (
        f"Loss of {best}, and how far the others are behind it, by tokens trained on, on the seeds that all have "
        f"({len(last.units)}). The last column is the change of that gap from {first_name} to {last_name} tokens, "
        "paired by seed, with its 95% interval, simultaneous over all pairs: closing or opening where the interval "
        "excludes zero. Closing says nothing about where the gap ends."
    )
    if widths := [f"{names[n]}: {each.margin:.3f}" for n, each in found.items() if each.margin]:
        caption += f" A gap below this may be chance: {', '.join(widths)}."
    lost = {names[n]: [arm.label for arm in results.arms if diverged_at(arm, n)] for n in found}
    gone = {name: ", ".join(labels) for name, labels in lost.items() if labels}
    notes = [f"{arms} diverged at {name} tokens and is not compared there" for name, arms in gone.items()]
    return Table("budgets", "Tokens", caption, [*names.values(), "change of the gap"], rows, notes)


def trend_word(change: Summary) -> str:
    """Whether the gap to the arm that is best at the last budget closes."""
    if change.low is None:
        return "one seed"
    if not change.excludes_zero:
        return "no clear change"
    return "opening" if change.mean > 0 else "closing"


def length_table(results: Results) -> Table | None:
    """Losses at each length, and at the longest with a window, on the seeds that all compared arms have."""
    lengths, entries = results.lengths(), [e for run in results.evaluations for e in run.extrapolation]
    if len(lengths) < 2:
        return None
    windows = {(e.length, e.window) for e in entries if e.window is not None and e.length == results.longest}
    places: list[tuple[int, int | None]] = [*((n, None) for n in lengths), *sorted(windows)]
    found = [length_blocks(results, *place).means for place in places]
    heads = [results.times(n) + (f", window {w}" if w else "") for n, w in places]
    order = [row.label for row in ranking(results) if any(row.label in means for means in found)]
    rows = [(n, [number(means.get(n), 3) for means in found]) for n in order]
    caption = (
        "Mean loss over the seeds that every encoding in the table has, at multiples of the training length."
    )
    return Table("lengths", "Longer texts", caption, heads, rows)


def far_table(results: Results) -> Table | None:
    """Differences to the best arm at the longest length, over seeds and over text."""
    length = results.longest or 0
    seeds, text = length_blocks(results, length), text_blocks(results, length)
    if len(results.lengths()) < 2 or len(seeds.means) < 2:
        return None
    rows = [(n, [_against(each, n, seeds.best, BEST) for each in (seeds, text)]) for n in seeds.order]
    caption = (
        "Differences with 95% intervals, simultaneous over all pairs. Over seeds: other training runs, the same "
        f"text (seeds: {len(seeds.units)}, paired). "
    )
    caption += (
        f"Over text: the same models, other text ({len(text.units)} stretches, paired, taken as independent). Each "
        "covers its own uncertainty only; a difference beyond chance should be so in both."
        if text.means
        else "Other text is not covered: these results have no losses of single stretches."
    )
    title = f"Behind {seeds.best} at {results.times(length)}"
    return Table("far", title, caption, ["over seeds", "over text"], rows)


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


EDGE = "The best {}rate is at the edge of the sweep for {}: a rate beyond it may be better."


def sweep_table(results: Results) -> Table:
    found = list(sweeps(results))
    rates = sorted({rate for each in found for rate in each.losses})

    def cell(each: Sweep, rate: float) -> Cell:
        if rate not in each.losses:
            return NONE
        loss = each.losses[rate]
        return Cell("diverged") if loss is None else number(loss, 4, unit=" *" * (rate == each.chosen))

    rows = [(each.label, [cell(each, rate) for rate in rates]) for each in found]
    edge = [each.label for each in found if each.at_edge]
    notes = [EDGE.format("", ", ".join(edge))] if edge else []
    caption = (
        "Validation loss by learning rate, on one seed, before the others; * is the rate taken for all seeds."
    )
    return Table("sweep", "Learning rates", caption, [f"{rate:g}" for rate in rates], rows, notes)


def lm_table(results: Results) -> Table:
    """Accuracies of `grape eval lm` in percent, with their standard errors."""
    found = results.lm_scores
    names = list(dict.fromkeys(name for scores in found.values() for name in scores.tasks))
    heads = [*(PAPER_TASKS.get(name, name) for name in names), "Avg."]
    rows = []
    for model, scores in found.items():
        for metric in METRICS:
            found_tasks = [scores.tasks.get(name) for name in names]
            pairs = [(getattr(s, metric, None), getattr(s, f"{metric}_stderr", None)) for s in found_tasks]
            pairs.append((scores.average(metric) if len(scores.tasks) == len(names) else None, None))
            rows.append((f"{model} {metric}", [Cell(percent(*pair), pair[0]) for pair in pairs]))
    shots = sorted({f"{each.shots} shots" for each in found.values()})
    limits = {f"at most {s.limit} samples a task" if s.limit else "all samples" for s in found.values()}
    how = ", ".join([*shots, *sorted(limits)])
    caption = f"Accuracy in percent ± its standard error over samples ({how}); one model a row."
    return Table("lm", "Language tasks", caption, heads, rows)


# ---- adapted models


def _by_arm(results: Results, cells: Callable[[str, Evaluation], list[Cell]]) -> list[tuple[str, list[Cell]]]:
    """A row for each arm, of its first seed."""
    firsts = {arm.label: next(iter(arm.evaluations.values()), None) for arm in results.arms}
    return [(label, cells(label, found)) for label, found in firsts.items() if found is not None]


def before_table(results: Results) -> Table:
    """Losses at every length, with the change since before; then with attention limited to the model's context."""
    lengths, window = results.lengths(), results.train_length
    over_text = {length: text_blocks(results, length) for length in lengths}

    def cell(label: str, found: Evaluation, length: int) -> Cell:
        shown, change = number(found.loss_at(length), 3), NONE
        if label != BEFORE and shown is not NONE:
            change = _against(over_text[length], label, BEFORE)
        small = f"{change.text}, {change.small}" if change.small else change.text
        return replace(shown, small=small)

    def cells(label: str, found: Evaluation) -> list[Cell]:
        limited = number(found.loss_at(results.longest or 0, window), 3)
        return [*(cell(label, found, length) for length in lengths), limited]

    heads = [*(f"loss at {n:,}" for n in lengths), f"at {results.longest or 0:,}, window {window}"]
    caption = (
        "Mean loss in nats a token on held-out text, the same text at every length, with the change since "
        "before and its 95% interval over stretches of text, simultaneous over all pairs of models. The last column "
        "limits attention to the context of the pretrained model: the baseline at greater lengths."
    )
    return Table("before", "Before and after", caption, heads, _by_arm(results, cells))


def passkey_table(results: Results) -> Table:
    """Percent of the numbers found, over all depths, and the loss of their tokens."""
    lengths = sorted({score.length for run in results.evaluations for score in run.passkey})

    def cell(found: Evaluation, length: int) -> Cell:
        here = [PasskeyScore(**score.model_dump()) for score in found.passkey if score.length == length]
        if not here:
            return NONE
        exact, nats, count = mean_of(here)
        return Cell(f"{100 * exact:.0f}% of {count}", exact, f"{nats:.2f}")

    caption = (
        "How many of the numbers hidden in a long text were given as the answer to the question at its end, over "
        "all depths, with the mean loss of a token of the answer in nats."
    )
    rows = _by_arm(results, lambda _, found: [cell(found, n) for n in lengths])
    return Table("passkey", "Numbers found", caption, [f"{n:,} tokens" for n in lengths], rows)
