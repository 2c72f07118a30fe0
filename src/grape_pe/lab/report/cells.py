"""A table as plain data, written as text or Markdown; the page writes it as HTML. And how numbers are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .statistics import Summary

WIDTH = 100


@dataclass(frozen=True)
class Cell:
    """What a cell shows; `value` is what the page sorts by, `small` an interval, `picture` an SVG."""

    text: str = ""
    value: float | None = None
    small: str = ""
    picture: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.small})" if self.small else self.text


NONE, BEST = Cell(), Cell("best", 0.0)


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

    def lines(self, missing: str) -> list[list[str]]:
        """Headings and rows as text."""
        rows = [[label, *(str(cell) or missing for cell in cells)] for label, cells in self.rows]
        return [["encoding", *self.heads], *rows]

    def text(self) -> str:
        """Long labels are cut to keep within 100 columns, where the rest leaves room for them."""
        lines = self.lines("-")
        first, *rest = (max(map(len, column)) for column in zip(*lines, strict=True))
        room = WIDTH - sum(rest) - 2 * len(rest)
        first = min(first, room) if room >= 8 else first
        shown = []
        for label, *cells in lines:
            cut = label if len(label) <= first else f"{label[: first - 1]}…"
            right = [cell.rjust(width) for cell, width in zip(cells, rest, strict=True)]
            shown.append("  ".join([cut.ljust(first), *right]).rstrip())
        return "\n".join([*shown, *self.notes])

    def markdown(self) -> str:
        head, *rows = self.lines("–")
        lines = [head, ["---"] * len(head), *([f"`{label}`", *cells] for label, *cells in rows)]
        shown = ["| " + " | ".join(each.replace("|", "\\|") for each in line) + " |" for line in lines]
        return "\n".join([*shown, *(f"\n{note}" for note in (self.caption, *self.notes) if note)])


def number(summary: Summary | None, digits: int, scale: float = 1.0, unit: str = "") -> Cell:
    """mean ± standard deviation over seeds."""
    if summary is None:
        return NONE
    spread = "" if summary.spread is None else f"{summary.spread * scale:,.{digits}f}"
    spread = f" ± {spread}" if spread.strip("0.") else ""
    return Cell(f"{summary.mean * scale:,.{digits}f}{spread}{unit}", summary.mean)


def mean_only(summary: Summary | None, digits: int, scale: float = 1.0, unit: str = "") -> Cell:
    return number(summary and replace(summary, spread=None), digits, scale, unit)


def difference(gap: Summary) -> Cell:
    """A paired difference and its interval."""
    return Cell(f"{gap.mean:+.3f}", gap.mean, interval(gap))


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
