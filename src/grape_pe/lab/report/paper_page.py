"""`grape report --paper`: the page with the paper's two tables and two figures, ours beside the published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from ..paper import SIZES, published
from .curves import training, validation
from .figure import Figure
from .page import NOTE, Part, each_in, grid, legend, page, part, recipe_html, table_html
from .paper_tables import headline, paper_table
from .reading import read_results
from .repeated import Repetition
from .results import Results
from .style import Looks, styles

TITLE = "The paper's tables, repeated"
CURVES = (
    "Runs of one encoding and recipe are one line, their mean. The paper shows its curves as pictures without numbers, "
    "so they are not drawn here."
)


def paper_page(found: Sequence[Repetition], notes: Sequence[str]) -> str:
    """The page of the runs that repeat rows of the paper."""
    results = {size: _results(size, found) for size in SIZES}
    arms = {arm.label: arm for each in results.values() if each for arm in each.arms}
    looks = styles(list(arms.values()))
    lead = f'<p class="lead">Published: {escape(published()["source"])}.</p>'
    said = f'<p class="headline">{escape(headline(found))}</p>{lead}{each_in(NOTE, notes)}'
    first = Part("answer", "Summary", f"<h1>{TITLE}</h1>{said}")
    tables = [_size_part(size, found, each, looks) for size, each in results.items()]
    recipes = [recipe for each in results.values() if each for recipe in each.recipes]
    about = part("about", "How this was measured", after="".join(map(recipe_html, recipes)), link="Method")
    parts = [each for each in (first, *tables, about) if each.body]
    return page(TITLE, parts, legend(list(arms.values()), looks) if arms else "")


def _results(size: str, found: Sequence[Repetition]) -> Results | None:
    """The runs of one size, those that follow the paper's recipe first."""
    own = sorted((run for run in found if run.row.size == size), key=lambda run: len(run.reasons))
    return read_results([run.directory for run in own]) if own else None


def _size_part(size: str, found: Sequence[Repetition], results: Results | None, looks: Looks) -> Part:
    figures = loss_figures(size, results, looks) if results else []
    notes = [*(results.notes if results else ()), *([] if figures else ["No losses of this size yet."])]
    body = table_html(paper_table(size, found), {}) + grid(figures) + each_in(NOTE, notes)
    return replace(part(size, f"{size.capitalize()} models", after=body), figures=figures)


def loss_figures(size: str, results: Results, looks: Looks) -> list[Figure]:
    """The paper's figure of one size: training and validation loss by step."""
    made = [
        replace(figure, key=f"{figure.key}-{size}", title=f"{title}, {size} models", caption=CURVES)
        for figure, title in (
            (training(results, looks), "Training loss"),
            (validation(results, looks), "Validation loss"),
        )
    ]
    return [figure for figure in made if not figure.empty]
