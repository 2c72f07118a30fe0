"""The report: one HTML file that needs nothing but a browser."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from ...extras import require
from ..files import write_text, writing
from .cells import NOTE, each_in
from .curves import loss_figures
from .figure import Figure
from .picture_figures import picture_figures
from .ranking import in_order
from .reading import read_results, shipped_with
from .results import ArmResults, Recipe, Results
from .scores import cost_figures, ranking_figure, task_figures
from .style import Looks, Style, palette_css, styles
from .tables import ranking_table, tables
from .verdict import Verdict, verdict


def write_report(directories: Sequence[Path], out: Path) -> Path:
    """Read what `read_results` reads and write one self-contained page; returns its path.

    Args:
        directories: what `read_results` reads.
        out: the HTML file.
    """
    return write_page(report_page(read_results([Path(d) for d in directories])), Path(out))


def write_page(text: str, out: Path) -> Path:
    """Write the page in one step, so that a kill leaves the old one."""
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)
    return out


def report_page(results: Results) -> str:
    """The page of comparisons or runs."""
    looks = styles(results.arms)
    made = tables_html(results, looks)

    def shown(*keys: str) -> str:
        return "".join(made.get(key, "") for key in keys)

    parts = [
        _answer(results, looks, shown("ranking")),
        _shipped(results, looks),
        part("loss", "Loss", loss_figures(results, looks), after=shown("budgets", "lengths", "far")),
        _tasks(results),
        part("lm", "Language tasks", after=shown("lm")),
        part("cost", "Speed and memory", cost_figures(results, looks)),
        part("rates", "Learning rates", after=shown("sweep")),
        pictures(results, looks),
        method(results.recipes),
    ]
    return page(_title(results), parts, legend(results.arms, looks))


def _title(results: Results) -> str:
    return "Which position encoding?" if len(results.arms) > 1 else "Training run"


@dataclass(frozen=True)
class Part:
    """A part of the page with its entry in the contents; empty ones are left out."""

    key: str
    link: str
    body: str
    figures: Sequence[Figure] = ()


def part(
    key: str, title: str, figures: Sequence[Figure] = (), small: Sequence[Figure] = (),
    *, lead: str = "", before: str = "", after: str = "", link: str = "", inside: Sequence[Figure] = (),
) -> Part:  # fmt: skip
    """A part with a heading; `inside` are figures that `after` places."""
    body = f"{before}{grid(figures)}{grid(small, 'small')}{after}"
    intro = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return Part(
        key, link or title, body and f"<h2>{escape(title)}</h2>{intro}{body}", [*figures, *small, *inside]
    )


def grid(figures: Sequence[Figure], kind: str = "") -> str:
    return f'<div class="grid {kind}">{"".join(map(figure_html, figures))}</div>' if figures else ""


def figure_html(figure: Figure) -> str:
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>" if figure.caption else ""
    return (
        f'<figure class="{"wide" if figure.wide else ""}"><h3>{escape(figure.title)}</h3>{_chooser(figure)}'
        f'<div class="plot" role="img" aria-label="{escape(figure.title)}" '
        f'data-figure="{escape(figure.key)}" style="height:{figure.height}px"></div>{caption}</figure>'
    )


def _chooser(figure: Figure) -> str:
    if len(figure.views) < 2:
        return each_in('<p class="choose">{}</p>', (view.label for view in figure.views if view.label))
    options = "".join(f'<option value="{i}">{escape(v.label)}</option>' for i, v in enumerate(figure.views))
    return f'<label class="choose">{escape(figure.choose)} <select>{options}</select></label>'


def _answer(results: Results, looks: Looks, table: str) -> Part:
    answer, figure = verdict(results), ranking_figure(results, looks)
    drawn = [] if figure.empty else [figure]
    notes = each_in(NOTE, filter(None, (results.recipes[0].note, *results.notes)))
    body = f"<h1>{_title(results)}</h1>{_verdict_html(answer)}{notes}{grid(drawn)}{table}"
    return Part("answer", "Answer", body, drawn)


def _verdict_html(answer: Verdict) -> str:
    details = each_in("<li>{}</li>", answer.details)
    return f'<p class="headline">{escape(answer.headline)}</p><ul class="details">{details}</ul>'


def _shipped(results: Results, looks: Looks) -> Part:
    """The answer of a longer comparison that is part of the installation."""
    if (place := shipped_with(results)) is None:
        return part("shipped", "")
    found = read_results([place])
    table = replace(ranking_table(found), key="shipped").filled().html(marked(looks))
    return part(
        "shipped", f"Shipped results of grape compare {place.stem}", link="Shipped results",
        lead="A longer comparison, which comes with grape-pe; it was not run on this machine.",
        after=_verdict_html(verdict(found)) + table,
    )  # fmt: skip


def tables_html(results: Results, looks: Looks) -> dict[str, str]:
    """Tables by key; those that are a part of the page have its title."""
    own = ("lm", "passkey", "sweep")
    made = (replace(each, title="") if each.key in own else each for each in tables(results))
    return {each.key: each.html(marked(looks)) for each in made}


def marked(looks: Looks) -> Callable[[str], str]:
    """HTML of an arm's label, after a line in its colour."""
    return lambda label: f"{looks[label].swatch} {escape(label)}" if label in looks else escape(label)


def legend(arms: Sequence[ArmResults], looks: Looks) -> str:
    chips = "".join(
        f'<button type="button" class="chip" aria-pressed="true" data-arm="{escape(arm.label)}">'
        f"{looks[arm.label].swatch}{escape(arm.label)}</button>"
        for arm in arms
    )
    return (
        f'<div class="legend"><p>Click to hide or show; double-click to show only this one</p>{chips}</div>'
    )


def _tasks(results: Results) -> Part:
    figures, small = task_figures(results)
    deep = " Small panels: by the depth of the answer in the text (0% is the beginning)."
    return part("tasks", "Tasks", figures, small, lead="Numbers are percent." + (deep if small else ""))


def pictures(results: Results, looks: Looks) -> Part:
    blocks, figures = "", []
    for index, arm in enumerate(in_order(results)):
        if arm.picture is not None:
            made = picture_figures(arm.picture, looks[arm.label], f"picture-{index}")
            blocks += picture_html(arm.label, arm.picture, made, looks[arm.label], opened=not blocks)
            figures += made
    lead = (
        "What each encoding learned, measured on a sample text with the model of the first seed. Best first."
    )
    return part("pictures", "Pictures", inside=figures, lead=lead, after=blocks)


def picture_html(
    label: str, picture: Mapping[str, Any], figures: Sequence[Figure], style: Style, opened: bool
) -> str:
    law = picture.get("breaks_relative_law")
    notes = each_in(NOTE, [f"No relative law: {law}"] if law else [])
    if not picture["singular"]:
        notes += f'<p class="lead">Singular values: {escape(picture["singular_about"])}.</p>'
    return (
        f'<details class="picture"{" open" if opened else ""}>'
        f"<summary>{style.swatch} {escape(label)}</summary>{notes}{grid(figures)}</details>"
    )


def picture_page(label: str, picture: Mapping[str, Any]) -> str:
    """The page of one encoding alone."""
    style = Style(0, "solid", "circle")
    figures = picture_figures(picture, style, "picture")
    body = f"<h1>{escape(label)}</h1>{picture_html(label, picture, figures, style, opened=True)}"
    return page(f"{label}: a position encoding", [Part("picture", "Picture", body, figures)])


def method(recipes: Sequence[Recipe]) -> Part:
    """The last part: what was run, and where."""
    body = ""
    for recipe in recipes:
        shown = {
            "command": recipe.command,
            "seeds": ", ".join(map(str, recipe.seeds)),
            "machine": _listed(recipe.machine),
            "versions": _listed(recipe.versions),
            "recipe": _listed(recipe.settings),
        }
        items = "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in shown.items() if v)
        body += f"<h3>{escape(recipe.name)}</h3><dl>{items}</dl>"
    return part("about", "How this was measured", after=body, link="Method")


def _listed(values: Mapping[str, Any]) -> str:
    return " · ".join(f"{name} {value}" for name, value in values.items() if value not in ("", None, {}))


def page(title: str, sections: Sequence[Part], legend: str = "") -> str:
    """The whole document: styles, contents, sections, figures as data with plotly if there are any, and the script.

    Sections without a body are left out.
    """
    sections = [each for each in sections if each.body]
    payload = {figure.key: figure.payload() for section in sections for figure in section.figures}
    data = json.dumps(payload, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    links = "".join(f'<a href="#{s.key}">{escape(s.link)}</a>' for s in sections)
    body = "".join(f'<section id="{s.key}">{s.body}</section>' for s in sections)
    plotly = f"<script>{require('plotly.offline', 'lab').get_plotlyjs()}</script>" if payload else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f'<style>{palette_css()}\n{_asset("page.css")}</style></head><body><div class="page">'
        f'<aside class="side"><nav aria-label="Contents">{links}</nav>{legend}</aside>'
        f'<main>{body}</main></div><script type="application/json" id="figures">{data}</script>'
        f"{plotly}<script>{_asset('page.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
