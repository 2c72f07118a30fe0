"""The report: one HTML file that needs nothing but a browser."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from ...extras import require
from ..files import write_text, writing
from .curves import loss_figures
from .figure import Figure
from .picture_figures import picture_figures
from .ranking import ranking
from .reading import read_results
from .results import ArmResults, Recipe, Results
from .scores import cost_figures, ranking_figure, task_figures
from .style import Style, palette_css, styles
from .tables import Cell, Table, tables
from .verdict import verdict

SVG_DASHES = {
    "solid": "",
    "dash": "6 3",
    "dot": "2 3",
    "dashdot": "6 3 2 3",
    "longdash": "10 3",
    "longdashdot": "9 2 2 2",
}
Looks = Mapping[str, Style]


def write_report(directories: Sequence[Path], out: Path) -> Path:
    """Read what `read_results` reads and write one self-contained page; returns its path."""
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
    made = {table.key: table_html(table, looks) for table in tables(results)}
    of_loss = [made.get(key, "") for key in ("budgets", "lengths", "far")]
    parts = [
        _answer(results, looks, made.get("ranking", "")),
        _part("loss", "Loss", loss_figures(results, looks), tables=of_loss),
        _tasks(results),
        _part("lm", "Language tasks", [], tables=[made.get("lm", "")]),
        _part("cost", "Speed and memory", cost_figures(results, looks)),
        _part("rates", "Learning rates", [], tables=[made.get("sweep", "")]),
        _pictures(results, looks),
        _about(results),
    ]
    return page(_title(results), [part for part in parts if part.body], _legend(results.arms, looks))


def _title(results: Results) -> str:
    return "Which position encoding?" if len(results.arms) > 1 else "Training run"


@dataclass(frozen=True)
class Part:
    """A part of the page with its entry in the contents; empty ones are left out."""

    key: str
    title: str
    body: str
    figures: Sequence[Figure] = ()


def _part(
    key: str,
    title: str,
    figures: Sequence[Figure],
    lead: str = "",
    small: Sequence[Figure] = (),
    tables: Sequence[str] = (),
) -> Part:
    if not figures and not small and not any(tables):
        return Part(key, title, "")
    intro = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    body = f"<h2>{escape(title)}</h2>{intro}{grid(figures)}{grid(small, 'small')}{''.join(tables)}"
    return Part(key, title, body, [*figures, *small])


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
        return "".join(f'<p class="choose">{escape(view.label)}</p>' for view in figure.views if view.label)
    options = "".join(f'<option value="{i}">{escape(v.label)}</option>' for i, v in enumerate(figure.views))
    return f'<label class="choose">{escape(figure.choose)} <select>{options}</select></label>'


def _answer(results: Results, looks: Looks, table: str) -> Part:
    answer = verdict(results)
    figure = ranking_figure(results, looks)
    details = "".join(f"<li>{escape(sentence)}</li>" for sentence in answer.details)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in results.notes)
    drawn = [] if figure.empty else [figure]
    body = (
        f'<h1>{_title(results)}</h1><p class="headline">{escape(answer.headline)}</p>'
        f'<ul class="details">{details}</ul>{notes}{grid(drawn)}{table}'
    )
    return Part("answer", "Answer", body, drawn)


def table_html(table: Table, looks: Looks) -> str:
    """A table that can be sorted by its headings."""
    head = "".join(
        f'<th scope="col"><button type="button">{escape(name)}</button></th>'
        for name in ("encoding", *table.heads)
    )
    body = "".join(
        f"<tr>{_row_head(label, looks.get(label))}{''.join(map(_cell, cells))}</tr>"
        for label, cells in table.rows
    )
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    return (
        f'{title}<div class="scroll" tabindex="0"><table id="table-{table.key}"><thead><tr>{head}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><p class="caption">{escape(table.caption)}</p>{notes}'
    )


def _row_head(label: str, style: Style | None) -> str:
    swatch = f"{_swatch(style)} " if style else ""
    return f'<th scope="row" data-value="{escape(label)}">{swatch}{escape(label)}</th>'


def _cell(cell: Cell) -> str:
    small = f"<small>{escape(cell.small)}</small>" if cell.small else ""
    value = "" if cell.value is None else cell.value
    return f'<td data-value="{value}">{escape(cell.text) or "–"}{small}</td>'


def _swatch(style: Style) -> str:
    dash = SVG_DASHES[style.dash]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        '<svg class="swatch" viewBox="0 0 26 12" aria-hidden="true"><line x1="1" y1="6" x2="25" y2="6" '
        f'stroke-width="3" stroke="{style.color}"{dashed}/></svg>'
    )


def _legend(arms: Sequence[ArmResults], looks: Looks) -> str:
    chips = "".join(
        f'<button type="button" class="chip" aria-pressed="true" data-arm="{escape(arm.label)}">'
        f"{_swatch(looks[arm.label])}{escape(arm.label)}</button>"
        for arm in arms
    )
    return f'<div class="legend"><p>Click hides and shows, a double click shows one alone</p>{chips}</div>'


def _tasks(results: Results) -> Part:
    figures = task_figures(results)
    deep = [figure for figure in figures if figure.key.startswith("depth-")]
    lead = "Numbers are percent."
    if deep:
        lead += " Small panels: how deep in the text the thing to find stood (0% is the beginning)."
    return _part("tasks", "Tasks", [f for f in figures if f not in deep], lead, deep)


def _pictures(results: Results, looks: Looks) -> Part:
    order = [row.label for row in ranking(results)]
    arms = sorted(results.arms, key=lambda arm: order.index(arm.label))
    blocks: list[str] = []
    figures: list[Figure] = []
    for index, arm in enumerate(arms):
        if arm.picture is None:
            continue
        made = picture_figures(arm.picture, looks[arm.label], f"picture-{index}")
        figures += made
        blocks.append(picture_html(arm.label, arm.picture, made, looks[arm.label], opened=not blocks))
    if not blocks:
        return Part("pictures", "Pictures", "")
    lead = "What each encoding learned to do: the first seed's model reads a sample text. Best first."
    body = f'<h2>Pictures</h2><p class="lead">{escape(lead)}</p>{"".join(blocks)}'
    return Part("pictures", "Pictures", body, figures)


def picture_html(
    label: str, picture: Mapping[str, Any], figures: Sequence[Figure], style: Style, opened: bool
) -> str:
    law = picture.get("breaks_relative_law")
    notes = f'<p class="note">No relative law: {escape(law)}</p>' if law else ""
    if not picture["singular"]:
        notes += f'<p class="lead">Singular values: {escape(picture["singular_about"])}.</p>'
    return (
        f'<details class="picture"{" open" if opened else ""}>'
        f"<summary>{_swatch(style)} {escape(label)}</summary>{notes}{grid(figures)}</details>"
    )


def picture_page(label: str, picture: Mapping[str, Any]) -> str:
    """The page of one encoding alone."""
    style = Style(0, "solid", "circle")
    figures = picture_figures(picture, style, "picture")
    body = f"<h1>{escape(label)}</h1>{picture_html(label, picture, figures, style, opened=True)}"
    return page(f"{label}: a position encoding", [Part("picture", "Picture", body, figures)])


def _about(results: Results) -> Part:
    body = "<h2>How this was measured</h2>" + "".join(map(_recipe_html, results.recipes))
    return Part("about", "Method", body)


def _recipe_html(recipe: Recipe) -> str:
    shown = {
        "command": recipe.command,
        "seeds": ", ".join(map(str, recipe.seeds)),
        "machine": _listed(recipe.machine),
        "versions": _listed(recipe.versions),
        "recipe": _listed(recipe.settings),
    }
    items = "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in shown.items() if v)
    return f"<h3>{escape(recipe.name)}</h3><dl>{items}</dl>"


def _listed(values: Mapping[str, Any]) -> str:
    return " · ".join(f"{name} {value}" for name, value in values.items() if value not in ("", None, {}))


def page(title: str, sections: Sequence[Part], legend: str = "") -> str:
    """The whole document: styles, contents, sections, figures as data, plotly once, and the script."""
    payload = {figure.key: figure.payload() for section in sections for figure in section.figures}
    data = json.dumps(payload, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    links = "".join(f'<a href="#{s.key}">{escape(s.title)}</a>' for s in sections)
    body = "".join(f'<section id="{s.key}">{s.body}</section>' for s in sections)
    plotly = require("plotly.offline", "lab").get_plotlyjs()
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f'<style>{palette_css()}\n{_asset("page.css")}</style></head><body><div class="page">'
        f'<aside class="side"><nav aria-label="Contents">{links}</nav>{legend}</aside>'
        f'<main>{body}</main></div><script type="application/json" id="figures">{data}</script>'
        f"<script>{plotly}</script><script>{_asset('page.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
