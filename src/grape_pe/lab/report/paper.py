"""The paper's two tables with ours beside them: text, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from ..evaluate.benchmarks import METRICS, PAPER_TASKS, Scores, percent
from ..paper import SIZES, published, rows
from .cells import NONE, NOTE, Cell, Table, each_in
from .curves import training, validation
from .figure import Figure
from .page import Part, legend, method, page, part
from .reading import read_results
from .repeated import Repetition, score_reasons
from .results import Results
from .style import Looks, styles

TITLE = "The paper's tables, repeated"
CURVES = (
    "Runs of one encoding and recipe are one line, their mean. The paper shows its curves as pictures without numbers, "
    "so they are not drawn here."
)
CAPTION = (
    "Accuracy in percent: as published, and ours ± its standard error over questions with the difference to the "
    "published score. The paper does not say whether it publishes acc or acc_norm, so both are shown; WinoGrande has "
    "only acc, and the average of acc_norm counts it."
)


@dataclass(frozen=True)
class Line:
    """One metric of one file of scores of a run; `difference` by task and for "average", if it may be compared."""

    run: Repetition
    file: str
    metric: str
    scores: Scores

    @property
    def reasons(self) -> tuple[str, ...]:
        return (*self.run.reasons, *score_reasons(self.scores))

    def values(self) -> dict[str, tuple[float | None, float | None]]:
        """Accuracy and standard error in [0, 1] of each task, and the average over the paper's seven."""
        tasks = self.scores.tasks
        found = {t: (getattr(s, self.metric), getattr(s, f"{self.metric}_stderr")) for t, s in tasks.items()}
        seven = {name: tasks[name] for name in PAPER_TASKS if name in tasks}
        whole = len(seven) == len(PAPER_TASKS)
        return {
            **found,
            "average": (replace(self.scores, tasks=seven).average(self.metric) if whole else None, None),
        }

    def differences(self) -> dict[str, float]:
        """Ours minus the published, in percent."""
        theirs = {**self.run.row.scores, "average": self.run.row.average}
        ours = self.values()
        known = {name: value for name in theirs if (value := ours.get(name, NOTHING)[0]) is not None}
        return {} if self.reasons else {name: 100 * value - theirs[name] for name, value in known.items()}


NOTHING = (None, None)


def lines(run: Repetition) -> Iterator[Line]:
    for file, scores in run.scores.items():
        for metric in METRICS:
            yield Line(run, file, metric, scores)


def paper_table(size: str, found: Sequence[Repetition]) -> Table:
    """The rows of one size as published, each followed by the runs that repeat it."""
    own = [run for run in found if run.row.size == size]
    others = {
        task: None for run in own for s in run.scores.values() for task in s.tasks if task not in PAPER_TASKS
    }
    names = [*PAPER_TASKS, "average", *others]
    shown: list[tuple[str, list[Cell]]] = []
    for row in rows():
        if row.size == size:
            runs = [run for run in own if run.row == row]
            theirs = {**row.scores, "average": row.average}
            cells = [Cell(f"{theirs[n]:.2f}", theirs[n]) if n in theirs else NONE for n in names]
            shown.append((f"{row.label}, published", [NONE if runs else Cell("not run"), *cells]))
            shown += [line for run in runs for line in _ours(run, names)]
    heads = ["run", *PAPER_TASKS.values(), "Avg.", *others]
    return Table(f"paper-{size}", "", CAPTION, heads, shown, list(_notes(own)))


def _ours(run: Repetition, names: Sequence[str]) -> Iterator[tuple[str, list[Cell]]]:
    if not run.scores:
        state = "not comparable" if run.reasons else "not scored"
        yield f"{run.row.label}, {run.name}", [Cell(state), *[NONE] * len(names)]
    for line in lines(run):
        values, gaps = line.values(), line.differences()
        cells = [_cell(values.get(name, NOTHING), gaps.get(name)) for name in names]
        state = "not comparable" if line.reasons else "comparable"
        yield f"{run.row.label}, {line.file} {line.metric}", [Cell(state), *cells]


def _cell(value: tuple[float | None, float | None], gap: float | None) -> Cell:
    if value[0] is None:
        return NONE
    return Cell(percent(*value), 100 * value[0], "" if gap is None else f"{gap:+.2f}")


def _notes(runs: Sequence[Repetition]) -> Iterator[str]:
    """What is worth knowing of runs, each text once with the runs it applies to."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, text in _remarks(run):
            found.setdefault(text, {})[name] = None
    for text, names in found.items():
        yield f"{', '.join(names)}: {text}."


def _remarks(run: Repetition) -> Iterator[tuple[str, str]]:
    """Why a run is not comparable, what it was trained with, and what is not known."""
    if not run.scores:
        place, reasons = run.directory, run.reasons
        yield run.name, f"not scored; grape eval lm {place}/final --output {place}/lm_eval.json"
        yield from [(run.name, f"not comparable: {'; '.join(reasons)}")] if reasons else []
    for line in lines(run):
        yield from [(line.file, f"not comparable: {'; '.join(line.reasons)}")] if line.reasons else []
    for each in run.variant:
        yield run.name, f"trained with {each}; the paper's text and the authors' code differ there"
    for each in run.unchecked:
        yield run.name, each


def headline(found: Sequence[Repetition]) -> str:
    """How many rows are repeated."""
    scored = {run.row.name for run in found if any(not line.reasons for line in lines(run))}
    begun = {run.row.name for run in found} - scored
    missing = len(rows()) - len(scored) - len(begun)
    return (
        f"{len(scored)} of the paper's {len(rows())} rows repeated; {len(begun)} with only runs that are not "
        f"comparable; {missing} not run."
    )


def paper_markdown(found: Sequence[Repetition], notes: Sequence[str]) -> str:
    parts = [f"**{headline(found)}**", f"Published: {published()['source']}.", *notes]
    for size in SIZES:
        parts += [f"**{size.capitalize()} models**", paper_table(size, found).markdown()]
    return "\n\n".join(parts) + "\n"


def paper_json(found: Sequence[Repetition], notes: Sequence[str]) -> dict[str, Any]:
    """Everything for scripts: our accuracies in [0, 1], the published ones and the differences in percent."""
    return {
        "headline": headline(found),
        "source": published()["source"],
        "notes": list(notes),
        "rows": [
            {"row": row.name, "published": {**row.scores, "average": row.average},
             "runs": [_run_json(run) for run in found if run.row == row]}
            for row in rows()
        ],
    }  # fmt: skip


def _run_json(run: Repetition) -> dict[str, Any]:
    return {
        "run": str(run.directory),
        "reasons": list(run.reasons),
        "variant": list(run.variant),
        "unchecked": list(run.unchecked),
        "scores": [
            {"file": line.file, "metric": line.metric, "reasons": list(line.reasons),
             "accuracy": {name: value for name, (value, _) in line.values().items()},
             "difference": line.differences()}
            for line in lines(run)
        ],
    }  # fmt: skip


def paper_page(found: Sequence[Repetition], notes: Sequence[str]) -> str:
    """The page of the runs that repeat rows of the paper."""
    results = {size: _results(size, found) for size in SIZES}
    arms = {arm.label: arm for each in results.values() if each for arm in each.arms}
    looks = styles(list(arms.values()))
    lead = f'<p class="lead">Published: {escape(published()["source"])}.</p>'
    intro = f'<p class="headline">{escape(headline(found))}</p>{lead}{each_in(NOTE, notes)}'
    first = Part("answer", "Summary", f"<h1>{TITLE}</h1>{intro}")
    tables = [_size_part(size, found, each, looks) for size, each in results.items()]
    about = method([recipe for each in results.values() if each for recipe in each.recipes])
    return page(TITLE, [first, *tables, about], legend(list(arms.values()), looks) if arms else "")


def _results(size: str, found: Sequence[Repetition]) -> Results | None:
    """The runs of one size, those that follow the paper's recipe first."""
    own = sorted((run for run in found if run.row.size == size), key=lambda run: len(run.reasons))
    return read_results([run.directory for run in own]) if own else None


def _size_part(size: str, found: Sequence[Repetition], results: Results | None, looks: Looks) -> Part:
    """A table, and the paper's figure of that size: training and validation loss by step."""
    figures: list[Figure] = []
    for make, name in ((training, "Training loss"), (validation, "Validation loss")):
        figure = make(results, looks) if results else None
        if figure and not figure.empty:
            title = f"{name}, {size} models"
            figures.append(replace(figure, key=f"{figure.key}-{size}", title=title, caption=CURVES))
    notes = [*(results.notes if results else ()), *([] if figures else ["No losses of this size yet."])]
    table = paper_table(size, found).html()
    return part(size, f"{size.capitalize()} models", figures, before=table, after=each_in(NOTE, notes))
