"""A table as plain data, written as text, Markdown or HTML; and how numbers are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from ..columns import aligned
from .statistics import Summary

WIDTH = 100
HEAD = '<th scope="col"><button type="button">{}</button></th>'
NOTE = '<p class="note">{}</p>'


def each_in(template: str, texts: Iterable[str]) -> str:
    """Each text, escaped, in the template."""
    return "".join(template.format(escape(text)) for text in texts)


@dataclass(frozen=True)
class Cell:
    """What a cell shows; `value` is what the page sorts by, `small` an interval, `picture` an SVG."""

    text: str = ""
    value: float | None = None
    small: str = ""
    picture: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.small})" if self.small else self.text

    def html(self) -> str:
        value = "" if self.value is None else self.value
        small = f"<small>{escape(self.small)}</small>" if self.small else ""
        return f'<td data-value="{value}">{self.picture + escape(self.text) or "–"}{small}</td>'


NONE, BEST = Cell(), Cell("best", 0.0)


@dataclass(frozen=True)
class Table:
    """Rows by the label of an arm or model, which `first` heads."""

    key: str
    title: str
    caption: str
    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    notes: Sequence[str] = ()
    first: str = "encoding"

    def filled(self) -> Table:
        kept = [i for i in range(len(self.heads)) if any(cells[i].text for _, cells in self.rows)]
        rows = [(label, [cells[i] for i in kept]) for label, cells in self.rows]
        return replace(self, heads=[self.heads[i] for i in kept], rows=rows)

    def lines(self, missing: str) -> list[list[str]]:
        """Headings and rows as text."""
        rows = [[label, *(str(cell) or missing for cell in cells)] for label, cells in self.rows]
        return [[self.first, *self.heads], *rows]

    def text(self) -> str:
        """At most 100 columns wide: long labels are cut, unless fewer than 8 letters would be left."""
        lines = self.lines("-")
        first, *rest = (max(map(len, column)) for column in zip(*lines, strict=True))
        room = WIDTH - sum(rest) - 2 * len(rest)
        first = min(first, room) if room >= 8 else first
        cut = [[name if len(name) <= first else f"{name[: first - 1]}…", *cells] for name, *cells in lines]
        return "\n".join([aligned(cut, left=1), *self.notes])

    def markdown(self, name: Callable[[str], str] = "`{}`".format) -> str:
        """A table with its caption and notes; `name` writes a row's label."""
        head, *rows = self.lines("–")
        lines = [head, ["---"] * len(head), *([name(label), *cells] for label, *cells in rows)]
        shown = ["| " + " | ".join(each.replace("|", "\\|") for each in line) + " |" for line in lines]
        return "\n".join([*shown, *(f"\n{note}" for note in (self.caption, *self.notes) if note)])

    def html(self, label: Callable[[str], str] = escape, words: Callable[[str], str] | None = None) -> str:
        """A table that can be sorted by its headings, with title, caption and notes.

        Args:
            label: HTML of a row's label.
            words: what the filter of the page searches, by label; without it rows are not filtered.
        """
        rows = []
        for name, cells in self.rows:
            found = "" if words is None else f' data-words="{escape(words(name))}"'
            head = f'<th scope="row" data-value="{escape(name)}">{label(name)}</th>'
            rows.append(f"<tr{found}>{head}{''.join(cell.html() for cell in cells)}</tr>")
        heads = each_in(HEAD, (self.first, *self.heads))
        title = f"<h3>{escape(self.title)}</h3>" if self.title else ""
        return (
            f'{title}<div class="scroll" tabindex="0"><table id="table-{self.key}"><thead><tr>{heads}</tr></thead>'
            f'<tbody>{"".join(rows)}</tbody></table></div><p class="caption">{escape(self.caption)}</p>'
            f"{each_in(NOTE, self.notes)}"
        )


def number(found: Summary | float | None, digits: int, scale: float = 1.0, unit: str = "") -> Cell:
    """One number, or mean ± standard deviation over seeds."""
    if found is None:
        return NONE
    mean, spread = (found.mean, found.spread) if isinstance(found, Summary) else (found, None)
    around = "" if spread is None else f"{spread * scale:,.{digits}f}"
    around = f" ± {around}" if around.strip("0.") else ""
    return Cell(f"{mean * scale:,.{digits}f}{around}{unit}", mean)


def difference(gap: Summary, word: str = "") -> Cell:
    """A paired difference and its interval."""
    return Cell(f"{word} {gap.mean:+.3f}".strip(), gap.mean, interval(gap))


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
