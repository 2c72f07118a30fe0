"""The report: one HTML file that needs nothing but a browser."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from ...extras import require
from ..files import write_text, writing
from .curves import loss_figures
from .figure import Figure
from .picture_figures import picture_figures
from .ranking import Row, ranking
from .reading import read_results
from .results import Arm, Recipe, Results
from .scores import cost_figures, ranking_figure, task_figures
from .statistics import Summary
from .style import Style, palette_css, styles
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
NOTHING = '<td data-value="">–</td>'
TABLE_CAPTION = (
    "Mean ± standard deviation over seeds. “Behind the best” compares runs of the same seed; below it the "
    "95% interval, simultaneous over all pairs: where it stays above zero, the difference is beyond "
    "chance. Other intervals are Student's, of the mean. Tasks: share solved exactly, averaged over "
    "lengths, then over tasks. Click a heading to sort."
)


def write_report(directories: Sequence[Path], out: Path) -> Path:
    """Read comparison directories and write one self-contained page; returns its path."""
    return write_page(report_page(read_results([Path(d) for d in directories])), Path(out))


def write_page(text: str, out: Path) -> Path:
    """Write the page in one step, so that a kill leaves the old one."""
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)
    return out


def report_page(results: Results) -> str:
    """The page of a comparison."""
    looks = styles(results.arms)
    sections = [
        _answer(results, looks),
        _section("loss", "Loss", "", loss_figures(results, looks)),
        _tasks(results),
        _section("cost", "Speed and memory", "", cost_figures(results, looks)),
        _pictures(results, looks),
        _about(results),
    ]
    return page("Which position encoding?", [s for s in sections if s.body], _legend(results.arms, looks))


class Section:
    """A part of the page with its entry in the contents; empty ones are left out."""

    def __init__(self, key: str, title: str, body: str, figures: Iterable[Figure] = ()) -> None:
        self.key, self.title, self.body, self.figures = key, title, body, list(figures)


def _section(
    key: str, title: str, lead: str, figures: Sequence[Figure], small: Sequence[Figure] = ()
) -> Section:
    if not figures and not small:
        return Section(key, title, "")
    said = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return Section(
        key, title, f"<h2>{escape(title)}</h2>{said}{grid(figures)}{grid(small, 'small')}", [*figures, *small]
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
        return "".join(f'<p class="choose">{escape(view.label)}</p>' for view in figure.views if view.label)
    options = "".join(f'<option value="{i}">{escape(v.label)}</option>' for i, v in enumerate(figure.views))
    return f'<label class="choose">{escape(figure.choose)} <select>{options}</select></label>'


def _answer(results: Results, looks: Looks) -> Section:
    said = verdict(results)
    figure = ranking_figure(results, looks)
    details = "".join(f"<li>{escape(sentence)}</li>" for sentence in said.details)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in results.notes)
    drawn = [] if figure.empty else [figure]
    body = (
        f'<h1>Which position encoding?</h1><p class="headline">{escape(said.headline)}</p>'
        f'<ul class="details">{details}</ul>{notes}{grid(drawn)}{_table(results, looks)}'
    )
    return Section("answer", "Answer", body, drawn)


def _table(results: Results, looks: Looks) -> str:
    """The ranking; columns that nothing was measured for are left out."""
    rows = ranking(results)
    lines = [_table_cells(row, results.stretch, i == 0) for i, row in enumerate(rows)]
    heads = [name for name in (lines[0] if lines else ()) if any(line[name] != NOTHING for line in lines)]
    head = "".join(
        f'<th scope="col"><button type="button">{escape(name)}</button></th>' for name in ("Encoding", *heads)
    )
    body = "".join(
        f"<tr{' class=best' if i == 0 and row.val_loss else ''}>{_row_head(row, looks[row.label])}"
        f"{''.join(line[name] for name in heads)}</tr>"
        for i, (row, line) in enumerate(zip(rows, lines, strict=True))
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><p class="caption">{TABLE_CAPTION}</p>'
    )


def _row_head(row: Row, style: Style) -> str:
    return f'<th scope="row" data-value="{escape(row.label)}">{_swatch(style)} {escape(row.label)}</th>'


def _table_cells(row: Row, stretch: str, best: bool) -> dict[str, str]:
    seeds = len(row.losses) or len(row.solved)
    status = f"<small>{escape(row.status)}</small>" if row.status else ""
    leads = best and row.val_loss is not None
    return {
        "Validation loss": _cell(row.val_loss, 4, interval=False),
        "Behind the best": '<td data-value="0">best</td>' if leads else _cell(row.behind, 4, sign=True),
        f"Loss at {stretch}": _cell(row.long_loss, 3),
        "Tasks": _cell(row.tasks, 1, scale=100, unit="%"),
        "Tokens/s": _cell(row.speed, 0, interval=False),
        "Memory": _cell(row.memory, 0, scale=2.0**-20, unit=" MB", interval=False),
        "Seeds": f'<td data-value="{seeds}">{seeds}{status}</td>',
    }


def _cell(
    summary: Summary | None,
    digits: int,
    scale: float = 1.0,
    unit: str = "",
    sign: bool = False,
    interval: bool = True,
) -> str:
    if summary is None:
        return NOTHING

    def show(value: float) -> str:
        return f"{value * scale:{'+' if sign else ''},.{digits}f}"

    spread = "" if summary.spread is None else f"{summary.spread * scale:,.{digits}f}"
    spread = f" ± {spread}" if spread.strip("0.") else ""
    shown = show(summary.mean) + spread + unit
    if interval and summary.low is not None and summary.high is not None:
        shown += f"<small>{show(summary.low)} … {show(summary.high)}</small>"
    return f'<td data-value="{summary.mean}">{shown}</td>'


def _swatch(style: Style) -> str:
    dash = SVG_DASHES[style.dash]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        '<svg class="swatch" viewBox="0 0 26 12" aria-hidden="true"><line x1="1" y1="6" x2="25" y2="6" '
        f'stroke-width="3" stroke="{style.color}"{dashed}/></svg>'
    )


def _legend(arms: Sequence[Arm], looks: Looks) -> str:
    chips = "".join(
        f'<button type="button" class="chip" aria-pressed="true" data-arm="{escape(arm.label)}">'
        f"{_swatch(looks[arm.label])}{escape(arm.label)}</button>"
        for arm in arms
    )
    return f'<div class="legend"><p>Click hides and shows, a double click shows one alone</p>{chips}</div>'


def _tasks(results: Results) -> Section:
    figures = task_figures(results)
    deep = [figure for figure in figures if figure.key.startswith("depth-")]
    lead = "Numbers are percent."
    if deep:
        lead += " Small panels: how deep in the text the thing to find stood (0% is the beginning)."
    return _section("tasks", "Tasks", lead, [f for f in figures if f not in deep], deep)


def _pictures(results: Results, looks: Looks) -> Section:
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
        return Section("pictures", "Pictures", "")
    lead = "What each encoding learned to do: the first seed's model reads a sample text. Best first."
    body = f'<h2>Pictures</h2><p class="lead">{escape(lead)}</p>{"".join(blocks)}'
    return Section("pictures", "Pictures", body, figures)


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
    return page(f"{label}: a position encoding", [Section("picture", "Picture", body, figures)])


def _about(results: Results) -> Section:
    body = "<h2>How this was measured</h2>" + "".join(map(_recipe_html, results.recipes))
    return Section("about", "Method", body)


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


def page(title: str, sections: Sequence[Section], legend: str = "") -> str:
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
